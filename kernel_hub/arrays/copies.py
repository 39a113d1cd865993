"""Copies between DeviceArrays and to and from host arrays, in the order of a stream.

non_blocking copies are ordered on their stream alone; all others come after every use that the
runtime was told of.
"""

from __future__ import annotations

from ctypes import byref, c_uint
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import driver as _driver
from ..errors import TensorError
from . import dtypes, handles, interop, pool
from .block import Call
from .streams import Event

_MEMORY_TYPE, _HOST = 2, 1  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_MEMORYTYPE_HOST


def host_array(value: Any) -> NDArray[Any]:
    """What NumPy makes of `value`. Raises TensorError where it makes nothing of it."""
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise TensorError(f"NumPy makes no array of this {kind}: {error}") from error


def overwrite(target: Any, source: Any, stream: Any, non_blocking: bool) -> None:
    """`target.copy_from(source, …)` of a DeviceArray."""
    if target.read_only:
        raise TensorError(f"{target!r} is read-only")
    if not target.is_contiguous:
        raise TensorError(f"copy_from needs a contiguous target, not strides {target.strides}")
    on_device = isinstance(source, type(target))
    array = source if on_device else host_array(source)
    _check_alike(target, array, "source")
    if not target.size:
        return
    if on_device:
        _between(target, array, stream)
        return
    # Row-major and in native byte order; a 0-dimensional array stays one.
    host = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    with_host(target, host, stream, non_blocking=non_blocking)


def read_into(source: Any, target: Any, stream: Any, non_blocking: bool) -> None:
    """`source.copy_to(target, …)` of a DeviceArray."""
    if not isinstance(target, np.ndarray):
        raise TensorError(f"copy_to takes a NumPy array, not a {type(target).__name__}")
    if not source.is_contiguous:
        raise TensorError(f"copy_to needs a contiguous source, not strides {source.strides}")
    _check_alike(source, target, "target")
    flags = target.flags
    if not (flags.c_contiguous and flags.writeable and target.dtype.isnative):
        raise TensorError("copy_to needs a row-major, writeable target in native byte order")
    if source.size:
        with_host(source, target, stream, to_host=True, non_blocking=non_blocking)


def _check_alike(array: Any, other: Any, role: str) -> None:
    if other.shape != array.shape:
        raise TensorError(f"{role} has shape {other.shape}, expected {array.shape}")
    # Raw bits (uint16 for bf16) are taken where NumPy lacks the dtype.
    raw = isinstance(other, np.ndarray) and other.dtype == array.dtype
    if not raw and dtypes.of(getattr(other, "_dtype", other.dtype)) is not array._dtype:
        raise TensorError(f"{role} has dtype {other.dtype}, expected {array.dtype_token}")


def _between(target: Any, source: Any, stream: Any) -> None:
    if not source.is_contiguous or source.device != target.device:
        raise TensorError(
            f"copy_from takes a contiguous source on device {target.device}, not {source!r} "
            f"with strides {source.strides}"
        )
    handle = interop.stream_handle(stream, target.device)
    pool.work(
        target.device,
        handle,
        f"copying {target.size_bytes:,} bytes to {target!r}",
        *target._block.settling(handle),
        *source._block.settling(handle),
        ("cuMemcpyDtoDAsync_v2", target.ptr, source.ptr, target.size_bytes, handle),
    )
    source._record_use(handle)
    target._record_use(handle)


def with_host(
    array: Any,
    host: NDArray[Any],
    stream: Any,
    *,
    to_host: bool = False,
    non_blocking: bool = False,
) -> None:
    """Copy `host.nbytes` bytes between `host` and what begins at `array.ptr`."""
    handle = interop.stream_handle(stream, array.device)
    ends, size_bytes = (array.ptr, host.ctypes.data), host.nbytes
    copy: Call = ("cuMemcpyHtoDAsync_v2", *ends, size_bytes, handle)
    if to_host:
        copy = ("cuMemcpyDtoHAsync_v2", *ends[::-1], size_bytes, handle)
    asked = f"copying {size_bytes:,} bytes {'of' if to_host else 'to'} {array!r}"
    calls: list[Call]
    if non_blocking and _is_pinned(host, array.device):
        calls = array._block.recording(handle)
        event = handles.spare_event(array.device) or Event(array.device)
        calls += handles.holding(host, event, handle, copy)
    else:
        # Pageable memory is waited for: where the GPU reads it itself, the copy may outlive the
        # call.
        calls = [*array._block.settling(handle), copy, ("cuStreamSynchronize", handle)]
    pool.work(array.device, handle, asked, *calls)
    if non_blocking or not to_host:
        array._record_use(handle)


def _is_pinned(host: NDArray[Any], device: int) -> bool:
    """Whether the memory is page-locked, by whomever."""
    driver = _driver.get()
    kinds = c_uint(), c_uint()
    ends = host.ctypes.data, host.ctypes.data + host.nbytes - 1
    asking: list[Call] = [
        ("cuPointerGetAttribute", byref(kind), _MEMORY_TYPE, end)
        for kind, end in zip(kinds, ends, strict=True)
    ]
    if driver.within(device, *asking)[1]:  # the driver knows nothing of pageable memory
        driver.skip_log()
        return False
    return all(kind.value == _HOST for kind in kinds)
