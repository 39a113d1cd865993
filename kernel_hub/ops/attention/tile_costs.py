"""About how long tiles of prompts take on Hopper, to choose among their sizes; which heads run
through theirs together.

Fitted to what drawn cases took on an H100 (docs/notes/flash_attention_sm90.md).
"""

from __future__ import annotations

import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from ..core.device import device_of
from .packed_tile import PackedTile
from .problem import Problem, Sizes

_START_US = 3.5
_MOST_COUNTED, _LATE = 8, 0.4  # rounds that are counted; of one, that the last takes after more
_APART = 0.35  # the same where tiles differ in their keys, the longest first
_LOOKED_AT = 64  # tiles of a sequence
_NARROWEST, _ROWS, _MORE_ROWS = 64, 128, 192
# Tokens of which tiles of both have two, and up to which fewer rows may be better.
_MOST_TWO_TILES, _MOST_SHORT = 288, 1024
_RAGGED_ROUNDS = 2.4  # of tiles of sequences that differ, for larger ones to be better


class TileCost(NamedTuple):
    """Of so many tokens over blocks of keys: a block takes unit_us, its beginning and end
    begin_us; a launch of them start_us, and `late` of a mean tile where they differ in keys."""

    tokens: int
    block_n: int
    unit_us: float
    begin_us: float
    start_us: float = _START_US
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


# Of 128 and of 192 rows, by the width of the larger and whether rows of heads are askew; how much
# faster the larger must be.
_TILES = {
    (96, False): (TileCost(_ROWS, 128, 1.33, 2.3), TileCost(192, 96, 1.38, 2.8), 0.97),
    (96, True): (TileCost(_ROWS, 128, 1.65, 2.3), TileCost(192, 96, 1.40, 2.8), 0.95),
    (112, False): (TileCost(_ROWS, 128, 1.70, 2.6), TileCost(192, 96, 1.50, 2.8), 1.0),
    (112, True): (TileCost(_ROWS, 128, 1.85, 2.6), TileCost(192, 96, 1.45, 2.8), 1.0),
}


def wider_rows(problem: Problem) -> int:
    """Columns of the kernel with tiles of 192 rows that is better for a problem without softcap
    that is not causal; 0: none. K and V are read less often, which counts where rows of heads
    begin between the L2's sectors."""
    head_dim, is_askew = problem.widest_head, problem.widest_head % 16 != 0
    prompt = prompt_of(problem, problem.q.shape[-2], *problem.window)
    width = next((width for width in (96, 112) if _NARROWEST < head_dim <= width), 0)
    if not width or prompt is None or problem.batch_invariant:
        return 0
    fewer, more, surely = _TILES[width, is_askew]
    num_sms = device_of(problem.q.device).num_sms
    if prompt.is_ragged and not (is_askew and rounds_of(prompt, _ROWS, num_sms) > _RAGGED_ROUNDS):
        return 0
    is_better = prompt_us(prompt, more, num_sms) < surely * prompt_us(prompt, fewer, num_sms)
    return width if is_better else 0


# unit_us, begin_us, start_us and late of short causal prompts whose heads share keys, by columns
# and rows: whole tiles, and those of packed heads in turn; of 64 rows two at a time.
_APART_TILES = {
    (64, 128): (0.914, 1.25, 5.0, 0.5), (64, 192): (0.968, 2.0, 5.5, 0.7),
    (128, 128): (1.177, 2.0, 5.0, 0.7), (256, 128): (1.017, 4.75, 3.0, 0.7),
}  # fmt: skip
_IN_TURN_TILES = {
    (64, 128): (1.247, 1.0, 6.5, 0.0), (64, 192): (1.152, 2.5, 4.5, 0.35),
    (128, 128): (1.157, 2.25, 6.0, 0.5), (128, 64): (0.599, 3.0, 3.5, 0.7),
    (256, 128): (1.423, 4.75, 4.0, 0.7),
}  # fmt: skip
_SHORT_CAUSAL = 1280  # tokens
# Of those tiles of 64 rows: tokens, and rounds of all that run at a time.
_FEW_ROWS, _FEW_ROWS_LONGEST, _FEW_ROWS_ROUNDS = 64, 768, 6


