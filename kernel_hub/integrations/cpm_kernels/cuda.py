"""What `cpm_kernels.library.cuda` offers: the driver's functions, on kernel_hub's checked launches.

A module is an image that was read and checked, a function one of kernel_hub's; both are objects and
no handles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ... import driver as _driver
from ... import kernel as _kernel
from ...driver.cuda_results import RESULTS
from ...errors import CubinNotFoundError
from . import base as base

CUDA_SUCCESS = 0
CUresult = ctypes.c_int
CUmodule = CUfunction = CUcontext = ctypes.c_void_p
_CODES = {name: code for code, (name, _) in RESULTS.items()}
globals().update(_CODES)

__all__ = [
    "CUDA_SUCCESS",
    *_CODES,
    "CUcontext",
    "CUfunction",
    "CUmodule",
    "CUresult",
    "checkCUStatus",
    "cuCtxGetCurrent",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuLaunchKernel",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
]


def cuDriverGetVersion() -> int:
    """13000 for CUDA 13.0."""
    return _driver.get().version


def __getattr__(name: str) -> Any:
    if name == "version":  # a constant of theirs, which opens the driver
        return cuDriverGetVersion()
    raise AttributeError(
        f"kernel_hub's cpm_kernels.library.cuda has no {name}; the package's own has what the "
        "driver has: pip install --no-deps cpm_kernels"
    )


def cuGetErrorName(error: int) -> str:
    """'CUDA_ERROR_INVALID_VALUE' for 1."""
    for name, code in (("CUDA_SUCCESS", CUDA_SUCCESS), *_CODES.items()):
        if code == error:
            return name
    raise RuntimeError(f"Invalid error value: {error}")


def cuGetErrorString(error: int) -> str:
    """The driver's words for a CUresult."""
    words = base.driver_words(error)
    if not words:
        raise RuntimeError(f"Invalid error value: {error}")
    return words


def checkCUStatus(error: int) -> None:
    """Raise what cpm_kernels raises for anything but CUDA_SUCCESS."""
    if error != CUDA_SUCCESS:
        raise RuntimeError(f"CUDA Error: {cuGetErrorString(error)}")


def cuModuleLoadData(data: bytes) -> base.LazyKernelCModule:
    """The image, read, checked and loaded on the current device."""
    module = base.LazyKernelCModule(data)
    try:
        module.get_module()
    except CubinNotFoundError:
        if not base.is_substituting():  # else each launch says what runs instead
            raise
    return module


def cuModuleUnload(module: base.LazyKernelCModule) -> None:
    """Unload the image; a later launch of its functions loads it again."""
    module.unload()


def cuModuleGetFunction(module: Any, name: str) -> Any:
    """A function of what `cuModuleLoadData`, or a LazyKernelCModule's get_module(), gave."""
    if isinstance(module, _kernel.Kernel):
        return module[name]
    function = base.KernelFunction(module, name)
    function.find()
    return function


def cuLaunchKernel(
    func: Any,
    gridDimX: int,
    gridDimY: int,
    gridDimZ: int,
    blockDimX: int,
    blockDimY: int,
    blockDimZ: int,
    sharedMemBytes: int,
    hStream: Any,
    kernelParams: Sequence[int],
) -> None:
    """Launch `func`; kernelParams: the address of each parameter's value in host memory."""
    grid, block = (gridDimX, gridDimY, gridDimZ), (blockDimX, blockDimY, blockDimZ)
    sizes = [param.size_bytes for param in func.params or ()]
    # Beyond the function's own there is nothing to read; the launch refuses the count.
    sizes += [0] * (len(kernelParams) - len(sizes))
    values = [
        ctypes.string_at(address, size) for address, size in zip(kernelParams, sizes, strict=False)
    ]
    func(grid, block, sharedMemBytes, 0 if hStream is None else hStream, values)


def cuCtxGetCurrent() -> ctypes.c_void_p:
    """The calling thread's context."""
    return ctypes.c_void_p(_driver.get().current_context())
