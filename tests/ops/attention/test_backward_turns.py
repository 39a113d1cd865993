"""Turns in adding to dq: a model of the Hopper kernel's rule, run by however many blocks there are.

A launch's works have indices. Blocks take them in that order, one that goes on its next one before
it has ended the last. Each round of a work adds to one of the sums of a block of queries, after
`earlier` others have (`BackwardWork` of plan.cuh): each of a block's two consumers to its own part
of it, no more than a round before the other. None may wait for ever, and a sum must have one order,
but for its first two: 0, a and b make what 0, b and a do.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from kernel_hub.ops.attention.backward.turns import Traffic, Turns, turns
from kernel_hub.ops.attention.backward.works import Pairs, Parting

PLANS = 3000


class Drawn(NamedTuple):
    lengths: tuple[int, int]
    window: tuple[int, int]
    tile: tuple[int, int]
    group: int
    num_pairs: int
    goes_on: bool
    plan: Turns


class Round(NamedTuple):
    """place: a sum of a block of queries; earlier: how many must have added to it."""

    place: tuple[int, int, int, int]
    earlier: int


def drawn(lots: random.Random) -> Drawn:
    lengths = lots.randrange(1, 90), lots.randrange(1, 90)
    window = lots.choice(((-1, -1), (-1, 0), (20, 0), (9, 30), (-1, 7), (15, -1)))
    tile, group = lots.choice(((8, 16), (16, 16), (8, 8))), lots.choice((1, 1, 2, 3, 4, 6))
    num_pairs, goes_on = lots.randrange(1, 12), lots.random() < 0.5
    free = Pairs(num_pairs, lots.randrange(1, num_pairs + 1))
    num_sms = lots.choice((3, 7, 132))
    read = Traffic(lots.choice((1 << 10, 8 << 20)), 1 << 10, 1 << 10, lots.random() < 0.5)
    plan = turns(lengths, window, tile, group, free, read, num_sms, goes_on=goes_on)
    if lots.random() < 0.7:  # any that the kernel could be given
        num_works = -(-lengths[1] // tile[1]) * num_pairs
        count = lots.choice((1, group, lots.randrange(1, group + 1), group * lots.choice((2, 3))))
        parted = Parting(lots.randrange(num_works + 1) if count > 1 else num_works, count)
        plan = Turns(
            lots.choice((1, 1, 2, 3)), lots.randrange(1, num_pairs + 1), parted, lots.random() < 0.5
        )
    return Drawn(lengths, window, tile, group, num_pairs, goes_on, plan)


def blocks_of(drawn: Drawn, key_block: int) -> range:
    """The blocks of queries that see some of these keys: by `BackwardWork.find`."""
    (seqlen_q, seqlen_k), (left, right), (block_m, block_n) = drawn[:3]
    left = seqlen_k if left < 0 else min(left, seqlen_k)
    right = seqlen_q if right < 0 else min(right, seqlen_q)
    home = key_block * block_n - (seqlen_k - seqlen_q)
    last = home + left + min(block_n, seqlen_k - key_block * block_n) - 1
    return range(
        max(0, (home - right) // block_m), min(-(-seqlen_q // block_m), last // block_m + 1)
    )


def order(num_pairs: int, num_blocks: int, plan: Turns) -> list[tuple[int, int]]:
    """(pair, block of keys) of each work."""
    firsts = range(0, num_pairs, plan.together)
    smaller = num_pairs - firsts[-1]  # the first group
    groups = [range(max(0, smaller + i - plan.together), smaller + i) for i in firsts]
    half = (num_blocks + 1) // 2 if plan.is_staggered else num_blocks
    found = []
    for group, after in itertools.pairwise([range(0), *groups, range(0)]):
        for i in range(half):
            if half + i < num_blocks:
                found += [(pair, half + i) for pair in group]
            found += [(pair, i) for pair in after]
    return found


def works(drawn: Drawn) -> list[list[Round]]:
    """The rounds of each index, in their order."""
    (seqlen_q, seqlen_k), (window_left, right), (block_m, block_n), group, num_pairs, _, plan = (
        drawn
    )
    left = seqlen_k if window_left < 0 else min(window_left, seqlen_k)
    num_blocks, (first, count) = -(-seqlen_k // block_n), plan.parted
    by_heads = min(count, group)
    by_queries = count // by_heads
    most = math.ceil(math.ceil(seqlen_q / block_m) / by_queries)
    found: list[list[Round]] = []
    for pair, key_block in order(num_pairs, num_blocks, plan):
        is_parted = len(found) >= first
        for nth in range(count if is_parted else 1):
            blocks, heads = blocks_of(drawn, key_block), range(group)
            if is_parted:
                part = nth // by_queries
                heads = range(part * group // by_heads, (part + 1) * group // by_heads)
                begin = nth % by_queries * most
                blocks = range(max(blocks.start, begin), min(blocks.stop, begin + most))
            places = [(m, head) for m in reversed(blocks) for head in heads]
            if 0 <= 2 * window_left <= seqlen_q:  # head by head
                places = [(m, head) for head in heads for m in reversed(blocks)]
            rounds = []
            for m, head in places:
                start = key_block * block_n - (seqlen_k - seqlen_q) + left
                earlier = min(key_block, -((m * block_m - start) // block_n))
                before = earlier // plan.sums
                place = pair, key_block % plan.sums, m, head
                rounds.append(Round(place, 0 if before == 1 and right >= 0 else before))
            found.append(rounds)
    return found


class Block:
    """One that takes works until there are none. goes_on: the next one before it ends the last."""

    def __init__(self, indices: Iterator[int], goes_on: bool) -> None:
        self._indices, self._goes_on = indices, goes_on
        self._works: list[int] = []
        self._take()

    def _take(self) -> None:
        while len(self._works) < (2 if self._goes_on else 1):
            if (index := next(self._indices, None)) is None:
                break
            self._works.append(index)

    @property
    def work(self) -> int | None:
        return self._works[0] if self._works else None

    def end(self) -> None:
        del self._works[0]
        self._take()


def added(
    of_works: Sequence[Sequence[Round]], num_blocks: int, goes_on: bool, lots: random.Random,
    num_own: int = 0,
) -> dict[tuple[int, ...], list[int]]:  # fmt: skip
    """Which works have added to each consumer's part of a sum, in what order, by blocks that are as
    quick as it happens.

    num_own: that many are of one block each, running or not. Raises RuntimeError where all wait."""
    indices = iter(range(num_own, len(of_works)))
    own = [itertools.chain(range(i, min(num_own, i + 1)), indices) for i in range(num_blocks)]
    blocks = [Block(each, goes_on) for each in own]
    done = [[0, 0] for _ in of_works]
    sums: dict[tuple[int, ...], list[int]] = {}
    while running := [block for block in blocks if block.work is not None]:
        has_moved = False
        for block in lots.sample(running, len(running)):
            index = block.work
            assert index is not None
            rounds, own_done = of_works[index], done[index]
            while (least := min(own_done)) < len(rounds):
                consumer = lots.randrange(2)
                if own_done[consumer] > least:
                    consumer = 1 - consumer
                place, earlier = rounds[own_done[consumer]]
                is_free = len(sums.get((*place, consumer), ())) >= earlier
                if not is_free or lots.random() < 0.3:
                    has_moved |= is_free
                    break
                sums.setdefault((*place, consumer), []).append(index)
                own_done[consumer] += 1
                has_moved = True
            if min(own_done) == len(rounds):
                block.end()
                has_moved = True
        if not has_moved:
            raise RuntimeError("all wait")
    return sums


def ordered(sums: dict[tuple[int, ...], list[int]]) -> dict[Any, Any]:
    """Each sum's works, the first two as a set."""
    return {place: ({*order[:2]}, order[2:]) for place, order in sums.items()}


