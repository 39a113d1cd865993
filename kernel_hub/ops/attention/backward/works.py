"""Which works of attention's backward several blocks share: on Hopper, by what each would take.

A work is a block of keys of a key head; its rounds are the blocks of queries that see them. Works
that begin last would leave multiprocessors idle: those are shared by blocks of fewer rounds. Works
of a pair, which is a sequence and a key head, share what they read; where a group of query heads
has drifted them apart it comes from the L2 only if all of it fits there.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

# What a work costs beside its rounds, in rounds: where a block goes on with the next one while it
# ends the last, and where it does not. Of a part, dk and dv are written and read once more.
_START_GOING_ON, _START = 1.5, 3.0
_PART = 1.5
_MOST_WORKS = 8  # a multiprocessor: with more of them the end is of no account
_MOST_PARTS = 12  # a multiprocessor
_COUNTS = (2, 3, 4, 6, 8, 12, 16)
_LOOKED_AT = 512  # blocks of keys, of so many that their end is of no account
_LEAST_GAIN = 0.04
_GAIN, _PARTS_GAIN = 0.02, 0.04  # with turns; by more parts
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
# Of causal ones of wide heads, so many sums that nobody waits: what more they cost.
_MANY_SUMS = 1.5
# What of rounds' reads the L2 holds; each doubling beyond it makes a round so much longer.
_L2_BYTES, _MISSED = 64 << 20, 0.45


class Parting(NamedTuple):
    """Works from the `first` on are shared by so many blocks each."""

    first: int
    blocks: int


class Turns(NamedTuple):
    """sums: of dq, -sums without turns; how many pairs run through their blocks of keys together;
    parts; is_staggered: the last half of their blocks in turn with the first half of the next
    pairs', causal ones of one length."""

    sums: int
    together: int
    parted: Parting
    is_staggered: bool = False


class Pairs(NamedTuple):
    """Of a sequence and a key head: how many; how many of them run through their blocks of keys
    together, or may; what the works of one read and add to, in bytes, if these drift apart."""

    total: int
    together: int
    drifting_bytes: int = 0

    def slowed(self, blocks: int, num_sms: int) -> float:
        """By what the rounds of a pair's `blocks` blocks last longer."""
        if not self.drifting_bytes:
            return 1.0
        at_once = min(self.total, max(self.together, num_sms / blocks))
        beyond = self.drifting_bytes * at_once / _L2_BYTES
        return 1 + _MISSED * max(0.0, math.log2(beyond))


