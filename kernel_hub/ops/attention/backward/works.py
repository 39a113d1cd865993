"""Which works of attention's backward several blocks share: on Hopper, by what each would take.

A work is a block of keys of a key head; its rounds are the blocks of queries that see them. Works
that begin last would leave multiprocessors idle: those are shared by blocks of fewer rounds. Works
of a pair, which is a sequence and a key head, share what they read; where a group of query heads
has drifted them apart it comes from the L2 only if all of it fits there.
"""

from __future__ import annotations

import functools
import heapq
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
# What of rounds' reads the L2 holds; each doubling beyond it makes a round so much longer.
_L2_BYTES, _MISSED = 64 << 20, 0.45


class Parting(NamedTuple):
    """Works from the `first` on are shared by so many blocks each."""

    first: int
    blocks: int


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
