"""What the modules of an installed cpm_kernels ask of `cpm_kernels.device`, without cudart."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ... import driver as _driver
from ...arrays import interop
from ...errors import ParamsError

__all__ = ["Device", "current_device", "num_devices"]

_handles: dict[int, Any] = {}


class Device:
    """A GPU by its number."""

    def __init__(self, index: int) -> None:
        if not hasattr(type(index), "__index__"):
            raise ParamsError(f"Device({index!r:.80}): the number of a GPU")
        if not 0 <= index < num_devices():
            raise ValueError(f"Device({index}): there are {num_devices()} devices")
        self._index = index

    def use(self) -> None:
        """Make the device's primary context the calling thread's."""
        driver = _driver.get()
        driver.call("cuCtxSetCurrent", driver.primary_context(self._index))

    @property
    def architecture(self) -> int:
        """Its compute capability: 90 for 9.0."""
        major, minor = _driver.get().compute_capability(self._index)
        return major * 10 + minor

    @property
    def cublasLtHandle(self) -> Any:
        """A cuBLASLt handle, made at the first use by the installed package's own bindings."""
        if self._index not in _handles:
            self.use()
            cublaslt = import_module("cpm_kernels.library.cublaslt")
            _handles[self._index] = cublaslt.cublasLtCreate()
        return _handles[self._index]


def num_devices() -> int:
    """How many GPUs the driver shows."""
    return _driver.get().device_count


def current_device() -> Device:
    """torch's current device, else the first."""
    return Device(interop.current_device())
