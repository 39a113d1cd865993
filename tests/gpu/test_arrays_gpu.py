"""Arrays and streams of CuPy, JAX, Numba and cuda.core on a real GPU."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from kernel_hub import DeviceArray, Kernel, TensorMap, driver
from kernel_hub.arrays import interop
from kernel_hub.errors import ParamsError

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
GRID, BLOCK = (4, 1, 1), (256, 1, 1)


@pytest.fixture
def cp() -> Any:
    return pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.fixture
def jnp() -> Any:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip(f"JAX here is for {jax.default_backend()}")
    return jax.numpy


@pytest.fixture
def core() -> Any:
    core = pytest.importorskip("cuda.core", reason="cuda-core is not installed")
    core.Device(0).set_current()
    return core


@pytest.fixture
def launch() -> Any:
    """launch_probe_5: out = x + scale * y."""
    return Kernel("launch_probe").launch_probe_5


@pytest.fixture(scope="module")
def late() -> Any:
    """A kernel that waits for 20 ms and only then writes."""
    pytest.importorskip("cuda.core", reason="the extra `jit` (cuda-core) is not installed")
    code = """
        extern "C" __global__ void late(float* x, float value, int n) {
            long long start, now;
            asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
            do {
                asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
            } while (now - start < 20000000);
            for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = value;
        }
    """
    return Kernel.from_source(code).late


# ---- CuPy


def test_cupy_arrays(cp: Any, launch: Any) -> None:
    out, x, y = (cp.random.rand(1024, dtype=cp.float32) for _ in range(3))
    launch(GRID, BLOCK, 0, None, [out, x, y, 1024, 0.5])
    cp.testing.assert_allclose(out, x + 0.5 * y, rtol=1e-6)
    launch(GRID, BLOCK, 0, None, [out[:512], x[::2], y, 256, 0.5])
    with pytest.raises(ParamsError, match=r"fp64 \[4\].*convert it to fp32"):
        launch(GRID, BLOCK, 0, None, [out, cp.zeros(4), y, 4, 0.5])
    assert DeviceArray.from_dlpack(x).ptr == x.data.ptr
    described = interop.describe(cp.zeros((4, 6), "float16").T)
    assert described is not None
    assert (described.dtype, described.shape, described.strides) == ("fp16", (6, 4), (1, 6))


def test_cupy_streams_and_their_order(cp: Any, launch: Any, late: Any) -> None:
    """What CuPy's current stream still does to an array comes before a launch elsewhere."""
    own, other = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    out, x, y = (cp.zeros(1024, cp.float32) for _ in range(3))
    cp.cuda.Device().synchronize()
    with own:
        late(1, 256, 0, own, [x, 3.0, 1024])
        launch(GRID, BLOCK, 0, other, [out, x, y, 1024, 0.5])
    other.synchronize()
    cp.testing.assert_array_equal(out, cp.full(1024, 3.0, cp.float32))
    with own:  # the same stream: nothing to wait for
        late(1, 256, 0, own, [x, 4.0, 1024])
        launch(GRID, BLOCK, 0, own, [out, x, y, 1024, 0.5])
        bound = launch.bind(GRID, BLOCK, 0, own, [x, out, y, 1024, 0.5])
        bound()
    own.synchronize()
    cp.testing.assert_array_equal(x, cp.full(1024, 4.0, cp.float32))


def test_cupy_arrays_in_a_graph_of_torch(cp: Any, launch: Any) -> None:
    torch = pytest.importorskip("torch")
    out, x, y = (cp.ones(1024, cp.float32) for _ in range(3))
    launch(GRID, BLOCK, 0, None, [out, x, y, 1024, 0.5])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(GRID, BLOCK, 0, None, [out, x, y, 1024, 2.0])
    out[:] = 0
    cp.cuda.Device().synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert float(out.sum()) == 3 * 1024


# ---- JAX


@pytest.mark.parametrize("token", ["float32", "float16", "bfloat16", "float8_e4m3fn", "int32"])
def test_what_jax_arrays_are(jnp: Any, token: str) -> None:
    array = jnp.arange(24).astype(token).reshape(4, 6)
    described = interop.describe(array)
    assert described is not None
    assert described.dtype == interop.torch_token(token)
    assert (described.device, described.shape, described.strides) == (0, (4, 6), (6, 1))
    kept = DeviceArray.from_dlpack(array)
    assert (kept.ptr, kept.dtype_token) == (described.address, described.dtype)


def test_jax_arrays_that_are_still_being_computed(jnp: Any, launch: Any) -> None:
    """JAX returns before its work is done: the launch waits for it, on whatever stream it is."""
    torch = pytest.importorskip("torch")
    big = jnp.ones((6000, 6000), jnp.float32) / 6000
    out = torch.zeros(1024, device="cuda")
    (big @ big).block_until_ready()  # compiled
    for stream in (None, torch.cuda.Stream()):
        product = big
        for _ in range(12):
            product = product @ big
        launch(GRID, BLOCK, 0, stream, [out, product.reshape(-1), product.reshape(-1), 1024, 1.0])
        torch.cuda.synchronize()
        expected = np.asarray(product).reshape(-1)[:1024] * 2
        np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=1e-6)


