"""mla_decode's lines by lot: few and many multiprocessors, items in one part to one a block,
lengths that the launch before writes, partials and tickets held against their bounds."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
import torch
import ways
from arena import Arena
from bits import same_bits
from emulated import written_just_ahead
from mla_step import LatentStep
from ways import Way

from kernel_hub.ops.core.device import PlannedGpu, pretend
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.kv_cache import mla_plan

MLA = importlib.import_module("kernel_hub.ops.kv_cache.mla_decode")
LOTS, LOTS_ON_A_GPU = 24, 20
_MOST_TILES = 24  # of all items, of 64 tokens, in the emulator


def drawn(lot: random.Random, way: Way, num_sms: int) -> LatentStep:
    """A long sequence among short ones; or all alike."""
    heads = lot.choice((3, 16, 20, 32, 33, 64, 70, 128))
    short = (0, 1, 63, 64, 65, 129, 200, -1)
    more = lot.choice((0, 1, 3, 9) if way.is_gpu else (0, 1, 3, 9, 35))
    lengths = [lot.choice(short) for _ in range(more)]
    tiles = num_sms * lot.choice((1, 2) if way.is_gpu else (1, 2, 3))
    if not way.is_gpu:
        tiles = min(_MOST_TILES // (1 if heads <= 64 else 2), tiles)
    if lot.random() < 0.3:
        length = 64 * max(1, tiles // (len(lengths) + 1)) - lot.choice((0, 0, 1, 40))
        lengths = [length] * (len(lengths) + 1)
    else:
        lengths.append(64 * tiles - lot.choice((0, 1, 63)))
        lot.shuffle(lengths)
    return LatentStep(
        way, lengths, lot.choice((torch.float16, torch.bfloat16)), num_heads=heads,
        seqlen_q=lot.choice((1, 1, 2)) if heads < 64 else 1,
        page_size=lot.choice((0, 8, 24, 64, 256)), seed=lot.randrange(1 << 30),
        softmax_scale=lot.choice((192**-0.5, 192**-0.5, 1.0, -0.1)),
    )  # fmt: skip


def is_a_line(lot: random.Random, patch: pytest.MonkeyPatch) -> None:
    """Items are one mostly, however few they are."""
    if lot.random() < 0.7:
        patch.setattr(mla_plan, "_FEW_PARTS", 999)
        patch.setattr(mla_plan, "_FEW_PARTS_64", 999)
    forget_all()


@pytest.mark.parametrize("number", range(LOTS))
def test_lines_by_lot(hopper_way: Way, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    if hopper_way.is_gpu:
        pytest.skip("of as many multiprocessors as there are: the next test")
    lot = random.Random(f"mla lines {number}")
    num_sms = lot.choice((2, 3, 8, 17, 24, 40))
    step = drawn(lot, hopper_way, num_sms)
    print(num_sms, step)
    monkeypatch.setattr(ways, "EMULATED_SMS", num_sms)
    is_a_line(lot, monkeypatch)
    taken: list[torch.Tensor] = []
    new = torch.empty
    with Arena("cpu", lot) as memory, pretend(PlannedGpu((9, 0), num_sms)):

        def tickets(_: torch.device, count: int) -> torch.Tensor:
            if not taken:
                taken.append(memory.empty("tickets", (count,), torch.int32).zero_())
            assert len(taken[0]) == count
            return taken[0]

        def partials(count: Any, **options: Any) -> torch.Tensor:
            if not options:  # the emulator's own
                return new(count)
            return memory.empty("partials", (count,), options["dtype"])

        monkeypatch.setattr(MLA, "counters", tickets)
        monkeypatch.setattr(torch, "empty", partials)
        first = again = step.check()
        if taken:  # else a launch of its own merges, by the lengths that there are
            old = [lot.choice((length, 0, 500, 1 << 30)) for length in step.lengths]
            lengths = step.options["cache_seqlens"]
            with written_just_ahead(lengths, torch.tensor(old).int()):
                again = step.run()
        for found, expected in zip(again, first, strict=True):
            same_bits(found, expected)
        assert not any(bool(each.any()) for each in taken)


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(LOTS_ON_A_GPU))
def test_lines_by_lot_on_a_gpu(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    if not hopper_way.is_gpu:
        pytest.skip("the test before")
    lot = random.Random(f"mla lines on a gpu {number}")
    step = drawn(lot, hopper_way, hopper_way.num_sms)
    print(step)
    is_a_line(lot, monkeypatch)
    first = step.check()
    for _ in range(3):
        for found, expected in zip(step.run(), first, strict=True):
            same_bits(found, expected)
