"""Triton's kernels on a GPU: those of every version kept in tests, and those of the one installed.

Results against torch; refusals leave the GPU alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from in_threads import in_threads

from kernel_hub import TensorMap
from kernel_hub.errors import LaunchConfigError, ParamsError
from kernel_hub.formats import triton as formats_triton

torch = pytest.importorskip("torch", reason="compares with torch")

DATA = Path(__file__).resolve().parents[1] / "formats/data/triton"
VERSIONS = sorted(path.name for path in DATA.iterdir() if path.name[0].isdigit())
load = formats_triton.load


def of_this_gpu(name: str, version: str) -> Any:
    """The kept kernel that runs here, or a skip."""
    capability = torch.cuda.get_device_capability()
    folder = {(9, 0): DATA / version, (8, 0): DATA / version / "sm80"}.get(capability)
    if folder is None or not (folder / f"{name}.cubin").is_file():
        pytest.skip(f"no {name} of Triton {version} for compute capability {capability} is kept")
    return load(folder, name)


def noise(*shape: int, dtype: Any = None) -> Any:
    return torch.randn(shape, device="cuda", dtype=dtype or torch.float32)


class TensorDescriptor:
    """What a call takes of Triton's class of that name."""

    def __init__(self, base: Any, block: list[int]) -> None:
        self.base, self.shape, self.strides = base, list(base.shape), list(base.stride())
        self.block_shape, self.padding = block, "zero"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("n", [16, 1008, 4096 - 16])