def test_nobody_waits_for_ever_and_sums_have_one_order() -> None:
    lots, num_turns = random.Random("turns"), 0
    for _ in range(PLANS):
        case = drawn(lots)
        if case.plan.sums < 0:
            continue
        num_turns += 1
        of_works = works(case)
        first = added(of_works, lots.choice((1, 2, 5)), case.goes_on, lots)
        again = added(of_works, lots.choice((3, 9, 132)), case.goes_on, lots)
        assert ordered(first) == ordered(again), case
        # Each block of queries has met each block of keys that it sees.
        for key_block in range(-(-case.lengths[1] // case.tile[1])):
            for m in blocks_of(case, key_block):
                place = 0, key_block % case.plan.sums, m, 0
                assert {(*place, 0), (*place, 1)} <= first.keys(), case
    assert num_turns > PLANS // 2


def test_sums_without_turns_have_two_parts() -> None:
    lots, num_found = random.Random("sums"), 0
    for _ in range(PLANS):
        case = drawn(lots)
        if case.plan.sums < 0:
            num_found += 1
            assert -(-case.lengths[1] // case.tile[1]) <= -2 * case.plan.sums
    assert num_found


def test_the_model_sees_who_waits_for_ever() -> None:
    lots, a, b = random.Random(1), (0, 0, 0, 0), (0, 0, 1, 0)
    # Two works that go round in a circle, each behind the other in one place.
    circle = [[Round(a, 0), Round(b, 1)], [Round(b, 0), Round(a, 1)]]
    both = {(*a, i): [0, 1] for i in (0, 1)} | {(*b, i): [1, 0] for i in (0, 1)}
    assert added(circle, 2, False, lots) == both
    with pytest.raises(RuntimeError, match="all wait"):
        added(circle, 1, False, lots)
    with pytest.raises(RuntimeError, match="all wait"):
        added(circle, 2, True, lots)  # one has both
    # Works that are of blocks which do not run yet.
    line = [[Round(a, i)] for i in range(4)]
    assert added(line, 1, True, lots) == {(*a, i): [0, 1, 2, 3] for i in (0, 1)}
    with pytest.raises(RuntimeError, match="all wait"):
        added(line, 1, True, lots, num_own=2)
