"""moe_route against fp64: every rule, ties, numbers that are none, and torch on the CPU."""

from __future__ import annotations

import importlib
import itertools
import math
import random
from typing import Any

import pytest
import torch
from bits import same_bits
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import moe_route
from kernel_hub.testing import reference_moe
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

op: Any = importlib.import_module("kernel_hub.ops.moe.moe_route")
INF, NAN = math.inf, math.nan
CPU = Way("torch", "cpu")  # without the fixture, which puts the kernel in torch's place
# num_experts, k, options: as models have them, and around where lanes and variants change.
RULES: list[tuple[int, int, dict[str, Any]]] = [
    (8, 2, {"renormalise": True}), (60, 4, {}), (128, 8, {"renormalise": True}), (1, 1, {}),
    (16, 1, {"scoring": "sigmoid"}), (9, 9, {"scoring": "sigmoid", "renormalise": True}),
    (33, 5, {"bias": True}), (256, 8, {"num_groups": 8, "top_groups": 4, "bias": True,
     "scoring": "sigmoid", "renormalise": True, "scale": 2.5}), (257, 3, {"scale": -0.5}),
    (160, 6, {"num_groups": 8, "top_groups": 3, "scale": 16.0}), (512, 10, {"renormalise": True}),
    (12, 6, {"num_groups": 6, "top_groups": 3}), (7, 3, {"num_groups": 7, "top_groups": 5}),
    (7, 3, {"num_groups": 7, "top_groups": 5, "bias": True}), (384, 8, {"bias": True,
     "scoring": "sigmoid"}), (512, 40, {"num_groups": 32, "top_groups": 7, "bias": True}),
    (400, 400, {}),
]  # fmt: skip


def given(way: Way, options: dict[str, Any], num_experts: int) -> dict[str, Any]:
    if not options.get("bias"):
        return options
    return {**options, "bias": way.randn(num_experts, seed=7) / 8}


def check_route(found: tuple[torch.Tensor, torch.Tensor], logits: torch.Tensor, k: int,
                options: dict[str, Any]) -> None:  # fmt: skip
    truth, own = (
        reference_moe.moe_route(logits, k, **options, dtype=each)
        for each in (torch.float64, torch.float32)
    )
    assert torch.equal(found[1], truth[1]), (found[1], truth[1])
    check(found[0], truth[0], own[0], name="weights")


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rules(way: Way, dtype: torch.dtype, rule: tuple[int, int, dict[str, Any]]) -> None:
    num_experts, k, options = rule
    options = given(way, options, num_experts)
    for tokens in [1, 3, 130, 301] if way.is_gpu else [1, 19]:
        logits = 2 * way.randn(tokens, num_experts, dtype=dtype, seed=tokens)
        weights = Guarded((tokens, k), torch.float32, way.device)
        experts = Guarded((tokens, k), torch.int32, way.device)
        found = moe_route(logits, k, **options, weights=weights.tensor, experts=experts.tensor)
        assert found[0] is weights.tensor and found[1] is experts.tensor
        weights.check("weights")
        experts.check("experts")
        check_route(found, logits, k, options)
        for again, first in zip(moe_route(logits, k, **options), found, strict=True):
            same_bits(again, first)