def test_jax_arrays_that_are_none(jnp: Any, launch: Any) -> None:
    import jax

    gone, host = jnp.zeros(4), jax.device_put(jnp.zeros(4), jax.devices("cpu")[0])
    gone.delete()
    for array, message in ((gone, "deleted or donated"), (host, "not in CUDA memory")):
        with pytest.raises(ParamsError, match=message):
            launch(GRID, BLOCK, 0, None, [array, None, None, 0, 0.5])

    def traced(x: Any) -> Any:
        with pytest.raises(ParamsError, match="JAX is tracing"):
            launch(GRID, BLOCK, 0, None, [x, None, None, 0, 0.5])
        return x

    jax.jit(traced)(jnp.zeros(4))


# ---- Numba


def test_numba_arrays_and_streams(launch: Any, late: Any) -> None:
    cuda = pytest.importorskip("numba.cuda", reason="Numba is not installed")
    if not cuda.is_available():
        pytest.skip("Numba finds no GPU")
    own, other = cuda.stream(), cuda.stream()
    x = cuda.to_device(np.zeros(1024, np.float32), stream=own)
    out, y = (cuda.to_device(np.zeros(1024, np.float32)) for _ in range(2))
    cuda.synchronize()
    late(1, 256, 0, own, [x, 3.0, 1024])
    # x names the stream it was made on.
    launch(GRID, BLOCK, 0, other, [out, x, y, 1024, 0.5])
    other.synchronize()
    np.testing.assert_array_equal(out.copy_to_host(), np.full(1024, 3, np.float32))
    assert interop.stream_handle(own, 0) == driver_handle(own)


def driver_handle(stream: Any) -> int:
    handle = stream.handle
    return int(getattr(handle, "value", handle) or 0)


# ---- cuda.core


def test_cuda_core_buffers_streams_and_devices(core: Any, launch: Any) -> None:
    device = core.Device(0)
    launch.load(device)
    stream = device.create_stream()
    out, x, y = (device.allocate(4096, stream=stream) for _ in range(3))
    for buffer, value in ((x, 1.5), (y, 2.0)):
        fill = Kernel("launch_probe").launch_probe_5
        source = DeviceArray.from_numpy(np.full(1024, value, np.float32))
        fill(GRID, BLOCK, 0, stream, [buffer, source, source, 1024, 0.0])
    launch(GRID, BLOCK, 0, stream, [out, x, y, 1024, 0.5])
    stream.sync()
    result = DeviceArray.from_address(int(out.handle), 1024, "fp32", owner=out).to_numpy()
    np.testing.assert_array_equal(result, np.full(1024, 2.5, np.float32))
    assert DeviceArray.empty(8, device=device).device == 0
    described = interop.describe(out)
    assert described is not None
    assert (described.address, described.dtype, described.shape) == (int(out.handle), None, (4096,))
    for buffer in (out, x, y):
        buffer.close(stream)
    with pytest.raises(ParamsError):
        launch(GRID, BLOCK, 0, stream, [out, x, y, 1024, 0.5])


def test_pinned_host_memory_of_cuda_core(core: Any, launch: Any) -> None:
    stream = core.Device(0).create_stream()
    buffer = core.LegacyPinnedMemoryResource().allocate(4096, stream=stream)
    out, x = DeviceArray.zeros(1024), DeviceArray.from_numpy(np.ones(1024, np.float32))
    launch(GRID, BLOCK, 0, None, [buffer, x, x, 1024, 1.0])
    launch(GRID, BLOCK, 0, None, [out, buffer, x, 1024, 1.0])
    np.testing.assert_array_equal(out.to_numpy(), np.full(1024, 3, np.float32))


def test_strided_memory_view(core: Any, cp: Any, launch: Any) -> None:
    from cuda.core.utils import StridedMemoryView

    x = cp.arange(1024, dtype=cp.float32)
    view = StridedMemoryView.from_any_interface(x, stream_ptr=-1)
    out = cp.zeros(1024, cp.float32)
    launch(GRID, BLOCK, 0, None, [out, view, view, 1024, 1.0])
    cp.testing.assert_array_equal(out, 2 * x)


# ---- tensor maps


def test_tensor_maps_of_other_arrays(cp: Any, jnp: Any) -> None:
    if driver.get().compute_capability(0)[0] < 9:
        pytest.skip("the TMA came with compute capability 9.0")
    for array in (cp.zeros((64, 128), "float16"), jnp.zeros((64, 128), "bfloat16")):
        made = TensorMap.tiled(array, (8, 64), swizzle="128B")
        described = interop.describe(array)
        assert described is not None
        assert (made.address, made.dtype, made.shape) == (
            described.address, described.dtype, (64, 128),
        )  # fmt: skip
