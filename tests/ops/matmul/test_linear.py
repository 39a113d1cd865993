"""linear against fp64: sizes, epilogues, layouts, every variant, refusals."""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from product_problems import ACTIVATIONS
from refused import check_misaligned, check_refused
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.matmul import linear_plan
from kernel_hub.testing.compare import check, product_atol
from kernel_hub.testing.guard import Guarded

module: Any = importlib.import_module("kernel_hub.ops.matmul.linear")
linear: Callable[..., torch.Tensor] = module.linear
DTYPES = [torch.float16, torch.bfloat16]


def reference(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, residual: torch.Tensor | None = None, *,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # fmt: skip
    """activation(a @ b.T + bias) + residual, each step rounded to `dtype`."""
    values = a.to(dtype) @ b.to(dtype).T
    if bias is not None:
        values = values + bias.to(dtype)
    values = ACTIVATIONS[activation](values)
    return values if residual is None else values + residual.to(dtype)


def check_linear(
    way: Way, m: int, n: int, k: int, *, dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None, activation: str | None = None, has_bias: bool = False,
    has_residual: bool = False,
) -> None:  # fmt: skip
    a, b = way.randn(m, k, dtype=dtype), way.randn(n, k, dtype=dtype, seed=1)
    bias = way.randn(n, dtype=dtype, seed=2) if has_bias else None
    kind = out_dtype or dtype
    residual = way.randn(m, n, dtype=kind, seed=3) if has_residual else None
    out = Guarded((m, n), kind, way.device)
    options = {"activation": activation, "residual": residual}
    got = linear(a, b, bias, out=out.tensor, **options)
    assert got is out.tensor
    out.check()
    truth = reference(a, b, bias, **options)
    own = reference(a, b, bias, **options, dtype=kind)
    check(got, truth, own, atol=product_atol(truth, kind, k), name=f"{(m, n, k)}")
    same_bits(linear(a, b, bias, out_dtype=out_dtype, **options), got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [8, 72, 264])
@pytest.mark.parametrize("n", [1, 127, 136])
@pytest.mark.parametrize("m", [1, 7, 16, 31, 65, 130])
def test_sizes(way: Way, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    check_linear(way, m, n, k, dtype=dtype)


@pytest.mark.parametrize("size", [(1, 4096, 4096), (129, 1000, 1544), (300, 4112, 72)], ids=str)
@pytest.mark.gpu
def test_larger(way: Way, size: tuple[int, int, int]) -> None:
    for dtype in DTYPES:
        check_linear(way, *size, dtype=dtype, activation="silu", has_residual=True)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("m", [3, 70])
def test_epilogues(way: Way, m: int, out_dtype: torch.dtype | None, activation: str | None) -> None:
    for has_bias, has_residual in ((False, False), (True, False), (False, True), (True, True)):
        for n in (40, 45):
            check_linear(
                way, m, n, 64, out_dtype=out_dtype, activation=activation,
                has_bias=has_bias, has_residual=has_residual,
            )  # fmt: skip


def test_leading_dimensions(way: Way) -> None:
    a, b = way.randn(2, 3, 5, 64, dtype=torch.float16), way.randn(24, 64, dtype=torch.float16)
    flat = linear(a.view(30, 64), b)
    assert linear(a, b).shape == (2, 3, 5, 24)
    same_bits(linear(a, b).view(30, 24), flat)
    same_bits(linear(a[0, 0, 0], b), flat[0])


def test_strided_rows(way: Way) -> None:
    wide, weights = way.randn(9, 80, dtype=torch.float16), way.randn(48, 80, dtype=torch.float16)
    a, b = wide[:, 8:72], weights[::2, :64]
    out = Guarded((9, 24), torch.float16, way.device, row_stride=27)
    residual = way.randn(9, 31, dtype=torch.float16, seed=4)[:, :24]
    linear(a, b, residual=residual, out=out.tensor)
    out.check()
    same_bits(out.tensor.contiguous(), linear(a.contiguous(), b.contiguous(), residual=residual))


@pytest.mark.parametrize("m", [2, 12, 70])
def test_expanded_and_overlapping_rows(way: Way, m: int) -> None:
    row, b = way.randn(1, 72, dtype=torch.float16), way.randn(40, 72, dtype=torch.float16)
    windows = way.randn(8 * m + 64, dtype=torch.float16).as_strided((m, 72), (8, 1))
    for a, weights in ((row.expand(m, 72), b), (windows, b), (windows, row.expand(24, 72))):
        rounded = reference(a, weights, dtype=torch.float16)
        check(linear(a, weights), reference(a, weights), rounded)


def test_the_default_dtype_is_of_no_matter(way: Way) -> None:
    # Shares of k are fp32 whatever torch makes by default.
    a, b = way.randn(12, 4104, dtype=torch.bfloat16), way.randn(40, 4104, dtype=torch.bfloat16)
    expected = linear(a, b)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        same_bits(linear(a, b), expected)
    finally:
        torch.set_default_dtype(kept)


def test_residual_in_place(way: Way) -> None:
    a, b = way.randn(70, 64, dtype=torch.bfloat16), way.randn(40, 64, dtype=torch.bfloat16)
    residual = way.randn(70, 40, dtype=torch.bfloat16, seed=5)
    expected = linear(a, b, residual=residual)
    linear(a, b, residual=residual, out=residual)
    same_bits(residual, expected)


def test_nan_and_inf(way: Way) -> None:
    a, b = way.randn(4, 16, dtype=torch.bfloat16), way.randn(8, 16, dtype=torch.bfloat16)
    a[1, 3], a[2, 0] = float("nan"), float("inf")
    for activation in ACTIVATIONS:
        out = linear(a, b, activation=activation)
        assert bool(out[1].isnan().all())
        assert bool(torch.isfinite(out[[0, 3]]).all())
    assert bool(linear(a, b)[2].isinf().all())


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_over_their_range(way: Way, dtype: torch.dtype, activation: str) -> None:
    # One column of a is not zero: the product is that column. Approximated for results of 16 bits.
    x = torch.cat([torch.linspace(-60, 60, 2001), torch.tensor([-6e4, -1e3, 0.0, 1e3, 6e4])])
    a, b = torch.zeros(len(x), 64), torch.zeros(64, 64)
    a[:, 5], b[:, 5] = x, 1.0
    a, b = a.to(dtype).to(way.device), b.to(dtype).to(way.device)
    truth = ACTIVATIONS[activation](a[:, 5].double())[:, None]
    rounding, error = (2.0**-11, 7e-5) if dtype == torch.float16 else (2.0**-8, 2.5e-4)
    for rows in (slice(0, 1), slice(700, 730), slice(None)):
        for out_dtype in (dtype, torch.float32):
            out = linear(a[rows], b, activation=activation, out_dtype=out_dtype).double()
            limit = truth[rows].abs() * rounding * 1.05 + error
            if out_dtype == torch.float32:
                limit = truth[rows].abs() * 2e-6 + 1e-6
            assert bool(((out - truth[rows]).abs() <= limit).all())


@pytest.mark.parametrize("shape", [(0, 8, 16), (3, 0, 16), (0, 0, 8)])
def test_nothing_to_do(way: Way, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = way.randn(m, k, dtype=torch.float16), way.randn(n, k, dtype=torch.float16)
    assert linear(a, b).shape == (m, n)


def test_no_columns(way: Way) -> None:
    a, b = way.randn(3, 0, dtype=torch.float16), way.randn(5, 0, dtype=torch.float16)
    bias = way.randn(5, dtype=torch.float16)
    same_bits(linear(a, b, bias), bias.expand(3, 5).contiguous())


@pytest.mark.parametrize(
    "size", [(5, 40, 600), (12, 40, 600), (20, 100, 1032), (40, 70, 1032)], ids=str
)
def test_shares_of_k(way: Way, size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Every portable body with k shared by three blocks, whatever the plan would choose.
    m, n, k = size
    capability = torch.cuda.get_device_capability() if way.is_gpu else (9, 0)
    for choice in linear_plan.portable_choices(capability, m, n, k, num_splits=3):
        monkeypatch.setattr("kernel_hub.ops.matmul.linear_launch.choose", lambda *_, c=choice: c)
        kinds = itertools.product(DTYPES, (None, torch.float32))
        for dtype, out_dtype in way.some(kinds, 3, choice.variant, size):
            if out_dtype is None or choice.variant != "m8_deep":  # which has no wide results
                forget_all()
                check_linear(
                    way, m, n, k, dtype=dtype, out_dtype=out_dtype, activation="gelu",
                    has_bias=True, has_residual=True,
                )  # fmt: skip


def force(
    monkeypatch: pytest.MonkeyPatch, name: str, way: Way, m: int, n: int, k: int, deals: bool
) -> int:
    """A variant of Hopper's takes what comes next; the k of that, as much as it needs."""
    k = max(k, 64 * linear_plan.HOPPER[name].splits)
    choice = linear_plan.hopper_choice(name, way.num_sms, m, n, k, deals=deals)
    monkeypatch.setattr("kernel_hub.ops.matmul.linear_launch.choose", lambda *_: choice)
    forget_all()
    return k


@pytest.mark.parametrize("variant", sorted(linear_plan.HOPPER))
def test_hopper_variants(hopper_way: Way, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = linear_plan.HOPPER[variant]
    most = tile.block_n if tile.swaps else 700
    sizes = [(1, 8, 64), (most, 333, 520), (most - 3, 4104, 1096), (most, 20000, 264)]
    sizes += [(most, 20000, 64), (most, 20000, 128)]
    many = itertools.product(
        DTYPES, (None, torch.float32)[: 1 + (variant in linear_plan.HOPPER_FP32)],
        (("silu", True, True), ("gelu", True, False), (None, False, False)),
    )  # fmt: skip
    cases = list(itertools.product(sizes, (False, True), many))
    if not hopper_way.is_gpu:  # some of what a GPU does in the same time, drawn by lot
        lot = random.Random(variant)
        sizes = [(1, 8, 64), (130, 520, 136), (69, 333, 520), (31, 520, 392)]
        kinds = [kind for _, _, kind in cases]
        cases = [(size, i > 1, lot.choice(kinds)) for i, size in enumerate(sizes)]
        cases.append((sizes[1], False, (torch.bfloat16, None, (None, False, False))))
    cases = hopper_way.some(cases, 3, variant)
    for (m, n, k), deals, (dtype, out_dtype, (activation, has_bias, has_residual)) in cases:
        k = force(monkeypatch, variant, hopper_way, m, n, k, deals)
        check_linear(
            hopper_way, m, n, k, dtype=dtype, out_dtype=out_dtype, activation=activation,
            has_bias=has_bias, has_residual=has_residual,
        )  # fmt: skip


@pytest.mark.parametrize("variant", sorted(linear_plan.HOPPER))
def test_aligned_residuals(hopper_way: Way, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # They come through the ring, of tiles that end early and of those whose k is dealt out.
    tile, lot = linear_plan.HOPPER[variant], random.Random(variant)
    most = min(tile.block_n, 150) if tile.swaps else 140
    sizes = [(most - 3, 264, 392), (1, 72, 72)]
    if hopper_way.is_gpu:
        sizes += [(5 * most + 1, 4104, 1096), (3 * most, 20000, 264)]
    cases = [
        (size, deals, lot.choice(DTYPES), lot.choice(list(ACTIVATIONS)), lot.random() < 0.5)
        for size, deals in itertools.product(sizes, (False, True))
    ]
    for (m, n, k), deals, dtype, activation, has_bias in hopper_way.some(cases, 2, variant):
        k = force(monkeypatch, variant, hopper_way, m, n, k, deals)
        check_linear(
            hopper_way, m, n, k, dtype=dtype, activation=activation, has_bias=has_bias,
            has_residual=True,
        )  # fmt: skip
        a, b = hopper_way.randn(m, k, dtype=dtype), hopper_way.randn(n, k, dtype=dtype, seed=1)
        out = Guarded((m, n), dtype, hopper_way.device, row_stride=n + 8)
        residual = hopper_way.randn(m, n, dtype=dtype, seed=3)
        out.tensor.copy_(residual)
        expected = linear(a, b, activation=activation, residual=residual)
        linear(a, b, activation=activation, residual=out.tensor, out=out.tensor)
        out.check()
        same_bits(out.tensor.contiguous(), expected)


@pytest.mark.parametrize("m", [96, 97, 104, 105, 200, 304, 305])
def test_shares_that_overlap(hopper_way: Way, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both blocks of a cluster fetch some columns of a tile; of a last one, one of them or both."""
    for deals in (False, True):
        k = force(monkeypatch, "swapped_128x200_c21", hopper_way, m, 264, 136, deals)
        check_linear(hopper_way, m, 264, k, dtype=torch.bfloat16, has_residual=deals)


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back() -> None:
    # Launches overlap the end of those before.
    check_back_to_back(
        "cases = [partial(ops.linear, randn(m, 512), randn(4096, 512)) for m in (1, 16, 64, 300)]"
    )


@pytest.mark.gpu
def test_each_launch_sees_the_one_before(way: Way) -> None:
    # A chain of products, each the next one's input and residual, against the same with waits.
    for m in (1, 16, 64, 300, 1024):
        weights = [way.randn(1024, 1024, dtype=torch.bfloat16, seed=i) / 32 for i in range(6)]
        first = way.randn(m, 1024, dtype=torch.bfloat16, seed=9)
        ends = []
        for waits in (False, True):
            rows, other = first.clone(), torch.empty_like(first)
            for i in range(120):
                linear(rows, weights[i % 6], residual=rows, activation="silu", out=other)
                rows, other = other, rows
                if i % 12 == 11:
                    rows.mul_(0.05)
                if waits:
                    torch.cuda.synchronize()
            ends.append(rows)
        assert bool(torch.isfinite(ends[0]).all())
        same_bits(*ends)


A, B = torch.ones(3, 16, dtype=torch.float16), torch.ones(8, 16, dtype=torch.float16)
REFUSED: list[tuple[Callable[[], object], list[str]]] = [
    (lambda: linear(None, B), ["a", "a torch tensor", "NoneType"]),
    (lambda: linear(A, None, out=B), ["b", "a torch tensor", "NoneType"]),
    (lambda: linear(A, B, out=[B]), ["out", "a torch tensor", "list"]),
    (lambda: linear(A.double(), B), ["a", "float16, bfloat16 or float32", "float64"]),
    (lambda: linear(A.float(), B), ["b", "dtype float32", "float16"]),
    (lambda: linear(A[:, :12], B[:, :12]), ["a", "multiple of 8", "shape (3, 12)"]),
    (lambda: linear(A, B.bfloat16()), ["b", "dtype float16", "bfloat16"]),
    (lambda: linear(A, B[:, :8]), ["b", "shape (n, 16)", "shape (8, 8)"]),
    (lambda: linear(A, B[0]), ["b", "shape (n, 16)", "shape (16,)"]),
    (lambda: linear(A, B, B[0, :7]), ["bias", "shape (8,)", "shape (7,)"]),
    (lambda: linear(A, B, activation="tanh"), ["activation", "'gelu'", "'tanh'"]),
    (lambda: linear(A, B, out_dtype=torch.float64), ["out_dtype", "float32", "float64"]),
    (lambda: linear(A, B, residual=A[:, :8].float()), ["residual", "float16", "float32"]),
    (lambda: linear(A, B, out=A[:2, :8]), ["out", "shape (3, 8)", "shape (2, 8)"]),
    (lambda: linear(A.clone().requires_grad_(), B), ["a", "no backward", "a.detach()"]),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals(way: Way, case: int) -> None:
    check_refused("linear", *REFUSED[case])


def test_misaligned_rows_are_refused(way: Way) -> None:
    b = way.randn(8, 16, dtype=torch.float16)
    check_misaligned(lambda a: linear(a, b), way.randn(3, 20, dtype=torch.float16), "a", "linear")


@pytest.mark.parametrize("name", ["a", "residual", "out"])
def test_the_rows_that_are_not_evenly_spaced_are_named(way: Way, name: str) -> None:
    tensors = {"a": way.randn(3, 5, 16).bfloat16(), "b": way.randn(8, 16).bfloat16()}
    tensors |= {key: way.randn(3, 5, 8).bfloat16() for key in ("residual", "out")}
    x = tensors[name]
    tensors[name] = torch.zeros(3, 6, x.shape[-1], dtype=x.dtype, device=x.device)[:, :5]
    with pytest.raises(TensorError, match=f"^linear: {name}: expected evenly spaced rows"):
        linear(**tensors)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_few_rows_beside_weights_off_the_sectors_of_the_l2(m: int) -> None:
    """There the body without tensor copies read at 60 to 90 % of the speed of those with."""
    for k, is_quicker in ((3584, True), (3536, m == 1), (3528, False), (1128, False)):
        choice = linear_plan.choose((9, 0), 132, m, 64000, k, False)
        assert (choice.cubin == "linear_small_m") == is_quicker, (m, k, choice.variant)
    strided = linear_plan.choose((9, 0), 132, m, 64000, 3584, False, b_stride=3624)
    assert strided.cubin == "linear_sm90"
    assert linear_plan.choose((8, 0), 108, m, 64000, 3528, False).cubin == "linear_small_m"


def test_tiles_of_one_round_share_k() -> None:
    """Where tiles of 64 weights and all rows are half of the multiprocessors, two take one."""
    for m, n, k, tokens in (
        (144, 4096, 4096, 160), (160, 4096, 14336, 160), (154, 3584, 3584, 160),
        (176, 4096, 4096, 208), (200, 4096, 14336, 208), (179, 3072, 8192, 208),
    ):  # fmt: skip
        choice = linear_plan.choose((9, 0), 132, m, n, k, False)
        assert choice.variant == f"swapped_64x{tokens}_c11_k2", (m, n, k)
    assert linear_plan.choose((9, 0), 132, 208, 4096, 4096, False).variant == "swapped_64x128_c11"
    assert linear_plan.choose((9, 0), 132, 200, 6144, 4096, False).variant == "128x96_c21"
    for m, n, k in (
        (390, 4096, 7168), (2334, 704, 8384), (209, 4096, 14336), (205, 58112, 29888),
    ):  # fmt: skip
        variant = linear_plan.choose((9, 0), 132, m, n, k, False).variant
        assert not variant.endswith(("160_c11_k2", "208_c11_k2")), (m, n, k)
