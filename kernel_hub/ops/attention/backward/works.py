"""Which works of attention's backward several blocks share, and how they take turns: on Hopper, by
what each would take.

A work is a block of keys of a key head; its rounds are the blocks of queries that see them. Works
that begin last would leave multiprocessors idle: those are shared by blocks of fewer rounds. Works
of a pair, which is a sequence and a key head, share what they read; where a group of query heads
has drifted them apart it comes from the L2 only if all of it fits there.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator, Sequence
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
_FEW_ROUNDS = 8  # kFewRounds of plan.cuh
_MOST_TEAMS = 10  # a pair
_FEW_BLOCKS = 4  # of keys: what they wait for each other is less than what they read again
_ENOUGH_MEMBERS = 8  # read each block of queries from memory once
_NEIGHBOURS = 1.07
_APART = 1.15  # what blocks of several pairs take longer
_PASSED_ON = 1.0  # rounds from one block's sums to the next one's


class Parting(NamedTuple):
    """Works from the `first` on are shared by so many blocks each."""

    first: int
    blocks: int


class Turns(NamedTuple):
    """team: as in plan.cuh; how many pairs run through their blocks of keys together; parts."""

    team: int
    together: int
    parted: Parting


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
    return _quickest(of_blocks, pairs, _COUNTS, num_sms, start)[0]


@functools.lru_cache(maxsize=256)
def turns(
    lengths: tuple[int, int], window: tuple[int, int], tile: tuple[int, int], group: int,
    pairs: Pairs, num_sms: int, *, goes_on: bool,
) -> Turns:  # fmt: skip
    """The same where works add to dq in one order."""
    of_blocks = rounds(lengths, window, tile, group)
    start = _START_GOING_ON if goes_on else _START
    of_heads = tuple(n for n in range(2, group + 1) if group % n == 0)
    if max(window) >= 0:
        # The last keys first: what a work adds to has been added to by then, by shorter ones. Parts
        # are whole heads: one that began where a work of higher keys ends would wait for all of it.
        of_blocks.reverse()
        found = []
        for together in (1, pairs.together):
            alike = pairs._replace(together=together)
            parted, taken = _quickest(of_blocks, alike, of_heads, num_sms, start)
            found.append((taken * (_APART if together > 1 else 1.0), Turns(-1, together, parted)))
        return min(found)[1]
    # A part of the queries is one of all works of a team.
    queries = -(-lengths[0] // tile[0])
    of_queries = tuple(group * n for n in _COUNTS if 2 * n <= queries)
    num_blocks, num_works = len(of_blocks), len(of_blocks) * pairs.total
    parted, taken = (
        Parting(num_works, 1),
        _whole(of_blocks, pairs, num_sms, start),
    )
    together = 1 if num_blocks <= _FEW_BLOCKS else pairs.together
    taken += _PASSED_ON * min(num_blocks, -(-num_sms // together))
    best = Turns(1, together, parted)
    for num_teams in range(1, min(_MOST_TEAMS, num_blocks // 2) + 1):
        members = -(-num_blocks // num_teams)
        # Teams of one pair that follow each other should not run at the same time.
        together = 1 if num_teams == 1 else min(pairs.total, -(-num_sms // members))
        if members > num_sms // 2 or (together > pairs.together and members < _ENOUGH_MEMBERS):
            continue
        # Of one size: a small group at the end would take its teams one by one.
        together = -(-pairs.total // -(-pairs.total // together)) if num_teams > 1 else 1
        # Neighbours that begin a round apart wait for what is on its way.
        slowed = _NEIGHBOURS if 2 * members > of_blocks[0] else 1.0
        for parted in _team_partings(num_teams, num_blocks, pairs, (*of_heads, *of_queries)):
            units = parted.first + (num_works - parted.first) * parted.blocks
            least_rounds = max(of_blocks) // parted.blocks
            if goes_on and units > num_sms and least_rounds < _FEW_ROUNDS:
                continue
            if units > max(_MOST_PARTS * num_sms, num_works):
                continue
            costs = [start + slowed * of_blocks[0]]
            costs += [start + _PART - slowed * (-of_blocks[0] // parted.blocks)]
            each = _teams_done(num_blocks, members, pairs.total, together, parted, costs, num_sms)
            if each < taken * (1 - (_LEAST_GAIN if parted.blocks > 1 else 0.0)):
                best, taken = Turns(members, together, parted), each
    return best


def parts_of_group(num_works: int, group: int, num_sms: int) -> int:
    """Into how many parts of as many heads a group goes: one, but where works of whole groups are
    few; then the fewest that make enough, as each part is written and read once more."""
    if num_works >= _FEW_WORKS * num_sms:
        return 1
    counts = (n for n in range(2, group) if group % n == 0)
    enough = (n for n in counts if num_works * n >= _ENOUGH_PARTS * num_sms)
    return next(enough, group)


def _whole(of_blocks: Sequence[float], pairs: Pairs, num_sms: int, start: float) -> float:
    """Without parts."""
    slowed = pairs.slowed(len(of_blocks), num_sms)
    if len(of_blocks) * pairs.total > _MOST_WORKS * num_sms:
        return pairs.total * sum(start + each * slowed for each in of_blocks) / num_sms
    return _until_done([start + each * slowed for each in _in_order(of_blocks, pairs)], num_sms)


def _quickest(
    of_blocks: Sequence[float], pairs: Pairs, counts: Sequence[int], num_sms: int, start: float
) -> tuple[Parting, float]:
    """Which works to part by one of `counts`, and how long all take. of_blocks: the rounds of the
    works of a pair, in their order."""
    num_works = len(of_blocks) * pairs.total
    best, least = Parting(num_works, 1), _whole(of_blocks, pairs, num_sms, start)
    waves = num_works // num_sms
    is_drifting = pairs.slowed(len(of_blocks), num_sms) > 1
    firsts = sorted({0, *(max(0, waves - i) * num_sms for i in range(3))})
    if num_works > _MOST_WORKS * num_sms:
        if not is_drifting:
            return best, least
        firsts = [0]
    works = _in_order(of_blocks, pairs)
    slowed = pairs.slowed(len(of_blocks), num_sms)
    whole = [start + each * slowed for each in works]
    for first in firsts:
        for count in counts:
            many = (num_works - first) * count
            is_many = many > max(_MOST_PARTS * num_sms, num_works - first)
            if is_many and (first or not is_drifting):
                break
            slowed = pairs.slowed(len(of_blocks) * count, num_sms)
            parts = [start + _PART + -(-each // count) * slowed for each in works[first:]]
            mean = (sum(whole[:first]) + count * sum(parts)) / num_sms
            if mean >= (1 - _LEAST_GAIN) * least:
                continue  # however well they fit
            if is_many:
                taken = mean + max(parts) / 2
            else:
                parts = [each for each in parts for _ in range(count)]
                taken = _until_done(whole[:first] + parts, num_sms)
            if taken < (1 - _LEAST_GAIN) * least:
                best, least = Parting(first, count), taken
    return best, least


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


def _team_partings(
    num_teams: int, num_blocks: int, pairs: Pairs, counts: Sequence[int]
) -> Iterator[Parting]:
    """What may be parted: only teams that are alike, of all works or of the last pairs."""
    num_works = num_blocks * pairs.total
    yield Parting(num_works, 1)
    if num_teams == 1:
        for count in counts:
            for pair in sorted({0, *(pairs.total * i // 8 for i in (4, 6, 7))}):
                yield Parting(pair * num_blocks, count)


def _teams_done(
    num_blocks: int, members: int, num_pairs: int, together: int, parted: Parting,
    costs: Sequence[float], num_sms: int,
) -> float:  # fmt: skip
    """How long teams take, each of which begins when all of its members may. costs: of a whole
    work, of a part."""
    whole, part = costs
    num_works = num_blocks * num_pairs
    if num_works > _MOST_WORKS * num_sms:
        at_once = num_sms // members * members
        parts = (num_works - parted.first) * parted.blocks
        return (parted.first * whole + parts * part * (parted.blocks > 1)) / at_once
    ends = [0.0] * num_sms  # sorted
    of_pairs = [0.0] * num_pairs
    work = 0
    for first_pair in range(0, num_pairs, together):
        for first in range(0, num_blocks, members):
            size = min(members, num_blocks - first)
            for pair in range(first_pair, min(first_pair + together, num_pairs)):
                is_parted = work >= parted.first
                for _ in range(parted.blocks if is_parted else 1):
                    end = max(ends[size - 1], of_pairs[pair] if together > 1 else 0.0)
                    end += part if is_parted else whole
                    ends = sorted(ends[size:] + [end] * size)
                    of_pairs[pair] = end
                work += size
    return ends[-1]
