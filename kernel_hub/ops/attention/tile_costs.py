"""About how long tiles of prompts take on Hopper, to choose among their sizes; which heads run
through theirs together.

Fitted to what drawn cases took on an H100 (docs/notes/flash_attention_sm90.md).
"""

from __future__ import annotations

import math

import torch

from ..core.device import device_of
from .packed_tile import PackedTile, Prompt, TileCost, prompt_of, prompt_us, rounds_of
from .problem import Problem, Sizes

_NARROWEST, _ROWS, _MORE_ROWS = 64, 128, 192
# Tokens of which tiles of both have two, up to which fewer rows may be better, and are where both
# leave as many empty.
_MOST_TWO_TILES, _MOST_SHORT, _MOST_ALIKE_ROWS = 288, 1024, 320
# Full prompts of one block of keys and more tokens are better drawn in turn; of 128 columns from so
# many rounds on, causal ones of 192, and of 256 side by side.
_LONG_ONE, _MANY_DRAWN, _LONG_WIDE, _MANY_WIDE, _MANY_PACKED = 104, 8, 88, 12, 6
_RAGGED_ROUNDS = 2.4  # of tiles of sequences that differ, for larger ones to be better

# Of 128 and of 192 rows, by the width of the larger and whether rows of heads are askew; how much
# faster the larger must be.
_TILES = {
    (96, False): (TileCost(_ROWS, 128, 1.33, 2.3), TileCost(192, 96, 1.38, 2.8), 0.97),
    (96, True): (TileCost(_ROWS, 128, 1.65, 2.3), TileCost(192, 96, 1.40, 2.8), 0.95),
    (112, False): (TileCost(_ROWS, 128, 1.70, 2.6), TileCost(192, 96, 1.50, 2.8), 1.0),
    (112, True): (TileCost(_ROWS, 128, 1.85, 2.6), TileCost(192, 96, 1.45, 2.8), 1.0),
}
_SURELY_CAUSAL, _SURELY_WINDOW = 0.87, 0.985  # of 112 columns; of others that are even


def wider_rows(problem: Problem) -> int:
    """Columns of the kernel with tiles of 192 rows, which knows windows, that is better for a
    problem; 0: none. K and V are read less often, which counts where rows of heads begin between
    the L2's sectors. Causal ones of up to 96 columns have a kernel of their own."""
    head_dim, is_askew = problem.widest_head, problem.widest_head % 16 != 0
    if problem.softcap != 0:
        us = () if problem.batch_invariant else _capped_us(problem)
        return 96 if len(us) > 2 and us[2] < us[1] else 0
    prompt = prompt_of(problem, problem.q.shape[-2], *problem.window)
    width = next((width for width in (96, 112) if _NARROWEST < head_dim <= width), 0)
    if not width or prompt is None or problem.batch_invariant:
        return 0
    if width > 96 and prompt.seqlen_q <= _ROWS and not prompt.is_ragged:  # they are half empty
        return 0
    fewer, more, surely = _TILES[width, is_askew]
    if problem.window[0] < 0 <= problem.window[1]:
        if width <= 96 or prompt.seqlen_q <= 2 * _ROWS:
            return 0
        surely = _SURELY_CAUSAL
    surely = surely if is_askew or problem.window[0] < 0 else max(surely, _SURELY_WINDOW)
    num_sms = device_of(problem.q.device).num_sms
    if prompt.is_ragged and not (is_askew and rounds_of(prompt, _ROWS, num_sms) > _RAGGED_ROUNDS):
        return 0
    is_better = prompt_us(prompt, more, num_sms) < surely * prompt_us(prompt, fewer, num_sms)
    return width if is_better else 0


# Full attention of up to 64 columns, in 128 rows and in 192; fitted to an H200.
_FULL_TILES = TileCost(_ROWS, 128, 1.10, 1.22, 4.44), TileCost(192, 128, 1.37, 1.48, 5.0)
_SURELY_FEWER = 0.97


def wants_fewer_rows(problem: Problem) -> bool:
    """Whether full attention of up to 64 columns is better in tiles of 128 rows than of 192."""
    prompt = prompt_of(problem, problem.q.shape[-2], -1, -1)
    if problem.widest_head > _NARROWEST or prompt is None or problem.batch_invariant:
        return False
    num_sms, is_long = device_of(problem.q.device).num_sms, prompt.seqlen_q > _MORE_ROWS
    if prompt.is_ragged and problem.q.shape[-2] > problem.k.shape[-2]:  # packed ones may be better
        return False
    rounds = rounds_of(prompt, _MORE_ROWS, num_sms)
    if prompt.is_ragged and is_long and (rounds > 2 or prompt.seqlen_q > _MOST_SHORT):
        return False
    fewer, more = (prompt_us(prompt, tile, num_sms) for tile in _FULL_TILES)
    return fewer < _SURELY_FEWER * more


