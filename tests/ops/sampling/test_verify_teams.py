"""Drafts verified by clusters: torch's tokens, whatever number of blocks has a position."""

from __future__ import annotations

import importlib
import math
import random
from typing import Any

import pytest
import test_verify_draft as chains
import test_verify_tree as trees
import torch
from test_verify_draft import drawn, likely, seeds
from ways import DTYPES, Way

from kernel_hub.ops.core.device import PlannedGpu, pretend
from kernel_hub.ops.sampling import verification

tree_op: Any = importlib.import_module("kernel_hub.ops.sampling.verify_tree")

SIZES = [1, 33, 700, 5001]


@pytest.fixture(params=[1, 2, 4, 8, 16])
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(verification, "choose_team", lambda *_: request.param)
    return int(request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chains(hopper_way: Way, dtype: torch.dtype, size: int, team: int) -> None:
    """Greedy rows beside others, drafts that end early, such as are kept and such as are not."""
    lot = random.Random(f"{size} {team}")
    batch, drafts = (40, 3) if hopper_way.is_gpu else (3, 2)
    logits = drawn(size, batch, drafts + 1, size, spread=4.0).to(dtype)
    ids = likely(logits, lot)
    ids[batch - 1, 1:] = -1
    temperature = torch.tensor([lot.choice((0.7, 1.0, math.nan)) for _ in range(batch)])
    temperature[0] = 0.0
    given = {**seeds(batch, team), "temperature": temperature}
    probs = (logits[:, :-1].float() + drawn(9, batch, drafts, size)).softmax(-1)
    chains.check(hopper_way, ids, logits, **given)
    chains.check(hopper_way, ids, logits, **given, draft_probs=probs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_trees(hopper_way: Way, dtype: torch.dtype, size: int, team: int) -> None:
    lot = random.Random(f"{size} {team}")
    batch, drafts = (40, 7) if hopper_way.is_gpu else (2, 4)
    logits = drawn(size, batch, drafts + 1, size, spread=3.0).to(dtype)
    ids = likely(logits, lot)
    ids[batch - 1, -1] = -1
    tree = trees.trees(lot, batch, drafts)
    tree[0, :3] = -1  # three siblings
    probs = drawn(9, batch, drafts, size, spread=2.0).softmax(-1)
    trees.check(hopper_way, ids, tree, logits, **seeds(batch, team))
    trees.check(hopper_way, ids, tree, logits, **seeds(batch, team), draft_probs=probs)


@pytest.mark.parametrize("size", [20001, 20480])
def test_long_shares(hopper_way: Way, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of a warp of many rounds of loads."""
    monkeypatch.setattr(verification, "choose_team", lambda *_: 1)
    lot = random.Random(size)
    logits = drawn(size, 2, 2, size, spread=4.0).to(lot.choice(DTYPES))
    temperature = torch.tensor([0.0, 1.0])
    probs = drawn(9, 2, 1, size).softmax(-1)
    given = {**seeds(2, 3), "temperature": temperature}
    chains.check(hopper_way, likely(logits, lot), logits, **given)
    chains.check(hopper_way, torch.tensor([[5], [7]]), logits, **given, draft_probs=probs)


def test_layouts(hopper_way: Way, team: int) -> None:
    """Rows apart from each other, that begin anywhere; such of drafts alone."""
    batch, size = 2, 612
    wide, ids = drawn(5, batch, 3, 2 * size), torch.tensor([[1, 600], [3, -1]])
    for logits in (wide[..., :size], wide[..., 1 : size + 1], wide[..., : size - 1]):
        q = drawn(6, batch, 2, 2 * logits.shape[2]).softmax(-1)
        for probs in (q[..., : logits.shape[2]], q[..., 1 : logits.shape[2] + 1]):
            chains.check(hopper_way, ids, logits, **seeds(batch), draft_probs=probs)
        chains.check(hopper_way, ids, logits.half(), **seeds(batch))


def test_odd_rows(hopper_way: Way, team: int) -> None:
    inf, nan, size = math.inf, math.nan, 300
    rows = torch.zeros(6, 2, size)
    rows[0], rows[1], rows[2, :, 3], rows[3, :, 4:] = nan, -inf, inf, -inf
    rows[4, :, :] = torch.tensor([1e30, -1e30, 3e38] * 100)
    drafts = torch.tensor([[0], [0], [3], [9], [2], [-1]])
    probs = torch.full((6, 1, size), 1 / size)
    probs[5] = nan
    given: dict[str, Any]
    for given in ({}, {"draft_probs": probs}, {"draft_probs": probs * 0}):
        chains.check(hopper_way, drafts, rows, **seeds(6), **given)
        tree = torch.full((6, 1), -1, dtype=torch.int32)
        trees.check(hopper_way, drafts, tree, rows, **seeds(6), **given)


def test_nothing_left_of_p(hopper_way: Way, team: int) -> None:
    """q above p everywhere: a rejection leaves nothing, and the token is one of p."""
    batch, size = 6, 260
    logits = drawn(3, batch, 3, size)
    probs = (logits[:, :2].softmax(-1) * 1.5).clamp(max=1)
    ids = torch.arange(2 * batch).view(batch, 2)
    _, num = chains.check(hopper_way, ids, logits, **seeds(batch), draft_probs=probs)
    assert int(num.min()) < 2
    siblings = torch.full((batch, 2), -1, dtype=torch.int32)
    trees.check(hopper_way, ids, siblings, logits, **seeds(batch), draft_probs=probs)


def test_teams_of_an_h200() -> None:
    gpu = PlannedGpu((9, 0), 132)
    for positions, size, team in (
        (5, 128256, 16), (24, 128256, 16), (25, 128256, 8), (5, 9000, 4), (48, 32000, 8),
        (49, 32000, 4), (145, 32000, 2), (320, 32000, 2), (1000, 20000, 1), (110, 128256, 8),
        (1000, 50257, 4),
    ):  # fmt: skip
        assert verification.choose_team(positions, size, gpu) == team
    # Without probabilities of drafts: fewer passes; where there may be one, no turns.
    for positions, size, certain, greedy in (
        (8, 128256, 16, 16), (9, 128256, 8, 8), (24, 128256, 8, 8), (48, 128256, 8, 4),
        (110, 128256, 4, 1), (200, 262144, 8, 1), (215, 50272, 2, 1), (5, 9000, 4, 4),
        (80, 3000, 1, 1),
    ):  # fmt: skip
        assert verification.choose_team(positions, size, gpu, False) == certain
        assert verification.choose_team(positions, size, gpu, False, True) == greedy
    assert verification.choose_team(5, 128256, PlannedGpu((8, 0), 108)) == 1
    # Trees with temperatures likewise: each may be greedy.
    for batch, size, given, team in (
        (24, 131072, True, 1),
        (24, 131072, False, 4),
        (3, 152064, True, 4),
    ):
        logits = torch.empty(batch, 16, size, device="meta")
        drafts = torch.empty(batch, 15, dtype=torch.int64, device="meta")
        temperature = torch.empty(batch, device="meta") if given else None
        arguments = verification.VerifyGiven(
            drafts, drafts.int(), logits, None, temperature, *[None] * 5
        )
        with pretend(gpu):
            launch = tree_op._verification.plan(arguments, 0)
        assert launch.options.get("cluster", (1,))[0] == team
