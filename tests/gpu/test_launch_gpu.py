"""Launches on a real GPU: values arrive, streams and devices are followed, errors are survived."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_threads import in_threads
from skips import alone

from kernel_hub import DeviceArray, Kernel, memory_stats
from kernel_hub.errors import (
    CubinCorruptError,
    CudaDriverError,
    FunctionNotFoundError,
    LaunchConfigError,
    ParamsError,
)

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parent.parent.parent
GRID, BLOCK = (4, 1, 1), (256, 1, 1)
DECLARED = {
    "take_struct": None, "add_table": ["float*"], "count": ["int*"],
    "use_shared": ["int*", "int"], "cluster_rank": ["int*"], "grid_sum": ["int*", "int*"],
    "bad_address": ["int*"], "needs_cluster": ["int*"],
}  # fmt: skip


@pytest.fixture(scope="module")
def kernels(cubin: Path) -> Kernel:
    return Kernel(cubin, signatures={name: given for name, given in DECLARED.items() if given})


@pytest.fixture
def probe() -> Any:
    return Kernel("launch_probe").launch_probe_5


def tensors(device: int = 0) -> list[Any]:
    return [torch.randn(1024, device=f"cuda:{device}") for _ in range(3)]


def expected(x: Any, y: Any, scale: float) -> Any:
    return x + scale * y


def test_twelve_parameters_of_all_kinds() -> None:
    (x, y, z), (w, out0, out1) = tensors(), tensors()
    before = out0[1000:].clone()
    params = [out0, out1, x, y, z, w, 1000, 3, -7, 0.5, -2.0, 5]
    Kernel("launch_probe").launch_probe_12(GRID, BLOCK, 0, None, params)
    torch.testing.assert_close(out0[:1000], ((x + 0.5 * y) * 3)[:1000])
    torch.testing.assert_close(out1[:1000], (z - 2.0 * w - 2)[:1000])
    assert torch.equal(out0[1000:], before)


def test_torch_tensors_and_a_storage_offset(probe: Any) -> None:
    out, x, y = tensors()
    probe(GRID, BLOCK, 0, None, [out, x, y, 1024, 0.5])
    torch.testing.assert_close(out, expected(x, y, 0.5))
    big = torch.zeros(2048, device="cuda")
    probe(gridDim=1, blockDim=256, params=(big[512:], x[256:], y[256:], 100, 2))
    torch.testing.assert_close(big[512:612], expected(x[256:356], y[256:356], 2))
    assert not big[:512].any()
    assert not big[612:].any()
    weight = torch.nn.Parameter(x.clone())
    probe(GRID, BLOCK, 0, None, [out, weight, y, 1024, 1.0])
    torch.testing.assert_close(out, expected(x, y, 1.0))


def test_refusals_with_torch(probe: Any) -> None:
    out, x, y = tensors()
    good = [out, x, y, 1024, 0.5]
    wrong: list[tuple[int, Any, str]] = [
        (0, out.half(), "fp16"),
        (0, out.cpu(), "cpu"),
        (0, torch.empty(4, device="meta"), "meta"),
        (1, x.data_ptr(), "c_void_p"),
        (3, 2**31, "range"),
        (3, torch.tensor(3, device="cuda"), "number"),
    ]
    for index, value, says in wrong:
        params = [*good]
        params[index] = value
        with pytest.raises(ParamsError, match=says):
            probe(GRID, BLOCK, 0, None, params)
    freed = torch.randn(1024, device="cuda")
    freed.untyped_storage().resize_(0)
    with pytest.raises(ParamsError, match="freed"):
        probe(GRID, BLOCK, 0, None, [freed, x, y, 1024, 0.5])
    empty = torch.empty(0, device="cuda")
    probe(1, 32, 0, None, [empty, empty, empty, 0, 0.5])
    # A parameter converted in place keeps its identity, not its dtype.
    weight = torch.nn.Parameter(x.clone())
    probe(GRID, BLOCK, 0, None, [out, weight, y, 1024, 0.5])
    weight.data = weight.data.half()
    with pytest.raises(ParamsError, match="fp16"):
        probe(GRID, BLOCK, 0, None, [out, weight, y, 1024, 0.5])
    probe(GRID, BLOCK, 0, None, good)
    torch.cuda.synchronize()


def test_streams_of_every_kind(probe: Any) -> None:
    out, x, y = tensors()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    handles: list[Any] = [side, side.cuda_stream, ctypes.c_void_p(side.cuda_stream)]
    try:
        from cuda.core import Device

        device = Device(0)
        device.set_current()
        handles.append(device.create_stream(side))
    except ImportError:
        pass
    try:
        import cupy

        handles.append(cupy.cuda.ExternalStream(side.cuda_stream))
    except ImportError:
        pass
    for scale, stream in enumerate(handles):
        with torch.cuda.stream(side):
            busy = torch.randn(2048, 2048, device="cuda")
            for _ in range(20):
                busy = busy @ busy * 1e-3
            x.fill_(float(scale))
        probe(GRID, BLOCK, 0, stream, [out, x, y, 1024, 0.5])
        side.synchronize()
        torch.testing.assert_close(out, expected(x, y, 0.5))
    with torch.cuda.stream(side):
        x.fill_(9.0)
        probe(GRID, BLOCK, 0, None, [out, x, y, 1024, 0.5])
    side.synchronize()
    torch.testing.assert_close(out, expected(x, y, 0.5))


def test_graph_capture(probe: Any) -> None:
    out, x, y = tensors()
    fresh = Kernel((ROOT / "cubins/sm90/launch_probe.cubin").read_bytes() + b"")
    scalars = (ctypes.c_int(1024), np.float32(0.5))
    fresh.unload()
    graph = torch.cuda.CUDAGraph()
    probe.load()
    bound = probe.bind(GRID, BLOCK, 0, None, [out, x, y, 1024, 0.5])
    other = torch.empty_like(out)
    with torch.cuda.graph(graph):
        bound()
        probe(GRID, BLOCK, 0, None, [other, out, y, 1024, 1.0])
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, expected(x, y, 0.5))
    torch.testing.assert_close(other, expected(out, y, 1.0))
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.add(x, y, out=out)
        with pytest.raises(LaunchConfigError, match=r"\.load\(\)"):
            Kernel("matmul_cache_kernel")["matmul_cache_kernel_0d1d2d"](
                (8, 8, 1), (32, 32, 1), 16384, None, [None, None, None]
            )
    fresh.launch_probe_5(GRID, BLOCK, 0, None, [out, x, y, *scalars])


def test_eight_threads_ten_thousand_launches(probe: Any) -> None:
    wrong: list[Any] = []

    def work(seed: int) -> None:
        torch.cuda.set_device(0)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.full((1024,), float(seed), device="cuda")
            y = torch.ones(1024, device="cuda")
            outs = [torch.empty(1024, device="cuda") for _ in range(10)]
            for i in range(10_000):
                probe((4, 1, 1), BLOCK, 0, None, [outs[i % 10], x, y, 1024, float(i)])
            stream.synchronize()
            for i, out in enumerate(outs):
                if not (out == seed + 9990.0 + i).all():
                    wrong.append((seed, i))

    in_threads(*[partial(work, seed) for seed in range(8)])
    assert not wrong


def test_two_gpus_follow_their_tensors(probe: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there is {torch.cuda.device_count()}")
    on = [tensors(device) for device in (0, 1)]
    for device in (1, 0, 1, 1, 0):
        for current in (0, 1):
            with torch.cuda.device(current):
                out, x, y = on[device]
                out.zero_()
                probe(GRID, BLOCK, 0, None, [out, x, y, 1024, 0.5])
                assert torch.cuda.current_device() == current
            torch.cuda.synchronize(device)
            torch.testing.assert_close(out, expected(x, y, 0.5))
    with pytest.raises(ParamsError, match="device 1"):
        probe(GRID, BLOCK, 0, None, [on[0][0], on[1][1], on[0][2], 1024, 0.5])
    with pytest.raises(LaunchConfigError, match="device 0"):
        probe(GRID, BLOCK, 0, torch.cuda.Stream(0), [*on[1], 1024, 0.5])
    bound = probe.bind(GRID, BLOCK, 0, None, [*on[1], 1024, 2.0])
    bound()
    torch.cuda.synchronize(1)
    torch.testing.assert_close(on[1][0], expected(on[1][1], on[1][2], 2.0))
    side = torch.cuda.Stream(1)
    with torch.cuda.device(0):
        side.wait_stream(torch.cuda.current_stream(1))
        probe(GRID, BLOCK, 0, side, [*on[1], 1024, 3.0])
    side.synchronize()
    torch.testing.assert_close(on[1][0], expected(on[1][1], on[1][2], 3.0))


def test_structures_globals_and_constants(kernels: Kernel) -> None:
    class Values(ctypes.Structure):
        _fields_ = [
            ("a", ctypes.c_double), ("b", ctypes.c_float), ("c", ctypes.c_int),
            ("d", ctypes.c_int64),
        ]  # fmt: skip

    out = torch.zeros(4, dtype=torch.float64, device="cuda")
    kernels.take_struct(1, 1, params=[out, Values(1.5, 2.5, -3, 2**40)])
    assert out.tolist() == [1.5, 2.5, -3.0, float(2**40)]
    constants = kernels.get_global("table", "fp32")
    assert constants.to_numpy().tolist() == [1.0, 2.0, 3.0, 4.0]
    number = torch.zeros(1, dtype=torch.int32, device="cuda")
    for _ in range(3):
        kernels.count(1, 1, params=[number])
    torch.cuda.synchronize()
    assert kernels.get_global("counter", "int32").to_numpy().tolist() == [3]
    with pytest.raises(FunctionNotFoundError):
        kernels.get_global("nothing")


def test_shared_memory_up_to_the_opt_in_limit(kernels: Kernel) -> None:
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    limit = kernels.use_shared.attributes()["max_dynamic_shared_bytes"]
    for num_bytes in (1024, 49152, 49156, 100_000, limit, 1024):
        out.zero_()
        kernels.use_shared(1, 32, num_bytes, None, [out, num_bytes // 4])
        assert out.item() == 77
    with pytest.raises(LaunchConfigError, match=str(limit)):
        kernels.use_shared(1, 32, limit + 4, None, [out, 1])


def test_clusters_and_cooperative_grids(kernels: Kernel) -> None:
    out = torch.full((16,), -1, dtype=torch.int32, device="cuda")
    kernels.cluster_rank(16, 32, params=[out], cluster=4)
    assert out.tolist() == [0, 1, 2, 3] * 4
    kernels.cluster_rank(16, 32, params=[out], cluster=(16, 1, 1))
    assert out.tolist() == list(range(16))
    with pytest.raises(LaunchConfigError, match="multiple of cluster"):
        kernels.cluster_rank(15, 32, params=[out], cluster=4)
    kernels.needs_cluster(16, 32, params=[out])
    assert out.tolist() == [2] * 16
    with pytest.raises(LaunchConfigError, match="multiple of cluster"):
        kernels.needs_cluster(15, 32, params=[out])
    blocks = 64
    result, scratch = (torch.zeros(blocks, dtype=torch.int32, device="cuda") for _ in range(2))
    kernels.grid_sum(blocks, 32, params=[result, scratch], cooperative=True)
    assert (result == blocks * (blocks - 1) // 2).all()
    with pytest.raises(LaunchConfigError, match="fit on the GPU"):
        kernels.grid_sum(10**6, 32, params=[result, scratch], cooperative=True)
    kernels.cluster_rank(16, 32, params=[out], programmatic=True, priority=-1, carveout=50)
    assert out.tolist() == [0] * 16


def test_occupancy_and_attributes_are_the_driver_s(kernels: Kernel) -> None:
    assert kernels.add_table.occupancy(1024) == 2
    assert kernels.use_shared.occupancy(32, 100_000) == 2
    found = kernels.add_table.attributes()
    major, minor = torch.cuda.get_device_capability()
    assert found["binary_version"] == 10 * major + minor
    assert found["num_regs"] == kernels.add_table.spec.num_regs
    assert found["max_threads"] == 1024


def test_ptx_and_fatbins(tmp_path: Path, compile_cuda: Callable[..., Path]) -> None:
    out = torch.zeros(4, device="cuda")
    source = tmp_path / "k.cu"  # for PTX: clusters and grid sync are not for sm_80
    source.write_text('extern "C" __global__ void add_table(float* o) '
                      "{ o[threadIdx.x] = threadIdx.x + 1; }")  # fmt: skip
    ptx = compile_cuda(source, "-ptx", "-arch=compute_80", suffix=".ptx")
    for made in (
        ptx,
        compile_cuda("gpu_kernels.cu", "-fatbin", "-arch=sm_90", suffix=".fatbin"),
        compile_cuda("gpu_kernels.cu", "-fatbin", "-arch=sm_90", "--no-compress", suffix=".fatbin"),
    ):
        out.zero_()
        kernel = Kernel(made, ["add_table"])
        kernel.add_table(1, 4, params=[out])
        assert out.tolist() == [1.0, 2.0, 3.0, 4.0]
        with pytest.raises(ParamsError, match="too many"):
            kernel.add_table(1, 4, params=[out, out])
    broken = ptx.read_text().replace("ret;", "no_such_instruction;")
    with pytest.raises(CudaDriverError, match="JIT log"):
        Kernel(broken.encode()).add_table(1, 4, params=[out])


def test_probe_loads_in_a_child_first(cubin: Path) -> None:
    out = torch.zeros(4, device="cuda")
    Kernel(cubin.read_bytes() + b"", ["add_table"], probe=True).add_table(1, 4, params=[out])
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(CubinCorruptError):
        Kernel(cubin.read_bytes()[:-64], probe=True)


@alone
def test_load_and_unload_do_not_grow(cubin: Path) -> None:
    kernel = Kernel(cubin, ["add_table"])
    out = torch.zeros(4, device="cuda")
    free = []
    for cycle in range(10_000):
        kernel.add_table(1, 4, params=[out])
        kernel.unload()
        if cycle in (500, 9_999):
            free.append(torch.cuda.mem_get_info()[0])
    assert free[0] - free[1] < 8 << 20


def test_numpy_and_cupy_arrays(probe: Any) -> None:
    x = np.arange(1024, dtype=np.float32)
    out, dx, dy = DeviceArray.empty(1024, "fp32"), *map(DeviceArray.from_numpy, (x, x))
    probe(GRID, BLOCK, 0, None, [out, dx, dy, 1024, 2.0])
    np.testing.assert_array_equal(out.to_numpy(), 3 * x)
    assert memory_stats().used_bytes >= 3 * 4096
    cupy = pytest.importorskip("cupy")
    cx = cupy.asarray(x)
    result = cupy.empty_like(cx)
    probe(GRID, BLOCK, 0, 0, [result, cx, dx, 1024, 1.0])
    np.testing.assert_array_equal(cupy.asnumpy(result), 2 * x)
