"""Page-locked host memory as NumPy arrays, which the GPU copies to and from beside other work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import driver
from . import dtypes, pool, strided
from .handles import Handle

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: page-locked to every GPU's context


class _HostMemory(Handle):
    """What an array of `empty_pinned` and its views have as their base."""

    _create, _destroy = "cuMemHostAlloc", "cuMemFreeHost"
    _waits = True

    def __init__(self, device: int, size_bytes: int, asked: str) -> None:
        super().__init__(device, size_bytes, _PORTABLE, asked=asked, size_bytes=size_bytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self._cell.value, False)
        return {"shape": (self._kept.size_bytes,), "typestr": "|u1", "data": data, "version": 3}


def empty_pinned(
    shape: int | Sequence[int], dtype: Any = "fp32", *, device: Any = None
) -> NDArray[Any]:
    """A NumPy array in page-locked host memory, with whatever that held.

    `DeviceArray.copy_from` and `copy_to` of such an array return at once where they are told
    `non_blocking`. The memory is the system's again when the array and all its views are gone and
    the copies that use it are done.

    shape, dtype: as for `DeviceArray.empty`.
    device: whose context allocates it, as for `DeviceArray.empty`; it is page-locked to all.
    Raises TensorError, DeviceOutOfMemoryError where the system has no such memory left, and
    CudaDriverError. Locking memory is slow: make one and use it again.
    """
    kind = dtypes.of(dtype)
    dims = strided.as_shape(shape)
    size_bytes = math.prod(dims) * kind.size_bytes
    if not size_bytes:
        return np.empty(dims, dtypes.numpy_dtype(kind))
    asked = (
        f"asked for {size_bytes:,} bytes of page-locked host memory for shape {dims} of "
        f"{kind.token}"
    )
    if size_bytes > pool.MAX_BYTES:  # ctypes would cut it to its last 64 bits
        raise driver.get().error("cuMemHostAlloc", 2, asked)
    memory = _HostMemory(pool.device_number(device), size_bytes, asked)
    return np.asarray(memory).view(dtypes.numpy_dtype(kind)).reshape(dims)
