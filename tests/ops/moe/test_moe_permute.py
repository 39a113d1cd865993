"""moe_permute against a sort written plainly: every way to count, experts of nobody, layouts."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import moe_permute
from kernel_hub.testing import reference_moe
from kernel_hub.testing.guard import Guarded

op: Any = importlib.import_module("kernel_hub.ops.moe.moe_permute")
SIZES = [(1, 1, 8), (5, 2, 64), (17, 8, 40), (33, 3, 2056), (130, 4, 7), (3, 40, 1), (64, 6, 264)]


def draw_experts(way: Way, tokens: int, k: int, num_experts: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-1, num_experts, (tokens, k), generator=generator, dtype=torch.int32)
    return drawn.to(way.device)


def check_permuted(found: tuple[torch.Tensor, ...], x: torch.Tensor, experts: torch.Tensor,
                   num_experts: int) -> None:  # fmt: skip
    rows, offsets, row_id_map = reference_moe.moe_permute(x, experts, num_experts)
    assert torch.equal(found[1], offsets)
    assert torch.equal(found[2], row_id_map)
    same_bits(found[0][: len(rows)], rows)


@pytest.fixture(params=["itself", "chunks", "placed", "placed by chunks"])
def counts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether each block counts all slots, or a launch before it, in many small chunks; whether
    that is another launch's than the one which moves rows."""
    kind = request.param
    for name in ("_COUNTED_APART", "_PLACED_APART"):
        monkeypatch.setattr(op, name, 0 if "chunks" in kind else 1 << 30)
    monkeypatch.setattr(op, "_MUCH", 0 if "placed" in kind else 1 << 40)
    if kind != "itself":
        for name in ("_LEAST_CHUNK", "_LEAST_PLACED"):
            monkeypatch.setattr(op, name, 16)
    op._plans.clear()


@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize("num_experts", [1, 8, 60, 300, 1024])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(way: Way, dtype: torch.dtype, size: tuple[int, int, int], num_experts: int) -> None:
    tokens, k, hidden = size
    x = way.randn(tokens, hidden, dtype=dtype)
    experts = draw_experts(way, tokens, k, num_experts)
    out = Guarded((tokens * k, hidden), dtype, way.device)
    offsets = Guarded((num_experts + 1,), torch.int32, way.device)
    row_id_map = Guarded((tokens, k), torch.int32, way.device)
    found = moe_permute(
        x, experts, num_experts, out=out.tensor, offsets=offsets.tensor,
        row_id_map=row_id_map.tensor,
    )  # fmt: skip
    assert found[0] is out.tensor and found[1] is offsets.tensor and found[2] is row_id_map.tensor
    for guarded in (out, offsets, row_id_map):
        guarded.check()
    check_permuted(found, x, experts, num_experts)
    rest = out.tensor[int(offsets.tensor[-1]) :].contiguous()
    assert (rest.view(torch.uint8) == 0xFF).all()  # rows of nobody are not written
    check_permuted(moe_permute(x, experts, num_experts), x, experts, num_experts)


