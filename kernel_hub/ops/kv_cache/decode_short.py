"""Decode steps on Hopper whose items, a cluster each, are merged in the launch itself
(csrc/kv_cache/decode_attention_sm90.cu and its twin for many rows or columns): when, and by how
many blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch

from ..attention import forward_split_sm90 as split
from ..attention import split_costs as costs
from ..attention.problem import mean_of
from ..core import common
from ..core.device import device_of, launch_sizes
from ..core.launch import Launch
from . import decode_shapes as shapes
from . import decode_sm90 as sm90
from .decode_plan import WIDE_CUBIN, DecodeGiven, Variant, choose_variant
from .decode_shapes import FEW_LONGEST, LONGEST, MOST_BLOCKS, OWN_WIDTHS, WIDTHS
from .decode_sm90 import problem_of

# Whether these kernels are used: None where they are faster, True wherever they can. For tests.
choice: bool | None = None

CUBIN = "decode_attention_sm90"
MAX_HEAD_DIM, PAGE_MULTIPLE = 256, 16
_VECTOR, _OUT_VECTOR = 8, 4  # elements that are read, or written, at once
_ROWS, _MOST_ROWS = 16, 32  # of a block
_SENT_BYTES = 24  # four columns of a row, its maximum and its sum
_BARRIER_BYTES = 8
# Tokens of a warp's tile; warps of the smaller blocks; columns of those of eight.
_TILE, _FEW_WARPS, MAX_EIGHT_WARPS = 16, 4, 128
# About how long they take, fitted to both GPUs (docs/notes/decode_attention.md), by width and rows
# of a block: a launch; a warp's tile; a round of blocks more than run at a time, how many of four
# warps share a multiprocessor. Then its part of all tiles; keys and values; twice the blocks of a
# cluster; of the first round's tiles what another one adds.
_TIMES = {
    (64, 16): (2.8, 0.37, 0.6, 4), (128, 16): (2.9, 0.71, 3.5, 3), (64, 32): (3.3, 0.74, 4.5, 3),
    (128, 32): (4.5, 1.15, 6.0, 2), (256, 16): (3.4, 0.92, 3.4, 1),
}  # fmt: skip
_WORK_US, _READ, _CLUSTER_US, _ROUND = 0.067, 1.9, 0.65, 0.06
_LEVEL_US, _LESS_US = 0.3, 0.4
# Of caches of 128 columns and so few bytes attention's tiles take more than their estimates by so
# much, against these.
_TILES_LATE, _FAST_TILES_LATE, _LATE_BYTES = 1.15, 0.95, 60e6
# Of several tokens, where memory is fast: many items of the most columns, whose rounds take more
# than is reckoned; few items of the fewest columns; many of more blocks of
# rows than so many.
_WIDE_CROWD, _NARROW_LATE, _MANY_BLOCKS, _MANY_LATE = 1.08, 1.13, 8, 0.8
_PLACES = {1: 1.0, 2: 0.5, 4: 31 / 132, 8: 15 / 132}  # of clusters, a multiprocessor
# Where parts, whose number is any, are no better, `LONGEST` and of the most columns: tokens of an
# item; bytes of all, or of an item.
_WIDE_LONGEST = 3072
_MOST_BYTES, _CROWDED_BYTES = 400 << 20, 128 << 10
# Of all in pages, whose lengths differ mostly, and of more than 64 columns. Longer ones there:
# tokens; how many items a multiprocessor there may be; how much longer few may take, which have no
# merge behind them. Then what a multiprocessor reads, and how much longer it may take where there
# are few.
_MOST_PAGED_BYTES = 2200 << 20
_PAGED_LONGEST, _MOST_LONG, _LONG_APART_US = 12_288, 6, 12.0
_BLOCK_BYTES_A_US, _APART_US = 37e3, 6.0
_LONGEST_SLOWER = 2048
_PARTS_WIDTH = 192
# Memory that gives more than this (an H200's) was measured by itself: parts are not faster than
# these kernels however many bytes there are.
_FAST_BYTES_A_US = 4.4e6
_FAST_PARTS_TOKENS = 512  # of few items of many columns
# Of caches that may be full, as plain ones may, lengths are alike mostly. Blocks of which two a
# multiprocessor are enough, by those: three lie on some, where others have one.
_FAST_EVENLY, _FAST_PAIRS = 0.9, (1.5, 2.0)
# Of the most columns, where items are more than multiprocessors: by those; bytes of an item, from
# which on parts are slower however many bytes all have; tokens, of caches that may be full.
_FAST_WIDE_ITEMS, _FAST_WIDE_BYTES, _FAST_WIDE_LONGEST = 11, 1 << 20, 4096
# Long items that are nearly as many as multiprocessors, and not known to differ by more than so.
_FAST_ROUND, _FAST_ROUND_LONGEST, _FAST_ALIKE = (0.64, 1.06), 2048, 2.2
_FAST_FOURS = 0.7  # of one token in clusters of four, whose blocks then all find places, or eight
# Of one token and the most columns, items so short that a round's start is most of it.
_FAST_WIDE_SHORT = 256
# Items that are as many as multiprocessors, a block each: of an engine's, all short enough.
_FAST_ALONE, _FAST_ALONE_ROOM = (0.9, 1.0), (1024, 1536)
# Long items that are more than clusters of eight find places, and fewer than two of a block fill:
# parts, of caches that may be full and so many bytes.
_FAST_PARTS, _FAST_PARTS_BYTES = 0.5, 50e6


def is_fast_memory(given: DecodeGiven) -> bool:
    """Whether the GPU's gives more than an H100's."""
    return device_of(given.q.device).peak_bytes_a_us >= _FAST_BYTES_A_US


def can_take(given: DecodeGiven) -> bool:
    """Whether the step is one that they compute: attention alone."""
    q, k_cache, out = given.q, given.k_cache, given.out
    # A mask's bits cost the narrow one registers, and so a block of three a multiprocessor.
    extras = (given.k, given.cos, given.qkv_bias, given.alibi_slopes, given.tree_mask)
    if any(x is not None for x in extras) or given.num_splits:
        return False
    if given.window_left >= 0 or given.softcap > 0.0 or given.softmax_scale <= 0.0:
        return False
    if q.dtype == torch.float32 or k_cache.dtype != q.dtype or q.shape[-1] > MAX_HEAD_DIM:
        return False
    if given.block_table is not None and k_cache.shape[1] % PAGE_MULTIPLE:
        return False
    return (
        device_of(q.device).has_wgmma
        and q.shape[0] < 1 << 16
        and k_cache.shape[2] * row_blocks(given) < 1 << 16
        and q.data_ptr() % common.VEC_BYTES == 0
        and out.data_ptr() % common.VEC_BYTES == 0
        and common.is_aligned(_VECTOR, *q.stride()[:3])
        and common.is_aligned(_OUT_VECTOR, *out.stride()[:3])
    )


def rows_of(given: DecodeGiven) -> int:
    """Tokens x query heads of a kv head."""
    return int(given.q.shape[1] * (given.q.shape[2] // given.k_cache.shape[2]))


def block_rows(given: DecodeGiven) -> int:
    """Rows that a cluster takes."""
    is_few = rows_of(given) <= _ROWS or given.q.shape[-1] > WIDTHS[1]
    return _ROWS if is_few else _MOST_ROWS


def is_small(given: DecodeGiven) -> bool:
    """Whether a step is of few rows and columns."""
    return rows_of(given) <= _ROWS and given.q.shape[-1] <= WIDTHS[1]


def row_blocks(given: DecodeGiven) -> int:
    """Blocks of rows of a kv head, an item each."""
    return -(-rows_of(given) // block_rows(given))


def shape_for(given: DecodeGiven) -> tuple[int, int]:
    """(warps of a block, blocks of a cluster); (0, 0): the step is not for these kernels."""
    if choice is False or not can_take(given):
        return 0, 0
    device, problem = device_of(given.q.device), problem_of(given)
    num_sms, is_fast = device.num_sms, is_fast_memory(given)
    items = given.q.shape[0] * given.k_cache.shape[2] * row_blocks(given)
    every = costs.sizes_of(problem)
    room = every[0].seqlen_k
    is_narrow, is_one, us = is_small(given), given.q.shape[1] == 1, 0.0
    is_wide = (width := width_of(given)) == WIDTHS[-1]
    few = num_sms // (2 if is_narrow else 8)
    is_few = items <= few and width <= WIDTHS[1] and room <= FEW_LONGEST
    if not (is_few and is_narrow):  # whose time nobody asks
        is_even = is_fast and is_narrow and width > WIDTHS[0] and items <= 2 * num_sms
        evenly = _FAST_EVENLY if is_even and fills_pool(given) else 0.5
        us, shape = best_shape(every, (width, block_rows(given)), items, num_sms, evenly)
    is_alike = room < _FAST_ALIKE * mean_of(each.mean for each in every)
    is_round = is_fast and is_narrow and is_alike and room > _FAST_ROUND_LONGEST
    is_round = is_round and _FAST_ROUND[0] * num_sms <= items <= _FAST_ROUND[1] * num_sms
    if is_few and is_fast and is_narrow:
        shape = shapes.few_fast_shape(items, room, width, num_sms, is_alike)
    elif is_few:
        shape = shapes.few_shape(items, room, num_sms)
    elif is_round:
        shape = 8, 2
        if is_one and items <= _FAST_FOURS * num_sms:
            shape = 4, 4 if room <= FEW_LONGEST else 8
    elif is_fast and is_narrow and is_alone(given, items, room):
        shape = 8, 1
    if choice:
        return shape
    is_plain = is_one and is_fast and is_narrow and given.block_table is None
    if is_plain and (long := shapes.long_plain_shape(items / num_sms, room, given.q.shape[-1]))[0]:
        return long
    is_full = is_alike and fills_pool(given)
    if is_fast and is_narrow and is_full and FEW_LONGEST < room <= LONGEST:
        least = _PLACES[MOST_BLOCKS] * _TIMES[width, _ROWS][3]
        is_more = least * num_sms < items <= _FAST_PARTS * num_sms
        if is_more and costs.key_bytes(every[0]) > _FAST_PARTS_BYTES:
            return 0, 0
    is_short = 4 * room * given.q.shape[-1] <= _CROWDED_BYTES
    longest = _WIDE_LONGEST if is_wide else LONGEST
    is_crowd = is_fast and is_wide and num_sms < items <= _FAST_WIDE_ITEMS * num_sms
    is_crowd = is_crowd and 4 * room * given.q.shape[-1] > _FAST_WIDE_BYTES
    longest = _FAST_WIDE_LONGEST if is_crowd and is_full else longest
    num_bytes, apart_us = costs.key_bytes(every[0]), _APART_US
    is_many = num_bytes > _MOST_BYTES and not is_short
    if is_fast and sm90.is_wide_step(given):
        us, blocks = sm90.wide_blocks(every, items, num_sms, _PLACES)
        us *= _WIDE_CROWD if items > 2 * num_sms or row_blocks(given) > 1 else 1.0
        is_theirs = us < min(sm90.wide_us(problem), sm90.tiles_us(given))
        is_theirs &= room <= LONGEST and not has_parts(given, items, room)
        return (_FEW_WARPS, blocks) if is_theirs and not (is_many and not is_crowd) else (0, 0)
    is_paged = is_narrow and given.block_table is not None and width == WIDTHS[1]
    if room > longest:
        if not is_paged or room > _PAGED_LONGEST or items > _MOST_LONG * num_sms:
            return 0, 0
        shape, apart_us = shapes.long_shape(items, num_sms), _LONG_APART_US
    elif is_many:
        is_many = is_paged and num_bytes <= _MOST_PAGED_BYTES
        if not is_many and not (is_fast and is_narrow) and not is_crowd:
            return 0, 0
        shape = shapes.many_shape(items, num_sms) if is_many and not is_round else shape
    # Clusters of few leave multiprocessors that parts would read by.
    apart = 1 / MOST_BLOCKS - items / num_sms
    if apart * 4 * room * given.q.shape[-1] > apart_us * _BLOCK_BYTES_A_US:
        return 0, 0
    if has_parts(given, items, room):
        return 0, 0
    # Parts find twice the places.
    if is_one and is_fast and is_wide and room <= _FAST_WIDE_SHORT:
        rounds, halves = (-(-items // places) for places in (num_sms, 2 * num_sms))
        if rounds == 2 * halves > 2:
            return 0, 0
    # Attention's tiles of more rows read a cache less often.
    is_late = width == WIDTHS[1] and costs.key_bytes(every[0]) < _LATE_BYTES
    late = (_FAST_TILES_LATE if is_fast else _TILES_LATE) if is_late else 1.0
    if is_fast and given.q.shape[1] > 1:
        if width == WIDTHS[0] and items <= num_sms and shape[1] < MOST_BLOCKS:
            late = _NARROW_LATE
        elif row_blocks(given) > _MANY_BLOCKS and items > 2 * num_sms:
            late = _MANY_LATE
    is_slower = not is_narrow and split.can_take(problem)
    is_slower = is_slower and late * split.best_way(problem).us < us
    is_long = room > _LONGEST_SLOWER and not is_fast
    if is_slower and (is_long or sm90.applies(given, parts_of(given))):
        return 0, 0
    return shape


def has_parts(given: DecodeGiven, items: int, room: int) -> bool:
    """Whether items are many of the kernel of parts, which has no columns that are not there."""
    num_sms, is_short = device_of(given.q.device).num_sms, room <= _FAST_PARTS_TOKENS
    is_narrower = WIDTHS[1] < given.q.shape[-1] <= _PARTS_WIDTH
    return is_narrower and items > (num_sms if is_fast_memory(given) and is_short else num_sms // 2)


def is_alone(given: DecodeGiven, items: int, room: int) -> bool:
    """Whether items are better off with a block each, as an engine's passes were measured."""
    least, most = (share * device_of(given.q.device).num_sms for share in _FAST_ALONE)
    shortest, longest = _FAST_ALONE_ROOM
    is_measured = least <= items <= most and shortest < room <= longest
    return is_measured and width_of(given) == WIDTHS[1] and not fills_pool(given)


