"""grouped_linear against fp64: sizes, offsets of every kind, epilogues, every variant, refusals."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from product_problems import ACTIVATIONS
from product_runs import force_choice, portable
from refused import check_misaligned, check_refused
from test_exports import exported_by_macros
from ways import Way

from kernel_hub.ops.matmul import grouped_plan
from kernel_hub.testing.compare import check, product_atol
from kernel_hub.testing.guard import Guarded

module: Any = importlib.import_module("kernel_hub.ops.matmul.grouped_linear")
grouped_linear: Callable[..., torch.Tensor] = module.grouped_linear
DTYPES = [torch.float16, torch.bfloat16]


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    offsets: Sequence[int],
    before: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Each step rounded to `dtype`; rows of no expert as they were before."""
    values = before.to(dtype)
    for expert, (first, end) in enumerate(itertools.pairwise(offsets)):
        product = a[first:end].to(dtype) @ b[expert].to(dtype).T
        if bias is not None:
            product = product + bias[expert].to(dtype)
        values[first:end] = ACTIVATIONS[activation](product)
    return values


def check_grouped(
    way: Way,
    offsets: Sequence[int],
    n: int,
    k: int,
    *,
    rows: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    has_bias: bool = False,
    row_stride: int | None = None,
) -> torch.Tensor:
    total, num_experts = offsets[-1] if rows is None else rows, len(offsets) - 1
    a, b = way.randn(total, k, dtype=dtype), way.randn(num_experts, n, k, dtype=dtype, seed=1)
    bias = way.randn(num_experts, n, dtype=dtype, seed=2) if has_bias else None
    kind = out_dtype or dtype
    out = Guarded((total, n), kind, way.device, row_stride=row_stride or n)
    before = way.randn(total, n, dtype=kind, seed=3)
    out.tensor.copy_(before)
    on_device = torch.tensor(offsets, dtype=torch.int32, device=way.device)
    options = {"bias": bias, "activation": activation}
    got = grouped_linear(a, b, on_device, out=out.tensor, **options)
    assert got is out.tensor
    out.check()
    truth = reference(a, b, offsets, before, **options)
    own = reference(a, b, offsets, before, **options, dtype=kind)
    check(got, truth, own, atol=product_atol(truth, kind, k), name=f"{(offsets, n, k)}")
    again = grouped_linear(a, b, on_device, out_dtype=out_dtype, **options)
    inside = slice(offsets[0], offsets[-1])
    same_bits(again[inside], got[inside].contiguous())
    same_bits(got[: offsets[0]].contiguous(), before[: offsets[0]])
    same_bits(got[offsets[-1] :].contiguous(), before[offsets[-1] :])
    return got


OFFSETS = [
    [0, 1],
    [0, 130],
    [0, 0, 0, 7, 7],
    [0, 63, 64, 129, 129, 260],
    [0, 300, 300, 300],
    [0, 0, 0, 0, 300],
    [0, *range(1, 34)],
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(1, 8), (127, 72), (136, 264)], ids=str)
@pytest.mark.parametrize("offsets", OFFSETS, ids=lambda x: "-".join(map(str, x[:6])))
def test_sizes(way: Way, dtype: torch.dtype, offsets: list[int], size: tuple[int, int]) -> None:
    check_grouped(way, offsets, *size, dtype=dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("n", [40, 45])
def test_epilogues(way: Way, n: int, out_dtype: torch.dtype | None, activation: str | None) -> None:
    for has_bias, offsets in itertools.product((False, True), ([0, 3, 3, 8], [0, 70, 75])):
        check_grouped(
            way, offsets, n, 64, out_dtype=out_dtype, activation=activation, has_bias=has_bias
        )


def test_rows_of_no_expert_are_not_written(way: Way) -> None:
    for rows, offsets in ((90, [5, 70, 70, 81]), (90, [0, 12, 13]), (20, [20, 20, 20])):
        check_grouped(way, offsets, 48, 64, rows=rows)
        check_grouped(way, offsets, 45, 64, rows=rows, row_stride=51)


def test_many_experts(way: Way) -> None:
    # More than a warp looks at in one go, most of them empty.
    generator = torch.Generator().manual_seed(5)
    for num_experts in (127, 128, 129, 300, 1025):
        counts = torch.randint(-6, 4, (num_experts,), generator=generator).clamp(min=0)
        check_grouped(way, [0, *counts.cumsum(0).tolist()], 24, 16)


@pytest.mark.parametrize(
    "offsets",
    [[-5, 9, 400, 20], [400, 9, -3, 5], [2**31 - 1, -(2**31), 7, 2**31 - 1], [9, 5, 2, 0]],
    ids=str,
)
def test_offsets_out_of_range(way: Way, offsets: list[int]) -> None:
    a, b = way.randn(40, 16, dtype=torch.float16), way.randn(3, 24, 16, dtype=torch.float16)
    out = Guarded((40, 24), torch.float16, way.device)
    out.tensor.zero_()
    on_device = torch.tensor(offsets, dtype=torch.int32, device=way.device)
    grouped_linear(a, b, on_device, out=out.tensor)
    out.check()
    # Cut to 0 .. 40, the first of them is in order.
    if offsets[0] == -5:
        whole = reference(a, b, [0, 9, 40, 40], torch.zeros_like(out.tensor))
        own = reference(a, b, [0, 9, 40, 40], torch.zeros_like(out.tensor), dtype=torch.float16)
        check(out.tensor, whole, own)


def test_strided_rows(way: Way) -> None:
    wide = way.randn(30, 80, dtype=torch.float16)
    weights = way.randn(4, 60, 80, dtype=torch.float16, seed=1)
    a, b = wide[:, 8:72], weights[1:, ::2, :64]
    bias = way.randn(3, 40, dtype=torch.float16, seed=2)[:, 5:35]
    offsets = torch.tensor([0, 11, 11, 30], dtype=torch.int32, device=way.device)
    out = Guarded((30, 30), torch.float16, way.device, row_stride=37)
    grouped_linear(a, b, offsets, bias=bias, out=out.tensor)
    out.check()
    dense = grouped_linear(a.contiguous(), b.contiguous(), offsets, bias=bias.contiguous())
    same_bits(out.tensor.contiguous(), dense)


def test_one_weight_for_all_experts(way: Way) -> None:
    a, b = way.randn(20, 64, dtype=torch.bfloat16), way.randn(1, 48, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 7, 20], dtype=torch.int32, device=way.device)
    expanded = grouped_linear(a, b.expand(2, 48, 64), offsets)
    same_bits(expanded, grouped_linear(a, b.repeat(2, 1, 1), offsets))
    row = a[:1].expand(20, 64)
    same_bits(grouped_linear(row, b, offsets[::2].contiguous())[3], expanded[0])


