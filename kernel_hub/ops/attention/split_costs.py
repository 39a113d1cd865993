"""About how long attention of few queries over many keys takes on Hopper, in equal shares or not.

Fitted to what drawn cases took (docs/notes/flash_attention_split_sm90.md).
"""

from __future__ import annotations

import math

from .packed_tile import PackedTile, Prompt, blocks_of
from .problem import Sizes, sizes_of
from .tile_costs import is_short_causal, short_causal_us

__all__ = [
    "COARSE_STEP", "LEAST_BLOCKS", "MOST_LONGER", "SLOTS", "STEP", "PackedTile", "Sizes",
    "blocks_seen", "has_parts", "is_chunk", "is_short_causal", "key_bytes", "longest_part",
    "packed_prompts_us", "read_us", "share_of", "sizes_of", "split_us", "tiles_us", "wants_parts",
    "whole_prompts_us", "whole_us",
]  # fmt: skip

SLOTS = 3  # of a block's pieces: Packing::kSlots
LEAST_BLOCKS = 2  # of a share: a piece costs as much as one to begin and to merge
# Of a multiprocessor: of whole tiles by the mean of head_dim and v's own.
_WHOLE_FLOPS_A_US = {64: 3.9e6, 96: 4.5e6, 112: 5.5e6, 128: 5.7e6, 160: 6e6, 192: 6.2e6, 256: 6.6e6}
_WIDE = 0.95  # of that, over caches
_FULL_FLOPS_A_US = {128: 3.3e6, 192: 4.3e6}  # of 64 columns without masks, by rows
_ROWS192_FLOPS_A_US = 5.4e6  # of 96 columns in such tiles
# Blocks of shares are each at keys of their own, and a row of a kv head may be less than what the
# L2 fetches: how much slower per part of 128 columns that there are not, and where rows begin
# within its lines.
_NARROW, _ASKEW = 0.59, 0.77
# A launch; lengths to be read, and a line made of them. A tile's first keys and its end, and what
# 128 columns add; of a stretch of one in a share that part.
_START_US, _LENGTHS_US = 3.0, 1.8
_TILE_US, _COLUMNS_US, _STRETCH = 2.8, 0.45, 0.61
_LONGEST_CHUNK = 1024  # queries
# The same of prompts; what a block of keys of 256 columns takes more there.
_PROMPT_START_US, _PROMPT_LENGTHS_US, _PROMPT_TILE_US, _PROMPT_COLUMNS_US = 4.5, 3.6, 2.0, 1.4
_PROMPT_WIDEST = 1.13
_L2_BYTES = 36e6
_TOGETHER = 264 * 128  # queries of heads: forward_sm90
# Steps by which a part, of which a block takes one, may be longer than a share, which has the ends
# of two tiles: Line::kTried - 1, and half of what a share is above that of the least. A step is a
# block of keys, and another for each STEP of a share; of each COARSE_STEP where shares would read
# keys again, or pieces of rows.
MOST_LONGER, STEP, COARSE_STEP = 7, 64, 16
_MOST_SMS = 132  # whose reads the L2 holds side by side
# Of what memory gives, what blocks of so many columns and rows read.
_OF_RATE = {(96, 128): 0.82, (128, 64): 0.93}
# Tiles by multiprocessors: with more there is hardly one to cut, and to look for it takes longer
# than it saves, but of so many blocks of keys.
_MOST_PARTED, _LONG_BLOCKS = 0.75, 64
# Of the mean tile: the last multiprocessor where there are fewer tiles than those, the long cut.
_ONE_LATE = 1.13
_APART = 0.12  # shares of many tiles are so much slower
# Of the longest part, by rounds of them: the last multiprocessor after their mean; where tiles are
# few, each that is cut is two parts, and of those some have two.
_LATE, _FEW_LATE, _FEW_ROUNDS = 0.34, 0.44, 1.6
_LONGEST = 1.1  # whole tiles of caches that differ, by the longest: whatever others are
_ORDERED = 0.25  # of a round that tiles which differ wait for the last, the longest first
# Of prompts: what is left of a tile's beginning and end in whole tiles; what the mean tile sees
# more, of the longest; where in turn is surely faster. Stretches more where tiles are shortest.
_QUICK, _LONGER, _SURELY, _HARDLY, _SHORT = 0.6, 0.34, 0.97, 0.99, 4
# Of whole tiles, of which not every multiprocessor has one; with lengths of caches.
_PROMPT, _PROMPT_MORE_US = 0.92, (-1.7, 1.5)
# Of prompts that `_sees_few` says: their tokens, without a window; a launch; a tile, and what 128
# columns of it add, whole and of packed heads in turn.
_FEW_TOKENS = 1280
_FEW_START_US, _FEW_TILE_US, _FEW_TURN_US = 6.7, (0.6, 1.5), (0.9, 2.1)


