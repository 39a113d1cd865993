"""Ahead-of-time built Triton kernels on a GPU: results, shared memory, tuning, dispatch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="results are compared with torch's")
pytest.importorskip("triton", reason="kernels are compiled by Triton")

from triton_kernels import add_kernel, copy_kernel, matmul_kernel  # noqa: E402

from kernel_hub.errors import KernelHubError  # noqa: E402
from kernel_hub.formats import triton  # noqa: E402
from kernel_hub.formats.triton import Problem, TritonFunction  # noqa: E402

pytestmark = pytest.mark.gpu

CONFIGS = [
    {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4},
    {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
]
POINTERS = "*fp16:16,*fp16:16,*fp16:16"


@pytest.fixture(scope="module")
def arch() -> str:
    return "sm{}{}".format(*torch.cuda.get_device_capability())


@pytest.fixture(scope="module")
def matmuls(tmp_path_factory: pytest.TempPathFactory, arch: str) -> Path:
    """A collection: every configuration, with sizes that 16 divides and with any."""
    out = tmp_path_factory.mktemp("matmuls")
    triton.compile_configs(
        matmul_kernel, CONFIGS, signature=f"{POINTERS},i32:16,i32:16,i32:16",
        arch=["sm80", arch], out=out / "divisible",
    )  # fmt: skip
    signature = f"{POINTERS},i32,i32,i32"
    triton.compile_configs(
        matmul_kernel, CONFIGS, signature=signature, arch=arch, out=out / "any"
    )  # fmt: skip
    return out


def launch(function: TritonFunction, a: Any, b: Any, out: Any) -> Any:
    (m, k), n = a.shape, b.shape[1]
    block = function.constexprs
    function[-(-m // block["BLOCK_M"]), -(-n // block["BLOCK_N"])](a, b, out, m, n, k)
    return out


def inputs(m: int, n: int, k: int) -> tuple[Any, Any, Any]:
    a = torch.randn(m, k, device="cuda", dtype=torch.float16)
    b = torch.randn(k, n, device="cuda", dtype=torch.float16)
    return a, b, torch.full((m, n), float("nan"), device="cuda", dtype=torch.float16)


def check(out: Any, a: Any, b: Any) -> None:
    truth = a.double() @ b.double()
    theirs = ((a @ b).double() - truth).abs().max()
    assert (out.double() - truth).abs().max() <= 2 * theirs + 1e-3


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 98432])
def test_vector_add(size: int, arch: str, tmp_path: Path) -> None:
    name = triton.compile(
        add_kernel, "*fp32:16,*fp32:16,*fp32:16,i32", constexprs={"BLOCK": 1024}, arch=arch,
        out=tmp_path,
    )  # fmt: skip
    x, y = torch.randn(size, device="cuda"), torch.randn(size, device="cuda")
    guarded = torch.full((size + 64,), 7.0, device="cuda")
    triton.collection(tmp_path)[name][-(-size // 1024)](x, y, guarded[:size], size)
    assert torch.equal(guarded[:size], x + y) and bool((guarded[size:] == 7).all())


@pytest.mark.parametrize("shape", [(1, 1, 1), (127, 129, 199), (512, 512, 512), (80, 208, 96)])
def test_matmul_in_every_configuration(shape: tuple[int, int, int], matmuls: Path) -> None:
    divisible = all(size % 16 == 0 for size in shape)
    for folder in ("divisible", "any"):
        kernels = triton.collection(matmuls / folder)
        assert len(kernels) == len(CONFIGS)
        for name in kernels:
            a, b, out = inputs(*shape)
            if divisible or folder == "any":
                check(launch(kernels[name], a, b, out), a, b)
            else:  # compiled to rely on what does not hold: refused, not launched
                with pytest.raises(KernelHubError, match="16"):
                    launch(kernels[name], a, b, out)
                assert bool(out.isnan().all())


def test_host_tensor_descriptors(arch: str, tmp_path: Path) -> None:
    tools = pytest.importorskip("triton.tools.tensor_descriptor", reason="made since Triton 3.4")
    kind = "tensordesc<fp16[64,64]>"
    name = triton.compile(
        copy_kernel, f"{kind},{kind}", constexprs={"BLOCK": 64}, arch=arch, out=tmp_path
    )
    x = torch.randn(200, 136, device="cuda", dtype=torch.float16)
    out = torch.full_like(x, float("nan"))
    source, target = (tools.TensorDescriptor.from_tensor(each, [64, 64]) for each in (x, out))
    triton.collection(tmp_path)[name][4, 3](source, target)
    assert torch.equal(out, x)


def test_shared_memory_above_48_kib(matmuls: Path) -> None:
    kernels = triton.collection(matmuls / "divisible")
    assert max(kernels[name].metadata.shared_bytes for name in kernels) > 48 << 10


def test_the_build_for_another_gpu_is_refused(matmuls: Path, arch: str) -> None:
    if arch.startswith("sm8"):
        pytest.skip("an sm_80 image runs on every 8.x")
    kernels = triton.collection(matmuls / "divisible")
    function = kernels.function(next(iter(kernels)), arch="sm80")
    with pytest.raises(KernelHubError, match="sm_80"):
        launch(function, *inputs(64, 64, 64))


def test_tune_and_dispatch(matmuls: Path) -> None:
    def case(**sizes: int) -> Problem:
        m, n, k = sizes.values()
        a, b, out = inputs(m, n, k)
        num_bytes = 2 * (m * k + k * n + m * n)
        return Problem(lambda function: launch(function, a, b, out), num_bytes, 2 * m * n * k)

    folder = matmuls / "divisible"
    shapes = [(16, 2048, 2048), (512, 512, 512), (4096, 4096, 1024)]
    asked = [dict(zip("MNK", shape, strict=True)) for shape in shapes]
    measured = triton.tune(folder, case, asked, rounds=3)
    for one in measured:
        assert not one.refused and one.best_us == min(one.medians.values()) > 0
    tuned = triton.collection(folder).tuned()
    for one in measured:
        assert tuned.choices[" ".join(f"{k}={v}" for k, v in one.sizes.items())] == one.best
    for shape in (*shapes, (32, 4000, 1504), (480, 480, 480)):
        a, b, out = inputs(*shape)
        function = tuned.select(**dict(zip("MNK", shape, strict=True)))
        check(launch(function, a, b, out), a, b)
