"""DeviceArray on the stand-in driver: who frees what, when, and what the pool says."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import make_stream
from in_threads import in_threads

from kernel_hub import driver
from kernel_hub.arrays import interop
from kernel_hub.arrays.device_array import DeviceArray, memory_stats, trim
from kernel_hub.errors import CudaDriverError, DeviceOutOfMemoryError, TensorError


def test_views_keep_the_memory(fakecuda: FakeCuda) -> None:
    array = DeviceArray.from_numpy(np.arange(8, dtype=np.float32))
    view = array[2:].reshape(2, 3)[1]
    del array
    gc.collect()
    assert fakecuda.live_allocations == 1
    np.testing.assert_array_equal(view.to_numpy(), [5, 6, 7])
    del view
    assert fakecuda.live_allocations == 0


def test_use_after_free_is_refused(fakecuda: FakeCuda) -> None:
    array = DeviceArray.zeros((4, 4))
    view = array[1:]
    assert not array.is_freed
    view.free()
    assert array.is_freed
    assert fakecuda.live_allocations == 0
    array.free()  # a second time does nothing
    assert fakecuda.calls("cuMemFreeAsync") == 1
    uses = [
        lambda: array.ptr,
        array.to_numpy,
        lambda: array[0],
        lambda: array.reshape(16),
        lambda: array.view("int32"),
        lambda: array.copy_from(np.zeros((4, 4), np.float32)),
        lambda: array.__cuda_array_interface__,
        lambda: array.__dlpack__(),
        lambda: DeviceArray.zeros((4, 4)).copy_from(array),
        lambda: interop.describe(array),
    ]
    for use in uses:
        with pytest.raises(TensorError, match="freed"):
            use()
    assert "freed" in repr(array)
    assert fakecuda.calls("cuMemFreeAsync") == 2  # the last line's own array


def test_freed_on_its_stream(fakecuda: FakeCuda) -> None:
    stream = make_stream()
    array = DeviceArray.zeros(16, stream=stream)
    array._record_use(stream)
    del array
    assert fakecuda.last_free_stream == stream
    assert fakecuda.calls("cuCtxSynchronize") == 0
    DeviceArray.zeros(16, stream=1).free()  # the other name of the legacy stream
    assert fakecuda.last_free_stream == 0


def test_use_on_another_stream_is_waited_for(fakecuda: FakeCuda) -> None:
    stream = make_stream()
    array = DeviceArray.zeros(16)
    array._record_use(0)
    array._record_use(1)
    array[4:]._record_use(stream)
    assert array.__cuda_array_interface__["stream"] == stream
    assert fakecuda.calls("cuCtxSynchronize") == 0
    array.to_numpy()
    assert fakecuda.calls("cuCtxSynchronize") == 1
    array.to_numpy()
    assert fakecuda.calls("cuCtxSynchronize") == 1  # waited already
    array._record_use(stream)
    del array
    assert fakecuda.calls("cuCtxSynchronize") == 2
    assert fakecuda.last_free_stream == 0
    assert fakecuda.live_allocations == 0


def test_stream_objects_live_as_long_as_the_memory(fakecuda: FakeCuda) -> None:
    class Stream:
        def __init__(self) -> None:
            self.cuda_stream = make_stream()

        def __del__(self) -> None:
            driver.get().try_call("cuStreamDestroy_v2", self.cuda_stream)

    array = DeviceArray.zeros(16, stream=Stream())
    gc.collect()
    assert fakecuda.live("streams") == 1
    del array
    assert fakecuda.live_allocations == 0
    assert fakecuda.live("streams") == 0


def test_no_free_while_the_stream_captures(fakecuda: FakeCuda) -> None:
    stream = make_stream()
    one, two = (DeviceArray.zeros(16, stream=stream) for _ in range(2))
    other = DeviceArray.zeros(16)
    fakecuda.set_capture(stream)
    del one
    two.free()
    other.free()  # the legacy stream would end the capture
    assert fakecuda.calls("cuMemFreeAsync") == 0
    assert memory_stats().pending_frees == 3
    fakecuda.set_capture(stream, 0)
    assert memory_stats().pending_frees == 0
    assert fakecuda.live_allocations == 0
    assert fakecuda.calls("cuMemFreeAsync") == 3
    assert fakecuda.capture_violations == 0


def test_a_capture_elsewhere_is_not_disturbed(fakecuda: FakeCuda) -> None:
    """Another thread captures on a stream that does not wait for the legacy one, as torch's."""
    fakecuda.set_capture(make_stream(blocking=False))
    array = DeviceArray.from_numpy(np.arange(8))
    np.testing.assert_array_equal(
        DeviceArray.zeros(8, "int64").copy_from(array).to_numpy(), range(8)
    )
    del array
    assert memory_stats().live_arrays == 0
    trim()
    assert fakecuda.live_allocations == 0
    assert fakecuda.capture_violations == 0


