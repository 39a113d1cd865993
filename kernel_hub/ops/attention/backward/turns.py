"""In which order works of attention's backward add to dq where its sums have one, on Hopper: how
many sums there are, which pairs run together, which works several blocks share.

A block of keys adds to a block of queries after those of lower keys have, so that it must begin
after them, and what it reads should still be in the L2. Of causal pairs the last blocks of keys are
short, and would begin too soon one after another: where there is another pair to begin, its first
half goes in turn with the last half of the one before it (staggered).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from .works import (
    _COUNTS,
    _LOOKED_AT,
    _MOST_PARTS,
    _MOST_WORKS,
    _PART,
    _START,
    _START_GOING_ON,
    Pairs,
    Parting,
    _in_order,
    _seen_by,
    _until_done,
    parting,
)

_GAIN, _PARTS_GAIN, _WIDE_GAIN = 0.02, 0.04, 0.08  # with turns; by more parts; of wide heads
_IN_TURNS = 1.06  # what passing turns on costs where nobody waits
# With turns: blocks of keys of a pair that run at a time; from one block's sums to the next one's
# turn, in rounds; how many sums of dq there may be, what each adds to a row of 8,192 scores.
_MEMBERS = 8
_HOP = 1.6
_SUMS = (1, 2, 3, 4, 6, 8, 12, 16)
_SUM = 0.6
_TURNS_BYTES, _FEW_BYTES = 25 << 20, 67 << 20
# Of causal ones that stay close, by tiles, and of those that do not; and what tells these apart: a
# round's bytes on all multiprocessors.
_CAUSAL_BYTES, _WIDE_BYTES, _APART_BYTES = 110 << 20, 72 << 20, 95 << 20
_CLOSE_BYTES = 20 << 20
# What the L2 gives again between one block of keys and the next one of a pair, by tiles, and of
# staggered ones; what each doubling beyond it costs wide heads that stay close, and causal ones.
_NARROW_AGAIN_BYTES, _AGAIN_BYTES, _STAGGERED_BYTES = 25 << 20, 31 << 20, 26 << 20
_APART, _APART_CAUSAL = 0.12, 0.1
# Of causal ones of wide heads, so many sums that nobody waits: what more they cost.
_MANY_SUMS = 1.5


class Turns(NamedTuple):
    """sums: of dq, -sums without turns; how many pairs run through their blocks of keys together;
    parts; is_staggered: the last half of their blocks in turn with the first half of the next
    pairs', causal ones of one length."""

    sums: int
    together: int
    parted: Parting
    is_staggered: bool = False


