"""Device memory as blocks of the driver's stream-ordered pools: one pool a device, made here.

Knows addresses, sizes and streams; nothing of shapes and dtypes.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import operator
import struct
import threading
from collections import defaultdict
from collections.abc import Callable
from ctypes import byref, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple

from .. import driver as _driver
from ..driver import apart
from ..driver.contexts import RelaxedCapture
from ..errors import CudaDriverError, TensorError
from . import dlpack, handles, interop
from .block import Block, Call, drain, forget, pending, unless_capturing, watches

MAX_BYTES = 2**63 - 1
_SMALL_BYTES = 1 << 20  # below it torch's allocator, too, calls an allocation small
_KEPT_SHARE = 32  # of the GPU's memory: what a pool keeps unused, unless told otherwise
# CUmemPool_attribute
_THRESHOLD, _RESERVED, _RESERVED_HIGH, _USED, _USED_HIGH = 4, 5, 6, 7, 8
_OUT_OF_MEMORY = 2

_lock = threading.Lock()
_pools: dict[int, int] = {}
# Allocations so far: one step of C each, so that no thread and no Ctrl-C loses one.
_allocations: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)
# What else gives device memory back when `trim` is called.
trims: list[Callable[[], None]] = []


class MemoryStats(NamedTuple):
    """What kernel_hub's pool on `device` holds, and what the device has left (bytes).

    `used` is inside live arrays; `reserved` is what the pool took from the device; `high` is the
    most that it has been. What lies above `release_threshold_bytes` unused goes back to the device
    by itself, see `set_release_threshold`. `small_arrays` (of the `live_arrays`) are below 1 MiB;
    `largest_array_bytes` is what the largest was asked for, `num_allocations` how many there have
    been. `pending_frees` wait for a graph capture to end. `pinned_host_bytes` are in arrays of
    `empty_pinned` made for this device.
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
    release_threshold_bytes: int
    small_arrays: int
    largest_array_bytes: int
    num_allocations: int
    pinned_host_bytes: int

    @property
    def unused_bytes(self) -> int:
        """What the pool keeps and no array uses: reserved - used."""
        return self.reserved_bytes - self.used_bytes

    @property
    def fragmentation(self) -> float:
        """The unused share of what is reserved, 0 to 1."""
        return self.unused_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


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
    if size_bytes > MAX_BYTES:  # ctypes would cut it to its last 64 bits
        raise _out_of_memory(driver, device, asked)
    pool = _pools.get(device) or apart.run(_make_pool, driver, device)
    if pending or watches.dead:
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
    next(_allocations[device])
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
        try:
            setting = _setting(pool, _THRESHOLD, _default_threshold(driver, device))
            driver.call(*setting, asked=asked)
        except CudaDriverError:
            driver.try_call("cuMemPoolDestroy", pool)
            raise
        _pools[device] = pool.value or 0
        return _pools[device]


def _default_threshold(driver: _driver.Driver, device: int) -> int:
    total = c_size_t()
    driver.call("cuDeviceTotalMem_v2", byref(total), device)
    return total.value // _KEPT_SHARE


def _setting(pool: Any, attribute: int, value: int) -> Call:
    return "cuMemPoolSetAttribute", pool, attribute, byref(c_uint64(value))


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
    handles.drain()
    kinds = _THRESHOLD, _USED, _RESERVED, _USED_HIGH, _RESERVED_HIGH
    figures = {kind: c_uint64() for kind in kinds}
    calls: list[Call] = []
    if device in _pools:
        for kind, value in figures.items():
            calls.append(("cuMemPoolGetAttribute", _pools[device], kind, byref(value)))
    free, total = c_size_t(), c_size_t()
    driver.run(device, *calls, ("cuMemGetInfo_v2", byref(free), byref(total)))
    sizes = [m.size_bytes for m in watches if m.device == device and m.cell.value]
    pinned = (kept.size_bytes for kept in handles.watches if kept.device == device and kept.once)
    return MemoryStats(
        device,
        used_bytes=figures[_USED].value,
        reserved_bytes=figures[_RESERVED].value,
        used_high_bytes=figures[_USED_HIGH].value,
        reserved_high_bytes=figures[_RESERVED_HIGH].value,
        free_device_bytes=free.value,
        total_device_bytes=total.value,
        live_arrays=len(sizes),
        pending_frees=sum(memory.device == device for memory in tuple(pending)),
        release_threshold_bytes=figures[_THRESHOLD].value,
        small_arrays=sum(size < _SMALL_BYTES for size in sizes),
        largest_array_bytes=max(sizes, default=0),
        # A count says what comes next in its repr alone without taking it.
        num_allocations=int(repr(_allocations[device])[len("count(") : -1]),
        pinned_host_bytes=sum(pinned),
    )


def pools() -> list[MemoryStats]:
    """The figures of every pool that there is."""
    return [statistics(device) for device in sorted(_pools)]


def memory_stats(device: Any = None) -> MemoryStats:
    """What kernel_hub's pool on `device` (None: the current one) holds and the GPU has left."""
    return statistics(device_number(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    """Let `used_high_bytes` and `reserved_high_bytes` begin again at what there is now."""
    _set(device_number(device), {_USED_HIGH: 0, _RESERVED_HIGH: 0}, "resetting the pool's peaks")


def set_release_threshold(threshold_bytes: int | None, device: Any = None) -> None:
    """How much a pool may keep beyond what arrays use; what lies above goes back by itself.

    threshold_bytes: bytes that the pool may have reserved, used or not, without giving back what
        is unused. Above it the driver does so at the next synchronisation of a stream, an event or
        the device. 0 keeps nothing, 2**63 - 1 everything, and None is the default: a 32nd of the
        GPU's memory.
    Allocating beyond it is never refused. Raises TensorError, CudaDriverError.
    """
    number, driver = device_number(device), _driver.get()
    asked = f"setting the release threshold of device {number}'s pool"
    if threshold_bytes is None:
        threshold_bytes = _default_threshold(driver, number)
    threshold_bytes = _whole("threshold_bytes", threshold_bytes)
    if number not in _pools:
        apart.run(_make_pool, driver, number)
    _set(number, {_THRESHOLD: threshold_bytes}, asked)


def _set(device: int, values: dict[int, int], asked: str) -> None:
    driver = _driver.get()
    if pool := _pools.get(device):
        calls = [_setting(pool, attribute, value) for attribute, value in values.items()]
        driver.run(device, *calls, asked=asked)


def _whole(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TensorError(f"{name}={value!r:.80}: a whole number of bytes") from None
    if not 0 <= number <= MAX_BYTES:
        raise TensorError(f"{name}={number}: expected 0 or more, below 2**63")
    return number


def trim(device: Any = None, *, keep_bytes: int = 0) -> None:
    """Return memory that the pool keeps for reuse to the GPU, down to `keep_bytes` reserved.

    Unloads images too that nothing can launch any more (see Kernel's `keep`).
    """
    device = device_number(device)
    keep_bytes = _whole("keep_bytes", keep_bytes)
    for more in trims:
        more()
    dlpack.sweep()
    drain()
    handles.drain()
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
    _allocations.clear()
    handles.forget()
    forget()
