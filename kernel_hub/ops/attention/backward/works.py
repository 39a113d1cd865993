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
_LEAST_GAIN = 0.04
_FEW_WORKS, _ENOUGH_PARTS = 2, 4  # a multiprocessor, where parts are of heads
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


def rounds(
    lengths: tuple[int, int], window: tuple[int, int], tile: tuple[int, int], group: int
) -> list[int]:
    """Those of each block of keys, for `group` query heads. tile: queries and keys of a block."""
    (seqlen_q, seqlen_k), (block_m, block_n) = lengths, tile
    left, right = (
        length if bound < 0 else min(bound, length)
        for bound, length in zip(window, (seqlen_k, seqlen_q), strict=True)
    )
    found = []
    for first_key in range(0, seqlen_k, block_n):
        home = first_key - (seqlen_k - seqlen_q)
        last_key = min(block_n, seqlen_k - first_key) - 1
        first = max(0, (home - right) // block_m)
        end = min(-(-seqlen_q // block_m), (home + left + last_key) // block_m + 1)
        found.append(group * max(0, end - first))
    return found


@functools.lru_cache(maxsize=256)
def parting(
    lengths: tuple[int, int], window: tuple[int, int], tile: tuple[int, int], group: int,
    pairs: Pairs, num_sms: int, *, goes_on: bool,
) -> Parting:  # fmt: skip
    """The quickest one found."""
    start = _START_GOING_ON if goes_on else _START
    of_blocks = rounds(lengths, window, tile, group)
    num_works = len(of_blocks) * pairs.total
    if num_works > _MOST_WORKS * num_sms:
        return _parting_of_many(of_blocks, pairs, num_sms, start)
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


def parts_of_group(num_works: int, group: int, num_sms: int) -> int:
    """Into how many parts of as many heads a group goes: one, but where works of whole groups are
    few; then the fewest that make enough, as each part is written and read once more."""
    if num_works >= _FEW_WORKS * num_sms:
        return 1
    counts = (n for n in range(2, group) if group % n == 0)
    enough = (n for n in counts if num_works * n >= _ENOUGH_PARTS * num_sms)
    return next(enough, group)


def _parting_of_many(
    of_blocks: Sequence[float], pairs: Pairs, num_sms: int, start: float
) -> Parting:
    """Whose end is of no account: all by few heads, where that keeps a group together."""
    best, least = Parting(len(of_blocks) * pairs.total, 1), math.inf
    for count in (1, *_COUNTS):
        slowed = pairs.slowed(len(of_blocks) * count, num_sms)
        more = start + _PART * (count > 1)
        costs = [more + -(-each // count) * slowed for each in of_blocks]
        taken = pairs.total * count * sum(costs) / num_sms
        taken += max(costs) / 2 if count > 1 else 0.0
        if taken < (1 - _LEAST_GAIN) * least:
            best, least = Parting(0, count) if count > 1 else best, taken
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
