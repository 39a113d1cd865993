"""linear of e4m3 against fp64 of the dequantised operands: sizes, scales, epilogues, refusals."""

from __future__ import annotations

import importlib
import itertools
import random as random_module
from collections.abc import Callable, Iterator

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from product_problems import ACTIVATIONS
from refused import check_refused
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops.core.device import PlannedGpu
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.matmul import linear_fp8 as fp8
from kernel_hub.ops.matmul import linear_fp8_plan as plan
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded
from kernel_hub.tuning import Gpu, Row

linear: Callable[..., torch.Tensor] = importlib.import_module("kernel_hub.ops.matmul.linear").linear
E4M3_OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
E4M3 = torch.float8_e4m3fn
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MODES = ["none", "tensor", "row", "mixed", "block"]
# Largest error of the sums, of the largest, with room beyond what was measured on an H200
# (docs/notes/linear_fp8.md). They leave the tensor cores after 128 of k, 512, or all of it.
BLOCKS_ERROR, PROMOTED_ERROR, FAST_ERROR = 1e-3, 2e-3, 2e-2


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The reference on the CPU, and the cubin."""
    device: str = request.param
    forget_all()
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels need a GPU of compute capability 9.0")
    yield device


@pytest.fixture
def hopper() -> str:
    """The cubin alone."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels need a GPU of compute capability 9.0")
    return "cuda"


