"""Tiles of Hopper's kernels in shares: which there are, how heads and tokens fill their rows, and
what they cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ..core import common
from ..core.device import Stated, launch_facts
from .problem import Problem, Sizes

CUBIN = "flash_attention_split_sm90"
MAX_BLOCKS = 256  # merge.cuh holds two pieces of each of a tile's chunks
MERGES_AN_SM, _MOST_SCANNED = 2, 32  # blocks of the merge; tiles that a warp of it looks at

# Of a multiprocessor, by width and rows, and how much more of its part a block of few rows does
# where it has one alone.
_FLOPS_A_US = {
    (64, 64): 2.3e6, (64, 128): 3.7e6, (64, 192): 4.3e6, (96, 128): 4.8e6, (96, 192): 5.4e6,
    (128, 64): 4.2e6, (128, 128): 5.8e6, (192, 128): 6.5e6, (256, 128): 7.0e6,
}  # fmt: skip
_ALONE = 1.72
_FEW_ENDS, _FEW_IN_TURN = 0.72, 0.95
_NEARLY = 1.04
_NARROWEST = 64
_FEW_ROWS, _PLACES = 64, 2  # rows of a tile of which a multiprocessor has so many
# Of chunks over caches of any lengths: the longest tile up to which to cut it and to merge takes
# longer than it saves; rounds up to which to sort and draw them does, known to differ or not.
_SHORT_TILE_US, _UNSORTED_ROUNDS = 10.0, (1.0, 2.2)
# The same of steps, of up to so many queries, where the longest one is not later than others, or of
# several queries by no more than so many times what pieces take.
_STEP, _WHOLE_TILE_US, _LATE_PIECES = 16, 40.0, 1.9
# Of a step's tiles of few rows: in turn, up to so many rounds, where one is long; shares of narrow
# heads, up to fewer.
_FEW, _FEW_TURNS, _FEWEST, _NARROW_SHARES = 0.4, 1.11, 0.3, 1.1
# Pieces of 128 rows and columns, one from each multiprocessor, out, in again and merged.
_PIECES_US = 2.9


@dataclass(frozen=True, slots=True)
class Body:
    """One compiled tile shape: `{CUBIN}_{dtype}_hdim{head_dim}_{mask}{suffix}`."""

    mask: str
    head_dim: int
    suffix: str = ""

    @property
    def has_few_rows(self) -> bool:
        """Whether two blocks run on a multiprocessor."""
        return self.suffix == "_rows64"

    def takes(self, problem: Problem) -> bool:
        """Whether it has the columns of a problem, and is of its dtype."""
        is_capped = problem.softcap != 0 and problem.q.dtype == torch.bfloat16
        is_there = is_capped or not self.has_few_rows or self.head_dim > _NARROWEST
        return is_there and self.head_dim >= problem.widest_head

    @property
    def stated(self) -> Stated:
        """Threads, shared memory, block_m (rows) and block_n (keys) of a tile."""
        return launch_facts(CUBIN, self.name(torch.bfloat16))

    def name(self, dtype: torch.dtype) -> str:
        """The function's name."""
        token = common.DTYPE_TOKENS[dtype]
        return f"{CUBIN}_{token}_hdim{self.head_dim}_{self.mask}{self.suffix}"


BODIES = (
    *(Body("causal", width) for width in (64, 96, 128, 192, 256)),
    *(Body("causal", width, "_rows192") for width in (64, 96)),
    *(Body("window", width) for width in (64, 128, 256)),
    Body("window", 64, "_rows64"),  # of bf16, for softcaps
    *(Body(mask, 128, "_rows64") for mask in ("causal", "window")),
)


def merge_name(dtype: torch.dtype, scan: int = 1) -> str:
    """The second kernel, of all bodies; scan: not 1 where most tiles are written already."""
    return f"{CUBIN}_{common.DTYPE_TOKENS[dtype]}_merge" + "_left" * (scan != 1)