@pytest.mark.parametrize("few", [0, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_tokens_and_few(
    way: Way, dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "_FEW_TOKENS", few)
    for num_experts in (1, 5, 8, 16, 60, 64, 100, 128, 256, 300):
        logits = way.randn(19, num_experts, dtype=dtype)
        k = min(num_experts, 6)
        check_route(moe_route(logits, k), logits, k, {})
        options = {"scoring": "sigmoid", "renormalise": True, "bias": way.randn(num_experts)}
        check_route(moe_route(logits, k, **options), logits, k, options)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_by_torch_on_the_cpu(rule: tuple[int, int, dict[str, Any]]) -> None:
    num_experts, k, options = rule
    options = given(CPU, options, num_experts)
    logits = CPU.randn(19, num_experts, dtype=torch.bfloat16)
    check_route(moe_route(logits, k, **options), logits, k, options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(way: Way, dtype: torch.dtype) -> None:
    for num_experts, shift, width in ((64, 0, 72), (64, 1, 64), (64, 0, 65), (13, 3, 40)):
        wide = Guarded((11, num_experts), dtype, way.device, row_stride=width, shift=shift)
        logits = wide.fill(way.randn(11, num_experts, dtype=dtype))
        check_route(moe_route(logits, 4), logits, 4, {})


def test_drawn_by_lot(way: Way) -> None:
    lot = random.Random(way.name)
    for _ in range(400 if way.is_gpu else 40):
        groups = lot.choice((1, 1, 2, 8, 16))
        size = lot.randrange(1, 512 // groups + 1)
        top_groups = lot.randrange(1, groups + 1)
        k = lot.randrange(1, min(size * top_groups, 20) + 1)
        options = {
            "scoring": lot.choice(("softmax", "sigmoid")), "renormalise": lot.random() < 0.5,
            "num_groups": groups, "top_groups": top_groups, "scale": lot.choice((1.0, 2.5)),
        }  # fmt: skip
        seed = lot.randrange(1 << 20)
        logits = way.randn(lot.randrange(1, 40), groups * size, dtype=lot.choice(DTYPES), seed=seed)
        check_route(moe_route(logits, k, **options), logits, k, options)


def test_the_lowest_of_equal_ones_first(way: Way) -> None:
    for num_experts, groups in ((8, 1), (64, 1), (64, 8), (500, 1), (500, 5)):
        same = torch.zeros(3, num_experts, device=way.device)
        same[1, ::2] = -0.0
        same[2, num_experts // 2] = 1
        options = {"num_groups": groups, "top_groups": 1}
        weights, experts = moe_route(same, 5, **options)
        assert experts[:2].tolist() == [[0, 1, 2, 3, 4]] * 2
        first = num_experts // 2
        begin = first // (num_experts // groups) * (num_experts // groups)
        others = [e for e in range(begin, num_experts) if e != first]
        assert experts[2].tolist() == [first, *others[:4]]
        if num_experts <= 64:
            assert (weights[0] == 1 / num_experts).all()
        ties = same.repeat(1, 1)[:1] + torch.arange(num_experts, device=way.device) // 3
        check_route(moe_route(ties, 5), ties, 5, {})


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_numbers_that_are_none(way: Way, scoring: str, has_bias: bool) -> None:
    for num_experts, groups in ((8, 1), (8, 4), (40, 1), (300, 1)):
        logits = way.randn(8, num_experts)
        logits[0] = NAN
        logits[1] = -INF
        logits[2] = INF
        logits[3, 2], logits[3, 5] = NAN, INF
        logits[4, 1:] = NAN
        logits[5, :4] = -INF
        logits[6, ::2] = INF
        logits[7, 3] = -INF
        bias = way.randn(num_experts) if has_bias else None
        if bias is not None:
            bias[1], bias[6] = NAN, -INF
        for renormalise, k in itertools.product((False, True), (1, 4, 8)):
            top_groups = max(1, groups // 4 * k // 2)
            options = {
                "scoring": scoring, "bias": bias, "num_groups": groups, "top_groups": top_groups,
                "renormalise": renormalise,
            }  # fmt: skip
            if k > num_experts // groups * top_groups:
                continue
            weights, experts = moe_route(logits, k, **options)
            assert weights.isfinite().all() and (weights >= 0).all()
            check_route((weights, experts), logits, k, options)
            assert all(len(set(row)) == k for row in experts.tolist())


def test_a_bias_chooses_and_does_not_weigh(way: Way) -> None:
    logits, bias = way.randn(5, 32), torch.zeros(32, device=way.device)
    bias[9] = 100
    weights, experts = moe_route(logits, 2, scoring="sigmoid", bias=bias)
    assert (experts[:, 0] == 9).all()
    torch.testing.assert_close(weights[:, 0], logits[:, 9].sigmoid())


def test_renormalised_softmax_is_that_of_the_chosen(way: Way) -> None:
    logits = 4 * way.randn(9, 32)
    weights, experts = moe_route(logits, 4, renormalise=True)
    torch.testing.assert_close(weights, logits.gather(-1, experts.long()).softmax(-1))


def test_no_tokens(way: Way) -> None:
    weights, experts = moe_route(torch.empty(0, 8, device=way.device), 2)
    assert weights.shape == experts.shape == (0, 2)


def test_refusals() -> None:
    logits = torch.randn(4, 8)
    for found, options in (
        ("k: expected at most 8", {"k": 9}), ("k: expected at least 1", {"k": 0}),
        ("scoring", {"scoring": "top"}), ("num_groups", {"num_groups": 3}),
        ("top_groups", {"top_groups": 2}), ("bias", {"bias": torch.randn(7)}),
        ("k: expected at most 4", {"k": 5, "num_groups": 2}), ("k: expected a whole", {"k": 2.0}),
        ("weights", {"weights": torch.empty(4, 3)}), ("scale", {"scale": NAN}),
        ("experts", {"experts": torch.empty(4, 2, dtype=torch.int64)}),
        ("weights", {"weights": torch.empty(4, 4)[:, ::2]}),
    ):  # fmt: skip
        with pytest.raises(TensorError, match=f"moe_route: {found}"):
            moe_route(logits, **{"k": 2, **options})
    for odd, found in ((torch.randn(4, 513), "1 to 512"), (logits[0], "two dimensions"),
                       (logits.T, "contiguous"), (logits.double(), "dtype")):  # fmt: skip
        with pytest.raises(TensorError, match=f"moe_route: logits.*{found}"):
            moe_route(odd, 2)
