"""Device memory as blocks of the driver's stream-ordered pools: one pool a device, made here.

Knows addresses, sizes and streams; nothing of shapes and dtypes.
"""

from __future__ import annotations

import ctypes
import gc
import operator
import struct
import threading
from collections.abc import Callable
from ctypes import byref, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple

from .. import driver as _driver
from ..driver import apart
from ..driver.contexts import RelaxedCapture
from ..errors import CudaDriverError, TensorError
from . import dlpack, interop
from .block import Block, Call, dead, drain, forget, live, pending, unless_capturing

_RELEASE_THRESHOLD = 4
_MAX_BYTES = 2**63 - 1
_RESERVED, _RESERVED_HIGH, _USED, _USED_HIGH = 5, 6, 7, 8
_OUT_OF_MEMORY = 2

_lock = threading.Lock()
_pools: dict[int, int] = {}
# What else gives device memory back when `trim` is called.
trims: list[Callable[[], None]] = []


class MemoryStats(NamedTuple):
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


def device_number(device: Any) -> int:
    """The device meant: None is torch's current one when torch uses CUDA, else 0."""
    try:
        return interop.current_device() if device is None else interop.device_index(device)
    except TypeError:
        raise TensorError(
            f"device={device!r:.80}: a number, 'cuda:0', or a device of torch, CuPy or cuda.core"
        ) from None


def attempt(
    driver: _driver.Driver, device: int, stream: int, asked: str, *calls: Call
) -> tuple[str, int]:
    """`Driver.within` for memory work on `stream`.

    Raises CudaDriverError if `stream` itself is capturing: work on arrays is not recorded.
    """
    call, code = driver.within(device, *unless_capturing(stream), *calls)
    if code and call in ("", "cuStreamIsCapturing"):
        raise driver.error(
            "cuStreamIsCapturing",
            code if call else 900,
            f"asked for {asked} while the stream captures a CUDA graph: do it before the capture "
            "begins",
        )
    return call, code


def work(device: int, stream: int, asked: str, *calls: Call) -> None:
    """`attempt`; raises CudaDriverError where one of `calls` fails."""
    driver = _driver.get()
    call, code = attempt(driver, device, stream, asked, *calls)
    if code:
        raise driver.error(call, code, asked)


def allocate(size_bytes: int, device: int, stream: int, asked: str) -> Block:
    """A block of `size_bytes` > 0, ordered on `stream`; `asked` describes it in an error.

    Raises DeviceOutOfMemoryError (after one more try with the pool trimmed) or CudaDriverError.
    """
    stream = 0 if stream == 1 else stream
    driver = _driver.get()
    if size_bytes > _MAX_BYTES:  # ctypes would cut it to its last 64 bits
        raise _out_of_memory(driver, device, asked)
    pool = _pools.get(device) or apart.run(_make_pool, driver, device)
    if pending or dead:
        drain()
    block = Block.owned(driver, size_bytes, device, stream)
    call = ("cuMemAllocFromPoolAsync", byref(block.cell), size_bytes, pool, stream)
    failed, code = attempt(driver, device, stream, asked, call)
    if code == _OUT_OF_MEMORY:
        driver.skip_log()  # the log of a try that may yet succeed
        _reclaim(driver, device, pool, stream)
        failed, code = attempt(driver, device, stream, asked, call)
    if code == _OUT_OF_MEMORY:
        raise _out_of_memory(driver, device, asked)
    if code:
        raise driver.error(failed, code, f"asked for {asked}")
    block.address = block.cell.value or 0
    return block


def _make_pool(driver: _driver.Driver, device: int) -> int:
    """The device's pool (CUmemoryPool), made at first use, in a thread of ours."""
    with _lock, driver.on_device(device), RelaxedCapture(driver):
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


def _reclaim(driver: _driver.Driver, device: int, pool: int, stream: int) -> None:
    """Free what can be freed: dead cycles, pending blocks, the pool's unused memory."""
    gc.collect()
    dlpack.sweep()
    drain()
    # Memory freed in stream order comes free. Not cuCtxSynchronize: see RelaxedCapture.
    driver.within(device, ("cuStreamSynchronize", stream))
    driver.within(device, ("cuMemPoolTrimTo", pool, 0))


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
    drain()
    figures = {kind: c_uint64() for kind in (_USED, _RESERVED, _USED_HIGH, _RESERVED_HIGH)}
    calls: list[Call] = []
    if device in _pools:
        for kind, value in figures.items():
            calls.append(("cuMemPoolGetAttribute", _pools[device], kind, byref(value)))
    free, total = c_size_t(), c_size_t()
    driver.run(device, *calls, ("cuMemGetInfo_v2", byref(free), byref(total)))
    memories = [watch.memory for watch in tuple(live)]
    return MemoryStats(
        device,
        used_bytes=figures[_USED].value,
        reserved_bytes=figures[_RESERVED].value,
        used_high_bytes=figures[_USED_HIGH].value,
        reserved_high_bytes=figures[_RESERVED_HIGH].value,
        free_device_bytes=free.value,
        total_device_bytes=total.value,
        live_arrays=sum(m.device == device and bool(m.cell.value) for m in memories),
        pending_frees=sum(memory.device == device for memory in tuple(pending)),
    )


def memory_stats(device: Any = None) -> MemoryStats:
    """What kernel_hub's pool on `device` (None: the current one) holds and the GPU has left."""
    return statistics(device_number(device))


def trim(device: Any = None, *, keep_bytes: int = 0) -> None:
    """Return memory that the pool keeps for reuse to the GPU, all but `keep_bytes`.

    Unloads images too that nothing can launch any more (see Kernel's `keep`).
    """
    device = device_number(device)
    try:
        keep_bytes = operator.index(keep_bytes)
    except TypeError:
        raise TensorError(f"keep_bytes={keep_bytes!r:.80}: a whole number of bytes") from None
    if not 0 <= keep_bytes <= _MAX_BYTES:
        raise TensorError(f"keep_bytes={keep_bytes}: expected 0 or more")
    for more in trims:
        more()
    dlpack.sweep()
    drain()
    if device in _pools:
        # The pool gives back what is free by now: most frees are on the legacy stream.
        _driver.get().run(
            device,
            ("cuStreamSynchronize", 0),
            ("cuMemPoolTrimTo", _pools[device], keep_bytes),
            asked="waiting for frees before trimming the pool",
        )


def _reset_for_tests() -> None:
    """Forget pools and blocks of a driver that a test is done with."""
    _pools.clear()
    forget()
