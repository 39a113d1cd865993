"""Device memory as blocks of the driver's stream-ordered pools: one pool a device, made here.

Knows addresses, sizes and streams; nothing of shapes and dtypes. Finalisers may run at any moment
(inside another allocation, in a forked child, at exit), so freeing takes no lock.
"""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import sys
import threading
from collections import deque
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from . import driver as _driver
from . import tensors
from ._results import STICKY
from .driver import RelaxedCapture
from .errors import CudaDriverError, TensorError

_RELEASE_THRESHOLD = 4
_MAX_BYTES = 2**63 - 1
_RESERVED, _RESERVED_HIGH, _USED, _USED_HIGH = 5, 6, 7, 8
# CUresults of a call that a graph capture forbids: the memory is freed later instead.
_CAPTURING = frozenset({900, 901, 906})
_OUT_OF_MEMORY, _DEINITIALIZED, _INVALID_CONTEXT, _CONTEXT_IS_DESTROYED = 2, 4, 201, 709

_lock = threading.Lock()
_pools: dict[int, int] = {}
# (device, address) of what is allocated; set operations are atomic, so finalisers may use it.
_live: set[tuple[int, int]] = set()
# Blocks whose freeing a graph capture held up.
_pending: deque[Block] = deque()


@dataclass(frozen=True)
class MemoryStats:
    """What kernel_hub's pool on `device` holds, and what the device has left (bytes).

    `used` is inside live arrays; `reserved` is what the pool took from the device and keeps for
    reuse; `high` is the most that it has been. `pending_frees` wait for a graph capture to end.
    """

    device: int
    used_bytes: int
    reserved_bytes: int
    used_high_bytes: int
    reserved_high_bytes: int
    free_device_bytes: int
    total_device_bytes: int
    live_arrays: int
    pending_frees: int


class Work:
    """`with Work(device, stream, asked) as driver:` the device is current, captures are safe.

    Raises CudaDriverError if `stream` itself is capturing: memory work of arrays is not recorded.
    """

    def __init__(self, device: int, stream: int, asked: str) -> None:
        self._driver = _driver.get()
        self._context = self._driver.on_device(device)
        self._relaxed = RelaxedCapture(self._driver)
        self._stream, self._asked = stream, asked

    def __enter__(self) -> _driver.Driver:
        self._context.__enter__()
        self._relaxed.__enter__()
        if code := _capture_code(self._driver, self._stream):
            self.__exit__()
            raise self._driver.error(
                "cuStreamIsCapturing",
                code,
                f"asked for {self._asked} while the stream captures a CUDA graph: do it before "
                "the capture begins",
            )
        return self._driver

    def __exit__(self, *exc: object) -> None:
        self._relaxed.__exit__()
        self._context.__exit__()


