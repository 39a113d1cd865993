"""decode_attention of sequences whose length is below 0: nothing read or appended, 0 and -inf."""

from __future__ import annotations

import math
import random

import pytest
import torch
from bits import same_bits
from decode_in_shares import in_shares
from decode_step import E4M3, Step
from ways import Way

from kernel_hub.ops import decode_attention
from kernel_hub.ops.kv_cache import decode_plan
from kernel_hub.testing.compare import check

BELOW = (-1, -2, -16, -300, -(2**31))


def check_finished(lot: random.Random, step: Step, num_splits: int) -> None:
    """Some of the sequences finish; the others' results are right, and no cache of these moves."""
    lengths = step.options["cache_seqlens"].clone()
    finished = torch.tensor([lot.random() < 0.5 for _ in step.lengths])
    finished[lot.randrange(len(finished))] = True
    below = torch.tensor([lot.choice(BELOW) for _ in step.lengths], dtype=torch.int32)
    finished, below = finished.to(lengths.device), below.to(lengths.device)
    step.options["cache_seqlens"] = torch.where(finished, below, lengths)
    before = [step.cached(which).clone() for which in (0, 1)]
    out, lse = step.run(num_splits=num_splits)
    assert not bool(out[finished].any())
    assert bool((lse[finished] == -math.inf).all())
    for which in (0, 1):
        same_bits(step.cached(which)[finished], before[which][finished], name="k v"[2 * which])
    step.options["cache_seqlens"] = lengths
    truth, truth_lse = (x[~finished] for x in step.truth(torch.float64))
    own, own_lse = (x[~finished] for x in step.truth(step.dtype))
    if truth.numel():
        check(out[~finished], truth, own, name="out")
        check(lse[~finished], truth_lse, own_lse, atol=1e-4, name="lse")


@pytest.mark.parametrize("number", range(24))
def test_by_lot(way: Way, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lot = random.Random(number)
    if lot.random() < 0.5:  # equal shares, worked out from the lengths, of short caches too
        monkeypatch.setattr(decode_plan, "SHORT_TOKENS", 0)
    seqlen_q = lot.choice((1, 1, 2, 5))
    lengths = [lot.choice((0, 1, seqlen_q, 63, 64, lot.randrange(300)))
               for _ in range(lot.choice((1, 2, 3, 6, 40)))]  # fmt: skip
    appends = lot.random() < 0.6
    step = Step(
        way, lengths, lot.choice((torch.float16, torch.bfloat16)), lot.choice((None, None, E4M3)),
        heads=lot.choice(((4, 2), (8, 1), (2, 2))), head_dim=lot.choice((64, 128)),
        seqlen_q=seqlen_q, page_size=lot.choice((0, 16)), append=appends,
        rope=lot.choice((0, 64)) if appends else 0, bias=appends and lot.random() < 0.3,
    )  # fmt: skip
    check_finished(lot, step, lot.choice((0, 0, 1, 3)))


@pytest.mark.parametrize("number", range(4))
def test_in_shares(hopper_way: Way, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lot = random.Random(number)
    lengths = [lot.randrange(200) for _ in range(lot.choice((1, 3)))]
    step = Step(
        hopper_way, lengths, heads=(8, 1), head_dim=64, seqlen_q=lot.choice((1, 3)),
        page_size=lot.choice((0, 64)),
    )  # fmt: skip
    with in_shares(monkeypatch, hopper_way) as taken:
        check_finished(lot, step, 0)
        assert taken


@pytest.mark.parametrize("appends", [False, True])
def test_nothing_to_refuse(appends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor on a CPU."""
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
    step = Step(Way("cpu", "cpu"), [100, 3], append=appends, page_size=16, seqlen_q=2)
    check_finished(random.Random(0), step, 0)


@pytest.mark.parametrize("columns", [None, 0])
def test_new_tokens_without_room(way: Way, columns: int | None) -> None:
    """In caches of no rows, and tables of no pages, they are dropped."""
    check_without_room(way, columns)


@pytest.mark.parametrize("columns", [None, 0])
def test_new_tokens_without_room_on_the_cpu(columns: int | None) -> None:
    check_without_room(Way("cpu", "cpu"), columns)


def check_without_room(way: Way, columns: int | None) -> None:
    q, new = way.randn(2, 1, 4, 64).bfloat16(), way.randn(2, 1, 2, 64).bfloat16()
    room = torch.zeros(2, 2, 16, 2, 64, dtype=torch.bfloat16, device=way.device)
    caches, table = (room[0, :, :0], room[1, :, :0]), None
    if columns is not None:
        caches = room[0], room[1]
        table = torch.zeros(2, columns, dtype=torch.int32, device=way.device)
    lengths = torch.zeros(2, dtype=torch.int32, device=way.device)
    decode_attention(q, *caches, cache_seqlens=lengths, k=new, v=new, block_table=table)
    assert not bool(room.any())