@pytest.mark.usefixtures("counts")
def test_launch_shapes(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    x, experts = way.randn(37, 96), draw_experts(way, 37, 5, 20)
    for chosen in ((32, 1, 1), (8, 5, 3), (1, 37, 2), (64, 40, 1), (2, 7, 1)):
        monkeypatch.setattr(op, "_choose", lambda *sizes, c=chosen: c)
        op._plans.clear()
        check_permuted(moe_permute(x, experts, 20), x, experts, 20)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_by_torch_on_the_cpu(size: tuple[int, int, int]) -> None:
    way = Way("torch", "cpu")  # without the fixture, which puts the kernel in torch's place
    tokens, k, hidden = size
    x, experts = way.randn(tokens, hidden), draw_experts(way, tokens, k, 5)
    experts[-1, -1] = 5
    check_permuted(moe_permute(x, experts, 5), x, experts, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(way: Way, dtype: torch.dtype) -> None:
    experts = draw_experts(way, 9, 3, 4)
    for shift, width in ((0, 72), (1, 64), (0, 65)):
        wide = Guarded((9, 64), dtype, way.device, row_stride=width, shift=shift)
        out = Guarded((27, 64), dtype, way.device, row_stride=width, shift=shift)
        x = wide.fill(way.randn(9, 64, dtype=dtype))
        check_permuted(moe_permute(x, experts, 4, out=out.tensor), x, experts, 4)
        out.check()


def test_drawn_by_lot(way: Way) -> None:
    lot = random.Random(way.name)
    for _ in range(100 if way.is_gpu else 12):
        tokens = round(2 ** (lot.random() * (13 if way.is_gpu else 7)))
        k, num_experts = lot.randrange(1, 9), lot.choice((2, 8, 64, 128, 257))
        x = way.randn(tokens, lot.choice((8, 24, 33)), dtype=lot.choice(DTYPES))
        experts = draw_experts(way, tokens, k, num_experts, lot.randrange(1 << 20))
        if lot.random() < 0.3:
            experts[:] = experts[0, 0]  # all of one expert
        found = moe_permute(x, experts, num_experts)
        flat = experts.flatten().long()
        kept = flat >= 0
        order = torch.where(kept, flat, num_experts).argsort(stable=True)[: int(kept.sum())]
        same_bits(found[0][: len(order)], x[order // k])
        assert torch.equal(found[2].flatten()[order].cpu(), torch.arange(len(order)).int())
        assert (found[2].flatten()[~kept] == -1).all()
        ends = torch.bincount(flat[kept], minlength=num_experts).cumsum(0).int()
        assert torch.equal(found[1][1:], ends) and int(found[1][0]) == 0


def test_nothing_to_sort(way: Way) -> None:
    for tokens, k, hidden in ((0, 2, 8), (3, 0, 8), (3, 2, 0)):
        x = torch.empty(tokens, hidden, device=way.device)
        experts = torch.ones(tokens, k, dtype=torch.int32, device=way.device)
        out, offsets, row_id_map = moe_permute(x, experts, 3)
        assert out.shape == (tokens * k, hidden) and row_id_map.shape == (tokens, k)
        assert offsets.tolist() == [0, 0, tokens * k, tokens * k]


def test_refusals() -> None:
    x, experts = torch.randn(4, 8), torch.zeros(4, 2, dtype=torch.int32)
    for found, arguments, outs in (
        ("x: expected two", (x[0], experts, 2), {}), ("experts", (x, experts.long(), 2), {}),
        ("experts", (x, experts[:3], 2), {}),
        ("num_experts: expected at most", (x, experts, 1025), {}),
        ("num_experts", (x, experts, 0), {}), ("experts", (x, experts[:, 0], 2), {}),
        ("experts: expected a contiguous", (x, torch.cat([experts, experts], 1)[:, :2], 2), {}),
        ("out", (x, experts, 2), {"out": torch.empty(4, 8)}),
        ("out: expected memory", (x, experts[:, :1].clone(), 2), {"out": x}),
        ("offsets", (x, experts, 2), {"offsets": torch.empty(2, dtype=torch.int32)}),
        ("row_id_map", (x, experts, 2), {"row_id_map": torch.empty(4, 1, dtype=torch.int32)}),
    ):  # fmt: skip
        with pytest.raises(TensorError, match=f"moe_permute: {found}"):
            moe_permute(*arguments, **outs)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back() -> None:
    # The rows of both ways to count, and what goes with them.
    check_back_to_back("""
x, logits = randn(3000, 64), randn(3000, 40)
def layer(tokens):
    weights, experts = ops.moe_route(logits[:tokens], 4, renormalise=True)
    rows, offsets, row_id_map = ops.moe_permute(x[:tokens], experts, 40)
    return rows, offsets, row_id_map, ops.moe_combine(rows, row_id_map, weights)
cases = [partial(layer, tokens) for tokens in (1, 37, 900, 3000)]
""")
