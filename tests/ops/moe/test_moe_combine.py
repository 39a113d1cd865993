"""moe_combine against fp64: layouts, slots of no row, residuals; and a whole layer of experts."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from bits import same_bits
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import grouped_linear, moe_combine, moe_permute, moe_route, silu_and_mul
from kernel_hub.testing import reference_moe
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

op: Any = importlib.import_module("kernel_hub.ops.moe.moe_combine")
SIZES = [(1, 1, 8), (5, 2, 64), (9, 8, 40), (3, 3, 2056), (20, 5, 7), (2, 11, 1), (4, 6, 4096)]


def draw(
    way: Way, tokens: int, k: int, hidden: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """rows, row_id_map, weights, residual; some slots are of no row."""
    generator = torch.Generator().manual_seed(tokens)
    places = torch.randperm(tokens * k, generator=generator).view(tokens, k).int() - k // 3
    rows = way.randn(max(1, tokens * k - k // 3), hidden, dtype=dtype)
    return (
        rows, places.clamp(min=-1).to(way.device), way.randn(tokens, k, seed=1),
        way.randn(tokens, hidden, dtype=dtype, seed=2),
    )  # fmt: skip


def check_combined(out: torch.Tensor, *given: torch.Tensor, residual: torch.Tensor | None) -> None:
    truth, own = (
        reference_moe.moe_combine(*given, residual=residual, dtype=each)
        for each in (torch.float64, out.dtype)
    )
    check(out, truth, own)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(way: Way, dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    tokens, _, hidden = size
    *given, more = draw(way, *size, dtype)
    for residual in (None, more):
        out = Guarded((tokens, hidden), dtype, way.device)
        assert moe_combine(*given, residual=residual, out=out.tensor) is out.tensor
        out.check()
        check_combined(out.tensor, *given, residual=residual)
        same_bits(moe_combine(*given, residual=residual), out.tensor)
    mine = more.clone()
    same_bits(moe_combine(*given, residual=mine, out=mine), out.tensor)


@pytest.mark.parametrize("ahead", [2, 4, 6, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_variant(
    way: Way, dtype: torch.dtype, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "_rows_at_once", lambda k: ahead)
    # Few tokens a group: blocks along gridDim.y, the last with fewer.
    monkeypatch.setattr(op, "_GROUP_UNITS", 16 * ahead)
    op._plans.clear()
    for size in ((9, 8, 40), (3, 3, 2056), (7, 1, 8), (5, 11, 264)):
        *given, residual = draw(way, *size, dtype)
        out = Guarded(residual.shape, dtype, way.device)
        moe_combine(*given, residual=residual, out=out.tensor)
        out.check()
        check_combined(out.tensor, *given, residual=residual)
    op._plans.clear()


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_by_torch_on_the_cpu(size: tuple[int, int, int]) -> None:
    way = Way("torch", "cpu")  # without the fixture, which puts the kernel in torch's place
    *given, residual = draw(way, *size, torch.bfloat16)
    check_combined(moe_combine(*given), *given, residual=None)
    check_combined(moe_combine(*given, residual=residual), *given, residual=residual)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(way: Way, dtype: torch.dtype) -> None:
    rows, places, weights, residual = draw(way, 9, 3, 64, dtype)
    for shift, width in ((0, 72), (1, 64), (0, 65)):
        wide, more, out = (
            Guarded((n, 64), dtype, way.device, row_stride=width, shift=shift)
            for n in (len(rows), 9, 9)
        )
        wide.fill(rows)
        more.fill(residual)
        moe_combine(wide.tensor, places, weights, residual=more.tensor, out=out.tensor)
        out.check()
        check_combined(out.tensor, rows, places, weights, residual=residual)


def test_slots_of_no_row_count_nothing(way: Way) -> None:
    rows = torch.full((2, 8), math.nan, device=way.device)
    places = torch.full((3, 2), -1, dtype=torch.int32, device=way.device)
    weights = torch.full((3, 2), math.nan, device=way.device)
    assert (moe_combine(rows, places, weights) == 0).all()
    residual = way.randn(3, 8)
    same_bits(moe_combine(rows, places, weights, residual=residual), residual)
    places[1, 0] = 1
    assert moe_combine(rows, places, weights).isnan().any(-1).tolist() == [False, True, False]


def test_nothing_to_combine(way: Way) -> None:
    for tokens, k, hidden in ((0, 2, 8), (3, 2, 0), (3, 0, 8)):
        places = torch.zeros(tokens, k, dtype=torch.int32, device=way.device)
        weights = torch.ones(tokens, k, device=way.device)
        out = moe_combine(way.randn(4, hidden), places, weights)
        assert out.shape == (tokens, hidden) and (out == 0).all()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_layer_of_experts(way: Way, dtype: torch.dtype) -> None:
    tokens, hidden, inner, num_experts, k = 21, 64, 32, 8, 2
    x = way.randn(tokens, hidden, dtype=dtype)
    logits = way.randn(tokens, num_experts, dtype=dtype, seed=1)
    gate_up = (way.randn(num_experts, 2 * inner, hidden, seed=2) / 8).to(dtype)
    down = (way.randn(num_experts, hidden, inner, seed=3) / 6).to(dtype)

    weights, experts = moe_route(logits, k, renormalise=True)
    rows, offsets, row_id_map = moe_permute(x, experts, num_experts)
    inner_rows = silu_and_mul(grouped_linear(rows, gate_up, offsets))
    out = moe_combine(grouped_linear(inner_rows, down, offsets), row_id_map, weights)

    def layer(wide: torch.dtype) -> torch.Tensor:
        sums = torch.zeros(tokens, hidden, dtype=wide, device=way.device)
        for token, j in torch.cartesian_prod(torch.arange(tokens), torch.arange(k)).tolist():
            expert = int(experts[token, j])
            gate, up = (gate_up[expert].to(wide) @ x[token].to(wide)).chunk(2)
            each = down[expert].to(wide) @ (torch.nn.functional.silu(gate) * up)
            sums[token] += weights[token, j].to(wide) * each
        return sums

    check(out, layer(torch.float64), layer(dtype))


def test_refusals() -> None:
    rows, places = torch.randn(8, 4), torch.zeros(4, 2, dtype=torch.int32)
    weights = torch.randn(4, 2)
    for found, given, more in (
        ("rows: expected two", (rows[0], places, weights), {}),
        ("row_id_map: expected dtype", (rows, places.long(), weights), {}),
        ("row_id_map: expected two", (rows, places[0], weights), {}),
        ("weights: expected shape", (rows, places, weights[:3]), {}),
        ("weights: expected dtype", (rows, places, weights.half()), {}),
        ("weights: expected a contiguous", (rows, places, torch.randn(4, 4)[:, :2]), {}),
        ("residual: expected shape", (rows, places, weights), {"residual": rows}),
        ("out: expected dtype", (rows, places, weights), {"out": rows[:4].half()}),
        ("out: expected memory", (rows, places, weights), {"out": rows[:4]}),
    ):  # fmt: skip
        with pytest.raises(TensorError, match=f"moe_combine: {found}"):
            moe_combine(*given, **more)