def blocks_seen(sizes: Sizes, tokens: int, block_n: int) -> int:
    """Blocks of keys that a tile of `tokens` sees, at most."""
    keys = sizes.seqlen_k
    if sizes.window_left >= 0:
        right = sizes.window_right if sizes.window_right >= 0 else sizes.seqlen_q
        keys = min(keys, tokens + sizes.window_left + right)
    return -(-keys // block_n)


def share_of(units: int, num_blocks: int) -> int:
    """The units of a block's share, as the kernel finds them."""
    return max(LEAST_BLOCKS, -(-units // num_blocks))


def longer_of(share: int, is_coarse: bool = False) -> int:
    """Blocks of keys that a part may have more than a share, as the kernel finds them."""
    steps = min(MOST_LONGER, max(0, share - LEAST_BLOCKS) // 2)
    return steps * (1 + share // (COARSE_STEP if is_coarse else STEP))


def has_parts(sizes: Sizes, tiles: int, num_blocks: int, block_n: int, rounds: int = 1) -> bool:
    """Whether tiles may be cut into parts, so many a block."""
    is_long = sizes.seqlen_k > _LONG_BLOCKS * block_n
    if sizes.window_left >= 0:
        return False
    if rounds > 1:  # of lengths that the host knows
        return is_long and not sizes.has_lengths and 2 * tiles <= rounds * num_blocks
    return tiles <= num_blocks * (1.0 if is_long else _MOST_PARTED)


def key_bytes(sizes: Sizes) -> float:
    """Of keys and values that are seen."""
    seen = sizes.mean
    if sizes.window_left >= 0:
        seen = min(seen, sizes.window_left + sizes.seqlen_q)
    return 4 * sizes.batch_size * sizes.num_kv_heads * seen * sizes.head_dim


def _all_bytes(sizes: Sizes) -> float:
    queries = 4 * sizes.batch_size * sizes.num_heads * sizes.seqlen_q * sizes.head_dim
    return key_bytes(sizes) + queries


def _both(products_us: float, bytes_us: float) -> float:
    """Of what runs side by side: longer than either where they are about as long."""
    return (products_us**4 + bytes_us**4) ** 0.25


def read_us(sizes: Sizes, tile: PackedTile, work: float) -> float:
    """Of products beside what is read for them, from the launch on."""
    return _begin_us(sizes) + _both(work, _all_bytes(sizes) / _rate(sizes, tile))


def _tile_us(width: int) -> float:
    return _TILE_US + _COLUMNS_US * width / 128


def _prompt_tile_us(width: int) -> float:
    return _PROMPT_TILE_US + _PROMPT_COLUMNS_US * width / 128


def _rounds_us(
    sizes: Sizes, tiles: int, tokens: int, unit_us: float, tile_us: float, block_n: int,
    num_sms: int, is_cut: bool,
) -> float:  # fmt: skip
    """Whole tiles on all multiprocessors, the longest first: the next one where there is room, or
    is_cut: in rounds, the long ones in parts."""
    rounds, seen = tiles / num_sms, blocks_seen(sizes, tokens, block_n)
    one = seen * unit_us + tile_us
    if rounds <= 1:
        if is_cut and sizes.is_ragged and sizes.has_lengths:
            return min(1.0, _ONE_LATE * sizes.evenness) * seen * unit_us + 2 * tile_us
        return one
    less = 0.0
    if sizes.window_left < 0 <= sizes.window_right:  # half see fewer keys
        less = min(sizes.seqlen_q, sizes.mean) / 2 / block_n
    if not sizes.is_ragged:
        most = math.ceil(rounds) * ((seen - less) * unit_us + tile_us)
        if not is_cut and less > 0:  # the last round is of the shortest
            shortest = math.ceil(rounds) * ((seen - 2 * less) * unit_us + tile_us)
            mean = (rounds + _ORDERED) * ((seen - less) * unit_us + tile_us)
            most = min(most, max(shortest, mean))
        return max(one, most)
    mean = max(1.0, seen * sizes.evenness - less)
    if is_cut:  # into parts of a multiprocessor's mean; who had long ones has short ones next
        longest = min(seen, rounds * mean)
        late = _LATE / rounds + _FEW_LATE * max(0.0, _FEW_ROUNDS - rounds)
        return (rounds * mean + late * longest) * unit_us + rounds * tile_us
    one *= _LONGEST * math.ceil(rounds / sizes.batch_size)
    return max(one, rounds * (mean * unit_us + tile_us))


def _whole_unit_us(sizes: Sizes, width: int, block_m: int, block_n: int) -> float:
    has_mask = max(sizes.window_left, sizes.window_right) >= 0
    flops = _WHOLE_FLOPS_A_US[width] if has_mask or width > 64 else _FULL_FLOPS_A_US[block_m]
    flops = _ROWS192_FLOPS_A_US if (width, block_m) == (96, 192) else flops
    return 4 * block_m * block_n * width / flops


def whole_us(sizes: Sizes, width: int, block_m: int, block_n: int, num_sms: int) -> float:
    """forward_sm90's: a block a tile, each walking through all keys."""
    tiles = -(-sizes.seqlen_q // block_m) * sizes.batch_size * sizes.num_heads
    unit_us = _whole_unit_us(sizes, width, block_m, block_n)
    unit_us *= _WIDE if width > 128 and is_chunk(sizes) else 1.0
    work = _rounds_us(
        sizes, tiles, block_m, unit_us, _tile_us(width), block_n, num_sms, is_cut=False
    )
    num_bytes = _all_bytes(sizes)
    if tiles > num_sms and sizes.is_prompt and not sizes.has_lengths:
        num_bytes += _read_again(sizes, -(-sizes.seqlen_q // block_m))
    us = _START_US + _both(work, num_bytes / sizes.bytes_a_us)
    has_caches = sizes.has_lengths and not (sizes.is_varlen or sizes.is_ragged)
    return _PROMPT * us + _PROMPT_MORE_US[has_caches] if sizes.is_prompt else us


def _read_again(sizes: Sizes, tiles: int) -> float:
    """Bytes of keys and values that whole tiles read again: a head's next tile comes after those of
    all heads that are scheduled together."""
    pairs = sizes.batch_size * sizes.num_kv_heads
    together = min(1.0, _TOGETHER * pairs / (sizes.batch_size * sizes.num_heads * sizes.seqlen_q))
    seen = key_bytes(sizes)
    return (tiles - 1) * max(0.0, seen - _L2_BYTES / max(together, 1 / pairs))


def _tiles(sizes: Sizes, tile: PackedTile) -> tuple[int, int]:
    """(tiles, tokens of one)."""
    _, tokens, tiles = tile.pack(sizes.seqlen_q, sizes.num_heads // sizes.num_kv_heads)
    return tiles * sizes.batch_size * sizes.num_kv_heads, tokens


def tiles_us(sizes: Sizes, tile: PackedTile, num_sms: int) -> float:
    """Whole tiles of packed heads in turn: those that run at a time read the same keys."""
    tiles, tokens = _tiles(sizes, tile)
    one = _unit_us(sizes, tile, tiles / num_sms), tile.ends * _tile_us(tile.width), tile.block_n
    work = _rounds_us(sizes, tiles, tokens, *one, num_sms, is_cut=True)
    # Of those that are longer than a multiprocessor's mean.
    pieces = min(1.0, num_sms / tiles / sizes.evenness) if sizes.is_ragged else 0.0
    work = _both(work, _all_bytes(sizes) / _rate(sizes, tile))
    us = _begin_us(sizes) + tile.in_turn * work + pieces * tile.pieces_us
    return tile.of_step(sizes, num_sms)[1] * us


def whole_prompts_us(sizes: Sizes, width: int, block_m: int, block_n: int, num_sms: int) -> float:
    """forward_sm90's, of prompts that have tiles for all multiprocessors."""
    tiles = _parts(sizes, block_m) * sizes.batch_size * sizes.num_heads
    unit_us = _whole_unit_us(sizes, width, block_m, block_n)
    known = short_causal_us(sizes, width, block_m, None, block_n, num_sms)
    if known is not None:
        return known
    if _sees_few(sizes):
        return _few_us(sizes, tiles, block_m, unit_us, _FEW_TILE_US, width, block_n, num_sms)
    begin_us = _QUICK * _prompt_tile_us(width)
    return _PROMPT_START_US + _prompts_us(sizes, tiles, unit_us, begin_us, block_n, num_sms)


def packed_prompts_us(sizes: Sizes, tile: PackedTile, whole_rows: int, num_sms: int) -> float:
    """The same in turn, of packed heads or more rows than whole_rows, which forward_sm90's tiles
    have; infinite where they would be those, or it knows a better order."""
    group = sizes.num_heads // sizes.num_kv_heads
    is_full = sizes.window_left < 0 and sizes.window_right < 0
    has_more = (sizes.has_lengths and group > 1) or (
        tile.width > 64 and tile.block_m > whole_rows and is_full
    )
    heads, tokens, _ = tile.pack(sizes.seqlen_q, group)
    places, packed = num_sms * tile.places, (heads, tokens)
    known = short_causal_us(sizes, tile.width, tile.block_m, packed, tile.block_n, places)
    if known is not None:
        return known / _HARDLY
    if not _sees_few(sizes) and (sizes.window_left >= 0 or not has_more):
        return math.inf
    tiles = _parts(sizes, tokens) * -(-group // heads) * sizes.batch_size * sizes.num_kv_heads
    if _sees_few(sizes):
        us = _few_us(
            sizes, tiles, tokens, tile.unit_us, _FEW_TURN_US, tile.width, tile.block_n, num_sms
        )
        return us / _SURELY
    tile_us = _prompt_tile_us(tile.width)
    unit_us = tile.unit_us * (_PROMPT_WIDEST if tile.width == 256 else 1.0)
    work = _prompts_us(sizes, tiles, unit_us, tile_us, tile.block_n, num_sms)
    begin_us = _PROMPT_START_US + sizes.has_lengths * _PROMPT_LENGTHS_US
    return (begin_us + work) / _SURELY


def _sees_few(sizes: Sizes) -> bool:
    """Whether heads may be packed, of prompts of one length that see few blocks of keys."""
    seen = sizes.seqlen_q if sizes.window_left < 0 else sizes.window_left
    is_alike = sizes.num_heads > sizes.num_kv_heads and not sizes.has_lengths
    return is_alike and seen <= _FEW_TOKENS


def _few_us(
    sizes: Sizes, tiles: float, tokens: int, unit_us: float, tile_us: tuple[float, float],
    width: int, block_n: int, num_sms: int,
) -> float:  # fmt: skip
    """Of tiles of so many tokens, which see few blocks of keys: where they lie in them counts."""
    left, right = sizes.window_left, sizes.window_right
    prompt = Prompt(sizes.batch_size, sizes.seqlen_q, int(sizes.mean), left, right)
    seen, _ = blocks_of(prompt, tokens, block_n)
    each = seen * unit_us + tile_us[0] + tile_us[1] * width / 128
    return _FEW_START_US + math.ceil(tiles / num_sms) * each


def _parts(sizes: Sizes, tokens: int) -> float:
    """Of so many tokens, of a prompt: where they differ, the last one is half full."""
    parts = sizes.seqlen_q / tokens
    return max(1.0, parts + 0.5) if sizes.is_varlen else math.ceil(parts)


def _prompts_us(
    sizes: Sizes, tiles: float, unit_us: float, tile_us: float, block_n: int, num_sms: int
) -> float:
    seen = sizes.mean
    if sizes.is_varlen:  # long prompts have more tiles
        seen += _LONGER * (sizes.seqlen_k - seen)
    if sizes.window_right >= 0:
        seen -= min(seen, seen if sizes.is_varlen else sizes.seqlen_q) / 2
    blocks, rounds = max(1.0, seen / block_n + 0.5), tiles / num_sms
    if sizes.window_right < 0 and (sizes.batch_size == 1 or not sizes.has_lengths):
        blocks, rounds = math.ceil(seen / block_n), math.ceil(rounds)
    return rounds * (blocks * unit_us + tile_us)


def is_chunk(sizes: Sizes) -> bool:
    """Whether it is of those that the constants were last fitted to: others keep their own."""
    return not sizes.is_prompt and sizes.seqlen_q <= _LONGEST_CHUNK


def _unit_us(sizes: Sizes, tile: PackedTile, busy: float) -> float:
    is_widest = tile.width == 256 and not is_chunk(sizes)
    return tile.unit_us_of(busy) * (_PROMPT_WIDEST if is_widest else 1.0)


def _begin_us(sizes: Sizes) -> float:
    lengths_us = _LENGTHS_US if is_chunk(sizes) else _PROMPT_LENGTHS_US
    return _START_US + sizes.has_lengths * lengths_us


def _again(sizes: Sizes, tile: PackedTile, tiles: int, seen: float, share: int) -> float:
    """Bytes of keys and values that shares read again: where blocks of a kv head are apart by more
    than the L2 holds."""
    num_heads, every = sizes.batch_size * sizes.num_kv_heads, key_bytes(sizes)
    tiles_a_head, tiles_a_share = tiles / num_heads, share / seen
    near = _L2_BYTES / (_MOST_SMS * tile.block_n * 4 * sizes.head_dim)
    if every <= _L2_BYTES:
        return 0.0
    if share < seen:  # line.cuh: chunks of a share are side by side, but the rest
        rest = (seen - 1) % share + 1
        chunk = rest if 2 * rest >= share else (share + rest) / 2
        moved = chunk / seen if 2 * rest >= share else 2 * chunk / seen
        apart = min(share % chunk, -share % chunk)
        return moved * _missed(apart / near) * (tiles_a_head - 1) * (every - _L2_BYTES)
    blocks_a_head = tiles_a_head / tiles_a_share
    at_a_time = min(1.0, tiles / tiles_a_share / max(1.0, blocks_a_head) / num_heads)
    held = min(1.0, _L2_BYTES / (at_a_time * every))
    missed = (1 - held) ** max(0.0, blocks_a_head - 1) if held < 1 else 0.0
    apart = seen if sizes.is_ragged else min(share % seen, -share % seen)
    return max(0.0, missed * tiles_a_head - 1) * _missed(apart / near) * every


def _missed(apart: float) -> float:
    """The part that the L2 holds no more, by how much is read in between."""
    return min(1.0, max(0.0, apart - 1))


def split_us(sizes: Sizes, tile: PackedTile, num_sms: int) -> float:
    """Equal shares or parts, whichever the kernel takes, and their merge."""
    return tile.of_step(sizes, num_sms)[0] * _cut(sizes, tile, num_sms)[0]


def longest_part(sizes: Sizes, tile: PackedTile, num_sms: int) -> int:
    """Blocks of keys of a part, where it is known without the device; 0: shares."""
    return _cut(sizes, tile, num_sms)[1]


def wants_parts(sizes: Sizes, tile: PackedTile, num_sms: int) -> bool:
    """Whether parts may be coarse steps longer than shares, which the device decides."""
    return _cut(sizes._replace(has_lengths=False), tile, num_sms)[1] > 0


def _cut(sizes: Sizes, tile: PackedTile, num_sms: int) -> tuple[float, int]:
    """(about how long it takes, blocks of keys of a part or 0)."""
    tiles, tokens = _tiles(sizes, tile)
    seen = blocks_seen(sizes, tokens, tile.block_n)
    longer = _LONGER * (sizes.is_varlen and sizes.is_prompt) * (1 - sizes.evenness)
    seen_mean = max(1.0, seen * (sizes.evenness + longer))
    share = max(LEAST_BLOCKS, math.ceil(tiles * seen_mean / num_sms))
    tiles_a_share = share / seen_mean
    stretches = min(share, 2 + tiles_a_share * (1 + _SHORT * (1 - sizes.evenness)))
    stretch_us = _STRETCH * tile.ends * _tile_us(tile.width)
    rate, num_bytes = _rate(sizes, tile), _all_bytes(sizes)
    blocks = min(num_sms, tiles * seen_mean / share)
    pieces = min(blocks + tiles, 2 * blocks) / num_sms
    unit_us = _unit_us(sizes, tile, blocks / num_sms)
    found = math.inf, 0
    for rounds in range(1, SLOTS + 1):
        longest = _longest_part(sizes, tiles, share, seen_mean, num_sms, rounds)
        most = share + longer_of(share, is_coarse=True)
        if not has_parts(sizes, tiles, num_sms, tile.block_n, rounds) or rounds * longest > most:
            continue
        work = rounds * (longest * unit_us + 2 * stretch_us)
        work = _both(work, num_bytes / rate + 2 * stretch_us)
        cut = rounds if rounds > 1 else min(1.0, pieces)
        found = min(found, (work + cut * tile.pieces_us, math.ceil(longest)))
        if rounds == 1 and longest <= share + longer_of(share):
            return _begin_us(sizes) + found[0], found[1]
    if sizes.window_left < 0:
        num_bytes += _again(sizes, tile, tiles, seen_mean, share)
    rate *= 1 - _NARROW * max(0.0, 1 - sizes.head_dim / 128)
    rate *= _ASKEW if sizes.head_dim % 64 else 1.0
    work = share * unit_us + stretches * stretch_us
    work = _both(work, num_bytes / rate + 2 * stretch_us)
    work *= 1 + _APART * min(1.0, max(0.0, tiles / num_sms - 1))
    us, longest = min(found, (work + pieces * tile.pieces_us, 0))
    return _begin_us(sizes) + us, longest


def _rate(sizes: Sizes, tile: PackedTile) -> float:
    """Bytes of keys and values a microsecond, where blocks read the same tokens at a time."""
    return sizes.bytes_a_us * _OF_RATE.get((tile.width, tile.block_m), 1.0)


def _longest_part(
    sizes: Sizes, tiles: int, share: int, seen_mean: float, num_sms: int, rounds: int
) -> float:  # fmt: skip
    """Blocks of keys of a part, where there are `rounds` a block: about, where lengths differ."""
    if not sizes.is_ragged:
        return math.ceil(seen_mean / max(1, rounds * num_sms // tiles))
    # Each tile's last part is about half of one.
    return share * num_sms / max(1.0, num_sms - tiles / 2)