def test_freed_after_use_in_the_current_capture(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = make_stream(blocking=False)
    monkeypatch.setattr(interop, "current_stream", lambda device: stream)
    used = DeviceArray.zeros(8, stream=0)
    fakecuda.set_capture(stream)
    used._record_use(stream)
    del used  # would wait for the device
    assert fakecuda.capture_violations == 0
    assert fakecuda.live_allocations == 1
    fakecuda.set_capture(stream, 0)
    memory_stats()
    assert fakecuda.live_allocations == 0


def test_no_memory_work_on_a_capturing_stream(fakecuda: FakeCuda) -> None:
    stream = make_stream()
    array = DeviceArray.zeros(16)
    fakecuda.set_capture(stream)
    for attempt in (
        lambda on: DeviceArray.empty(16, stream=on),
        lambda on: array.to_numpy(stream=on),
        lambda on: array.copy_from(np.zeros(16, np.float32), stream=on),
    ):
        for on in (stream, None):
            with pytest.raises(CudaDriverError, match="do it before the capture begins"):
                attempt(on)
    assert fakecuda.capture_violations == 0
    assert fakecuda.context_depth == 0
    fakecuda.set_capture(stream, 0)
    DeviceArray.empty(16, stream=stream)


def test_from_address_keeps_the_owner_and_frees_nothing(fakecuda: FakeCuda) -> None:
    base = DeviceArray.from_numpy(np.arange(4, dtype=np.float32))
    view = DeviceArray.from_address(base.ptr, 4, "fp32", 0, base)
    del base
    assert fakecuda.live_allocations == 1
    np.testing.assert_array_equal(view.to_numpy(), [0, 1, 2, 3])
    view.free()
    assert view.is_freed
    assert fakecuda.live_allocations == 0


def test_not_copied_or_pickled_as_an_address(fakecuda: FakeCuda) -> None:
    array = DeviceArray.zeros(4)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="to_numpy"):
            attempt(array)
    with pytest.raises(TypeError, match="to_numpy"):
        np.asarray(array)


def test_thousand_cycles_do_not_grow(fakecuda: FakeCuda) -> None:
    DeviceArray.empty(1024).free()
    before = memory_stats()
    for _ in range(1000):
        array = DeviceArray.empty((32, 32))
        array[3].reshape(4, 8)
        del array
    after = memory_stats()
    assert after == before._replace(num_allocations=1001)
    assert after.live_arrays == after.used_bytes == 0
    assert fakecuda.live_allocations == 0
    assert fakecuda.live("pools") == 1
    assert fakecuda.context_depth == 0


def test_threads(fakecuda: FakeCuda) -> None:
    def work(seed: int) -> None:
        kept = []
        for step in range(200):
            host = np.full(64, seed * 1000 + step, np.int32)
            array = DeviceArray.from_numpy(host)
            np.testing.assert_array_equal(array.to_numpy(), host)
            kept.append(array)
            if step % 3 == 0:
                kept.clear()
            if step % 5 == 0:
                array.free()
                array.free()
        memory_stats()

    in_threads(*[partial(work, seed) for seed in range(8)])
    assert fakecuda.live_allocations == 0
    assert fakecuda.live("pools") == 1
    assert memory_stats().live_arrays == 0