def random(device: str, *shape: int, seed: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def scales(
    device: str, mode: str, m: int, n: int, k: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scales between 0.05 and 0.15."""
    blocks = -(-k // 128)
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return (0.05 + 0.1 * torch.rand(shape, generator=generator)).to(device)

    if mode == "none":
        return None, None
    if mode == "tensor":
        return draw(), draw(1)
    if mode == "row":
        return draw(m, 1), draw(n)
    if mode == "mixed":
        return draw(m), draw(1)
    return draw(m, blocks), draw(-(-n // 128), blocks)


def dequantised(
    values: torch.Tensor, scale: torch.Tensor | None, mode: str, block_rows: int
) -> torch.Tensor:
    wide = values.double()
    if scale is None:
        return wide
    factors = scale.double()
    if mode == "block":
        rows = torch.arange(values.shape[0], device=values.device) // block_rows
        columns = torch.arange(values.shape[1], device=values.device) // 128
        return wide * factors[rows][:, columns]
    return wide * (factors if factors.numel() == 1 else factors.reshape(-1, 1))


def check_linear(
    device: str,
    m: int,
    n: int,
    k: int,
    mode: str = "row",
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    activation: str | None = None,
    has_bias: bool = False,
    has_residual: bool = False,
    use_fast_accum: bool = False,
    out_stride: int | None = None,
) -> None:
    a, b = random(device, m, k, seed=0), random(device, n, k, seed=1)
    a_scale, b_scale = scales(device, mode, m, n, k)
    bias = random(device, n, seed=2, dtype=out_dtype) if has_bias else None
    residual = random(device, m, n, seed=3, dtype=out_dtype) if has_residual else None
    out = Guarded((m, n), out_dtype, device, row_stride=out_stride)
    options = {
        "activation": activation, "residual": residual, "a_scale": a_scale, "b_scale": b_scale,
        "use_fast_accum": use_fast_accum,
    }  # fmt: skip
    got = linear(a, b, bias, out=out.tensor, **options)
    assert got is out.tensor
    out.check()
    product = dequantised(a, a_scale, mode, 1) @ dequantised(b, b_scale, mode, 128).T
    truth = ACTIVATIONS[activation](product if bias is None else product + bias.double())
    if residual is not None:
        truth = truth + residual.double()
    largest = float(product.abs().max()) if m * n else 0.0
    error = BLOCKS_ERROR if mode == "block" else PROMOTED_ERROR
    of_sums = (FAST_ERROR if use_fast_accum else error) * largest
    atol = of_sums + torch.finfo(out_dtype).eps * (float(truth.abs().max()) if m * n else 0.0)
    check(got, truth, truth, atol=atol, name=f"{(m, n, k)} {mode}")
    same_bits(linear(a, b, bias, out_dtype=out_dtype, **options), got)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [16, 144, 528])
@pytest.mark.parametrize("n", [1, 127, 136])
@pytest.mark.parametrize("m", [1, 7, 17, 65, 130])
def test_sizes(device: str, m: int, n: int, k: int, mode: str) -> None:
    check_linear(device, m, n, k, mode)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("m", [3, 150])
def test_epilogues(device: str, m: int, out_dtype: torch.dtype, activation: str | None) -> None:
    for has_bias, has_residual, n in itertools.product((False, True), (False, True), (40, 45)):
        check_linear(
            device, m, n, 144, "mixed" if has_bias else "block", out_dtype=out_dtype,
            activation=activation, has_bias=has_bias, has_residual=has_residual,
        )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["tensor", "row", "block"])
@pytest.mark.parametrize("size", [(1, 4096, 4096), (129, 1000, 14336), (300, 4112, 2064)], ids=str)
def test_larger(hopper: str, size: tuple[int, int, int], mode: str) -> None:
    for out_dtype in OUT_DTYPES:
        check_linear(hopper, *size, mode, out_dtype=out_dtype)
    if mode != "block":
        check_linear(hopper, *size, mode, use_fast_accum=True)


@pytest.mark.parametrize("deals", [0, 1])
@pytest.mark.parametrize("variant", sorted(plan.VARIANTS))
def test_every_variant(hopper_way: Way, variant: str, deals: int) -> None:
    tile = plan.VARIANTS[variant]
    most = tile.block_n if tile.swaps else 700
    sizes = [(1, 8, 128), (most, 333, 528), (most - 3, 4104, 1104), (most, 40000, 512)]
    modes = ("row",) if tile.is_fast else ("tensor", "row", "block")
    if variant in plan.WITHOUT_BLOCKS:
        modes = ("tensor", "row")
    cases = list(itertools.product(sizes, OUT_DTYPES, modes, (None, "silu")))
    if not hopper_way.is_gpu:
        lot = random_module.Random(f"{variant} {deals}")
        sizes = [(1, 8, 128), (most % 300, 200, 272), (70, 333, 656)]
        kinds = [case[1:] for case in cases]
        cases = [(size, *lot.choice(kinds)) for size in sizes]
        cases += [((131, 136, 400), torch.bfloat16, mode, None) for mode in modes]
    with plan.TABLE.forcing(Row(variant, {"group": 3, "deals": deals})):
        for (m, n, k), out_dtype, mode, activation in hopper_way.some(cases, 3, variant, deals):
            check_linear(
                hopper_way.device, m, n, max(k, 128 * tile.splits), mode, out_dtype=out_dtype,
                activation=activation, has_bias=mode == "row",
                has_residual=mode != "tensor" and activation is not None,
                use_fast_accum=tile.is_fast,
            )  # fmt: skip


@pytest.mark.parametrize("variant", sorted(plan.VARIANTS))
def test_aligned_residuals(hopper_way: Way, variant: str) -> None:
    # They come through the ring, of tiles that end early and of those whose k is dealt out.
    tile, lot = plan.VARIANTS[variant], random_module.Random(variant)
    most = min(tile.block_n, 150) if tile.swaps else 140
    sizes = [(most - 3, 264, 528), (1, 72, 144)]
    if hopper_way.is_gpu:
        sizes += [(5 * most + 1, 4104, 1104), (3 * most, 20000, 272)]
    modes = ("row",) if tile.is_fast or variant in plan.WITHOUT_BLOCKS else ("row", "block")
    cases = [
        (*case, lot.choice(OUT_DTYPES[:2]), lot.choice(list(ACTIVATIONS)), lot.random() < 0.5)
        for case in itertools.product(sizes, (0, 1), modes)
    ]
    for (m, n, k), deals, mode, dtype, activation, has_bias in hopper_way.some(cases, 2, variant):
        with plan.TABLE.forcing(Row(variant, {"group": 3, "deals": deals})):
            check_linear(
                hopper_way.device, m, n, max(k, 128 * tile.splits), mode,
                out_dtype=dtype, activation=activation, has_bias=has_bias, has_residual=True,
                use_fast_accum=tile.is_fast,
            )  # fmt: skip


def test_a_residual_of_one_row_for_all(device: str) -> None:
    a, b, row = random(device, 70, 128, seed=4), random(device, 40, 128, seed=5), torch.randn(1, 40)
    row = row.to(device, torch.bfloat16)
    expected = linear(a, b, residual=row.repeat(70, 1))
    same_bits(linear(a, b, residual=row.expand(70, 40)), expected)


@pytest.mark.gpu
def test_a_thousand_launches(hopper: str) -> None:
    check_back_to_back(
        "sizes = [(1, 4096, 4096), (40, 4096, 14336), (300, 1032, 528), (1500, 4096, 512)]\n"
        "cases = [partial(ops.linear, randn(m, k, dtype=e4m3), randn(n, k, dtype=e4m3),"
        " use_fast_accum=fast) for m, n, k in sizes for fast in (False, True)]"
    )


def test_leading_dimensions_and_strides(device: str) -> None:
    wide = random(device, 2, 3, 5, 96, seed=4)
    a, b = wide[..., 16:80], random(device, 24, 128, seed=5)[:, :64]
    row = (torch.rand(30) + 0.5).to(device)
    flat = linear(a.contiguous().view(30, 64), b.contiguous(), a_scale=row)
    for scale in (row.view(2, 3, 5), row.view(2, 3, 5, 1)):
        same_bits(linear(a, b, a_scale=scale).view(30, 24), flat)
    same_bits(linear(a[0, 0, 0], b, a_scale=row[0]), flat[0])
    blocks = torch.rand(2, 30, 3).to(device)[0, :, 1:2]
    expected = linear(a.reshape(30, 64), b, a_scale=blocks.contiguous())
    same_bits(linear(a.reshape(30, 64), b, a_scale=blocks), expected)
    turned = (torch.rand(2, 30) + 0.5).to(device).T  # columns contiguous, as some quantisers write
    a, b = random(device, 30, 256, seed=6), random(device, 24, 256, seed=7)
    of_b = (torch.rand(1, 2) + 0.5).to(device)
    expected = linear(a, b, a_scale=turned.contiguous(), b_scale=of_b)
    same_bits(linear(a, b, a_scale=turned, b_scale=of_b), expected)


def test_output_rows_apart(device: str) -> None:
    for stride in (56, 59):
        check_linear(device, 70, 48, 64, "row", out_stride=stride)


def test_residual_in_place(device: str) -> None:
    a, b = random(device, 70, 64, seed=0), random(device, 40, 64, seed=1)
    residual = random(device, 70, 40, seed=5, dtype=torch.bfloat16)
    expected = linear(a, b, residual=residual)
    linear(a, b, residual=residual, out=residual)
    same_bits(residual, expected)


def test_nan(device: str) -> None:
    a, b = random(device, 4, 16, seed=0), random(device, 8, 16, seed=1)
    a.view(torch.uint8)[1, 3] = 0x7F
    scale = torch.tensor([1.0, 1.0, float("nan"), 1.0]).to(device)
    for activation in ACTIVATIONS:
        out = linear(a, b, activation=activation, a_scale=scale)
        assert bool(out[1:3].isnan().all())
        assert bool(torch.isfinite(out[[0, 3]]).all())


@pytest.mark.parametrize("shape", [(0, 8, 16), (3, 0, 16), (0, 0, 16)])
def test_nothing_to_do(device: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = random(device, m, k, seed=0), random(device, n, k, seed=1)
    assert linear(a, b, out_dtype=torch.float32).shape == (m, n)


def test_compiled(device: str) -> None:
    def forward(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return linear(a, b, activation="silu", a_scale=scale, out_dtype=torch.float16) + 1

    a, b = random(device, 9, 64, seed=0), random(device, 24, 64, seed=1)
    scale = torch.rand(9, 1).to(device)
    compiled = torch.compile(forward, fullgraph=True, backend="eager")
    same_bits(compiled(a, b, scale), forward(a, b, scale))
    operators, given = torch.ops.kernel_hub, (a, b, scale, None, None, 2, None)
    out = torch.empty(9, 24, dtype=torch.float16, device=a.device)
    for op, arguments in (
        (operators.linear_fp8, (*given, 0, torch.bfloat16)),
        (operators.linear_fp8_out, (*given, 1, out)),
    ):
        # test_schema multiplies its inputs, which torch cannot in e4m3.
        torch.library.opcheck(op.default, arguments, test_utils=E4M3_OPCHECKS)


def test_below_9_0_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "device_of", lambda _: PlannedGpu((8, 9), 142, "NVIDIA L40S"))
    a, b = (torch.empty(4, 16, dtype=E4M3, device="meta") for _ in range(2))
    out = torch.empty(4, 4, dtype=torch.bfloat16, device="meta")
    with pytest.raises(TensorError, match=r"linear: a: .*9\.0.*found compute capability 8\.9"):
        fp8.plan_launch(a, b, None, None, None, None, out, 0, False, False)


A, B = torch.ones(3, 256).to(E4M3), torch.ones(130, 256).to(E4M3)
ONE = torch.ones(1)
REFUSED: list[tuple[Callable[[], object], list[str]]] = [
    (lambda: linear(None, B, a_scale=ONE), ["a", "a torch tensor", "NoneType"]),
    (lambda: linear(A, None), ["b", "a torch tensor", "NoneType"]),
    (lambda: linear(A.half(), B), ["b", "dtype float16", "float8_e4m3fn"]),
    (lambda: linear(A.half(), B.half(), a_scale=ONE), ["a", "float8_e4m3fn", "float16"]),
    (lambda: linear(A.half(), B.half(), use_fast_accum=True), ["a", "float8_e4m3fn", "float16"]),
    (lambda: linear(A, B.half()), ["b", "float8_e4m3fn", "float16"]),
    (lambda: linear(A[:, :24], B[:, :24]), ["a", "multiple of 16", "shape (3, 24)"]),
    (lambda: linear(A[:, :0], B[:, :0]), ["a", "multiple of 16", "shape (3, 0)"]),
    (lambda: linear(A, B[:, :128]), ["b", "shape (n, 256)", "shape (130, 128)"]),
    (lambda: linear(A, B[0]), ["b", "shape (n, 256)", "shape (256,)"]),
    (lambda: linear(A, B, torch.ones(130)), ["bias", "dtype bfloat16", "float32"]),
    (lambda: linear(A, B, torch.ones(7).bfloat16()), ["bias", "shape (130,)", "shape (7,)"]),
    (lambda: linear(A, B, out_dtype=E4M3), ["out_dtype", "bfloat16", "float8_e4m3fn"]),
    (lambda: linear(A, B, residual=torch.ones(3, 130)), ["residual", "bfloat16", "float32"]),
    (lambda: linear(A, B, out=torch.ones(2, 130)), ["out", "shape (3, 130)", "shape (2, 130)"]),
    (lambda: linear(A, B, a_scale=1.0), ["a_scale", "a torch tensor", "float 1.0"]),
    (lambda: linear(A, B, a_scale=ONE.half()), ["a_scale", "dtype float32", "float16"]),
    (lambda: linear(A, B, a_scale=torch.ones(4)), ["a_scale", "(3,)", "(3, 2)", "shape (4,)"]),
    (lambda: linear(A, B, b_scale=torch.ones(2)), ["b_scale", "(130,)", "(2, 2)", "shape (2,)"]),
    (lambda: linear(A, B, a_scale=torch.ones(3, 2)), ["b_scale", "blocks", "None"]),
    (
        lambda: linear(A, B, a_scale=torch.ones(3), b_scale=torch.ones(2, 2)),
        ["b_scale", "blocks", "shape (2, 2)"],
    ),
    (
        lambda: linear(
            A, B, a_scale=torch.ones(3, 2), b_scale=torch.ones(2, 2), use_fast_accum=True
        ),
        ["use_fast_accum", "False with scales of blocks"],
    ),
    (lambda: linear(A, B, a_scale=ONE.clone().requires_grad_()), ["a_scale", "no backward"]),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals(case: int) -> None:
    check_refused("linear", *REFUSED[case])


@pytest.mark.gpu
def test_rows_the_copy_engine_cannot_fetch_are_refused(hopper: str) -> None:
    a, b = random(hopper, 5, 88, seed=0), random(hopper, 8, 64, seed=1)
    for wrong in (a[:, 1:65], a[:, :64], a[:1, 8:72]):
        with pytest.raises(TensorError, match="multiples of 16 bytes"):
            linear(wrong, b)
    row = random(hopper, 1, 64, seed=2).expand(5, 64)
    with pytest.raises(TensorError, match="do not overlap"):
        linear(row, b)


def test_every_variant_is_chosen() -> None:
    chosen = {
        plan.choose(132, m, n, k, is_fast).variant
        for m in (1, 8, 16, 17, 33, 65, 128, 180, 256, 300, 384, 512, 560, 1024, 2048, 4096, 8192)
        for n in (8, 256, 1024, 4096, 6144, 8192, 10240, 28672, 57344)
        for k in (128, 4096, 8192, 14336, 28672)
        for is_fast in (False, True)
    }
    assert chosen == set(plan.VARIANTS)


def test_candidates_apply() -> None:
    gpu = Gpu((9, 0), 132)
    for m in (1, 40, 300):
        for fast in (0, 1):
            rows = list(plan.candidates(gpu, m, n=4096, k=4096, fast=fast))
            assert rows
            for row in rows:
                variant = plan.VARIANTS[row.variant]
                assert fast or not variant.is_fast
                assert not variant.swaps or m <= variant.block_n or variant.block_n >= 64
