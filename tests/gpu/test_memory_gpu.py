"""DeviceArray on a real GPU: copies, the pool, interchange with torch and CuPy, quiet exits."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_threads import in_threads

from kernel_hub import (
    DeviceArray,
    Stream,
    driver,
    empty_pinned,
    memory_stats,
    reset_peak_memory_stats,
    set_release_threshold,
    synchronize,
    trim,
)
from kernel_hub.arrays import block, dtypes, handles
from kernel_hub.errors import CudaDriverError, DeviceOutOfMemoryError, TensorError

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.mark.parametrize("token", sorted(dtypes.DTYPES))
@pytest.mark.parametrize("shape", [(), (1,), (127, 129), (3, 0), (2, 3, 4)])
def test_round_trip(token: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape, dtype=int))
    array = DeviceArray.empty(shape, token)
    host = (np.arange(count) % 100).reshape(shape).astype(array.dtype)
    array.copy_from(host)
    assert array.to_numpy().tobytes() == host.tobytes()
    assert DeviceArray.zeros(shape, token).to_numpy().tobytes() == bytes(host.nbytes)


def test_views() -> None:
    host = np.arange(4 * 5 * 6, dtype=np.int64).reshape(4, 5, 6)
    array = DeviceArray.from_numpy(host)
    for key in (1, (slice(1, 3), 2), (..., slice(0, 6, 2)), (slice(None), slice(1, 4), 5)):
        np.testing.assert_array_equal(array[key].to_numpy(), host[key])
    array[2, 1:].copy_from(np.zeros((4, 6), np.int64))
    host[2, 1:] = 0
    np.testing.assert_array_equal(array.to_numpy(), host)
    copied = DeviceArray.empty(host.shape, "int64").copy_from(array)
    np.testing.assert_array_equal(copied.to_numpy(), host)


def test_pool_reuses_memory() -> None:
    gc.collect()
    trim()
    DeviceArray.empty(64 << 20, "uint8").free()
    before = memory_stats()
    for _ in range(1000):
        DeviceArray.empty(64 << 20, "uint8")
    after = memory_stats()
    assert after.reserved_bytes == before.reserved_bytes >= 64 << 20
    assert after.used_bytes == before.used_bytes
    assert after.live_arrays == before.live_arrays
    assert 0 < after.free_device_bytes < after.total_device_bytes
    trim()
    assert memory_stats().reserved_bytes < 64 << 20


def test_out_of_memory() -> None:
    free = memory_stats().free_device_bytes
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        DeviceArray.empty(2 * free, "uint8")
    assert f"asked for {2 * free:,} bytes" in str(caught.value)
    np.testing.assert_array_equal(DeviceArray.zeros(8).to_numpy(), np.zeros(8))


def test_threads() -> None:
    def work(seed: int) -> None:
        for step in range(100):
            host = np.full(10_000, seed * 1000 + step)
            np.testing.assert_array_equal(DeviceArray.from_numpy(host).to_numpy(), host)

    in_threads(*[partial(work, seed) for seed in range(8)])


# ---- what the pool keeps ----


@pytest.fixture
def threshold() -> Iterator[Callable[[int | None], None]]:
    """Sets it on an empty pool; the default comes back."""
    gc.collect()
    synchronize()
    trim()
    yield set_release_threshold
    set_release_threshold(None)


def test_what_lies_above_the_threshold_goes_back(
    torch: Any, threshold: Callable[[int | None], None]
) -> None:
    stream = Stream()
    ways = (synchronize, stream.synchronize, lambda: stream.record().synchronize())
    for wait in (*ways, torch.cuda.synchronize):
        for kept in (2**63 - 1, 0):
            threshold(kept)
            assert memory_stats().release_threshold_bytes == kept
            DeviceArray.empty(256 << 20, "uint8", stream=stream).free()
            assert memory_stats().unused_bytes >= 256 << 20, "not before"
            wait()
            assert (memory_stats().unused_bytes >= 256 << 20) == (kept > 0), wait
    threshold(None)
    stats = memory_stats()
    assert stats.release_threshold_bytes == stats.total_device_bytes // 32


def test_the_pools_figures() -> None:
    gc.collect()
    before = memory_stats()
    small, large = DeviceArray.empty(100), DeviceArray.empty(64 << 20, "uint8")
    stats = memory_stats()
    assert stats.live_arrays - before.live_arrays == 2
    assert stats.small_arrays - before.small_arrays == 1
    assert stats.num_allocations - before.num_allocations == 2
    assert stats.largest_array_bytes >= large.size_bytes
    assert stats.used_bytes - before.used_bytes >= large.size_bytes + small.size_bytes
    assert 0 <= stats.fragmentation < 1
    large.free()
    synchronize()
    reset_peak_memory_stats()
    assert memory_stats().used_high_bytes == memory_stats().used_bytes


# ---- page-locked host memory ----


def test_copies_that_nobody_waits_for() -> None:
    gc.collect()
    synchronize()
    before = memory_stats().pinned_host_bytes
    stream = Stream()
    host, back = empty_pinned(64 << 20, "int32"), empty_pinned(64 << 20, "int32")
    host[:], back[:] = np.arange(64 << 20), 0
    array = DeviceArray.empty(64 << 20, "int32", stream=stream)
    stream.synchronize()
    array.copy_from(host, stream=stream, non_blocking=True)
    array.copy_to(back, stream=stream, non_blocking=True)
    assert not stream.is_done, "256 MiB each way in the time of two calls"
    del host
    assert memory_stats().pinned_host_bytes - before == 512 << 20
    stream.synchronize()
    gc.collect()
    assert memory_stats().pinned_host_bytes - before == 256 << 20
    np.testing.assert_array_equal(back, np.arange(64 << 20))
    pageable = np.empty_like(back)
    array.copy_to(pageable, stream=stream, non_blocking=True)
    assert stream.is_done
    np.testing.assert_array_equal(pageable, back)
    del back
    gc.collect()
    assert memory_stats().pinned_host_bytes == before


def test_memory_that_torch_page_locked(torch: Any) -> None:
    torch.cuda.init()  # before it torch calls nothing page-locked
    assert torch.from_numpy(empty_pinned(100)).is_pinned()
    host = torch.arange(1 << 20, dtype=torch.float32).pin_memory().numpy()
    stream = torch.cuda.Stream()
    array = DeviceArray.from_numpy(host, stream=stream, non_blocking=True)
    assert [len(copies) for copies in handles._copying.values() if copies] == [1]
    expected = host.copy()
    del host
    np.testing.assert_array_equal(array.to_numpy(stream), expected)
    synchronize()
    assert not any(handles._copying.values())


def test_page_locked_memory_beside_a_capture(torch: Any) -> None:
    held, stream = empty_pinned(1000), Stream()
    array = DeviceArray.zeros(1000, stream=stream)
    before = memory_stats().pinned_host_bytes
    graph, tensor = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        tensor.add_(1)
        del held  # would wait for the device
        array.copy_from(empty_pinned(1000), stream=stream, non_blocking=True)
        inside = memory_stats().pinned_host_bytes
    graph.replay()
    assert tensor.tolist() == [1] * 8
    assert inside >= before
    synchronize()
    assert memory_stats().pinned_host_bytes == before - 4000


# ---- torch ----


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "int32", "uint8", "bool"])
def test_torch_dlpack(torch: Any, name: str) -> None:
    dtype = getattr(torch, name)
    tensor = (torch.arange(24, device="cuda") % 5).to(dtype).reshape(4, 6)
    array = DeviceArray.from_dlpack(tensor[1:, ::2])
    assert array.ptr == tensor[1:].data_ptr()
    assert (array.shape, array.strides) == ((3, 3), (6, 2))
    assert array.to_numpy().astype(float).tolist() == tensor[1:, ::2].double().tolist()
    back = torch.from_dlpack(array)
    assert back.dtype == dtype
    assert back.data_ptr() == array.ptr
    assert torch.equal(back, tensor[1:, ::2])


def test_torch_keeps_our_memory(torch: Any) -> None:
    gc.collect()
    before = memory_stats().live_arrays
    tensor = torch.from_dlpack(DeviceArray.from_numpy(np.arange(1000, dtype=np.float32)))
    gc.collect()
    assert memory_stats().live_arrays == before + 1
    assert tensor.sum().item() == 499500
    view = tensor[10:]
    del tensor
    assert view[0].item() == 10
    del view
    gc.collect()
    assert memory_stats().live_arrays == before


def test_we_keep_torchs_memory(torch: Any) -> None:
    tensor = torch.arange(1 << 20, device="cuda")
    held = torch.cuda.memory_allocated()
    array = DeviceArray.from_dlpack(tensor)
    del tensor
    gc.collect()
    assert torch.cuda.memory_allocated() == held
    assert array[-1].to_numpy() == (1 << 20) - 1
    del array
    gc.collect()
    assert torch.cuda.memory_allocated() < held


def test_torch_reads_the_array_interface(torch: Any) -> None:
    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    array = DeviceArray.from_numpy(host)
    tensor = torch.as_tensor(array[:, ::2], device="cuda")
    assert tensor.cpu().tolist() == host[:, ::2].tolist()
    tensor += 1
    np.testing.assert_array_equal(array.to_numpy()[:, ::2], host[:, ::2] + 1)


def test_torch_streams_are_ordered(torch: Any) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        big = torch.ones(4096, 4096, device="cuda")
        for _ in range(20):
            big = big @ torch.eye(4096, device="cuda")
        array = DeviceArray.from_dlpack(big)
        assert (array.to_numpy() == 1).all()
        mine = DeviceArray.zeros(1 << 20)
        assert mine._block.stream == side.cuda_stream
    mine._record_use(torch.cuda.current_stream().cuda_stream)
    del mine  # waits: it was used on the default stream
    assert (DeviceArray.zeros(1 << 20).to_numpy() == 0).all()


def test_torch_graph_capture(torch: Any) -> None:
    array = DeviceArray.zeros(1 << 16)
    tensor = torch.from_dlpack(array)
    doomed = DeviceArray.zeros(1 << 16)
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        tensor.add_(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    plain = DeviceArray.zeros(1 << 16)
    pending: list[int] = []
    with torch.cuda.graph(graph):
        tensor.add_(1)
        stream = torch.cuda.current_stream().cuda_stream
        doomed._record_use(stream)
        del doomed  # queued: freeing would end the capture
        del plain  # freed at once: its own stream does not capture
        pending.append(len(block.pending))
        with pytest.raises(CudaDriverError, match="before the capture begins"):
            DeviceArray.empty(16)
        # On a stream that does not capture everything goes on, and the capture survives it.
        elsewhere = DeviceArray.zeros(16, stream=0)
        assert (elsewhere.to_numpy(stream=0) == 0).all()
        elsewhere.free()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert pending == [1]
    assert memory_stats().pending_frees == 0
    assert (array.to_numpy() == 2).all()


def test_cpu_tensors_are_refused(torch: Any) -> None:
    with pytest.raises(TensorError, match="not in CUDA memory"):
        DeviceArray.from_dlpack(torch.zeros(3))


# ---- CuPy ----


def test_cupy_dlpack(cupy: Any) -> None:
    theirs = cupy.arange(24, dtype=cupy.float32).reshape(4, 6)
    array = DeviceArray.from_dlpack(theirs[:, 1:3])
    np.testing.assert_array_equal(array.to_numpy(), theirs[:, 1:3].get())
    back = cupy.from_dlpack(array)
    assert back.data.ptr == array.ptr
    cupy.testing.assert_array_equal(back, theirs[:, 1:3])
    del theirs, back
    gc.collect()
    assert array.to_numpy().shape == (4, 2)


def test_cupy_array_interface(cupy: Any) -> None:
    host = np.arange(24, dtype=np.int64).reshape(4, 6)
    array = DeviceArray.from_numpy(host)
    theirs = cupy.asarray(array[1:, ::3])
    assert theirs.data.ptr == array[1:].ptr
    cupy.testing.assert_array_equal(theirs, host[1:, ::3])
    theirs += 1
    np.testing.assert_array_equal(array.to_numpy()[1:, ::3], host[1:, ::3] + 1)


def test_cupy_keeps_our_memory(cupy: Any) -> None:
    gc.collect()
    before = memory_stats().live_arrays
    theirs = cupy.from_dlpack(DeviceArray.from_numpy(np.arange(10)))
    gc.collect()
    assert int(theirs.sum()) == 45
    assert memory_stats().live_arrays == before + 1
    del theirs
    gc.collect()
    assert memory_stats().live_arrays == before


# ---- processes ----


@pytest.mark.parametrize(
    "hold",
    [
        "",
        "import torch; tensor = torch.from_dlpack(array)",
        "import torch; torch.kept = torch.from_dlpack(array); array._record_use(2)",
        "import torch, atexit; t = torch.from_dlpack(array); atexit.register(lambda: t.sum())",
        "import cupy; theirs = cupy.from_dlpack(array); cupy.kept = theirs",
        "import torch; array = DeviceArray.from_dlpack(torch.zeros(4, device='cuda'))",
    ],
)
def test_exit_is_quiet(hold: str) -> None:
    for module in ("torch", "cupy"):
        if module in hold:
            pytest.importorskip(module, reason=f"{module} is not installed")
    code = f"from kernel_hub import DeviceArray\narray = DeviceArray.zeros((4, 4))\n{hold}\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_two_devices() -> None:
    if driver.get().device_count < 2:
        pytest.skip("one GPU only; this needs two")
    host = np.arange(1000, dtype=np.float32)
    arrays = [DeviceArray.from_numpy(host, device=device) for device in (0, 1)]
    for device, array in enumerate(arrays):
        assert array.device == device
        np.testing.assert_array_equal(array.to_numpy(), host)
        assert memory_stats(device).live_arrays >= 1