def is_short_causal(sizes: Sizes) -> bool:
    """Whether prompts are of one length, short, causal, and their heads share keys."""
    return (
        sizes.is_prompt
        and sizes.num_heads > sizes.num_kv_heads
        and sizes.seqlen_q <= _SHORT_CAUSAL
        and (sizes.window_left, sizes.window_right) == (-1, 0)
        and (sizes.head_dim <= 64 or 96 < sizes.head_dim <= 128 or sizes.head_dim > 192)
        and not (sizes.has_lengths or sizes.has_softcap)
    )


def short_causal_us(
    sizes: Sizes, width: int, rows: int, packed: tuple[int, int] | None, block_n: int, places: int
) -> float | None:
    """About how long they take in tiles of so many columns and rows, of which `places` run at a
    time; packed: heads and tokens of those in turn. None where nothing is known of such tiles."""
    known = (_APART_TILES if packed is None else _IN_TURN_TILES).get((width, rows))
    if known is None or not is_short_causal(sizes):
        return None
    heads, tokens = packed or (1, rows)
    packs = -(-sizes.num_heads // sizes.num_kv_heads // heads) * sizes.num_kv_heads
    prompt = Prompt(sizes.batch_size * packs, sizes.seqlen_q, int(sizes.mean), -1, 0)
    is_long = sizes.seqlen_q > _FEW_ROWS_LONGEST
    if rows == _FEW_ROWS and (is_long or rounds_of(prompt, tokens, places) > _FEW_ROWS_ROUNDS):
        return math.inf
    return prompt_us(prompt, TileCost(tokens, block_n, *known), places)


def is_surely_in_turn(problem: Problem, tile: PackedTile, sizes: Sizes) -> bool:
    """Whether prompts of one length are surely better in turn, in tiles of 128 rows, as those of
    forward_sm90 are of 192: many of 96 columns or fewer and heads alone; windows of 64 columns that
    are dealt in one round."""
    if sizes.has_lengths or not sizes.is_prompt or tile.block_m != _ROWS:
        return False
    seqlen_q, tiles = sizes.seqlen_q, math.ceil(sizes.seqlen_q / _ROWS)
    rounds = tiles * sizes.batch_size * sizes.num_heads / device_of(problem.q.device).num_sms
    if sizes.window_left >= 0:
        return tile.width == 64 and problem.softcap == 0 and rounds <= 1
    if sizes.num_heads != sizes.num_kv_heads or tile.width > 96:
        return False
    if tile.width == 64:  # tiles of 192 rows are half empty
        return problem.softcap == 0 and sizes.window_right < 0 and seqlen_q <= _ROWS and rounds > 4
    if sizes.window_right < 0:  # rows of heads that begin between the L2's sectors
        is_askew = problem.widest_head % 16 != 0
        return is_askew and _MORE_ROWS < seqlen_q <= 2 * _ROWS and rounds >= 2.5
    is_short = _MORE_ROWS < seqlen_q <= 2 * _ROWS or _MOST_TWO_TILES < seqlen_q <= _MOST_SHORT
    return is_short and rounds >= 3


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


# K and V of the heads that run together stay in the L2: of 50 MB on an H100 half is near.
_L2_BYTES = 18 << 20
# Of all heads of a group: two tiles a multiprocessor, half of their keys masked; where there are
# more than so many times that, one is enough.
_GROUP_QUERIES, _MANY_GROUPS = 264 * 128, 5
# Of short prompts of wide heads (columns of k and v), from so many tiles on, queries and output
# count too, and a tile for every other multiprocessor is enough. Of narrow ones half of the bytes
# are better where tiles are many.
_MANY_TILES = 8 * 132
# Sequences that are alike: Order::kMostAlike, and bytes that tiles of theirs, which do not run side
# by side, may read again.
_MOST_ALIKE, _ALIKE_BYTES = 16, 40 << 20
_WIDE_HEADS, _MORE_L2_BYTES, _SHORT_WIDE, _SOME_TILES, _FEW_TILES = 320, 22 << 20, 1024, 250, 66

# In turn: tiles that see up to so many keys are better pair by pair in more rounds than that or
# with a softcap, of wide heads in fewer.
_FEW_KEYS, _MANY_ROUNDS, _FEW_ROUNDS, _NARROW = 384, 9, 3.5, 128


def heads_a_group(problem: Problem, seqlen_k: int) -> int:
    """How many (batch, head) pairs are scheduled together, so that their K and V stay in the L2.

    The last group begins with its longest tiles when the others end, so groups are about alike,
    and have work for as long as a longest tile takes.
    """
    num_heads, head_dim = problem.q.shape[-2:]
    num_kv_heads = max(1, problem.k.shape[-2])
    head_dims = head_dim + problem.v.shape[-1]
    if problem.window[0] >= 0:  # what tiles side by side see
        seqlen_k = min(seqlen_k, problem.window[0] + 2 * _ROWS)
    pair_bytes = max(1, seqlen_k * head_dims * problem.q.element_size())
    num_pairs = num_kv_heads * (1 if problem.has_lengths else problem.batch_size)
    group = max(1, num_heads // num_kv_heads)
    seqlen_q = max(1, problem.seqlens[0])
    least = -(-_GROUP_QUERIES // (seqlen_q * group))
    if num_pairs * group * seqlen_q > _MANY_GROUPS * _GROUP_QUERIES:
        least = -(-least // 2)
    l2_bytes, tiles = _L2_BYTES, -(-seqlen_q // _ROWS) * group
    is_half = problem.q.element_size() == 2
    is_wide, is_short = head_dims > _WIDE_HEADS and is_half, seqlen_q <= _SHORT_WIDE
    if is_short and is_half and head_dims <= 2 * _NARROW and num_pairs * tiles > _MANY_TILES:
        l2_bytes //= 2
    if is_wide and is_short and num_pairs * tiles >= _SOME_TILES:
        l2_bytes, least = _MORE_L2_BYTES, -(-_FEW_TILES // tiles)
        pair_bytes += group * seqlen_q * head_dims * problem.q.element_size()
    if not problem.has_lengths and seqlen_k >= 2 * seqlen_q:  # tiles are alike
        least = 2
    together = max(1, least, round(l2_bytes / pair_bytes))
    num_groups = max(1, round(num_pairs / together))
    if problem.has_lengths and num_groups == 1:  # of sequences that are alike, too
        held = _ALIKE_BYTES // (pair_bytes * num_kv_heads)
        most = max(1, min(_MOST_ALIKE, held, round(together / num_kv_heads)))
        return num_heads * -(-problem.batch_size // max(1, -(-problem.batch_size // most)))
    return max(1, -(-num_pairs // num_groups)) * group


def pairs_together(problem: Problem, sizes: Sizes, keys: int, rounds: float, width: int) -> int:
    """How many (sequence, kv head) pairs run in turn through their tiles together, the last ones of
    all of them first: where the first see the fewest keys. keys: of the blocks of the longest."""
    is_one, is_open = keys <= _ROWS, sizes.window_left < 0
    if problem.has_lengths or sizes.window_right < 0 or not (sizes.is_prompt and is_open):
        return 1
    is_narrow = width <= _NARROW
    if is_one or rounds <= 1:
        return 1
    is_better = not sizes.has_softcap and rounds <= _MANY_ROUNDS
    if keys <= _FEW_KEYS and not (is_better if is_narrow else rounds >= _FEW_ROUNDS):
        return 1
    group = sizes.num_heads // sizes.num_kv_heads
    return max(1, heads_a_group(problem, sizes.seqlen_k) // group)