def fills_pool(given: DecodeGiven) -> bool:
    """Whether there are no more pages than tables have: an engine has, of lengths that differ."""
    table = given.block_table
    return table is None or given.k_cache.shape[0] <= table.numel()


def parts_of(given: DecodeGiven) -> Variant:
    """The kernel of parts for a step that these compute."""
    return choose_variant(
        given.q.shape[-1], given.k_cache.element_size(), rows_of(given), False, True
    )


def best_shape(
    every: Sequence[costs.Sizes], kernel: tuple[int, int], items: int, num_sms: int,
    evenly: float = 0.5,
) -> tuple[float, tuple[int, int]]:  # fmt: skip
    """About how long the fastest shape takes, and which it is.

    every: what the caches may be; kernel: its head_dim and rows; items: clusters; evenly: how much
    of the choice is the first's, of lengths that are alike, where there are two.
    """
    width, _ = kernel
    start_us, tile_us, round_us, beside = _TIMES[kernel]
    ways = []
    for warps, blocks in itertools.product((4, 8), _PLACES):
        if warps == 8 and width > MAX_EIGHT_WARPS:
            continue
        places = num_sms * _PLACES[blocks] * (beside if warps == 4 else 1)
        begin_us = start_us + _CLUSTER_US * math.log2(blocks)
        each_us = []
        for each in every:
            tiles = -(-each.seqlen_k // (_TILE * warps * blocks))
            work = items * each.mean / _TILE / num_sms
            # Of lengths that differ, a round's short ones make room for the next.
            rounds = items / places if each.is_ragged else math.ceil(items / places)
            one_us = begin_us + tile_us * tiles
            one_us += (round_us + _ROUND * tile_us * tiles) * max(0.0, rounds - 1)
            one_us += _WORK_US * work + costs.key_bytes(each) / (_READ * each.bytes_a_us)
            each_us.append(one_us)
        us = mean_of(each_us)
        weighed = math.prod(x**y for x, y in zip(each_us, (evenly, 1 - evenly), strict=False))
        ways.append((us if len(every) == 1 else weighed, us, (warps, blocks)))
    _, us, shape = min(ways)
    # Clusters take less than what they are chosen by.
    return us + _LEVEL_US - _LESS_US * math.log2(shape[1]), shape


def plan(
    given: DecodeGiven, tokens: int, shape: tuple[int, int], numbers: tuple[int | float, ...]
) -> Launch:
    """The launch, which takes the parameters of the other kernel."""
    warps, blocks = shape
    grid = blocks, given.k_cache.shape[2] * row_blocks(given), given.q.shape[0]
    num_bytes = shared_bytes(sizes_of(given), tokens, rows_of(given), shape)
    return Launch(
        common.shipped(cubin_of(given), name(given)), grid, (32 * warps, 1, 1),
        max(num_bytes, pairs_bytes(given, shape, math.prod(grid))), numbers,
        options={"programmatic": True, "cluster": (blocks, 1, 1)},
    )  # fmt: skip


def pairs_bytes(given: DecodeGiven, shape: tuple[int, int], num_blocks: int) -> int:
    """Of shared memory that no more than two blocks a multiprocessor have; 0: as many as fit."""
    device = device_of(given.q.device)
    few, most = (x * device.num_sms for x in _FAST_PAIRS)
    is_narrow = is_small(given) and width_of(given) == WIDTHS[1]
    is_theirs = shape[0] == _FEW_WARPS and shape[1] < MOST_BLOCKS  # which find fewer places then
    is_capped = is_fast_memory(given) and is_narrow and is_theirs and few < num_blocks <= most
    return device.sm_shared_bytes // 3 if is_capped else 0


def name(given: DecodeGiven) -> str:
    """The function for a step."""
    suffix = "" if block_rows(given) == _ROWS else "_rows32"
    token = common.DTYPE_TOKENS[given.q.dtype]
    widths = (WIDTHS[0], *OWN_WIDTHS, WIDTHS[1]) if is_small(given) else WIDTHS
    width = next(width for width in widths if width >= given.q.shape[-1])
    if given.cache_ready and is_small(given) and width == WIDTHS[1]:
        suffix = "_ready"  # kernels that do not wait are slower besides: those of engines alone
    return f"{cubin_of(given)}_{token}_hdim{width}{suffix}"


def cubin_of(given: DecodeGiven) -> str:
    """Where it is."""
    return CUBIN if is_small(given) else WIDE_CUBIN


def width_of(given: DecodeGiven) -> int:
    """Its head_dim, but for those between, which plans do not tell apart."""
    return next(width for width in WIDTHS if width >= given.q.shape[-1])


def sizes_of(given: DecodeGiven) -> Mapping[str, int]:
    """What it states."""
    return launch_sizes(cubin_of(given), name(given))


def shared_bytes(sizes: Mapping[str, int], tokens: int, rows: int, shape: tuple[int, int]) -> int:
    """Of a block: a ring no longer than the cache, or what the warps merge; queries; what is sent
    to it."""
    warps, blocks = shape
    tile, width, block_rows = sizes["block_n"], sizes["head_dim"], sizes["block_m"]
    pairs = sizes["stages"] if tokens > blocks * warps * tile else 1
    ring = pairs * 2 * tile * width * sizes["element_bytes"]
    merged = block_rows * (width + 10) * 4
    queries = block_rows * width * sizes["element_bytes"]
    if block_rows == _ROWS and width < WIDTHS[-1]:
        queries = 0  # in registers
    share = -(-min(rows, block_rows) * width // _OUT_VECTOR // blocks) if blocks > 1 else 0
    return queries + warps * max(ring, merged) + blocks * share * _SENT_BYTES + _BARRIER_BYTES
