"""Page-locked host memory on the stand-in driver: its life, and copies that nobody waits for."""

from __future__ import annotations

import gc
import os
import sys
from functools import partial

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import check_fork, make_stream, run_child
from in_threads import in_threads

from kernel_hub import DeviceArray, Stream, empty_pinned, memory_stats, synchronize, trim
from kernel_hub.arrays import dtypes, interop
from kernel_hub.driver.cuda_results import RESULTS
from kernel_hub.errors import CudaDriverError, DeviceOutOfMemoryError, TensorError

NOT_READY = 600


@pytest.mark.parametrize("token", sorted(dtypes.DTYPES))
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), 7, (4, 0)])
def test_it_is_a_numpy_array(fakecuda: FakeCuda, token: str, shape: int | tuple[int, ...]) -> None:
    host = empty_pinned(shape, token)
    expected = np.empty(shape, dtypes.numpy_dtype(dtypes.of(token)))
    assert isinstance(host, np.ndarray)
    assert (host.shape, host.dtype) == (expected.shape, expected.dtype)
    assert host.flags.c_contiguous and host.flags.writeable
    assert fakecuda.live_host_allocations == (1 if host.size else 0)
    assert memory_stats().pinned_host_bytes == host.nbytes
    host.view(np.uint8 if host.ndim else host.dtype)[...] = 1
    back = DeviceArray.from_numpy(host, non_blocking=True).to_numpy()
    assert back.tobytes() == host.tobytes()


def test_the_memory_lives_as_long_as_a_view(fakecuda: FakeCuda) -> None:
    host = empty_pinned((4, 6), "int32")
    host[:] = np.arange(24).reshape(4, 6)
    view = memoryview(host.T[::2].view(np.float32))
    copied = host.copy()
    del host
    gc.collect()
    assert fakecuda.live_host_allocations == 1
    del view
    gc.collect()
    assert fakecuda.live_host_allocations == 0
    assert copied[3, 5] == 23
    assert memory_stats().pinned_host_bytes == 0


def test_copies_that_nobody_waits_for(fakecuda: FakeCuda) -> None:
    stream = Stream()
    host, back = empty_pinned(100, "int32"), empty_pinned((10, 10), "int32")
    host[:] = np.arange(100)
    array = DeviceArray.from_numpy(host.reshape(10, 10), stream=stream, non_blocking=True)
    assert array.copy_to(back, stream=stream, non_blocking=True) is back
    array.copy_from(back, stream=stream, non_blocking=True)
    assert fakecuda.calls("cuStreamSynchronize") == fakecuda.calls("cuCtxSynchronize") == 0
    np.testing.assert_array_equal(back.ravel(), host)
    array.copy_to(back, stream=stream)
    assert fakecuda.calls("cuStreamSynchronize") == 1
    array.free()
    assert fakecuda.calls("cuCtxSynchronize") == 0


def test_host_memory_is_kept_until_the_copy_is_done(fakecuda: FakeCuda) -> None:
    stream, other = Stream(), Stream()
    array = DeviceArray.zeros(8, stream=stream)
    fakecuda.fail("cuEventQuery", NOT_READY, count=-1)
    for on in (stream, other, None):
        array.copy_from(empty_pinned(8), stream=on, non_blocking=True)
    array.copy_to(empty_pinned(8), stream=stream, non_blocking=True)
    gc.collect()
    memory_stats()
    assert fakecuda.live_host_allocations == 4
    assert fakecuda.live("events") == 4
    fakecuda.clear_faults()
    stream.synchronize()
    assert (fakecuda.live_host_allocations, fakecuda.live("events")) == (0, 4)
    array.copy_to(empty_pinned(8), stream=stream, non_blocking=True)
    assert fakecuda.live("events") == 4, "events are used again"
    # Of other streams than the array's own, freeing waits for all the work there is.
    array.free()
    assert fakecuda.calls("cuCtxSynchronize") == 1


@pytest.mark.parametrize("look", [memory_stats, trim, synchronize, lambda: empty_pinned(1)])
def test_who_notices_that_a_copy_is_done(fakecuda: FakeCuda, look: object) -> None:
    array = DeviceArray.zeros(8)
    fakecuda.fail("cuEventQuery", NOT_READY, count=-1)
    for _ in range(3):
        array.copy_from(empty_pinned(8), non_blocking=True)
    queries = fakecuda.calls("cuEventQuery")
    memory_stats()
    assert fakecuda.calls("cuEventQuery") == queries + 1, "the oldest of a stream is asked alone"
    fakecuda.clear_faults()
    look()  # type: ignore[operator]
    gc.collect()
    assert fakecuda.live_host_allocations == 0


def test_pageable_memory_is_waited_for(fakecuda: FakeCuda) -> None:
    array = DeviceArray.from_numpy(np.arange(8), non_blocking=True)
    host = np.zeros(8, np.int64)
    array.copy_to(host, non_blocking=True)
    assert fakecuda.calls("cuStreamSynchronize") == 2
    np.testing.assert_array_equal(host, range(8))
    # What NumPy had to copy first is pageable too.
    array.copy_from(empty_pinned(16, "int64")[::2], non_blocking=True)
    assert fakecuda.calls("cuStreamSynchronize") == 3