def test_nothing_to_do(way: Way) -> None:
    for total, num_experts, n, k in ((0, 3, 8, 16), (4, 2, 0, 16), (4, 0, 8, 16)):
        a = way.randn(total, k, dtype=torch.float16)
        b = way.randn(num_experts, n, k, dtype=torch.float16)
        offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=way.device)
        assert grouped_linear(a, b, offsets).shape == (total, n)
    check_grouped(way, [0, 0, 0, 0], 8, 16, rows=5)


def test_no_columns(way: Way) -> None:
    check_grouped(way, [0, 3, 5], 8, 0, has_bias=True, activation="relu")


def test_a_graph_replays_with_other_offsets(way: Way) -> None:
    if not way.is_gpu:
        pytest.skip("graphs are a GPU's")
    a, b = way.randn(64, 64, dtype=torch.bfloat16), way.randn(3, 48, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 64, 64, 64], dtype=torch.int32, device=way.device)
    out = grouped_linear(a, b, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_linear(a, b, offsets, out=out)
    for found in ([0, 64, 64, 64], [0, 10, 20, 64], [0, 0, 63, 64]):
        offsets.copy_(torch.tensor(found, dtype=torch.int32))
        graph.replay()
        same_bits(out, grouped_linear(a, b, offsets))


force = partial(force_choice, module)


@pytest.mark.parametrize("which", [0, 1])
def test_portable_variants(way: Way, which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, portable(way, which))
    for dtype in DTYPES:
        check_grouped(way, [0, 130, 131, 131, 200], 136, 136, dtype=dtype)
    check_grouped(way, [3, 130, 200], 141, 40, rows=203, activation="gelu", has_bias=True)
    check_grouped(way, [0, 5, 200], 136, 72, out_dtype=torch.float32, has_bias=True)


@pytest.mark.parametrize("variant", sorted(grouped_plan.HOPPER["grouped_linear"]))
def test_hopper_variants(hopper_way: Way, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    way, sms = hopper_way, hopper_way.num_sms
    if not way.is_gpu:
        force(monkeypatch, partial(grouped_plan.hopper_choice, variant, sms, group=8))
        check_grouped(way, [0, 130, 131, 131, 200], 136, 136, dtype=torch.float16)
        check_grouped(way, [3, 100, 150], 333, 72, row_stride=341)
        check_grouped(way, [0, 65, 70], 136, 328, activation="silu", has_bias=True)
        check_grouped(way, [0, 65, 70], 136, 200, out_dtype=torch.float32)
        return
    for group in (1, 8):
        force(monkeypatch, partial(grouped_plan.hopper_choice, variant, sms, group=group))
        for dtype in DTYPES:
            for offsets in OFFSETS:
                check_grouped(way, offsets, 520, 264, dtype=dtype)
            check_grouped(way, [3, 700, 701, 701, 1500], 4104, 1096, rows=1603, dtype=dtype)
            check_grouped(way, [0, 200, 901], 333, 200, dtype=dtype, row_stride=341)
            check_grouped(way, [0, 20, 301], 1000, 72, dtype=dtype, has_bias=True)
        # Two blocks share k of a tile.
        check_grouped(way, [0, 200, 200, 901], 520, 2056)
        check_grouped(way, [3, 200, 901], 333, 4096, rows=902, activation="silu", has_bias=True)
        for activation, out_dtype in itertools.product(ACTIVATIONS, (None, torch.float32)):
            check_grouped(
                way, [0, 65, 199, 400], 392, 136, activation=activation, out_dtype=out_dtype,
                has_bias=True,
            )  # fmt: skip


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back() -> None:
    check_back_to_back(
        "offsets = torch.tensor([0, 1, 1, 70, 300], dtype=torch.int32, device='cuda')\n"
        "b = randn(4, 1024, 512)\n"
        "cases = [partial(ops.grouped_linear, randn(m, 512), b, offsets) for m in (8, 90, 300)]\n"
        "w = randn(4, 1024, 4096)\n"
        "cases += [partial(ops.grouped_linear, randn(m, 4096), w, offsets) for m in (200, 300)]"
    )


def test_variants_are_what_is_exported_and_each_is_chosen() -> None:
    for op in ("grouped_linear", "batched_matmul"):
        chosen = set()
        for capability, k in itertools.product(((8, 0), (9, 0)), (64, 128, 512, 2048, 4096)):
            for count, rows, n in itertools.product((4, 8, 128), ROWS, SIZES):
                total = rows * count // 4 if op == "grouped_linear" else rows
                problem = grouped_plan.GroupedProblem(op, count, total, n, k)
                choice = grouped_plan.choose(capability, 132, problem, True)
                chosen |= {f"{op}_{token}_{choice.variant}" for token in ("fp16", "bf16")}
        assert chosen == exported_by_macros(op, (op, f"{op}_sm90"))


ROWS = (1, 16, 32, 48, 64, 144, 256, 320, 1024, 4096)
SIZES = (64, 128, 192, 512, 1024, 1536, 4096, 14336)


A, B = torch.ones(3, 16, dtype=torch.float16), torch.ones(2, 8, 16, dtype=torch.float16)
OFFSETS_2 = torch.tensor([0, 1, 3], dtype=torch.int32)
REFUSED: list[tuple[Callable[[], object], list[str]]] = [
    (lambda: grouped_linear(None, B, OFFSETS_2), ["a", "a torch tensor", "NoneType"]),
    (lambda: grouped_linear(A, None, OFFSETS_2), ["b", "a torch tensor", "NoneType"]),
    (lambda: grouped_linear(A, B, None), ["offsets", "a torch tensor", "NoneType"]),
    (lambda: grouped_linear(A.float(), B, OFFSETS_2), ["a", "float16 or bfloat16", "float32"]),
    (lambda: grouped_linear(A[0], B, OFFSETS_2), ["a", "two dimensions", "shape (16,)"]),
    (lambda: grouped_linear(A[:, :12], B, OFFSETS_2), ["a", "multiple of 8", "(3, 12)"]),
    (lambda: grouped_linear(A, B[0], OFFSETS_2), ["b", "(num_experts, n, 16)", "shape (8, 16)"]),
    (lambda: grouped_linear(A, B.bfloat16(), OFFSETS_2), ["b", "float16", "bfloat16"]),
    (lambda: grouped_linear(A, B[..., :8], OFFSETS_2), ["b", "(num_experts, n, 16)", "(2, 8, 8)"]),
    (lambda: grouped_linear(A, B, OFFSETS_2[:2]), ["offsets", "shape (3,)", "shape (2,)"]),
    (lambda: grouped_linear(A, B, OFFSETS_2.long()), ["offsets", "int32", "int64"]),
    (lambda: grouped_linear(A, B, OFFSETS_2, bias=A[0, :8]), ["bias", "shape (2, 8)", "(8,)"]),
    (lambda: grouped_linear(A, B, OFFSETS_2, activation="tanh"), ["activation", "'tanh'"]),
    (lambda: grouped_linear(A, B, OFFSETS_2, out_dtype=torch.float64), ["out_dtype", "float32"]),
    (lambda: grouped_linear(A, B, OFFSETS_2, out=A[:2, :8]), ["out", "(3, 8)", "(2, 8)"]),
    (lambda: grouped_linear(A.clone().requires_grad_(), B, OFFSETS_2), ["a", "no backward"]),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refusals(way: Way, case: int) -> None:
    check_refused("grouped_linear", *REFUSED[case])


def test_misaligned_rows_are_refused(way: Way) -> None:
    offsets = torch.tensor([0, 3], dtype=torch.int32, device=way.device)
    b = way.randn(1, 8, 16, dtype=torch.float16)
    check_misaligned(lambda a: grouped_linear(a, b, offsets), way.randn(3, 20, dtype=torch.float16))