class Traffic(NamedTuple):
    """What a pair reads and adds to, a round's queries of it, and one sum of dq, in bytes; is_wide:
    tiles of 64 x 64."""

    pair_bytes: int
    round_bytes: int
    sum_bytes: int
    is_wide: bool

    def together(
        self, num_pairs: int, num_sms: int, *, is_large: bool, is_causal: bool,
        window_bytes: int = 0,
    ) -> list[int]:  # fmt: skip
        """How many pairs may run at a time: what the L2 holds. Of few keys at a time, so that few
        wait for each other as they begin; where these move on together they need no more, nor do
        those that do not drift far apart: few works, or causal ones, of which even fewer keys at a
        time wait less."""
        few_keys = -(-num_sms // _MEMBERS)
        is_close = self.is_close(num_sms)
        most, room, causal, wide, apart = (
            max(1, each // max(1, self.pair_bytes))
            for each in (_TURNS_BYTES, _FEW_BYTES, _CAUSAL_BYTES, _WIDE_BYTES, _APART_BYTES)
        )
        again = _AGAIN_BYTES if self.is_wide else _NARROW_AGAIN_BYTES
        again = max(1, again // max(1, self.pair_bytes))
        if is_close:
            most = max(most, few_keys)
        if window_bytes and not is_close:  # each block of keys begins where the one before it has
            found = [max(1, _FEW_BYTES // window_bytes)]
        elif not (is_causal or window_bytes):
            found = [again] if is_large else [again, max(again, few_keys)]
        elif is_close:
            fewer = max(1, most // 2)
            found = [most] if is_large or self.is_wide else [fewer, most, 2 * most]
        elif is_large:
            found = [most]
        else:
            found = [most, max(most, min(max(few_keys, 2 * most), room))]
        groups = [-(-num_pairs // n) for n in found]
        if is_causal and not window_bytes:
            limit = apart if not is_close else wide if self.is_wide else causal
            more = max(most, min(2 * few_keys, limit))
            groups = [*([] if is_large else groups), max(1, round(num_pairs / more))]
        return list(dict.fromkeys(-(-num_pairs // n) for n in groups))

    def is_close(self, num_sms: int) -> bool:
        """Whether blocks of keys of a pair do not drift far apart."""
        return num_sms * self.round_bytes <= _CLOSE_BYTES

    def staggered(self, num_pairs: int) -> int:
        """How many causal ones begin together, where the last halves of as many others end."""
        groups = math.ceil(num_pairs / max(1.0, _STAGGERED_BYTES / max(1, self.pair_bytes)))
        return -(-num_pairs // groups)

    def slowed(self, together: int, num_sms: int, *, is_causal: bool) -> float:
        """By what rounds last longer where so many run together, but staggered ones."""
        beyond = together * self.pair_bytes / _AGAIN_BYTES
        each = _APART_CAUSAL if is_causal else _APART
        counts = self.is_wide and self.is_close(num_sms) and beyond > 1
        return 1 + each * math.log2(beyond) if counts else 1.0

    def of_sums(self, sums: int) -> float:
        """What more than one sum cost, in rounds for a round's rows and keys."""
        beyond = sums * self.sum_bytes / _TURNS_BYTES
        return (sums - 1) * _SUM * (0.9 if self.is_wide else 1.0) * max(0.8, min(2.0, beyond))


@functools.lru_cache(maxsize=256)
def turns(
    lengths: tuple[int, int], window: tuple[int, int], tile: tuple[int, int], group: int,
    free: Pairs, read: Traffic, num_sms: int, *, goes_on: bool, is_ragged: bool = False,
) -> Turns:  # fmt: skip
    """The same where works add to dq in one order. free: as without turns."""
    start = _START_GOING_ON if goes_on else _START
    num_blocks = -(-lengths[1] // tile[1])
    num_works = num_blocks * free.total
    is_large = num_works > _MOST_WORKS * num_sms
    is_many = num_works > _MOST_PARTS * num_sms
    step = max(1, num_blocks // _LOOKED_AT) if is_many else 1
    seen_by = _seen_by(lengths, window, tile, step)
    of_blocks = [group * (end - first) for first, end in seen_by]
    num_rounds = sum(of_blocks) * num_blocks / len(of_blocks)
    in_whole = num_blocks * start + num_rounds
    behind = [step * each for each in _behind(seen_by)]
    unordered = 2 if window[1] >= 0 else 1  # of each sum, that begin at once
    is_causal, has_window = window[1] >= 0, window[0] >= 0
    orders = [
        (together, False)
        for together in read.together(
            free.total,
            num_sms,
            is_large=is_large,
            is_causal=is_causal,
            window_bytes=max(of_blocks) * read.round_bytes if has_window else 0,
        )
    ]
    if is_causal and not (has_window or is_ragged):
        staggered = read.staggered(free.total)
        if staggered < free.total:
            orders = [*([] if is_large else orders), (staggered, True)]
    counts = [n for n in _counts_in_turns(group) if num_works * n <= _MOST_PARTS * num_sms]

    @functools.cache
    def costs_of(count: int) -> list[list[float]]:
        """What parts of each block of keys cost, where works go into so many."""
        if count == 1:
            return [[start + each] for each in of_blocks]
        parts = _parts_in_turns(seen_by, lengths[0], tile[0], group, count)
        return [[start + _PART + each for each in of_block] for of_block in parts]

    parts_gain = _WIDE_GAIN if read.is_wide else _PARTS_GAIN
    best, least, before = Turns(1, 1, Parting(num_works, 1)), math.inf, math.inf
    for sums in sorted({*(n for n in _SUMS if 2 * n < num_blocks), -(-num_blocks // 2)}):
        more = read.of_sums(sums) * free.total * group * lengths[0] / (tile[0] * tile[1])
        if sums > _SUMS[-1] or more >= _IN_TURNS * least:
            break
        if num_blocks <= 2 * sums:
            parted = parting(lengths, window, tile, group, free, num_sms, goes_on=goes_on)
            each = _MANY_SUMS if read.is_wide and window[1] >= 0 else 1.0
            taken = each * more + _free_taken(of_blocks, free, parted, num_sms, start)
            if taken < _IN_TURNS * least:
                best, least = Turns(-sums, free.together, parted), taken
            continue
        if sums > 2 and least == before:
            continue  # fewer have not been better than one
        before, lowest = least, math.inf
        for count in (1, *counts):
            at_count = math.inf
            more_each = start + _PART * (count > 1)
            in_parts = num_blocks * count * more_each + num_rounds
            # Of the first pairs, that block begins after those before it that add to its sum.
            soonest = more + max(
                max(0, behind[i] // sums + 1 - unordered) * _HOP + more_each + of_blocks[i] / count
                for i in (0, len(behind) // 2, -1)
            )
            for together, is_staggered in orders:
                if is_staggered and sums > 1:  # which the L2 would have to hold
                    continue
                slowed = (
                    1.0 if is_staggered else read.slowed(together, num_sms, is_causal=is_causal)
                )
                # All works, or those of the last pairs that run together.
                last = 0 if is_staggered else max(0, free.total - together)
                for first in (0, last) if count > 1 and last and not is_large else (0,):
                    work = first * in_whole + (free.total - first) * in_parts
                    gain = parts_gain if count > best.parted.blocks else _GAIN
                    most = least * (1 - gain) / slowed
                    if max(more + work / num_sms, 0 if first else soonest) >= most:
                        continue
                    if is_many:
                        hops = min(behind[-1] + 1, -(-num_sms // together)) / sums + 1 - unordered
                        taken = more + work / num_sms + _HOP * max(0.0, hops)
                    else:
                        of_pairs = ((first, costs_of(1)), (free.total, costs_of(count)))
                        taken = more + _taken_in_turns(
                            of_pairs, behind, unordered, (together, is_staggered), sums, num_sms,
                            work, most - more,
                        )  # fmt: skip
                    at_count = min(at_count, slowed * taken)
                    if taken < most:
                        parted = Parting(first * num_blocks if count > 1 else num_works, count)
                        best = Turns(sums, together, parted, is_staggered)
                        least = slowed * taken
            if lowest < at_count < math.inf:
                break  # more parts cost more
            lowest = min(lowest, at_count)
    return best


def _behind(seen_by: Sequence[tuple[int, int]]) -> list[int]:
    """How many blocks of keys before each begin at the same queries, the last ones: through a
    window each begins at its own."""
    found = [0]
    for before, block in itertools.pairwise(seen_by):
        found.append(found[-1] + 1 if block[1] == before[1] else 0)
    return found


def _counts_in_turns(group: int) -> list[int]:
    """Into how many parts works may go: of whole heads, or of one's queries."""
    of_heads = {n for n in _COUNTS if n < group} | {n for n in _even(group) if n > 1}
    return sorted(of_heads) + [group * n for n in _COUNTS]


@functools.lru_cache(maxsize=64)
def _even(group: int) -> list[int]:
    return [n for n in range(1, group + 1) if group % n == 0]


def _parts_in_turns(
    seen_by: Sequence[tuple[int, int]], seqlen_q: int, block_m: int, group: int, count: int
) -> list[list[int]]:
    """The rounds of each block's parts, as `find_rounds` of plan.cuh shares them."""
    by_heads = min(count, group)
    by_queries = count // by_heads
    most = -(-seqlen_q // block_m // by_queries)
    found = []
    firsts = range(0, by_queries * most, most)
    ends = [nth * group // by_heads for nth in range(by_heads + 1)]
    sizes = [end - first for first, end in itertools.pairwise(ends)]
    for begin, end in seen_by:
        of_head = [max(0, min(end, first + most) - max(begin, first)) for first in firsts]
        found.append([size * each for size in sizes for each in of_head])
    return found


def _taken_in_turns(
    of_pairs: Sequence[tuple[int, Sequence[Sequence[float]]]], behind: Sequence[int],
    unordered: int, order: tuple[int, bool], sums: int, num_sms: int, work: float, most: float,
) -> float:  # fmt: skip
    """How long parts of blocks of keys take that begin after those `sums` blocks before them, but
    for a sum's first, `unordered` ones; inf where that is seen to be no less than `most`.

    of_pairs: what they cost each up to that pair; work: all of them; behind: as `_behind`; order:
    how many pairs run together, and whether they are staggered.
    """
    num_pairs, (together, is_staggered) = of_pairs[-1][0], order
    ends = [0.0] * num_sms
    # What they can wait for one another in all before it takes too long.
    patience = most * num_sms - work
    num_blocks = len(of_pairs[-1][1])
    half = -(-num_blocks // 2) if is_staggered else num_blocks
    before_of: dict[tuple[int, int], list[float]] = {}
    smaller = (num_pairs - 1) % together + 1  # the first ones
    num_groups = -(-num_pairs // together)
    for nth in range(num_groups + (1 if is_staggered else 0)):
        for step in range(half):
            # Of the group before this one the last half, of this one the first.
            for group, block in ((nth - 1, half + step), (nth, step)):
                if not 0 <= group < num_groups or block >= num_blocks:
                    continue
                size = together if group else smaller
                end = smaller + group * together
                parts = next(each for pair, each in of_pairs if end <= pair)[block]
                count = len(parts)
                before = before_of.get((group, block % sums))
                if before is None:
                    before = before_of[group, block % sums] = [0.0] * (size * count)
                waits = behind[block] >= unordered * sums
                for i in range(size * count):
                    begin, turn = ends[0], before[i]
                    if waits and turn > begin:
                        patience -= turn - begin
                        begin = turn
                    before[i] = max(turn, begin + _HOP)
                    heapq.heapreplace(ends, begin + parts[i % count])
                if patience < 0:
                    return math.inf
    return max(ends)


def _free_taken(
    of_blocks: Sequence[float], pairs: Pairs, parted: Parting, num_sms: int, start: float
) -> float:
    """How long works take of which none waits."""
    slowed = pairs.slowed(len(of_blocks) * parted.blocks, num_sms)
    if len(of_blocks) * pairs.total > _MOST_WORKS * num_sms:  # all are parted, or none
        more = start + _PART * (parted.blocks > 1)
        whole = sum(more + -(-each // parted.blocks) * slowed for each in of_blocks)
        return pairs.total * parted.blocks * whole / num_sms
    works = _in_order(of_blocks, pairs)
    costs = [start + each * slowed for each in works[: parted.first]]
    for each in works[parted.first :]:
        costs += [start + _PART + -(-each // parted.blocks) * slowed] * parted.blocks
    if len(costs) > _MOST_WORKS * num_sms:
        return sum(costs) / num_sms
    return _until_done(costs, num_sms)