def test_copy_to_refuses(fakecuda: FakeCuda) -> None:
    array = DeviceArray.zeros((2, 4), "int32")
    locked = np.zeros((2, 4), np.int32)
    locked.flags.writeable = False
    for target, message in (
        (np.zeros((4, 2), np.int32), r"target has shape \(4, 2\), expected \(2, 4\)"),
        (np.zeros((2, 4), np.float32), "target has dtype float32, expected int32"),
        (np.zeros((4, 2), np.int32).T, "row-major, writeable target"),
        (np.zeros((2, 4), ">i4"), "native byte order"),
        (locked, "row-major, writeable target"),
        ([[0] * 4] * 2, "takes a NumPy array, not a list"),
    ):
        with pytest.raises(TensorError, match=message):
            array.copy_to(target)  # type: ignore[arg-type]
    with pytest.raises(TensorError, match="contiguous source"):
        array[:, ::2].copy_to(np.zeros((2, 2), np.int32))
    raw = DeviceArray.zeros(4, "bf16").copy_to(np.ones(4, dtypes.numpy_dtype(dtypes.of("bf16"))))
    assert raw.tobytes() == bytes(8)
    assert DeviceArray.zeros(0).copy_to(empty_pinned(0)).size == 0


@pytest.mark.parametrize("code", sorted(RESULTS))
@pytest.mark.parametrize(
    "call", ["cuMemHostAlloc", "cuEventCreate", "cuEventRecord", "cuMemcpyHtoDAsync_v2"]
)
def test_each_call_failing(fakecuda: FakeCuda, call: str, code: int) -> None:
    array = DeviceArray.zeros(8)
    fakecuda.fail(call, code)
    with pytest.raises(CudaDriverError) as caught:
        array.copy_from(empty_pinned(8), non_blocking=True)
    assert (caught.value.call, caught.value.code) == (call, code)
    assert isinstance(caught.value, MemoryError) == (code == 2)
    del caught
    fakecuda.clear_faults()
    gc.collect()
    memory_stats()
    assert fakecuda.live_host_allocations == 0
    assert fakecuda.live("events") <= 1


def test_no_such_memory_left(fakecuda: FakeCuda) -> None:
    for length in (2**50, 2**61, 2**62):
        with pytest.raises(DeviceOutOfMemoryError, match="bytes of page-locked host memory for"):
            empty_pinned(length, "int32")
    for shape, dtype in ((-1, "fp32"), (4, "complex64")):
        with pytest.raises(TensorError):
            empty_pinned(shape, dtype)


def test_a_capture_holds_the_free_up(fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_stream(blocking=False)
    monkeypatch.setattr(interop, "current_stream", lambda device: stream)
    host = empty_pinned(8)
    fakecuda.set_capture(stream)
    del host
    memory_stats()
    assert fakecuda.live_host_allocations == 1
    assert memory_stats().pinned_host_bytes == 32
    assert fakecuda.capture_violations == 0
    array = DeviceArray.zeros(8, stream=0)
    with pytest.raises(CudaDriverError, match="do it before the capture begins"):
        array.copy_from(empty_pinned(8), non_blocking=True)
    fakecuda.set_capture(stream, 0)
    memory_stats()
    assert fakecuda.live_host_allocations == 0


def test_a_free_that_fails_is_shown_unless_the_context_is_lost(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda info: seen.append(str(info.exc_value)))
    for code in (1, 4, 201, 700):
        host = empty_pinned(8)
        fakecuda.fail("cuMemFreeHost", code)
        del host
    assert len(seen) == 1 and "giving back 0x" in seen[0]
    assert memory_stats().pinned_host_bytes == 0


def test_threads(fakecuda: FakeCuda) -> None:
    stream = Stream()

    def work(seed: int) -> None:
        array = DeviceArray.zeros(64, "int32", stream=stream)
        for step in range(100):
            host, back = empty_pinned(64, "int32"), empty_pinned(64, "int32")
            host[:] = seed * 1000 + step
            array.copy_from(host, stream=stream, non_blocking=True)
            array.copy_to(back, stream=stream, non_blocking=True)
            assert (back == host).all()

    in_threads(*[partial(work, seed) for seed in range(8)])
    assert memory_stats().pinned_host_bytes == 0
    assert fakecuda.live_host_allocations == 0


@pytest.mark.parametrize(
    "hold", ["pass", "import sys; sys.kept = host", "cycle = [host]; cycle.append(cycle)"]
)
def test_exit_is_quiet(fakecuda: FakeCuda, hold: str) -> None:
    done = run_child(
        fakecuda,
        "from kernel_hub import DeviceArray, empty_pinned\n"
        "host = empty_pinned((4, 4))\n"
        f"DeviceArray.zeros((4, 4)).copy_from(host, non_blocking=True)\n{hold}\n",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_fork(fakecuda: FakeCuda) -> None:
    check_fork(
        fakecuda,
        "array = [empty_pinned(4)]\n"
        "array.append(DeviceArray.from_numpy(array[0], non_blocking=True))",
        "lambda: empty_pinned(4), lambda: array[1].copy_to(array[0])",
        "array[1].copy_to(array[0])",
    )
