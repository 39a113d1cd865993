"""Which works of attention's backward several blocks share: on Hopper, by what each would take.

A work is a block of keys of a key head; its rounds are the blocks of queries that see them. Works
that begin last would leave multiprocessors idle: those are shared by blocks of fewer rounds.
"""

from __future__ import annotations

import functools
import heapq
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


class Parting(NamedTuple):
    """Works from the `first` on are shared by so many blocks each."""

    first: int
    blocks: int


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
    pairs: tuple[int, int], num_sms: int, *, goes_on: bool, has_turns: bool,
) -> Parting:  # fmt: skip
    """The quickest one found. pairs: of a sequence and a key head, and how many of them run
    through their blocks of keys together; has_turns: works add to dq one after another."""
    num_pairs, together = pairs
    num_works = -(-lengths[1] // tile[1]) * num_pairs
    if has_turns:
        # A part that began where one of higher keys ends would wait for all of that one's rounds.
        count = parts_of_group(num_works, group, num_sms)
        return Parting(0, count) if count > 1 else Parting(num_works, 1)
    best = Parting(num_works, 1)
    if num_works > _MOST_WORKS * num_sms:
        return best
    of_blocks = rounds(lengths, window, tile, group)
    works: list[int] = []
    for first in range(0, num_pairs, together):
        size = min(together, num_pairs - first)
        works += [each for each in of_blocks for _ in range(size)]
    start = _START_GOING_ON if goes_on else _START
    whole = [start + each for each in works]
    least = (1 - _LEAST_GAIN) * _until_done(whole, num_sms)
    waves = num_works // num_sms
    for first in sorted({0, *(max(0, waves - i) * num_sms for i in range(3))}):
        for count in _COUNTS:
            if (num_works - first) * count > max(_MOST_PARTS * num_sms, num_works - first):
                break
            parts = [start + _PART - (-each // count) for each in works[first:]]
            if sum(whole[:first]) + count * sum(parts) >= least * num_sms:
                continue  # however well they fit
            parts = [each for each in parts for _ in range(count)]
            taken = _until_done(whole[:first] + parts, num_sms)
            if taken < least:
                best, least = Parting(first, count), taken
    return best


def parts_of_group(num_works: int, group: int, num_sms: int) -> int:
    """Into how many parts of as many heads a group goes: one, but where works of whole groups are
    few; then the fewest that make enough, as each part is written and read once more."""
    if num_works >= _FEW_WORKS * num_sms:
        return 1
    counts = (n for n in range(2, group) if group % n == 0)
    enough = (n for n in counts if num_works * n >= _ENOUGH_PARTS * num_sms)
    return next(enough, group)


def _until_done(costs: Sequence[float], num_sms: int) -> float:
    """Of works that are begun in this order, each by the multiprocessor that is free first."""
    ends = list(costs[:num_sms])
    heapq.heapify(ends)
    for cost in costs[num_sms:]:
        heapq.heapreplace(ends, ends[0] + cost)
    return max(ends, default=0.0)
