"""What `cpm_kernels.library.cudart` offers of devices, streams, events and copies, on the driver.

No libcudart is opened. The current device is torch's, as in every launch of kernel_hub.
"""

# ruff: noqa: N816 the names are the CUDA runtime's

from __future__ import annotations

import ctypes
from typing import Any

from ... import driver as _driver
from ...arrays import interop
from ...errors import LaunchConfigError
from .cuda import cuGetErrorName, cuGetErrorString

__all__ = [
    "checkCUDAStatus",
    "cudaDeviceGetAttribute",
    "cudaDriverGetVersion",
    "cudaError_t",
    "cudaEventCreate",
    "cudaEventDestroy",
    "cudaEventRecord",
    "cudaEvent_t",
    "cudaGetDevice",
    "cudaGetDeviceCount",
    "cudaGetErrorName",
    "cudaGetErrorString",
    "cudaMemGetInfo",
    "cudaMemsetAsync",
    "cudaSetDevice",
    "cudaStreamCreate",
    "cudaStreamCreateWithFlags",
    "cudaStreamDefault",
    "cudaStreamDestroy",
    "cudaStreamNonBlocking",
    "cudaStreamSynchronize",
    "cudaStreamWaitEvent",
    "cudaStream_t",
    "cudaSuccess",
]

cudaSuccess, cudaStreamDefault, cudaStreamNonBlocking = 0, 0, 1
cudaError_t = ctypes.c_int
cudaStream_t = cudaEvent_t = ctypes.c_void_p
cudaGetErrorName, cudaGetErrorString = cuGetErrorName, cuGetErrorString
_NO_TIMING = 2  # of an event


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"kernel_hub's cpm_kernels.library.cudart has no {name}; the package's own has what the "
        "CUDA runtime has: pip install --no-deps cpm_kernels"
    )


def _call(name: str, *args: Any) -> None:
    driver = _driver.get()
    with driver.on_device(cudaGetDevice()):
        driver.call(name, *args)


def checkCUDAStatus(error: int) -> None:
    """Raise what cpm_kernels raises for anything but cudaSuccess."""
    if error != cudaSuccess:
        raise RuntimeError(f"CUDA Runtime Error: {cudaGetErrorString(error)}")


def cudaDriverGetVersion() -> int:
    """13000 for CUDA 13.0."""
    return _driver.get().version


def cudaGetDeviceCount() -> int:
    """How many GPUs the driver shows."""
    return _driver.get().device_count


def cudaGetDevice() -> int:
    """torch's current device, else 0."""
    return interop.current_device()


def cudaSetDevice(device_id: int) -> None:
    """Make a GPU current for torch and this thread; without torch launches go to device 0."""
    driver = _driver.get()
    context = driver.primary_context(device_id)  # refuses a number that there is not
    torch = interop.loaded_torch()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.set_device(device_id)
    elif device_id != cudaGetDevice():
        raise LaunchConfigError(
            f"cudaSetDevice({device_id}): without torch, launches go to device {cudaGetDevice()}; "
            "import torch first, or show the program that GPU alone (CUDA_VISIBLE_DEVICES)"
        )
    driver.call("cuCtxSetCurrent", context)


def cudaDeviceGetAttribute(attribute: int, device_id: int) -> int:
    """A device attribute by its number."""
    return _driver.get().attribute(device_id, attribute)


def cudaMemGetInfo() -> tuple[int, int]:
    """(free, total) bytes of the current device."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def cudaStreamCreate() -> ctypes.c_void_p:
    """A stream of the current device."""
    return cudaStreamCreateWithFlags(cudaStreamDefault)


def cudaStreamCreateWithFlags(flags: int) -> ctypes.c_void_p:
    """A stream of the current device; flags: cudaStreamNonBlocking or cudaStreamDefault."""
    stream = cudaStream_t()
    _call("cuStreamCreate", ctypes.byref(stream), flags)
    return stream


def cudaStreamDestroy(stream: Any) -> None:
    """Destroy a stream, once its work is done."""
    _call("cuStreamDestroy_v2", stream)


def cudaStreamSynchronize(stream: Any) -> None:
    """Wait for a stream."""
    _call("cuStreamSynchronize", stream)


def cudaStreamWaitEvent(stream: Any, event: Any, flags: int = 0) -> None:
    """Have a stream wait for an event."""
    _call("cuStreamWaitEvent", stream, event, flags)


def cudaEventCreate() -> ctypes.c_void_p:
    """An event of the current device, without a time."""
    event = cudaEvent_t()
    _call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
    return event


def cudaEventRecord(event: Any, stream: Any = 0) -> None:
    """Record an event in a stream."""
    _call("cuEventRecord", event, stream)


def cudaEventDestroy(event: Any) -> None:
    """Destroy an event."""
    _call("cuEventDestroy_v2", event)


def cudaMemsetAsync(dst: Any, value: int, size: int, stream: Any) -> None:
    """Set `size` bytes of device memory."""
    address = dst.value or 0 if isinstance(dst, ctypes.c_void_p) else dst
    _call("cuMemsetD8Async", address, value, size, stream)