class Block:
    """One allocation, or memory of somebody else kept alive through `owner`.

    owner: what must live as long as the memory does (its true owner, or the stream's object).
    stream: the stream it was allocated for, and is freed on.
    last_stream: where it was last used, as far as the runtime was told.
    """

    __slots__ = (
        "_foreign",
        "_owned",
        "address",
        "device",
        "freed",
        "last_stream",
        "owner",
        "size_bytes",
        "stream",
    )

    def __init__(
        self, address: int, size_bytes: int, device: int, stream: int, owner: object = None
    ) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.device = device
        self.stream = self.last_stream = stream
        self.owner = owner
        self.freed = False
        self._foreign: set[int] = set()
        # Holds the driver while there is something to free; taken out by the one who frees.
        self._owned: list[_driver.Driver] = []

    def record_use(self, stream: int) -> None:
        """Note work on `stream`: freeing will wait for it if it is not the block's own."""
        stream = 0 if stream == 1 else stream  # 1 names the legacy default stream too
        self.last_stream = stream
        if stream != self.stream:
            self._foreign.add(stream)

    def settle(self, stream: int) -> None:
        """Let `stream` see all work recorded so far: waits for the device if it was elsewhere."""
        stream = 0 if stream == 1 else stream
        if self.stream == stream and not self._foreign:
            return
        driver = _driver.get()
        with driver.on_device(self.device):
            driver.call("cuCtxSynchronize", asked="waiting for work on the array's other streams")
        self._foreign.clear()

    def free(self) -> None:
        """Give the memory back in stream order; a second call does nothing."""
        if self.freed:
            return
        if self._owned and self._owned[0].pid != os.getpid():
            raise _driver.forked_error()
        self.freed = True
        error = self._release()
        self.owner = None
        if error:
            raise error

    def __del__(self) -> None:
        # At exit the modules this needs may be gone, and the process gives the memory back.
        if sys is None or sys.is_finalizing():
            return
        error = self._release()
        if error is not None and error.code not in _LOST:
            raise error  # shown by sys.unraisablehook

    def _release(self) -> CudaDriverError | None:
        try:
            driver = self._owned.pop()
        except IndexError:  # not ours, or freed already
            return None
        if driver.pid != os.getpid():
            return None
        code, call = self._free_on(driver)
        if code in _CAPTURING:
            kept = Block(self.address, self.size_bytes, self.device, self.stream, self.owner)
            kept._foreign, kept.freed = self._foreign, True
            kept._owned.append(driver)
            _pending.append(kept)
            return None
        _live.discard((self.device, self.address))
        if code == 0:
            return None
        return driver.error(call, code, f"freeing {self.size_bytes:,} bytes at {self.address:#x}")

    def _free_on(self, driver: _driver.Driver) -> tuple[int, str]:
        """(CUresult, the call it came from) of freeing the memory after all work recorded on it."""
        context = driver.primary_context(self.device)
        code = driver.try_call("cuCtxPushCurrent_v2", context)
        if code:
            return code, "cuCtxPushCurrent_v2"
        try:
            if code := _capture_code(driver, self.stream):
                return code, "cuStreamIsCapturing"
            if self._foreign:
                # The other streams may be gone by now, so nothing may be asked of their handles.
                # A capture in this thread is on torch's current stream and would not survive the
                # synchronisation; one in another thread cannot be seen.
                if code := _capture_code(driver, tensors.current_stream(self.device)):
                    return code, "cuStreamIsCapturing"
                if code := driver.try_call("cuCtxSynchronize"):
                    return code, "cuCtxSynchronize"
            with RelaxedCapture(driver):
                code = driver.try_call("cuMemFreeAsync", self.address, self.stream)
            return code, "cuMemFreeAsync"
        finally:
            driver.try_call("cuCtxPopCurrent_v2", byref(c_void_p()))


# After these there is nothing left to free, and an exit or an earlier error has said why.
_LOST = STICKY | {_DEINITIALIZED, _INVALID_CONTEXT, _CONTEXT_IS_DESTROYED}


def device_number(device: Any) -> int:
    """The device meant: None is torch's current one when torch uses CUDA, else 0."""
    return tensors.current_device() if device is None else tensors.device_index(device)


def _capture_code(driver: _driver.Driver, stream: int) -> int:
    """Nonzero (a code of _CAPTURING) if `stream` is recording a graph."""
    status = c_int()
    code = driver.try_call("cuStreamIsCapturing", stream, byref(status))
    if code in _CAPTURING:
        return code
    # Another failure (a stream destroyed since) is no capture; the free itself will tell.
    return 900 if code == 0 and status.value else 0


def allocate(size_bytes: int, device: int, stream: int, asked: str) -> Block:
    """A block of `size_bytes` > 0, ordered on `stream`; `asked` describes it in an error.

    Raises DeviceOutOfMemoryError (after one more try with the pool trimmed) or CudaDriverError.
    """
    stream = 0 if stream == 1 else stream
    if size_bytes > _MAX_BYTES:  # ctypes would cut it to its last 64 bits
        raise _out_of_memory(_driver.get(), device, asked)
    with Work(device, stream, asked) as driver:
        pool = _pool(driver, device)
        if _pending:
            drain()
        address = c_void_p()
        arguments = (byref(address), size_bytes, pool, stream)
        code = driver.try_call("cuMemAllocFromPoolAsync", *arguments)
        if code == _OUT_OF_MEMORY:
            driver.take_log()  # the log of a try that may yet succeed
            _reclaim(driver, pool, stream)
            code = driver.try_call("cuMemAllocFromPoolAsync", *arguments)
        if code == _OUT_OF_MEMORY:
            raise _out_of_memory(driver, device, asked)
        if code:
            raise driver.error("cuMemAllocFromPoolAsync", code, f"asked for {asked}")
    block = Block(address.value or 0, size_bytes, device, stream)
    block._owned.append(driver)
    _live.add((device, block.address))
    return block


