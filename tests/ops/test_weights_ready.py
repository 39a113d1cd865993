"""`weights_ready` of the products: weights are read ahead of the launch before where a caller
promises that they are ready, and nowhere else; rows of a never."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from bits import same_bits
from emulated import written_just_ahead
from refused import check_refused
from ways import Way

from kernel_hub import ops
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.matmul import linear_plan, paired_plan, tiles

CHOOSERS = {  # of an op: whose `choose` plans it
    "linear": "kernel_hub.ops.matmul.linear_launch",
    "swiglu_linear": "kernel_hub.ops.matmul.swiglu_linear",
    "gated_linear": "kernel_hub.ops.matmul.swiglu_linear",
    "qkv_linear": "kernel_hub.ops.projection.qkv_linear",
}
OPS = sorted(CHOOSERS)
HEADS: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 1}


def product(op: str, a: torch.Tensor, b: torch.Tensor, **how: Any) -> torch.Tensor:
    if op == "qkv_linear":
        return torch.cat([x.flatten() for x in ops.qkv_linear(a, b, **HEADS, **how)])
    found: torch.Tensor = getattr(ops, op)(a, b, *["gelu"][: op == "gated_linear"], **how)
    return found


def variants(op: str) -> list[tuple[str, int]]:
    """Of an op: their names, and the most rows of a that each takes here."""
    if op == "linear":
        hopper: Any = [(name, linear_plan.HOPPER[name]) for name in linear_plan.HOPPER]
    else:
        kernels = op.replace("gated", "swiglu")
        hopper = [(tile.name, tile) for tile in paired_plan.HOPPER[kernels]]
    found = [(name, min(70, tile.block_n) if tile.swaps else 70) for name, tile in hopper]
    return [*found, ("m8_deep", 8), ("m8", 7), ("m16", 13)]


def force(
    monkeypatch: pytest.MonkeyPatch, op: str, name: str, num_sms: int, m: int, n: int, k: int
) -> None:
    """A variant takes what comes next."""
    kernels = op.replace("gated", "swiglu")
    if name in tiles.SMALL_M or name == "m8_deep":
        if op == "linear":
            few = linear_plan.portable_choices((9, 0), m, n, k, 1, num_sms)
        else:
            few = paired_plan.portable_choices(kernels, (9, 0), num_sms, m, n)
        choice = next(each for each in few if each.variant == name)
    elif op == "linear":
        choice = linear_plan.hopper_choice(name, num_sms, m, n, k)
    else:
        tile = next(each for each in paired_plan.HOPPER[kernels] if each.name == name)
        choice = paired_plan.hopper_choice(kernels, tile, num_sms, m, n)
    monkeypatch.setattr(f"{CHOOSERS[op]}.choose", lambda *_: choice)
    forget_all()


def cases(
    way: Way, monkeypatch: pytest.MonkeyPatch, op: str, most: int, n: int, k: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Variants, rows of a for each, and weights."""
    for name, m in way.some(variants(op), most, op):
        a = way.randn(m, k, dtype=torch.bfloat16)
        b = way.randn(n, k, dtype=torch.bfloat16, seed=1) / 16
        force(monkeypatch, op, name, way.num_sms, m, n, k)
        yield name, a, b


@pytest.mark.parametrize("op", OPS)
def test_who_sees_what_the_launch_before_writes(
    hopper_way: Way, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hopper_way.is_gpu:
        pytest.skip("the emulator knows when a launch has ended; a GPU shows it now and then")
    n = 40 if op == "linear" else 256  # blocks that all find a place, else no launch overlaps
    for name, a, b in cases(hopper_way, monkeypatch, op, 4, n, 1096):
        expected = product(op, a, b)
        same_bits(product(op, a, b, weights_ready=True), expected)
        with written_just_ahead(a, torch.full_like(a, 9.0)):
            same_bits(product(op, a, b), expected)
            same_bits(product(op, a, b, weights_ready=True), expected)
        with written_just_ahead(b, torch.full_like(b, 9.0)):
            same_bits(product(op, a, b), expected)
            # Who breaks the promise is not told.
            assert not torch.equal(product(op, a, b, weights_ready=True), expected), name


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_launches_just_ahead(hopper_way: Way, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hopper_way.is_gpu:
        pytest.skip("one launch after another")
    for name, a, b in cases(hopper_way, monkeypatch, op, 99, 2048, 2048):
        check_behind_launches(op, name, a, b)


def check_behind_launches(op: str, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Rows of a that a norm writes, which lets the product begin before it has waited itself, and
    weights that a launch just ahead writes; behind a slow one."""
    weight, slow = torch.ones_like(a[0]), a.new_ones(3000, 2 * a.shape[1])
    given, halves = torch.cat((a, a.flip(0)), 1), torch.cat((b, b.flip(0)), 1)
    x, rows, weights = torch.empty_like(a), torch.empty_like(a), torch.empty_like(b)

    def rows_ahead(ready: bool) -> torch.Tensor:
        rows.fill_(float("nan"))
        ops.silu_and_mul(slow)
        ops.silu_and_mul(given, out=x)
        ops.rms_norm(x, weight, out=rows)
        return product(op, rows, b, weights_ready=ready)

    def weights_ahead() -> torch.Tensor:
        weights.fill_(float("nan"))
        ops.silu_and_mul(slow)
        ops.silu_and_mul(halves, out=weights)
        return product(op, a, weights)

    for run in (partial(rows_ahead, True), partial(rows_ahead, False), weights_ahead):
        check_in_turn(run, name)
    same_bits(rows_ahead(True), rows_ahead(False))


def check_in_turn(run: Callable[[], torch.Tensor], name: str) -> None:
    """The same bits when each launch waits for the last one to end, in a queue, and in a graph."""
    expected = run()
    torch.cuda.synchronize()
    assert bool(torch.isfinite(expected).all()), name
    torch.cuda._sleep(200_000)
    queued = [run() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run() for _ in range(3)]
    graph.replay()
    graph.replay()
    for found in (*queued, *captured):
        same_bits(found, expected)


@pytest.mark.parametrize("op", OPS)
def test_it_is_true_or_false(op: str) -> None:
    a, b = torch.ones(2, 16).half(), torch.ones(256, 16).half()
    check_refused(
        op, partial(product, op, a, b, weights_ready="soon"),
        ["weights_ready", "True or False", "'soon'"],
    )  # fmt: skip
    same_bits(product(op, a, b, weights_ready=True), product(op, a, b))


@pytest.mark.parametrize("op", OPS)
def test_batch_invariant_plans_have_the_same_bits(hopper_way: Way, op: str) -> None:
    for m in (1, 9, 70):
        a = hopper_way.randn(m, 264, dtype=torch.bfloat16)
        b = hopper_way.randn(256, 264, dtype=torch.bfloat16, seed=1)
        how = {"deterministic": "batch"}
        same_bits(product(op, a, b, weights_ready=True, **how), product(op, a, b, **how))


@pytest.mark.parametrize("op", OPS)
def test_each_has_a_plan_of_its_own(hopper_way: Way, op: str) -> None:
    """What was planned without the promise is not launched with it."""
    module: Any = importlib.import_module(CHOOSERS[op].replace("linear_launch", "linear"))
    a, b = torch.ones(2, 72).half(), torch.ones(256, 72).half()
    if hopper_way.is_gpu:
        a, b = a.cuda(), b.cuda()
    forget_all()
    for ready in (False, True, False, True):
        product(op, a, b, weights_ready=ready)
    plans = (
        module._plans
        if hasattr(module, "_plans")
        else getattr(module, f"_{op.split('_')[0]}").plans
    )
    assert len(plans) == 2