class Traffic(NamedTuple):
    """What a pair reads and adds to, a round's queries of it, and one sum of dq, in bytes; is_wide:
    tiles of 64 x 64."""

    pair_bytes: int
    round_bytes: int
    sum_bytes: int
    is_wide: bool

    def together(
        self, num_pairs: int, num_sms: int, *, is_large: bool, is_causal: bool,
        has_window: bool = False,
    ) -> list[int]:  # fmt: skip
        """How many pairs may run at a time: what the L2 holds. Of few keys at a time, so that few
        wait for each other as they begin; where these move on together they need no more, nor do
        those that do not drift far apart: few works, or causal ones, of which even fewer keys at a
        time wait less."""
        few_keys = -(-num_sms // _MEMBERS)
        is_close = num_sms * self.round_bytes <= _CLOSE_BYTES
        most, room, causal, wide, apart = (
            max(1, each // max(1, self.pair_bytes))
            for each in (_TURNS_BYTES, _FEW_BYTES, _CAUSAL_BYTES, _WIDE_BYTES, _APART_BYTES)
        )
        if is_close:
            most = max(most, few_keys)
            fewer = max(1, most // 2)
            found = [most] if is_large or self.is_wide else [fewer, most, 2 * most]
        elif is_large:
            found = [most]
        else:
            found = [most, max(most, min(max(few_keys, 2 * most), room))]
        groups = [-(-num_pairs // n) for n in found]
        if is_causal and not (is_close and has_window):
            limit = apart if not is_close else wide if self.is_wide else causal
            more = max(most, min(2 * few_keys, limit))
            groups = [*([] if is_large else groups), max(1, round(num_pairs / more))]
        return list(dict.fromkeys(-(-num_pairs // n) for n in groups))

    def of_sums(self, sums: int) -> float:
        """What more than one sum cost, in rounds for a round's rows and keys."""
        beyond = sums * self.sum_bytes / _TURNS_BYTES
        return (sums - 1) * _SUM * (0.9 if self.is_wide else 1.0) * max(0.8, min(2.0, beyond))


def _seen_by(
    lengths: tuple[int, int], window: tuple[int, int], tile: tuple[int, int], step: int = 1
) -> list[tuple[int, int]]:
    """The blocks of queries that see each block of keys: the first one and the one behind the last.
    tile: queries and keys of a block; step: from one that is looked at to the next one."""
    (seqlen_q, seqlen_k), (block_m, block_n) = lengths, tile
    left, right = (
        length if bound < 0 else min(bound, length)
        for bound, length in zip(window, (seqlen_k, seqlen_q), strict=True)
    )
    ahead, num_blocks_q = seqlen_k - seqlen_q, -(-seqlen_q // block_m)
    found = []
    for first_key in range(0, seqlen_k, step * block_n):
        home = first_key - ahead
        first = (home - right) // block_m if home > right else 0
        last_key = home + min(block_n, seqlen_k - first_key) - 1
        stop = (last_key + left) // block_m + 1
        stop = stop if stop < num_blocks_q else num_blocks_q
        found.append((first, stop if stop > first else first))
    return found


def rounds(
    lengths: tuple[int, int], window: tuple[int, int], tile: tuple[int, int], group: int,
    step: int = 1,
) -> list[int]:  # fmt: skip
    """Those of each block of keys, for `group` query heads."""
    return [group * (stop - first) for first, stop in _seen_by(lengths, window, tile, step)]


@functools.lru_cache(maxsize=256)
def parting(
    lengths: tuple[int, int], window: tuple[int, int], tile: tuple[int, int], group: int,
    pairs: Pairs, num_sms: int, *, goes_on: bool,
) -> Parting:  # fmt: skip
    """The quickest one found."""
    start = _START_GOING_ON if goes_on else _START
    num_blocks = -(-lengths[1] // tile[1])
    num_works = num_blocks * pairs.total
    if num_works > _MOST_WORKS * num_sms:
        step = max(1, num_blocks // _LOOKED_AT)
        of_blocks = rounds(lengths, window, tile, group, step)
        classes = ((num_works / len(of_blocks), of_blocks),)
        count = parts_of_all(classes, num_blocks, pairs, num_sms, start, is_ragged=False)
        return Parting(0 if count > 1 else num_works, count)
    of_blocks = rounds(lengths, window, tile, group)
    works = _in_order(of_blocks, pairs)
    slowed = pairs.slowed(len(of_blocks), num_sms)
    whole = [start + each * slowed for each in works]
    best, least = Parting(num_works, 1), (1 - _LEAST_GAIN) * _until_done(whole, num_sms)
    waves, is_drifting = num_works // num_sms, slowed > 1
    for first in sorted({0, *(max(0, waves - i) * num_sms for i in range(3))}):
        for count in _COUNTS:
            is_many = (num_works - first) * count > max(_MOST_PARTS * num_sms, num_works - first)
            if is_many and (first or not is_drifting):
                break
            slowed = pairs.slowed(len(of_blocks) * count, num_sms)
            parts = [start + _PART + -(-each // count) * slowed for each in works[first:]]
            mean = (sum(whole[:first]) + count * sum(parts)) / num_sms
            if mean >= least:
                continue  # however well they fit
            if is_many:
                taken = mean + max(parts) / 2
            else:
                parts = [each for each in parts for _ in range(count)]
                taken = _until_done(whole[:first] + parts, num_sms)
            if taken < least:
                best, least = Parting(first, count), (1 - _LEAST_GAIN) * taken
    return best


@functools.lru_cache(maxsize=256)
def turns(
    lengths: tuple[int, int], window: tuple[int, int], tile: tuple[int, int], group: int,
    free: Pairs, read: Traffic, num_sms: int, *, goes_on: bool,
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
    togethers = read.together(
        free.total, num_sms, is_large=is_large, is_causal=window[1] >= 0, has_window=window[0] >= 0
    )
    counts = [n for n in _counts_in_turns(group) if num_works * n <= _MOST_PARTS * num_sms]

    @functools.cache
    def costs_of(count: int) -> list[list[float]]:
        """What parts of each block of keys cost, where works go into so many."""
        if count == 1:
            return [[start + each] for each in of_blocks]
        parts = _parts_in_turns(seen_by, lengths[0], tile[0], group, count)
        return [[start + _PART + each for each in of_block] for of_block in parts]

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
            for together in togethers:
                # All works, or those of the last pairs that run together.
                last = (free.total - 1) // together * together
                for first in (0, last) if count > 1 and last and not is_large else (0,):
                    work = first * in_whole + (free.total - first) * in_parts
                    most = least * (1 - (_PARTS_GAIN if count > best.parted.blocks else _GAIN))
                    if max(more + work / num_sms, 0 if first else soonest) >= most:
                        continue
                    if is_many:
                        hops = min(behind[-1] + 1, -(-num_sms // together)) / sums + 1 - unordered
                        taken = more + work / num_sms + _HOP * max(0.0, hops)
                    else:
                        of_pairs = ((first, costs_of(1)), (free.total, costs_of(count)))
                        taken = more + _taken_in_turns(
                            of_pairs, behind, unordered, together, sums, num_sms, work, most - more
                        )
                    at_count = min(at_count, taken)
                    if taken < most:
                        parted = Parting(first * num_blocks if count > 1 else num_works, count)
                        best, least = Turns(sums, together, parted), taken
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
    unordered: int, together: int, sums: int, num_sms: int, work: float, most: float,
) -> float:  # fmt: skip
    """How long parts of blocks of keys take that begin after those `sums` blocks before them, but
    for a sum's first, `unordered` ones; inf where that is seen to be no less than `most`.

    of_pairs: what they cost each up to that pair; work: all of them; behind: as `_behind`.
    """
    num_pairs = of_pairs[-1][0]
    ends = [0.0] * num_sms
    # What they can wait for one another in all before it takes too long.
    patience = most * num_sms - work
    for first_pair in range(0, num_pairs, together):
        costs = next(each for end, each in of_pairs if first_pair < end)
        count = len(costs[0])
        size = min(together, num_pairs - first_pair)
        begins = [[0.0] * (size * count) for _ in range(sums)]
        for block, parts in enumerate(costs):
            before = begins[block % sums]
            for nth in range(size * count):
                begin, turn = ends[0], before[nth]
                if turn > begin and behind[block] >= unordered * sums:
                    patience -= turn - begin
                    begin = turn
                before[nth] = max(turn, begin + _HOP)
                heapq.heapreplace(ends, begin + parts[nth % count])
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


def parts_of_all(
    classes: Sequence[tuple[float, Sequence[int]]], num_blocks: int, pairs: Pairs, num_sms: int,
    start: float, *, is_ragged: bool,
) -> int:  # fmt: skip
    """By how many blocks all works are shared.

    classes: the rounds of some works and for how many each of them stands; the last ones last."""
    best, least = 1, math.inf
    for count in (1, *_COUNTS):
        slowed = pairs.slowed(num_blocks * count, num_sms)
        more = start + _PART * (count > 1)
        whole = longest = end = 0.0
        for times, rounds_of in classes:
            costs = [more + -(-each // count) * slowed for each in rounds_of]
            whole += times * count * sum(costs)
            end = max(costs) / 2
            longest = max(longest, 2 * end)
        # Of many works of one length the end is of no account.
        taken = max(longest, whole / num_sms + (end if is_ragged or count > 1 else 0.0))
        if taken < (1 - _LEAST_GAIN) * least:
            best, least = count, taken
    return best


def _in_order(of_blocks: Sequence[float], pairs: Pairs) -> list[float]:
    """The rounds of works: of pairs that are together the first blocks, then the second ones."""
    works: list[float] = []
    for first in range(0, pairs.total, pairs.together):
        size = min(pairs.together, pairs.total - first)
        works += [each for each in of_blocks for _ in range(size)]
    return works


def _until_done(costs: Sequence[float], num_sms: int) -> float:
    """Of works that are begun in this order, each by the multiprocessor that is free first."""
    ends = list(costs[:num_sms])
    heapq.heapify(ends)
    for cost in costs[num_sms:]:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends, default=0.0)