def test_two_threads_free_one_array(fakecuda: FakeCuda) -> None:
    for _ in range(50):
        array = DeviceArray.empty(8)
        in_threads(*[array.free] * 4)
    assert fakecuda.calls("cuMemFreeAsync") == 50


def test_devices(make_fakecuda: Callable[..., FakeCuda]) -> None:
    fake = make_fakecuda(devices=2)
    zero, one = (DeviceArray.zeros(256, device=device) for device in (0, 1))
    assert (zero.device, one.device) == (0, 1)
    assert fake.live("pools") == 2
    assert memory_stats(1).live_arrays == 1
    assert memory_stats(1).used_bytes == 1024
    np.testing.assert_array_equal(one.to_numpy(), np.zeros(256))
    assert one.__dlpack_device__() == (2, 1)
    with pytest.raises(TensorError, match="device 0"):
        zero.copy_from(one)
    del one
    assert memory_stats(1).live_arrays == 0
    with pytest.raises(CudaDriverError, match="asked for device 2; there are 2"):
        DeviceArray.empty(1, device=2)


# ---- statistics, trimming, running out ----


def test_stats_and_trim(fakecuda: FakeCuda) -> None:
    fresh = memory_stats()
    assert (fresh.reserved_bytes, fresh.live_arrays) == (0, 0)
    assert fakecuda.live("pools") == 0
    array = DeviceArray.empty(40 << 20, "uint8")
    stats = memory_stats(0)
    assert stats.used_bytes == 40 << 20
    assert stats.reserved_bytes == stats.reserved_high_bytes == 64 << 20
    assert stats.free_device_bytes == fresh.free_device_bytes - (64 << 20)
    assert stats.live_arrays == 1
    del array
    kept = memory_stats()
    assert kept.reserved_bytes == 64 << 20  # kept for reuse
    trim(keep_bytes=32 << 20)
    assert memory_stats().reserved_bytes == 32 << 20
    trim()
    assert memory_stats().reserved_bytes == 0
    assert memory_stats().used_high_bytes == 40 << 20
    with pytest.raises(TensorError, match="keep_bytes"):
        trim(keep_bytes=-1)


def test_out_of_memory_says_the_figures(fakecuda: FakeCuda) -> None:
    fakecuda.set_total_memory(0, 100 << 20)
    kept = DeviceArray.empty(10 << 20, "uint8")
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        DeviceArray.empty((200, 1 << 20), "uint8")
    text = str(caught.value)
    for part in (
        "asked for 209,715,200 bytes for shape (200, 1048576) of uint8",
        "71,303,168 of 104,857,600 bytes free",
        "pool holds 33,554,432 bytes, 10,485,760 of them in 1 live arrays",
        "torch.cuda.empty_cache()",
    ):
        assert part in text
    assert isinstance(caught.value, MemoryError)
    assert caught.value.code == 2
    assert fakecuda.live_allocations == 1
    kept.to_numpy()
    DeviceArray.empty(10 << 20, "uint8")


def test_out_of_memory_reclaims_first(fakecuda: FakeCuda) -> None:
    fakecuda.set_total_memory(0, 100 << 20)
    # A dead cycle holds 60 MiB, and the pool would hold on to what it has.
    cycle: list[object] = [DeviceArray.empty(60 << 20, "uint8")]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        assert fakecuda.live_allocations == 1
        DeviceArray.empty(90 << 20, "uint8")
    finally:
        gc.enable()
    assert fakecuda.live_allocations == 0
    assert fakecuda.calls("cuMemPoolTrimTo") == 1


def test_device_without_pools(make_fakecuda: Callable[..., FakeCuda]) -> None:
    fake = make_fakecuda()
    fake.set_device_attribute(0, driver.MEMORY_POOLS_SUPPORTED, 0)
    with pytest.raises(CudaDriverError, match="no stream-ordered memory pools"):
        DeviceArray.empty(1)
    DeviceArray.empty(0)  # needs no memory