def test_add(version: str, n: int) -> None:
    f = of_this_gpu("add_kernel", version)
    x, y = noise(n), noise(n)
    out = torch.full((n + 64,), torch.nan, device="cuda")
    f[(-(-n // 256),)](x, y, out, n)
    assert torch.equal(out[:n], x + y)
    assert out[n:].isnan().all()
    bound = f.bind(-(-n // 256), params=[x, x, out, n])
    bound()
    assert torch.equal(out[:n], x + x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    f(-(-n // 256), stream=stream, params=[y, y, out, n])
    stream.synchronize()
    assert torch.equal(out[:n], y + y)


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
def test_tuples(version: str) -> None:
    f = of_this_gpu("tuple_kernel", version)
    x, y, out = noise(64), noise(64), torch.full((64,), torch.nan, device="cuda")
    f[1]((x, y), (60, (2.5,)), out)
    torch.testing.assert_close(out[:60], 2.5 * x[:60] + (y[:60] + 3))
    assert out[60:].isnan().all()
    f[1](x, y, 61, 0.0, out)
    assert torch.equal(out[:61], y[:61] + 3)


def test_descriptors_of_tlx() -> None:
    """fbtriton's language extension: TMA by descriptors of the host, with and without its ttir."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kept kernel of fbtriton is for compute capability 9.0")
    f = load(DATA / "fbtriton", "tlx_copy")
    x, out = (noise(256, 192, dtype=torch.float16) for _ in range(2))
    f[(4, 3)](TensorDescriptor(x, [64, 64]), TensorDescriptor(out, [64, 64]), 7)
    assert torch.equal(out, x)


def test_clusters_of_a_grid_s_blocks() -> None:
    """TLX's ctas_per_cga: the grid counts blocks."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kept kernel of fbtriton is for compute capability 9.0")
    f = load(DATA / "fbtriton", "add_kernel")
    x, y, out = noise(4096), noise(4096), torch.full((4096,), torch.nan, device="cuda")
    f[16](x, y, out, 4096)
    assert torch.equal(out, x + y)
    with pytest.raises(LaunchConfigError, match="multiple of cluster"):
        f[15](x, y, out, 4096)


@pytest.mark.parametrize("version", VERSIONS)
def test_clusters(version: str) -> None:
    f = of_this_gpu("cluster_kernel", version)
    n = 5000
    x, y, out = noise(n), noise(n), torch.full((n,), torch.nan, device="cuda")
    f[(-(-n // 512),)](x, y, out, n)
    assert torch.equal(out, x * y)


@pytest.mark.parametrize("version", VERSIONS)
def test_matmul(version: str) -> None:
    f = of_this_gpu("matmul_kernel", version)
    m, n, k = 100, 75, 96
    a, b = noise(m, k, dtype=torch.float16), noise(k, 80, dtype=torch.float16)
    out = torch.full((m, 80), torch.nan, device="cuda", dtype=torch.float16)
    f[(-(-m // 32), -(-n // 32))](a, b, out, m, n, k, a.stride(0), b.stride(0), 80, 0.5)
    wanted = 0.5 * (a.double() @ b[:, :n].double())
    torch.testing.assert_close(out[:, :n].double(), wanted, rtol=2e-3, atol=2e-3)
    assert out[:, n:].isnan().all()


@pytest.mark.parametrize("version", VERSIONS)
def test_scratch_on_several_streams_and_threads(version: str) -> None:
    f = of_this_gpu("scratch_kernel", version)
    inputs = [noise(160, 96) for _ in range(4)]
    outs = [torch.full_like(x, torch.nan) for x in inputs]
    torch.cuda.synchronize()

    def work(x: Any, out: Any) -> None:
        stream = torch.cuda.Stream()
        for _ in range(50):
            f[(5, 3)](x, out, 160, 96, stream=stream)
        stream.synchronize()

    in_threads(*[partial(work, *pair) for pair in zip(inputs, outs, strict=True)])
    for x, out in zip(inputs, outs, strict=True):
        assert torch.equal(out, 2 * x)


def test_scratch_in_a_graph() -> None:
    f = of_this_gpu("scratch_kernel", VERSIONS[-1])
    x, out = noise(64, 64), torch.zeros(64, 64, device="cuda")
    stream = torch.cuda.Stream()
    bound = f.bind((2, 2), stream=stream, params=[x, out, 64, 64])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        bound()
        with pytest.raises(RuntimeError, match="bind the launch to the stream before"):
            f[(2, 2)](x, out, 64, 64)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, 2 * x)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, 2 * x)


@pytest.mark.parametrize("version", VERSIONS)
def test_host_descriptors(version: str) -> None:
    f = of_this_gpu("desc_kernel", version)
    x = noise(60, 264, dtype=torch.float16)
    grid = (4, 3)
    values: list[Any] = [TensorDescriptor(x, [16, 128])]
    if f.metadata.descriptors:
        values.append(TensorMap.tiled(x, (16, 64), swizzle="128B"))
    for value in values:
        out = torch.full_like(x, torch.nan)
        f[grid](value, out, 60, 264, 0.25)
        assert torch.equal(out, (x.float() * 0.25).half())


def test_refusals_touch_no_memory() -> None:
    f = of_this_gpu("add_kernel", VERSIONS[-1])
    x, out = noise(1024), torch.zeros(1024, device="cuda")
    with pytest.raises(ParamsError, match=r"x_ptr.*not aligned to 16 bytes"):
        f[4](x[1:], x, out, 512)
    with pytest.raises(ParamsError, match=r"\(n\) is 500, which is not divisible by 16"):
        f[4](x, x, out, 500)
    with pytest.raises(LaunchConfigError, match="blockDim"):
        f(4, 256, params=[x, x, out, 512])
    with pytest.raises(ParamsError, match="fp16"):
        f[4](x.half(), x, out, 512)
    torch.cuda.synchronize()
    assert not out.any()


# -- the Triton that is installed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def jit() -> dict[str, Callable[..., Any]]:
    pytest.importorskip("triton", reason="makes kernels with the installed Triton")
    import importlib.util

    path = DATA.parents[1] / "make_triton_data.py"
    spec = importlib.util.spec_from_file_location("make_triton_data", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, Callable[..., Any]] = module.kernels()
    return made


def test_what_triton_just_ran(cache: Path, jit: dict[str, Any]) -> None:
    x, y = noise(4096), noise(4096)
    outs = [torch.empty_like(x) for _ in range(2)]
    jit["add_kernel"][(16,)](x, y, outs[0], 4096, BLOCK=256)
    f = load("add_kernel")
    f[(16,)](x, y, outs[1], 4096)
    assert torch.equal(*outs)
    outs[1].zero_()
    f(16, params={"x_ptr": x, "y_ptr": y, "out_ptr": outs[1], "n": 4096})
    assert torch.equal(*outs)
    with pytest.raises(ParamsError, match=r"\(n\) is 1000, which is not divisible by 16"):
        f[(4,)](x, y, outs[1], 1000)


def test_a_large_matmul_that_triton_just_ran(cache: Path, jit: dict[str, Any]) -> None:
    size = 512
    a, b = (noise(size, size, dtype=torch.float16) for _ in range(2))
    outs = [torch.zeros_like(a) for _ in range(2)]
    numbers = (size, size, size, size, size, size, 1.5)
    jit["matmul_kernel"][(4, 4)](
        a, b, outs[0], *numbers, BM=128, BN=128, BK=64, num_warps=8, num_stages=4
    )
    f = load("matmul_kernel")
    assert f.metadata.shared_bytes > 48 * 1024 or torch.cuda.get_device_capability() < (9, 0)
    f[(4, 4)](a, b, outs[1], *numbers)
    assert torch.equal(*outs)
    wanted = 1.5 * (a.double() @ b.double())
    torch.testing.assert_close(outs[1].double(), wanted, rtol=2e-3, atol=2e-2)


def test_descriptors_that_triton_just_ran(cache: Path, jit: dict[str, Any]) -> None:
    descriptors = pytest.importorskip("triton.tools.tensor_descriptor", reason="Triton 3.4 on")
    x = noise(60, 264, dtype=torch.float16)
    described = descriptors.TensorDescriptor.from_tensor(x, [16, 128])
    outs = [torch.full_like(x, torch.nan) for _ in range(2)]
    jit["desc_kernel"][(4, 3)](described, outs[0], 60, 264, 0.25, BM=16, BN=128)
    f = load("desc_kernel")
    f[(4, 3)](described, outs[1], 60, 264, 0.25)
    assert torch.equal(*outs)
    assert torch.equal(outs[1], (x.float() * 0.25).half())


def test_device_descriptors_that_triton_just_ran(cache: Path, jit: dict[str, Any]) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor descriptors made on the device need compute capability 9.0")
    import triton

    triton.set_allocator(
        lambda size, align, stream: torch.empty(size, device="cuda", dtype=torch.int8)
    )
    x = noise(64, 96)
    outs = [torch.zeros_like(x) for _ in range(2)]
    jit["scratch_kernel"][(2, 3)](x, outs[0], 64, 96, BM=32, BN=32)
    f = load("scratch_kernel")
    assert f.metadata.global_scratch_bytes > 0
    f[(2, 3)](x, outs[1], 64, 96)
    assert torch.equal(outs[0], 2 * x)
    assert torch.equal(*outs)


def test_autotuned_with_clusters(cache: Path, jit: dict[str, Any]) -> None:
    import triton

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("clusters need compute capability 9.0")
    configs = [triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 512}, num_ctas=2)]
    tuned = triton.autotune(configs, key=["n"])(jit["add_kernel"])
    x, y = noise(4096), noise(4096)
    out = torch.zeros_like(x)
    tuned[lambda meta: (triton.cdiv(4096, meta["BLOCK"]),)](x, y, out, 4096)
    assert torch.equal(out, x + y)
    with pytest.raises(FileNotFoundError, match="holds 2 kernels 'add_kernel'"):
        load("add_kernel")
    clusters = set()
    for path in cache.glob("*/add_kernel.json"):
        f = load(path.parent)
        clusters.add(f.metadata.num_ctas)
        out.zero_()
        f[(32,)](x, y, out, 4096)  # enough programs of either size
        assert torch.equal(out, x + y)
    assert clusters == {1, 2}