def _pool(driver: _driver.Driver, device: int) -> int:
    """The device's pool (CUmemoryPool), made at first use. The device's context is current."""
    if device in _pools:
        return _pools[device]
    with _lock:
        if device in _pools:
            return _pools[device]
        if not driver.attribute(device, _driver.MEMORY_POOLS_SUPPORTED):
            raise driver.error(
                "cuMemPoolCreate",
                801,
                f"device {device} ({driver.device_name(device)}) has no stream-ordered memory "
                "pools, which DeviceArray needs; use torch or CuPy memory on this device",
            )
        # CUmemPoolProps: pinned allocations, no export handles, located on this device.
        props = ctypes.create_string_buffer(struct.pack("<iiii72x", 1, 0, 1, device), 88)
        pool = c_void_p()
        asked = f"making the memory pool of device {device}"
        driver.call("cuMemPoolCreate", byref(pool), props, asked=asked)
        # Keep everything: an allocation after a free is then served without the kernel driver.
        everything = c_uint64(2**64 - 1)
        try:
            driver.call(
                "cuMemPoolSetAttribute", pool, _RELEASE_THRESHOLD, byref(everything), asked=asked
            )
        except CudaDriverError:
            driver.try_call("cuMemPoolDestroy", pool)
            raise
        _pools[device] = pool.value or 0
        return _pools[device]


def _reclaim(driver: _driver.Driver, pool: int, stream: int) -> None:
    """Free what can be freed: dead cycles, pending blocks, the pool's unused memory."""
    gc.collect()
    drain()
    # Memory freed in stream order comes free. Not cuCtxSynchronize: see _Relaxed.
    driver.try_call("cuStreamSynchronize", stream)
    driver.try_call("cuMemPoolTrimTo", pool, 0)


def drain() -> None:
    """Free the blocks that a graph capture held up, as far as it is over."""
    for _ in range(len(_pending)):
        try:
            block = _pending.popleft()
        except IndexError:  # another thread drained the rest
            return
        if error := block._release():
            raise error


def _out_of_memory(driver: _driver.Driver, device: int, asked: str) -> CudaDriverError:
    stats = statistics(device)
    return driver.error(
        "cuMemAllocFromPoolAsync",
        _OUT_OF_MEMORY,
        f"asked for {asked}; device {device} has {stats.free_device_bytes:,} of "
        f"{stats.total_device_bytes:,} bytes free; kernel_hub's pool holds "
        f"{stats.reserved_bytes:,} bytes, {stats.used_bytes:,} of them in {stats.live_arrays} live "
        "arrays\n  Free arrays (del or .free()) or ask for less; memory that torch caches comes "
        "free with torch.cuda.empty_cache().",
    )


def statistics(device: int) -> MemoryStats:
    """Figures of the device's pool; zeros while it has none."""
    driver = _driver.get()
    with driver.on_device(device), RelaxedCapture(driver):
        if _pending:
            drain()
        figures = {}
        for attribute in (_USED, _RESERVED, _USED_HIGH, _RESERVED_HIGH):
            value = c_uint64()
            if device in _pools:
                driver.call("cuMemPoolGetAttribute", _pools[device], attribute, byref(value))
            figures[attribute] = value.value
        free, total = c_size_t(), c_size_t()
        driver.call("cuMemGetInfo_v2", byref(free), byref(total))
    return MemoryStats(
        device,
        used_bytes=figures[_USED],
        reserved_bytes=figures[_RESERVED],
        used_high_bytes=figures[_USED_HIGH],
        reserved_high_bytes=figures[_RESERVED_HIGH],
        free_device_bytes=free.value,
        total_device_bytes=total.value,
        live_arrays=sum(of_device == device for of_device, _ in tuple(_live)),
        pending_frees=sum(block.device == device for block in tuple(_pending)),
    )


def memory_stats(device: Any = None) -> MemoryStats:
    """What kernel_hub's pool on `device` (None: the current one) holds and the GPU has left."""
    return statistics(device_number(device))


def trim(device: Any = None, *, keep_bytes: int = 0) -> None:
    """Return memory that the pool keeps for reuse to the GPU, all but `keep_bytes`."""
    device = device_number(device)
    if keep_bytes < 0:
        raise TensorError(f"keep_bytes={keep_bytes}: expected 0 or more")
    driver = _driver.get()
    with driver.on_device(device), RelaxedCapture(driver):
        drain()
        if device not in _pools:
            return
        # The pool gives back what is free by now: most frees are on the legacy stream.
        driver.call("cuStreamSynchronize", 0, asked="waiting for frees before trimming the pool")
        driver.call("cuMemPoolTrimTo", _pools[device], keep_bytes)


def _reset_for_tests() -> None:
    """Forget pools and blocks of a driver that a test is done with."""
    _pools.clear()
    _live.clear()
    for block in _pending:
        block._owned.clear()
    _pending.clear()
