"""The forward launch of few queries over many keys on Hopper: when, how packed, which numbers.

Knows the canonical `Problem`, of which `forward_sm90.applies` has checked what its kernels ask, and
the kernels of csrc/attention/flash_attention_split_sm90.cu.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ..core import common
from ..core.counters import counters
from ..core.device import Stated, device_of, launch_facts
from ..core.launch import Launch
from . import packed_tile
from . import split_costs as costs
from . import tile_costs as prompts
from .packed_tile import BODIES, CUBIN, MAX_BLOCKS, MERGES_AN_SM, Body, chunk_parts, merge_name
from .problem import (
    Problem,
    lse_strides_of,
    mean_of,
    packed_tensor_map,
    strides_of,
    tensor_map,
)

# Whether these kernels are used: None where they are faster, True wherever they can. For tests.
choice: bool | None = None
# Whether tiles are cut: None where it is faster. For tests.
cuts_tiles: bool | None = None
# Whether shares may be parts. For tests.
has_parts = True
# Whether tiles in turn are whole, whatever lengths: None where it is faster. For tests.
alone: bool | None = None
# Parts that blocks draw, of the longest tile: None where it is faster, 0: shares. For tests.
prompt_parts: int | None = None

NUM_COUNTERS, _NO_MASK = 2, 1 << 29  # the next unit that is drawn, blocks that are done
_MERGE_WARPS, _AT_ONCE = 8, 4  # merge.cuh: of a block; pieces that a warp has on their way
_MAX_BATCH, _MAX_HEADS, _MAX_UNITS = 256, 1 << 15, 1 << 30  # Line::kMost; 32-bit sums
# Packing::longest: units are blocks of keys, or tiles, sorted by their lengths or as they come.
_SHARES, _SORTED, _AS_THEY_COME = 1, 1 << 30, 1 << 29
# Columns of tiles of few rows; keys up to which two of them are no slower, twice that of steps.
_FEW_ROWS_WIDTH, _FEW_ROWS_LONGEST = 128, 8192
_HARDLY_MORE, _SURELY = ((1, 0.4), (2, 0.2)), 0.93  # of prompts: above rounds; of few tiles
_NEARLY, _SHORT_CHUNK = 1.025, 256  # of caches that differ; queries whose heads share no keys
# Parts that blocks draw: of more queries than a step's, by blocks so many tiles; floats of pieces.
_STEP, _FEWEST_TILES, _MOST_FLOATS = 16, 0.3, 25 << 20
_CHUNK_PARTS, _SURELY_PARTS, _CHUNK_PIECES = (2, 3, 4, 5, 7), 0.97, 1.2


class Packed(NamedTuple):
    """What tensor maps and the second launch of a plan are made of."""

    heads: int
    tokens: int
    box_rows: int
    floats: int  # of the workspace: pieces
    ints: int  # and the line
    merge: Launch | None  # None: nothing is left to it


class Way(NamedTuple):
    """A kernel for a problem; about how long it takes in shares or parts, and in tiles in turn."""

    body: Body
    tile: costs.PackedTile
    shares_us: float
    tiles_us: float
    parts: int = 0  # of the longest tile, which blocks draw; 0: shares

    @property
    def is_cut(self) -> bool:
        """Whether tiles are cut into pieces: else each block takes whole ones in turn."""
        return self.shares_us <= self.tiles_us if cuts_tiles is None else cuts_tiles

    @property
    def us(self) -> float:
        """About how long it takes."""
        return self.shares_us if self.is_cut else self.tiles_us


def bodies_of(problem: Problem) -> list[Body]:
    """The kernels for a problem: of one width, and that of few rows."""
    mask = "window" if problem.window[0] >= 0 or problem.softcap != 0 else "causal"
    fitting = [x for x in BODIES if x.mask == mask and x.takes(problem)]
    least = min(body.head_dim for body in fitting)
    is_few = least <= _FEW_ROWS_WIDTH and problem.batch_size > 0
    if is_few:
        sizes = costs.sizes_of(problem)[0]
        longest = _FEW_ROWS_LONGEST << (1 < sizes.seqlen_q <= _STEP)
        is_chunk = costs.is_chunk(sizes) and sizes.seqlen_k <= longest
        is_short = _is_short_causal(problem) or prompts.is_side_by_side(problem, sizes)
        is_few = (is_chunk and mask == "causal") or (least == _FEW_ROWS_WIDTH and is_short)
        is_few |= prompts.wants_few_rows(problem, sizes)
    few = [x for x in fitting if x.has_few_rows][:1] * is_few
    return [x for x in fitting if x.head_dim == least and not x.has_few_rows] + few


def can_take(problem: Problem) -> bool:
    """Whether these kernels take a problem that forward_sm90's take."""
    device = device_of(problem.q.device)
    batch_size, (seqlen_q, seqlen_k) = problem.batch_size, problem.seqlens
    num_heads, num_kv_heads = problem.q.shape[-2], problem.k.shape[-2]
    if problem.cu_seqlens_k is not None:
        seqlen_k = max(seqlen_k, problem.totals[1])
    units = 0
    for tile in (_tile(problem, body) for body in bodies_of(problem)):
        tiles = tile.pack(max(1, seqlen_q), num_heads // num_kv_heads)[2]
        units = max(units, batch_size * num_kv_heads * tiles * (-(-seqlen_k // tile.block_n) + 1))
    return (
        (batch_size <= _MAX_BATCH or not problem.has_lengths)
        and num_heads < _MAX_HEADS
        and device.num_sms <= MAX_BLOCKS
        and min(batch_size, seqlen_q, seqlen_k) > 0
        and units <= _MAX_UNITS
    )


def applies(problem: Problem, whole: Stated, width: int) -> bool:
    """Whether a problem that forward_sm90's kernels take is better off in equal shares.

    whole, width: its kernel there, and the mean of that one's widths.
    """
    if choice is False or not can_take(problem):
        return False
    if choice:
        return True
    block_m, block_n = whole.sizes["block_m"], whole.sizes["block_n"]
    if is_crowded(problem, block_m) or _is_short_causal(problem):
        num_sms, sizes = device_of(problem.q.device).num_sms, costs.sizes_of(problem)
        is_narrow = problem.widest_head <= 64 and problem.q.dtype == torch.bfloat16
        if problem.softcap != 0 and is_narrow and not prompts.wants_few_rows(problem, sizes[0]):
            return False  # that one tells tiny scores from others, these do not
        every = (costs.whole_prompts_us(x, width, block_m, block_n, num_sms) for x in sizes)
        return best_way(problem, block_m).us < mean_of(every)
    surely = _SURELY if _prompt_rounds(problem, block_m) > 1 else 1.0
    known = costs.sizes_of(problem)[0]
    is_short = known.seqlen_q <= _SHORT_CHUNK or known.num_heads > known.num_kv_heads
    if known.has_lengths and known.is_ragged and costs.is_chunk(known) and is_short:
        surely = _NEARLY
    return best_way(problem).us < surely * mean_of(whole_us(problem, whole, width))


def is_crowded(problem: Problem, block_m: int) -> bool:
    """Whether a problem is of prompts, with tiles of so many rows for all multiprocessors: these
    differ in their keys, which forward_sm90's schedule orders."""
    rounds = _prompt_rounds(problem, block_m)
    # Hardly more than rounds, of alike tiles, is as long as one more; less in shares.
    is_alike = problem.softcap == 0 and max(problem.window) < 0 and not problem.has_lengths
    more = _prompt_rounds(problem, 192) if problem.widest_head <= 64 else rounds  # or fewer rows
    hardly = (each - n <= x for each in (rounds, more) for n, x in _HARDLY_MORE if each > n)
    return rounds >= 1 and not (is_alike and any(hardly))


def _prompt_rounds(problem: Problem, block_m: int) -> float:
    sizes = costs.sizes_of(problem)[0]
    tiles = -(-sizes.seqlen_q // block_m) * sizes.batch_size * sizes.num_heads
    return sizes.is_prompt * tiles / device_of(problem.q.device).num_sms


def _is_short_causal(problem: Problem) -> bool:
    is_alike = problem.q.shape[-1] == problem.v.shape[-1]
    return is_alike and costs.is_short_causal(costs.sizes_of(problem)[0])


def whole_us(problem: Problem, whole: Stated, width: int) -> tuple[float, ...]:
    """About how long forward_sm90's kernel takes, for each of `sizes_of` the problem; arguments as
    those of `applies`."""
    num_sms = device_of(problem.q.device).num_sms
    block_m, block_n = whole.sizes["block_m"], whole.sizes["block_n"]
    every = costs.sizes_of(problem)
    return tuple(costs.whole_us(each, width, block_m, block_n, num_sms) for each in every)


def _tile(problem: Problem, body: Body) -> costs.PackedTile:
    sizes = body.stated.sizes
    # The TMA fills up heads that there are none of; windows ask whose scores are small.
    is_alone = problem.k.shape[-2] == 1 and body.mask == "causal"
    return costs.PackedTile(body.head_dim, sizes["block_m"], sizes["block_n"], is_alone)


def best_way(problem: Problem, whole_rows: int = 0) -> Way:
    """The fastest, by their costs; whole_rows: of the tiles that a prompt would have elsewhere."""
    num_sms, sizes = device_of(problem.q.device).num_sms, costs.sizes_of(problem)
    ways, is_packed = [], whole_rows > 0 and is_crowded(problem, whole_rows)
    is_short = whole_rows > 0 and _is_short_causal(problem)
    is_bound = problem.cu_seqlens_k is None or problem.totals[1] <= problem.seqlens[1]
    for body in bodies_of(problem):
        tile = _tile(problem, body)
        if prompts.is_surely_in_turn(problem, tile, sizes[0]):
            return Way(body, tile, math.inf, 0.0)
        places, shares, parts = tile.blocks_at_once(num_sms), math.inf, 0
        if not is_packed:
            shares = mean_of(costs.split_us(each, tile, places) for each in sizes)
        if body.mask == "causal" and is_bound and not (body.has_few_rows or is_short):
            parts_us, most = packed_tile.prompt_parts(sizes[0], tile, places)
            if prompt_parts is not None:
                parts_us, most = shares, prompt_parts
            if most > 0:
                shares, parts = parts_us, most
            elif len(sizes) == 1 and prompt_parts is None:
                shares, parts = min((shares, 0), _chunk_parts(sizes[0], tile, places))
        if is_packed or is_short:
            tiles = mean_of(costs.packed_prompts_us(x, tile, whole_rows, num_sms) for x in sizes)
            ways.append(Way(body, tile, shares / _SURELY, tiles, parts))
            continue
        tiles = math.inf  # whole prompts': forward_sm90 knows the order
        if not sizes[0].is_prompt:
            tiles = mean_of(costs.tiles_us(each, tile, places) for each in sizes)
        ways.append(Way(body, tile, shares, tiles, parts))
    return min(ways, key=lambda way: way.us)


def _chunk_parts(sizes: costs.Sizes, tile: costs.PackedTile, places: int) -> tuple[float, int]:
    """(about how long few queries take in parts that blocks draw, of how many the longest tile is),
    a little more than that: others are surer."""
    found = math.inf, 0
    is_open = sizes.window_left < 0 and not (sizes.is_varlen or sizes.has_softcap)
    if not is_open or not costs.is_chunk(sizes) or sizes.seqlen_q <= _STEP:
        return found
    _, tokens, tiles = tile.pack(sizes.seqlen_q, sizes.num_heads // sizes.num_kv_heads)
    tiles *= sizes.batch_size * sizes.num_kv_heads
    blocks = costs.blocks_seen(sizes, tokens, tile.block_n)
    for parts in _CHUNK_PARTS if tiles > _FEWEST_TILES * places else ():
        if tiles * parts * tile.block_m * tile.width <= _MOST_FLOATS:
            work, rounds = chunk_parts(sizes, tile, places, parts, blocks)
            work_us = costs.read_us(sizes, tile, work)
            us = work_us + _CHUNK_PIECES * min(3.0, rounds) * tile.pieces_us
            found = min(found, (us / _SURELY_PARTS, parts))
    return found


def _longest(problem: Problem, tile: costs.PackedTile, tiles: int, num_blocks: int) -> int:
    """Packing::longest: parts of tiles, one a block or a few, where they are hardly longer than
    shares or read less."""
    sizes = costs.sizes_of(problem)[0]
    places = tile.blocks_at_once(device_of(problem.q.device).num_sms)
    if not has_parts or problem.softcap != 0:
        return _SHARES
    if problem.has_lengths:
        if not costs.has_parts(sizes, tiles, num_blocks, tile.block_n):
            return _SHARES
        is_coarse = costs.wants_parts(sizes, tile, places)
        return -costs.MOST_LONGER - is_coarse * (costs.MOST_LONGER + 1)
    longest = costs.longest_part(sizes, tile, places)
    return max(2, longest) if longest > 0 else _SHARES


def plan(
    problem: Problem, out: torch.Tensor, lse: torch.Tensor | None, whole_rows: int = 0
) -> Launch:  # fmt: skip
    """The launch, where `applies`; its `maps` is a `Packed`, with the merge in it. whole_rows: as
    `best_way` takes them."""
    q, k = problem.q, problem.k
    num_heads = q.shape[-2]
    num_kv_heads = k.shape[-2]
    group = num_heads // num_kv_heads
    seqlen_q, seqlen_k = problem.seqlens
    left, right = problem.window
    way = best_way(problem, whole_rows)
    body, tile, is_cut, parts = way.body, way.tile, way.is_cut, way.is_cut * way.parts
    stated, block_m, block_n = body.stated, tile.block_m, tile.block_n
    heads, tokens, tiles = tile.pack(seqlen_q, group)
    tiles *= problem.batch_size * num_kv_heads
    num_sms = device_of(q.device).num_sms
    team = 1
    least_blocks = costs.LEAST_BLOCKS
    most_blocks = tile.blocks_at_once(num_sms, is_cut or problem.softcap == 0)
    num_blocks = min(most_blocks, tiles)
    sizes = costs.sizes_of(problem)[0]._replace(seqlen_k=seqlen_k)
    seen = costs.blocks_seen(sizes, tokens, block_n)
    together = prompts.pairs_together(problem, sizes, seen * block_n, tiles / most_blocks, tile)
    is_short, is_whole = seen <= prompts.short_blocks(sizes, tile), False
    if together == 1 and body.mask == "causal" and problem.has_lengths:
        every, rounds = costs.sizes_of(problem), tiles / most_blocks
        is_short, is_whole = tile.whole_of(every, seen, rounds, is_short, costs.is_chunk(sizes))
        is_whole = is_whole if alone is None else alone
    longest = _AS_THEY_COME if is_short else _SORTED
    if together > 1:
        longest = _SORTED if tiles > prompts.DEALT_ROUNDS * most_blocks else _AS_THEY_COME
    if is_cut:
        num_blocks = min(most_blocks, -(-tiles * (seen + 1) // least_blocks))
        share = costs.share_of(tiles * seen, num_blocks)
        longest = _longest(problem, tile, tiles, num_blocks)
        together = 1
        if parts > 0:
            longest = max(2, -(-seen // parts))
            share, together = min(share, longest), 0
    # Warps of the merge for a tile: for each 16 of its rows and 32 columns, or a team of them where
    # it has many pieces, as long as all run at a time.
    strips = -(-heads * min(tokens, seqlen_q) // 16)
    columns = body.head_dim // 32
    if is_cut:
        most = MERGES_AN_SM * num_sms * _MERGE_WARPS
        while (
            team < _MERGE_WARPS
            and seen > team * _AT_ONCE * share
            and 2 * team * tiles * strips * columns <= most
        ):
            team *= 2
    warps = team * strips * columns
    merge_blocks = -(-tiles * warps // _MERGE_WARPS)
    scan = 1
    if team == 1:
        scan = 1 if parts else packed_tile.scan_of(tiles, merge_blocks, num_blocks, num_sms, is_cut)
    scans = -(-tiles // scan)
    if not is_cut and problem.has_lengths:  # it lists those that it takes
        most = MERGES_AN_SM * num_sms * _MERGE_WARPS
        scan, scans = 0, min(tiles, max(1, most // warps))
    table = problem.block_table
    page_size = k.shape[1] if table is not None else 1
    box_rows = block_n if table is None else math.gcd(page_size, block_n)
    if body.mask == "causal" and right < 0:
        right = _NO_MASK
    places = (*strides_of(out), *lse_strides_of(lse))
    common_numbers = (
        problem.batch_size, num_heads, num_kv_heads, problem.v.shape[-1], seqlen_q, seqlen_k,
        *problem.totals, left, right, heads, tokens, -(-(1 << 16) // heads), least_blocks, longest,
    )  # fmt: skip
    tables = problem.cu_seqlens_k, table, problem.cache_seqlens
    numbers = (
        *places, 0 if table is None else table.stride(0), *common_numbers,
        together,
        k.shape[0],  # where paged: pages
        page_size, box_rows, int(any(each is not None for each in tables)), problem.sink_type,
        *problem.exponents, *problem.small_scores,
    )  # fmt: skip
    merger = merge_name(q.dtype, scan)
    merge_grid = -(-scans * warps // _MERGE_WARPS), 1, 1
    if scan == 1:
        merge_grid = -(-warps // _MERGE_WARPS), tiles, 1
    merge: Launch | None = Launch(
        common.shipped(CUBIN, merger),
        merge_grid,
        launch_facts(CUBIN, merger).block, 0,
        (
            *places, *common_numbers, problem.sink_type, num_blocks, team, scan, scans, strips,
            body.head_dim, block_m, -(-(1 << 36) // block_n),
        ),
        options={"programmatic": True},
    )  # fmt: skip
    sees_keys = right < 0 or right == _NO_MASK or seqlen_k >= seqlen_q
    is_alone = not is_cut and (is_whole if problem.has_lengths else sees_keys)
    if is_alone:
        merge = None
    is_mixed = longest == _SORTED and problem.has_lengths and body.mask == "causal"
    has_pieces = is_cut or (is_mixed and not is_alone)
    pieces = max(num_blocks * costs.SLOTS, tiles * parts) if has_pieces else 0
    floats = pieces * block_m * (body.head_dim + 2)
    ints = problem.batch_size + 2 if problem.has_lengths and not is_alone else 0
    packed = Packed(heads, tokens, box_rows, floats, ints, merge)
    function = common.shipped(CUBIN, body.name(q.dtype))
    return Launch(
        function, (num_blocks, 1, 1), stated.block, stated.shared_bytes, numbers, packed,
        {"programmatic": True},
    )  # fmt: skip


def maps(
    packed: Packed, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[bytes, bytes, bytes]:
    """The descriptors that the launch takes instead of q, k and v."""
    # Keys are read once mostly: an H200's memory gives less of pairs of lines.
    keys, values = (tensor_map(x, packed.box_rows, "128B") for x in (k, v))
    return packed_tensor_map(q, packed.tokens, packed.heads), keys, values


def launch(
    planned: Launch, maps: tuple[bytes, ...], q: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, flag: torch.Tensor | None, tables: tuple[Any, Any, Any, Any, Any],
) -> None:  # fmt: skip
    """Run what `plan` made, and the merge.

    flag: `bounds.flag` of the op; tables: cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table,
    sinks.
    """
    packed: Any = planned.maps
    room = torch.empty(max(1, packed.floats + packed.ints), dtype=torch.float32, device=q.device)
    line = room[packed.floats :].view(torch.int32) if packed.ints else None
    planned.function(
        planned.grid, planned.block, planned.shared_bytes, None,
        (
            out, lse, flag, room, line, *maps, *tables, counters(q.device, NUM_COUNTERS),
            *planned.numbers,
        ),
        **planned.options,
    )  # fmt: skip
    merge = packed.merge
    if merge is None:
        return
    merge.function(
        merge.grid, merge.block, 0, None,
        (out, lse, flag, room, line, *tables[:3], tables[4], *merge.numbers),
        **merge.options,
    )  # fmt: skip
