"""mla_decode where an item is a cluster, whose blocks merge its parts: by lot, and its plan."""

from __future__ import annotations

import random

import pytest
import torch
import ways
from bits import same_bits
from emulated import written_just_ahead
from mla_step import LatentStep
from ways import Way

from kernel_hub.ops.core.device import PlannedGpu, pretend
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.kv_cache import mla_plan

LOTS = 10
EMULATED_SMS = 60


@pytest.mark.parametrize("number", range(LOTS))
def test_teams_by_lot(hopper_way: Way, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Blocks without tokens, without rows, of two rows' blocks; lengths of the launch before."""
    lot = random.Random(f"mla teams {number}")
    heads = lot.choice((33, 48, 64, 70, 128))
    parts = lot.choice((2, 3, 4) if heads > 64 else (2, 3, 4, 8))
    step = LatentStep(
        hopper_way, [lot.choice((0, 1, 63, 200, 500, 640, -1)) for _ in range(lot.choice((1, 3)))],
        lot.choice((torch.float16, torch.bfloat16)), num_heads=heads,
        seqlen_q=lot.choice((1, 2)) if heads < 64 else 1, page_size=lot.choice((0, 8, 64)),
        seed=number, softmax_scale=lot.choice((192**-0.5, 1.0, -0.1)),
        room=lot.choice((0, 700)), is_strided=lot.random() < 0.5,
    )  # fmt: skip
    print(parts, step)
    monkeypatch.setattr(ways, "EMULATED_SMS", EMULATED_SMS)
    monkeypatch.setattr(mla_plan, "choose_team", lambda *_: parts)
    forget_all()
    first = again = step.check()
    if hopper_way.is_gpu:
        again = step.run()
    else:
        with pretend(PlannedGpu((9, 0), EMULATED_SMS)):
            old = torch.tensor([lot.choice((0, 500, 1 << 30)) for _ in step.lengths]).int()
            with written_just_ahead(step.options["cache_seqlens"], old):
                again = step.run()
    for found, expected in zip(again, first, strict=True):
        same_bits(found, expected)
    forget_all()


@pytest.mark.parametrize("room, page_size", [(500, 0), (504, 24)])
def test_lengths_that_lie(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, room: int, page_size: int
) -> None:
    """What is longer than its cache counts as one that is full, in every block of a cluster."""
    step = LatentStep(hopper_way, [room] * 3, num_heads=64, page_size=page_size)
    monkeypatch.setattr(ways, "EMULATED_SMS", EMULATED_SMS)
    monkeypatch.setattr(mla_plan, "choose_team", lambda *_: 4)
    forget_all()
    full = step.check()
    step.options["cache_seqlens"] += torch.tensor([0, 5, 2**30]).to(hopper_way.device).int()
    for found, expected in zip(step.run(), full, strict=True):
        same_bits(found, expected)
    forget_all()


@pytest.mark.parametrize(
    "items, tokens, cluster, parts",
    [
        (12, 2673, 1, 8),  # a pair longer than parts that fill the GPU, which merge by a launch
        (19, 474, 1, 4),
        (27, 1699, 1, 4),
        (28, 1699, 1, 0),  # clusters of 4 that do not run at a time
        (2, 1058, 1, 0),  # few blocks: the launch behind takes little
        (10, 588, 1, 0),
        (6, 2904, 1, 0),
        (7, 1152, 1, 8),
        (6, 5015, 1, 0),  # three pairs longer
        (13, 3262, 2, 4),
        (14, 1164, 2, 0),
        (3, 228, 2, 4),
        (3, 187, 2, 0),  # fewer tiles than parts
    ],
)
def test_few_items_are_teams(items: int, tokens: int, cluster: int, parts: int) -> None:
    assert mla_plan.choose_team(items, tokens, mla_plan.SM90, 0, 132, cluster) == parts
    for variant, num_splits in (
        (mla_plan.SM90, 2),
        (mla_plan.PORTABLE, 0),
        (mla_plan.SM90_FEW[0], 0),
    ):
        assert mla_plan.choose_team(items, tokens, variant, num_splits, 132, cluster) == 0
