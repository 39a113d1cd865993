"""CUDA kernels as data: prebuilt cubins, chosen for the GPU at hand, checked and launched.

Importing this loads nothing: no driver, no torch, no file is read before it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import errors as errors
    from . import formats as formats
    from . import ops
    from . import testing as testing
    from .arrays.device_array import DeviceArray, memory_stats, trim
    from .arrays.pinned import empty_pinned
    from .arrays.pool import reset_peak_memory_stats, set_release_threshold
    from .arrays.streams import Event, Stream, synchronize
    from .arrays.tensor_map import TensorMap
    from .errors import (
        CompileError,
        CubinCorruptError,
        CubinNotFoundError,
        CudaDriverError,
        DeviceOutOfMemoryError,
        DriverNotFoundError,
        FunctionNotFoundError,
        KernelHubError,
        LaunchConfigError,
        MissingPackageError,
        ModelError,
        ParamsError,
        ProbeError,
        PromptTooLongError,
        RankError,
        RequestError,
        TableError,
        TensorError,
    )
    from .kernel import BoundLaunch, Kernel, KernelFunction, LoadedImage, loaded_images
    from .registry import own as registry

_HOME = {
    "Kernel": "kernel",
    "KernelFunction": "kernel",
    "BoundLaunch": "kernel",
    "LoadedImage": "kernel",
    "loaded_images": "kernel",
    "DeviceArray": "arrays.device_array",
    "memory_stats": "arrays.device_array",
    "trim": "arrays.device_array",
    "reset_peak_memory_stats": "arrays.pool",
    "set_release_threshold": "arrays.pool",
    "empty_pinned": "arrays.pinned",
    "TensorMap": "arrays.tensor_map",
    **dict.fromkeys(("Event", "Stream", "synchronize"), "arrays.streams"),
    **dict.fromkeys(
        (
            "KernelHubError",
            "DriverNotFoundError",
            "CudaDriverError",
            "DeviceOutOfMemoryError",
            "CubinNotFoundError",
            "CubinCorruptError",
            "CompileError",
            "FunctionNotFoundError",
            "ParamsError",
            "LaunchConfigError",
            "MissingPackageError",
            "ModelError",
            "ProbeError",
            "PromptTooLongError",
            "RankError",
            "RequestError",
            "TableError",
            "TensorError",
        ),
        "errors",
    ),
}
_MODULES = ("errors", "formats", "ops", "registry", "testing")

__all__ = [
    "BoundLaunch",
    "CompileError",
    "CubinCorruptError",
    "CubinNotFoundError",
    "CudaDriverError",
    "DeviceArray",
    "DeviceOutOfMemoryError",
    "DriverNotFoundError",
    "Event",
    "FunctionNotFoundError",
    "Kernel",
    "KernelFunction",
    "KernelHubError",
    "LaunchConfigError",
    "LoadedImage",
    "MissingPackageError",
    "ModelError",
    "ParamsError",
    "ProbeError",
    "PromptTooLongError",
    "RankError",
    "RequestError",
    "Stream",
    "TableError",
    "TensorError",
    "TensorMap",
    "empty_pinned",
    "loaded_images",
    "memory_stats",
    "ops",
    "registry",
    "reset_peak_memory_stats",
    "set_release_threshold",
    "synchronize",
    "trim",
]


if not TYPE_CHECKING:  # to which every name would be there

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _HOME:
            value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        elif name in _MODULES:
            value = import_module(f".{name}", __name__)
        else:
            raise AttributeError(f"module 'kernel_hub' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