def scan_of(tiles: int, merge_blocks: int, num_blocks: int, num_sms: int, is_cut: bool) -> int:
    """Tiles that a warp of the merge looks at: all in one wave, about two of them with pieces."""
    scan, most = 1, min(_MOST_SCANNED, 2 * tiles // num_blocks if is_cut else _MOST_SCANNED)
    while 2 * scan <= most and merge_blocks > scan * MERGES_AN_SM * num_sms:
        scan *= 2
    return scan


class PackedTile(NamedTuple):
    """Of a kernel in shares. is_alone: heads of a tile need not divide the group."""

    width: int
    block_m: int
    block_n: int
    is_alone: bool = False

    def pack(self, seqlen_q: int, group: int) -> tuple[int, int, int]:
        """(heads, tokens, tiles): heads of a group that share a tile, tokens of it, tiles of a
        group. The fewest tiles, and of those the most heads."""
        best = None
        for heads in range(1, min(group, self.block_m) + 1):
            if group % heads == 0 or self.is_alone:
                tokens = self.block_m // heads
                tiles = -(-seqlen_q // tokens) * -(-group // heads)
                if best is None or tiles <= best[2]:
                    best = heads, tokens, tiles
        assert best is not None
        return best

    @property
    def places(self) -> int:
        """How many blocks run on a multiprocessor."""
        return _PLACES if self.block_m == _FEW_ROWS else 1

    def blocks_at_once(self, num_sms: int, have_pieces: bool = True) -> int:
        """How many run at once on so many of those; have_pieces: the merge numbers them."""
        places = num_sms * self.places
        return min(MAX_BLOCKS, places) if have_pieces else places

    @property
    def ends(self) -> float:
        """What its beginning and end take of those of others."""
        return _FEW_ENDS if self.block_m == _FEW_ROWS else 1.0

    @property
    def in_turn(self) -> float:
        """What drawing the next tile takes of that."""
        return _FEW_IN_TURN if self.block_m == _FEW_ROWS else 1.0

    @property
    def unit_us(self) -> float:
        """Of a block of keys, where all places are taken."""
        rate = _FLOPS_A_US[self.width, self.block_m]
        return 4 * self.block_m * self.block_n * self.width / rate * self.places

    def unit_us_of(self, busy: float) -> float:
        """The same where so many of all places are."""
        is_alone = self.places > 1 and self.places * busy <= _NEARLY
        return self.unit_us / _ALONE if is_alone else self.unit_us

    def whole_of(
        self, every: Sequence[Sizes], seen: int, rounds: float, is_short: bool, is_chunk: bool
    ) -> tuple[bool, bool]:
        """Of tiles of lengths on the device, the longest of so many blocks of keys: (whether they
        are taken as they come, whether they stay whole, so that no merge comes after)."""
        if is_short or not is_chunk:
            return is_short, is_short
        longest_us = seen * self.unit_us_of(min(1.0, rounds))
        is_step = every[0].seqlen_q <= _STEP and longest_us <= _WHOLE_TILE_US
        late_us = longest_us * (1 - rounds * every[-1].evenness)
        is_late = late_us > (every[0].seqlen_q > 1) * _LATE_PIECES * self.pieces_us
        is_whole = longest_us <= _SHORT_TILE_US or (is_step and not is_late)
        most = _UNSORTED_ROUNDS[any(not each.is_ragged for each in every)]
        return rounds <= most and longest_us <= _SHORT_TILE_US, is_whole

    def of_step(self, sizes: Sizes, places: int) -> tuple[float, float]:
        """What shares, and tiles in turn, of a step of several tokens take of what is reckoned,
        where tiles of few rows do not fill half of their places."""
        if self.block_m != _FEW_ROWS or not 1 < sizes.seqlen_q <= _STEP:
            return 1.0, 1.0
        tiles = self.pack(sizes.seqlen_q, sizes.num_heads // sizes.num_kv_heads)[2]
        rounds = tiles * sizes.batch_size * sizes.num_kv_heads / places
        if sizes.head_dim <= _NARROWEST and rounds <= _FEWEST:
            return _NARROW_SHARES, 1.0
        longest_us = -(-sizes.seqlen_k // self.block_n) * self.unit_us_of(rounds)
        return 1.0, _FEW_TURNS if rounds <= _FEW and longest_us > _SHORT_TILE_US else 1.0

    @property
    def pieces_us(self) -> float:
        """Of pieces from each multiprocessor, out, in again and merged."""
        return _PIECES_US * self.width / 128 * self.places * self.block_m / 128


# Parts of a causal prompt's tiles, which blocks draw: of the longest at most so many, and of all in
# rounds; a launch; a part's ends, and what 128 columns add; pieces and blocks of keys by those of
# others, these of 256 columns.
_MOST_PARTS, _MOST_ROUNDS = 5, 2.4
_PARTS_START_US, _PART_US, _PART_COLUMNS_US, _PIECES = 5.0, 2.0, 1.5, 1.5
_UNIT, _WIDEST_UNIT = 1.02, 1.1


@lru_cache(maxsize=256)
def prompt_parts(sizes: Sizes, tile: PackedTile, places: int) -> tuple[float, int]:
    """(about how long a prompt takes in equal parts of its tiles, of how many the longest is);
    infinite, 0: where it is not causal, or has tiles for all places."""
    group = sizes.num_heads // sizes.num_kv_heads
    heads, tokens, tiles = tile.pack(sizes.seqlen_q, group)
    packs = -(-group // heads) * sizes.batch_size * sizes.num_kv_heads
    is_causal = (sizes.window_left, sizes.window_right) == (-1, 0)
    found = math.inf, 0
    if not (sizes.is_prompt and is_causal) or sizes.has_softcap or sizes.is_varlen:
        return found
    if tiles * sizes.batch_size * sizes.num_kv_heads > places:
        return found
    ahead, block_n = int(sizes.mean) - sizes.seqlen_q, tile.block_n
    firsts = range(tokens, sizes.seqlen_q + tokens, tokens)
    seen = [-(-max(1, ahead + min(first, sizes.seqlen_q)) // block_n) for first in firsts]
    unit_us = tile.unit_us * (_WIDEST_UNIT if tile.width == 256 else _UNIT)
    part_us = _PART_US + _PART_COLUMNS_US * tile.width / 128
    tried, share = set(), seen[-1]
    if sizes.has_lengths:  # the device's parts are no longer than a share
        share = -(-seen[-1] * packs * len(seen) // places)
    for parts in range(2, _MOST_PARTS + 1):
        longest = max(2, min(share, -(-seen[-1] // parts)))
        unit = -(-seen[-1] // -(-seen[-1] // longest))
        rounds = packs * sum(-(-each // unit) for each in seen) / places
        if unit in tried or rounds > _MOST_ROUNDS:
            continue
        tried.add(unit)
        us = _drawn_us(seen, unit, packs, places, unit_us, part_us)
        found = min(found, (us + _PIECES * min(2.0, rounds) * tile.pieces_us, parts))
    return _PARTS_START_US + found[0], found[1]


_LATEST, _COUNTED_ROUNDS = 0.5, 16  # of a part that the last one is late; rounds that are counted


def chunk_parts(
    sizes: Sizes, tile: PackedTile, places: int, parts: int, blocks: int
) -> tuple[float, float]:
    """(products of few queries in parts of tiles that blocks draw, rounds of these): `parts` of the
    longest, which sees so many blocks of keys."""
    tiles = tile.pack(sizes.seqlen_q, sizes.num_heads // sizes.num_kv_heads)[2]
    tiles *= sizes.batch_size * sizes.num_kv_heads
    less = (sizes.window_right == 0) * min(sizes.seqlen_q, sizes.mean) / 2 / tile.block_n
    longest = max(2, -(-blocks // parts))
    if sizes.has_lengths:  # the device's parts are no longer than a share
        longest = min(
            longest, max(2, math.ceil(tiles * max(1.0, blocks * sizes.evenness) / places))
        )
    part_us = _PART_US + _PART_COLUMNS_US * tile.width / 128
    one = longest * tile.unit_us + part_us
    if not sizes.is_ragged:
        count = -(-blocks // longest)
        one = -(-blocks // count) * tile.unit_us + part_us
        rounds = tiles * count / places
        late = math.ceil(rounds) if rounds <= _COUNTED_ROUNDS else rounds + _LATEST
        return late * one * (1 - less / blocks * (rounds > 1)), rounds
    # Lengths are about those of a power of what is evenly spread.
    power = 1 / sizes.evenness - 1
    every = [max(1.0, blocks * ((i + 0.5) / 16) ** power) for i in range(16)]
    rounds = sum(math.ceil(each / longest) for each in every) * tiles / 16 / places
    seen = sum(max(0.5, each - less) for each in every) * tiles / 16 / places
    return max(one, seen * tile.unit_us + rounds * part_us + _LATEST * one), rounds


def _drawn_us(
    seen: list[int], unit: int, packs: int, places: int, unit_us: float, part_us: float
) -> float:
    """Until the last of `packs` tiles each, cut into units of so many blocks of keys, is done: the
    first parts of all come first, the longest of these first."""
    idle: dict[float, int] = {0.0: places}  # when they are free -> how many
    for first in range(0, seen[-1], unit):
        units = Counter(min(unit, each - first) for each in reversed(seen) if each > first)
        for blocks, tiles in units.items():
            left = tiles * packs
            while left > 0:
                free = min(idle)
                taken = min(left, idle[free])
                idle[free] -= taken
                if idle[free] == 0:
                    del idle[free]
                end = free + blocks * unit_us + part_us
                idle[end] = idle.get(end, 0) + taken
                left -= taken
    return max(idle)


# Of whole prompts: a launch; rounds that are counted, and of one, that the last takes after more;
# the same where tiles differ in their keys, the longest first; tiles of a sequence that are looked
# at.
_PROMPT_START_US, _MOST_COUNTED, _LATE = 3.5, 8, 0.4
_APART, _LOOKED_AT = 0.35, 64


class TileCost(NamedTuple):
    """Of so many tokens over blocks of keys: a block takes unit_us, its beginning and end
    begin_us; a launch of them start_us, and `late` of a mean tile where they differ in keys."""

    tokens: int
    block_n: int
    unit_us: float
    begin_us: float
    start_us: float = _PROMPT_START_US
    late: float = _APART


class Prompt(NamedTuple):
    """Heads of all sequences, of a length that is theirs or the mean; a window's bounds, -1: none;
    causal: right is 0."""

    heads: float
    seqlen_q: int
    seqlen_k: int
    left: int
    right: int
    is_ragged: bool = False


def prompt_of(problem: Problem, heads: int, left: int, right: int) -> Prompt | None:
    """As the host knows it; None where there is nothing of it."""
    tables = problem.cu_seqlens_q, problem.cu_seqlens_k
    seqlen_q, seqlen_k = (
        longest if table is None else min(longest, -(-total // max(1, problem.batch_size)))
        for table, longest, total in zip(tables, problem.seqlens, problem.totals, strict=True)
    )
    if min(seqlen_q, seqlen_k, problem.q.numel()) == 0:
        return None
    is_ragged = tables[0] is not None and problem.batch_size > 1
    return Prompt(problem.batch_size * heads, seqlen_q, seqlen_k, left, right, is_ragged)


def rounds_of(prompt: Prompt, tokens: int, num_sms: int) -> float:
    """Of tiles of so many tokens; sequences that differ end within one."""
    tiles = -(-prompt.seqlen_q // tokens) + 0.5 * (prompt.is_ragged and prompt.seqlen_q > tokens)
    return tiles * prompt.heads / num_sms


def blocks_of(prompt: Prompt, tokens: int, block_n: int) -> tuple[float, int]:
    """(the mean, the most) of the blocks of keys that tiles of so many tokens touch."""
    seqlen_q, seqlen_k = prompt.seqlen_q, prompt.seqlen_k
    # An odd step meets every place of a tile in a block of keys.
    firsts = range(0, seqlen_q, tokens * (seqlen_q // tokens // _LOOKED_AT | 1))
    seen, most = 0, 0
    for first in firsts:
        at = first + seqlen_k - seqlen_q  # the first query's own key
        end, begin = seqlen_k, 0
        if prompt.right >= 0:
            end = min(seqlen_k, at + min(tokens, seqlen_q - first) + prompt.right)
        if prompt.left >= 0:
            begin = max(0, at - prompt.left)
        blocks = max(0, -(-end // block_n) - begin // block_n)
        seen, most = seen + blocks, max(most, blocks)
    return seen / len(firsts), most


def prompt_us(prompt: Prompt, tile: TileCost, num_sms: int) -> float:
    """About how long it takes in such tiles."""
    mean, most = blocks_of(prompt, tile.tokens, tile.block_n)
    mean_us = tile.begin_us + mean * tile.unit_us
    rounds = rounds_of(prompt, tile.tokens, num_sms)
    if prompt.right == 0:
        longest = tile.begin_us + most * tile.unit_us
        us = longest if rounds <= 1 else max(longest, (rounds + tile.late) * mean_us)
        return tile.start_us + us
    rounds = math.ceil(rounds) if rounds <= _MOST_COUNTED else rounds + _LATE
    return tile.start_us + rounds * mean_us