# unit_us, begin_us, start_us and late of short causal prompts whose heads share keys, by columns
# and rows: whole tiles, and those of packed heads in turn; of 64 rows two at a time.
_APART_TILES = {
    (64, 128): (0.914, 1.25, 5.0, 0.5), (64, 192): (0.968, 2.0, 5.5, 0.7),
    (128, 128): (1.177, 2.0, 5.0, 0.5), (256, 128): (1.017, 4.75, 3.0, 0.7),
}  # fmt: skip
_IN_TURN_TILES = {
    (64, 128): (1.247, 1.0, 6.5, 0.0), (64, 192): (1.152, 2.5, 4.5, 0.35),
    (128, 128): (1.157, 2.25, 6.0, 0.5), (128, 64): (0.599, 3.0, 3.5, 0.7),
    (256, 128): (1.423, 4.75, 4.0, 0.7),
}  # fmt: skip
_SHORT_CAUSAL, _ALONE_LONGEST = 1280, 448  # tokens; of heads alone
# Of those tiles of 64 rows: tokens, where each has a multiprocessor and where not, and rounds of
# all that run at a time.
_FEW_ROWS, _FEW_ROWS_ALONE, _FEW_ROWS_LONGEST, _FEW_ROWS_ROUNDS = 64, 896, 640, 12
# Of prompts side by side, the mean, up to which such tiles are better; of these as many as half of
# the multiprocessors have. Where heads share keys a longer mean, if all have so many.
_SIDE_BY_SIDE, _LEAST_SIDE_BY_SIDE = 176, 66
_LONGER_SIDE_BY_SIDE, _MANY_SIDE_BY_SIDE = 300, 2000
_SHORT_BLOCKS = 3  # of keys, up to which to sort takes longer than it saves
# Of prompts of one length: tokens up to which such tiles, of 128 columns, may be better, causal and
# not; of heads of up to 64 columns with a softcap in fp16; left bounds of windows, and tokens up to
# which a wider one is narrow too.
_FEW_ROWS_TILE = PackedTile(128, _FEW_ROWS, 64)
_FEW_ROWS_MOST, _FEW_ROWS_FULL, _FEW_ROWS_SHARED = 768, 512, 128
_FEW_ROWS_WINDOW, _FEW_ROWS_WIDER, _FEW_ROWS_SHORT = 96, 127, 384
_SHARED_ROUNDS, _MANY_FEW_ROUNDS = 12, 8  # shared: full, of shared keys
# With a softcap, by columns and whether rows of heads are askew: tiles of 64 rows, up to so many
# tokens, and those of more rows; of the first a block of keys takes less where each tile has a
# multiprocessor. Those of 64 and of 96 columns are of bf16; tiny scores are told from others, for
# which those of up to 64 columns and of 192 rows are made, up to a softcap of _MOST_TOLD.
_CAPPED_TILES = {
    (64, False): (TileCost(64, 64, 0.9, 1.65, 4.1, 0.55), TileCost(192, 96, 1.45, 1.8, 4.3, 0.7)),
    (96, False): (
        TileCost(64, 64, 0.97, 3.1, 4.7, 0.6),
        TileCost(_ROWS, 128, 1.46, 2.1, 5.85, 0.65), TileCost(192, 80, 1.38, 2.55, 5.15, 0.6),
    ),
    (96, True): (
        TileCost(64, 64, 1.22, 2.85, 4.85, 0.55),
        TileCost(_ROWS, 128, 1.58, 2.8, 5.25, 0.5), TileCost(192, 80, 1.45, 3.0, 5.35, 0.55),
    ),
    (128, False): (
        TileCost(64, 64, 0.95, 2.7, 4.95, 0.75), TileCost(_ROWS, 128, 1.63, 1.9, 5.3, 0.9)
    ),
    (128, True): (
        TileCost(64, 64, 1.46, 2.05, 5.9, 0.9), TileCost(_ROWS, 128, 1.75, 2.3, 6.0, 0.85)
    ),
}  # fmt: skip
_CAPPED_ALONE, _CAPPED_LONGEST, _MOST_TOLD = 0.5, 1280, 55.0


