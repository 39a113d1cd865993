"""The pool's own figures and settings on the stand-in driver: what it keeps, what goes back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from fakecuda import FakeCuda
from in_threads import in_threads

from kernel_hub import DeviceArray, Event, Stream, driver, memory_stats, synchronize, trim
from kernel_hub import reset_peak_memory_stats as reset_peaks
from kernel_hub import set_release_threshold as set_threshold
from kernel_hub.errors import CudaDriverError, TensorError

MIB = 1 << 20


def test_what_is_kept_by_itself(fakecuda: FakeCuda) -> None:
    assert memory_stats().release_threshold_bytes == 0  # no pool yet
    DeviceArray.empty(1).free()
    stats = memory_stats()
    assert stats.release_threshold_bytes == stats.total_device_bytes // 32
    large = DeviceArray.empty(stats.release_threshold_bytes, "uint8")
    large.free()
    assert memory_stats().reserved_bytes > stats.release_threshold_bytes
    synchronize()
    assert memory_stats().reserved_bytes <= stats.release_threshold_bytes + (32 << 20)


@pytest.mark.parametrize(
    "wait",
    [
        synchronize,
        lambda: Stream().synchronize(),
        lambda: Event().synchronize(),
        lambda: DeviceArray.zeros(1).to_numpy(),
    ],
)
def test_what_lies_above_goes_back_at_a_synchronisation(
    fakecuda: FakeCuda, wait: Callable[[], object]
) -> None:
    set_threshold(64 * MIB)
    kept = DeviceArray.empty(40 * MIB, "uint8")
    DeviceArray.empty(200 * MIB, "uint8").free()
    assert memory_stats().reserved_bytes == 256 * MIB
    wait()
    assert memory_stats().reserved_bytes == 64 * MIB
    kept.free()
    wait()
    assert memory_stats().reserved_bytes == 64 * MIB, "as much is kept"
    assert fakecuda.calls("cuMemPoolTrimTo") == 0


def test_the_threshold_is_the_users(make_fakecuda: Callable[..., FakeCuda]) -> None:
    fake = make_fakecuda(devices=2)
    set_threshold(0, device=1)
    assert fake.live("pools") == 1
    assert memory_stats(1).release_threshold_bytes == 0
    DeviceArray.empty(8, device=1).free()
    set_threshold(2**63 - 1, "cuda:1")
    assert memory_stats(1).release_threshold_bytes == 2**63 - 1
    set_threshold(None, 1)
    assert memory_stats(1).release_threshold_bytes == memory_stats(1).total_device_bytes // 32
    for wrong in (-1, 2**63, 1.5, "1 GB"):
        with pytest.raises(TensorError, match="threshold_bytes="):
            set_threshold(wrong, 1)  # type: ignore[arg-type]
    fake.fail("cuMemPoolSetAttribute", 1)
    with pytest.raises(CudaDriverError, match="release threshold of device 1's pool"):
        set_threshold(5, 1)
    for call in ("cuDeviceTotalMem_v2", "cuMemPoolSetAttribute"):
        fake.fail(call, 1)
        with pytest.raises(CudaDriverError, match=call):
            DeviceArray.empty(1, device=0)
        assert fake.live("pools") == 1


def test_a_device_without_pools_has_no_threshold(fakecuda: FakeCuda) -> None:
    fakecuda.set_device_attribute(0, driver.MEMORY_POOLS_SUPPORTED, 0)
    with pytest.raises(CudaDriverError, match="no stream-ordered memory pools"):
        set_threshold(5)


def test_pieces_and_what_no_array_uses(fakecuda: FakeCuda) -> None:
    empty = memory_stats()
    assert (empty.unused_bytes, empty.fragmentation) == (0, 0.0)
    assert (empty.small_arrays, empty.largest_array_bytes, empty.num_allocations) == (0, 0, 0)
    small = [DeviceArray.empty(1000, "uint8") for _ in range(3)]
    large = [DeviceArray.empty(size * MIB, "uint8") for size in (1, 5)]
    stats = memory_stats()
    assert (stats.live_arrays, stats.small_arrays) == (5, 3)
    assert (stats.largest_array_bytes, stats.num_allocations) == (5 * MIB, 5)
    assert stats.unused_bytes == stats.reserved_bytes - stats.used_bytes > 0
    assert stats.fragmentation == stats.unused_bytes / stats.reserved_bytes
    del large, small
    stats = memory_stats()
    assert (stats.live_arrays, stats.largest_array_bytes, stats.num_allocations) == (0, 0, 5)
    assert stats.fragmentation == 1.0
    trim()
    assert memory_stats().fragmentation == 0.0


def test_peaks_begin_again(fakecuda: FakeCuda) -> None:
    reset_peaks()  # of no pool
    assert fakecuda.live("pools") == 0
    kept = DeviceArray.empty(8 * MIB, "uint8")
    DeviceArray.empty(100 * MIB, "uint8").free()
    trim()
    assert memory_stats().used_high_bytes == 108 * MIB
    reset_peaks()
    stats = memory_stats()
    assert stats.used_high_bytes == stats.used_bytes == kept.size_bytes
    assert stats.reserved_high_bytes == stats.reserved_bytes == 32 * MIB


def test_no_allocation_is_lost_between_threads(fakecuda: FakeCuda) -> None:
    def work(count: int) -> None:
        for _ in range(count):
            DeviceArray.empty(8)

    in_threads(*[partial(work, 200)] * 8)
    assert memory_stats().num_allocations == 1600
    assert memory_stats().num_allocations == 1600