def _capped_us(problem: Problem) -> tuple[float, ...]:
    """About how long prompts of one length take in each of `_CAPPED_TILES`; () where it is not
    known."""
    head_dim, num_heads = problem.widest_head, problem.q.shape[-2]
    prompt = prompt_of(problem, num_heads, *problem.window)
    if prompt is None or problem.has_lengths or head_dim > 128 or prompt.left >= 0:
        return ()
    is_bf16, is_narrow = problem.q.dtype == torch.bfloat16, head_dim <= _NARROWEST
    is_told, is_askew = is_bf16 and problem.softcap <= _MOST_TOLD, head_dim % 16 != 0
    if prompt.seqlen_k >= 2 * prompt.seqlen_q or (is_narrow and not is_told):
        return ()
    columns = 64 if is_narrow else 96 if head_dim <= 96 and is_bf16 else 128
    few, *more = _CAPPED_TILES[columns, is_askew and not is_narrow][: 2 + is_told]
    num_sms = device_of(problem.q.device).num_sms
    places = _FEW_ROWS_TILE.places * num_sms
    heads, tokens, _ = _FEW_ROWS_TILE.pack(prompt.seqlen_q, num_heads // problem.k.shape[-2])
    packed = prompt._replace(heads=prompt.heads / heads)
    is_alone = _FEW_ROWS_TILE.places * rounds_of(packed, tokens, places) <= 1
    few = few._replace(tokens=tokens, unit_us=few.unit_us * (_CAPPED_ALONE if is_alone else 1.0))
    return prompt_us(packed, few, places), *(prompt_us(prompt, x, num_sms) for x in more)


def is_short_causal(sizes: Sizes) -> bool:
    """Whether prompts are of one length, short, causal, and their heads share keys, or leave the
    second tile half empty."""
    is_alone = sizes.num_heads == sizes.num_kv_heads
    if is_alone and not (96 < sizes.head_dim <= 128 and _ROWS < sizes.seqlen_q <= _ALONE_LONGEST):
        return False
    return (
        sizes.is_prompt
        and sizes.seqlen_q <= _SHORT_CAUSAL
        and (sizes.window_left, sizes.window_right) == (-1, 0)
        and (sizes.head_dim <= 64 or 96 < sizes.head_dim <= 128 or sizes.head_dim > 192)
        and not (sizes.has_lengths or sizes.has_softcap)
    )


def is_side_by_side(problem: Problem, sizes: Sizes) -> bool:
    """Whether prompts are short and causal, side by side: tiles of few rows are better for heads of
    128 columns."""
    tiles = sizes.batch_size * sizes.num_heads * max(1.0, sizes.seqlen_q / _FEW_ROWS)
    are_many = tiles >= _MANY_SIDE_BY_SIDE and sizes.num_heads > sizes.num_kv_heads
    most = _LONGER_SIDE_BY_SIDE if are_many else _SIDE_BY_SIDE
    return sizes.mean <= most and tiles >= _LEAST_SIDE_BY_SIDE and _are_side_by_side(problem, sizes)


def _are_side_by_side(problem: Problem, sizes: Sizes) -> bool:
    is_causal = (sizes.window_left, sizes.window_right) == (-1, 0) and not sizes.has_softcap
    is_plain = problem.block_table is problem.cache_seqlens is None
    return sizes.is_varlen and sizes.is_prompt and is_causal and is_plain


def wants_few_rows(problem: Problem, sizes: Sizes) -> bool:
    """Whether prompts of one length are surely better in turn in tiles of 64 rows, two blocks a
    multiprocessor: those whose tiles have one each, narrow windows, short ones with a softcap."""
    head_dim, seqlen_q, left = problem.widest_head, sizes.seqlen_q, sizes.window_left
    group, is_full = sizes.num_heads // sizes.num_kv_heads, sizes.window_right != 0
    is_narrow = head_dim <= _NARROWEST
    if sizes.has_lengths or not sizes.is_prompt or head_dim > _FEW_ROWS_TILE.width:
        return False
    heads, _, tiles = _FEW_ROWS_TILE.pack(max(1, seqlen_q), group)
    num_sms = device_of(problem.q.device).num_sms
    rounds = tiles * sizes.batch_size * sizes.num_kv_heads / (_FEW_ROWS_TILE.places * num_sms)
    are_many = rounds > _MANY_FEW_ROUNDS
    if left >= 0 and not (is_full or sizes.has_softcap or is_narrow):
        is_short = seqlen_q <= _FEW_ROWS_SHORT
        if left <= (_FEW_ROWS_WIDER if is_short else _FEW_ROWS_WINDOW):
            is_askew = head_dim % 16 != 0
            return not (are_many and head_dim <= 96 and (is_short or is_askew))
    if sizes.has_softcap:
        us = _capped_us(problem)
        if not us:  # narrow ones whose tiny scores are not told
            return is_narrow and left < 0 and heads > 1 and seqlen_q <= _FEW_ROWS_SHARED
        return seqlen_q <= _CAPPED_LONGEST and us[0] < min(us[1:])
    if _FEW_ROWS_TILE.places * rounds <= 1:
        is_few = seqlen_q <= (_FEW_ROWS_FULL if is_full or is_narrow else _FEW_ROWS_MOST)
        is_long = is_full and left >= 0 and seqlen_q > 2 * _ROWS  # shorter ones are not ours
        return is_few and (is_long if is_narrow else not is_short_causal(sizes))
    are_half_empty = _ROWS < seqlen_q <= _MORE_ROWS  # two tiles of 128
    is_better = is_full and left < 0 and not is_narrow and group > 1 and are_half_empty
    return is_better and rounds <= _SHARED_ROUNDS


def short_blocks(sizes: Sizes, tile: PackedTile) -> int:
    """Blocks of keys of the longest of tiles in turn, up to which they run as they come."""
    is_ragged = sizes.is_varlen and sizes.is_prompt
    return _SHORT_BLOCKS * (tile.places if is_ragged else 1) - (is_ragged and tile.width > 192)


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
    rounds = rounds_of(prompt, tokens, places)
    longest = _FEW_ROWS_LONGEST if rounds > 0.5 else _FEW_ROWS_ALONE
    is_long = sizes.num_heads == sizes.num_kv_heads and sizes.seqlen_q > 2 * _ROWS
    least, most = is_long, _FEW_ROWS_ROUNDS
    if rows == _FEW_ROWS and (sizes.seqlen_q > longest or not least <= rounds <= most):
        return math.inf
    return prompt_us(prompt, TileCost(tokens, block_n, *known), places)


def is_surely_in_turn(problem: Problem, tile: PackedTile, sizes: Sizes) -> bool:
    """Whether prompts of one length are surely better in turn, in tiles of 128 rows: many of heads
    alone, where forward_sm90's are of 192; windows of 64 columns that are dealt in one round. In
    tiles of 64 rows those side by side, too."""
    if tile.block_m == _FEW_ROWS:
        return is_side_by_side(problem, sizes) or wants_few_rows(problem, sizes)
    seqlen_q, tiles = sizes.seqlen_q, math.ceil(sizes.seqlen_q / _ROWS)
    rounds = tiles * sizes.batch_size * sizes.num_heads / device_of(problem.q.device).num_sms
    is_shared = sizes.num_heads > sizes.num_kv_heads
    if tile.width > _MORE_ROWS and is_shared and _are_side_by_side(problem, sizes):
        return rounds > _MANY_PACKED and sizes.mean <= _FEW_ROWS
    if sizes.has_lengths or not sizes.is_prompt or tile.block_m != _ROWS:
        return False
    if sizes.window_left >= 0:
        return tile.width == 64 and problem.softcap == 0 and rounds <= 1
    if problem.widest_head > _MORE_ROWS and problem.softcap != 0:  # blocks of 80 keys, for 64
        is_packed = is_shared and sizes.window_right == 0
        is_fewer = seqlen_q <= tile.block_n or (is_packed and _ROWS < seqlen_q <= 2 * tile.block_n)
        return _NARROWEST < seqlen_q == sizes.seqlen_k and is_fewer and rounds > 1
    is_half_empty = _MORE_ROWS < seqlen_q <= 2 * _ROWS
    is_full, is_one = problem.softcap == 0 and sizes.window_right < 0, seqlen_q <= _ROWS
    if sizes.num_heads != sizes.num_kv_heads or tile.width > _MORE_ROWS:
        return False
    if tile.width > 128:  # one tile a head, whose queries and keys stay in the L2
        is_long = _LONG_WIDE < seqlen_q <= _ROWS and sizes.window_right == 0
        return is_long and problem.q.shape[-1] == problem.v.shape[-1] and rounds >= _MANY_WIDE
    if tile.width == 128:  # they are drawn
        return is_full and _LONG_ONE < seqlen_q <= _ROWS and rounds >= _MANY_DRAWN
    if tile.width == 64:
        return False
    if sizes.window_right < 0:  # rows of heads that begin between the L2's sectors
        is_askew = problem.widest_head % 16 != 0
        return is_askew and (rounds >= 3.5 if is_one else is_half_empty and rounds >= 2.5)
    if is_one:
        return rounds >= 3
    fewer, more = (-(-seqlen_q // rows) * rows for rows in (_ROWS, _MORE_ROWS))  # with empty ones
    is_fuller = more > fewer or (more == fewer and seqlen_q <= _MOST_ALIKE_ROWS)
    is_short = _MORE_ROWS < seqlen_q <= 2 * _ROWS or _MOST_TWO_TILES < seqlen_q <= _MOST_SHORT
    return is_short and is_fuller and rounds >= 3


# K and V of the heads that run together stay in the L2: of 50 MB on an H100 half is near.
_L2_BYTES = 18 << 20
# Of all heads of a group: two tiles a multiprocessor, half of their keys masked; where there are
# more than so many times that, one is enough.
_GROUP_QUERIES, _MANY_GROUPS = 264 * 128, 5
# Of short prompts of wide heads (columns of k and v), from so many tiles on, queries and output
# count too, and a tile for every other multiprocessor is enough. Of narrow ones half of the bytes
# are better where tiles are many, and of wide ones that are alone.
_MANY_TILES = 8 * 132
# Sequences that are alike: Order::kMostAlike, and bytes that tiles of theirs, which do not run side
# by side, may read again.
_MOST_ALIKE, _ALIKE_BYTES = 16, 40 << 20
_WIDE_HEADS, _MORE_L2_BYTES, _SHORT_WIDE, _SOME_TILES, _FEW_TILES = 320, 22 << 20, 1024, 250, 66

# In turn: tiles that see up to so many keys are better pair by pair in more rounds than that or
# with a softcap, of wide heads in fewer.
_FEW_KEYS, _MANY_ROUNDS, _FEW_ROUNDS, _NARROW = 384, 9, 3.5, 128
_DRAWN_ROUNDS = 3  # of tiles of 64 rows that see about as many keys
DEALT_ROUNDS = 1.6  # of tiles that differ: the first have the shortest next


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
        is_alone = group == 1 and problem.softcap == 0
        l2_bytes, least = _MORE_L2_BYTES >> is_alone, -(-_FEW_TILES // tiles)
        pair_bytes += group * seqlen_q * head_dims * problem.q.element_size()
    if not problem.has_lengths and seqlen_k >= 2 * seqlen_q:  # tiles are alike
        least = 2
    together = max(1, least, round(l2_bytes / pair_bytes))
    num_groups = max(1, round(num_pairs / together))
    is_capped = problem.softcap != 0 and problem.window[1] >= 0 and head_dims <= 2 * _NARROW
    if is_capped and _ROWS < seqlen_q <= 2 * _ROWS:
        num_groups *= 2
    if problem.has_lengths and num_groups == 1:  # of sequences that are alike, too
        held = _ALIKE_BYTES // (pair_bytes * num_kv_heads)
        most = max(1, min(_MOST_ALIKE, held, round(together / num_kv_heads)))
        return num_heads * -(-problem.batch_size // max(1, -(-problem.batch_size // most)))
    return max(1, -(-num_pairs // num_groups)) * group


def pairs_together(
    problem: Problem, sizes: Sizes, keys: int, rounds: float, tile: PackedTile
) -> int:  # fmt: skip
    """How many (sequence, kv head) pairs run in turn through their tiles together, the last ones of
    all of them first: where the first see the fewest keys. keys: of the blocks of the longest."""
    group = sizes.num_heads // sizes.num_kv_heads
    if tile.block_m == _FEW_ROWS and wants_few_rows(problem, sizes):
        differ = sizes.window_left >= 0 or (sizes.window_right >= 0 and keys > 2 * _ROWS)
        if rounds <= (1 if differ else _DRAWN_ROUNDS):
            return 1
        return max(1, heads_a_group(problem, sizes.seqlen_k) // group)
    is_one, is_open = keys <= _ROWS, sizes.window_left < 0
    is_full = sizes.window_right < 0 and is_open and not sizes.has_softcap
    is_long = is_full and is_one and sizes.seqlen_q > _LONG_ONE and 64 < tile.width <= _NARROW
    if (is_long or tile.width == _MORE_ROWS) and is_surely_in_turn(problem, tile, sizes):
        return max(2, heads_a_group(problem, sizes.seqlen_k) // group)
    if problem.has_lengths or sizes.window_right < 0 or not (sizes.is_prompt and is_open):
        return 1
    is_narrow = tile.width <= _NARROW
    if is_one or rounds <= 1:
        return 1
    is_better = not sizes.has_softcap and rounds <= _MANY_ROUNDS
    if not is_narrow and keys <= _FEW_KEYS and rounds <= DEALT_ROUNDS:
        return sizes.batch_size * sizes.num_kv_heads  # who had the longest has the shortest next
    if keys <= _FEW_KEYS and not (is_better if is_narrow else rounds >= _FEW_ROUNDS):
        return 1
    return max(1, heads_a_group(problem, sizes.seqlen_k) // group)
