"""The forward launch of few queries over many keys on Hopper: when, how packed, which numbers.

Knows the canonical `Problem`, of which `forward_sm90.applies` has checked what its kernels ask, and
the kernels of csrc/attention/flash_attention_split_sm90.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..core import common
from ..core.device import Stated, device_of, launch_facts
from ..core.launch import Launch
from .problem import Problem, lse_strides_of, packed_tensor_map, strides_of, tensor_map

# Whether these kernels are used: None where they are faster, True wherever they can. For tests.
choice: bool | None = None

CUBIN = "flash_attention_split_sm90"
WIDTHS = (64, 128, 256)
_SLOTS = 3  # Packing::kSlots
_MERGE_WARPS, _AT_ONCE = 8, 4  # merge.cuh: of a block; pieces that a warp has on their way
_MAX_BATCH = 256  # Line::kMost
_MAX_HEADS = 1 << 15
_MAX_SMS = 256
_MAX_UNITS = 1 << 30
_NO_MASK = 1 << 29
_LEAST_BLOCKS = 2  # of a share: a piece costs as much as one to begin and to merge
# What the cost model knows of an H200 (docs/notes/flash_attention_split_sm90.md).
# Of a multiprocessor, by the mean of head_dim and v's own.
_FLOPS_A_US = {64: 3.9e6, 96: 4.8e6, 128: 5.2e6, 160: 5.3e6, 192: 5.3e6, 256: 5.6e6}
_BYTES_A_US = 4.2e6
_TILE_US, _PIECE_US, _MERGE_US = 1.0, 0.7, 3.5
_GAIN = 0.93


class Sizes(NamedTuple):
    """A problem, as plans see it: lengths are typical ones."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    window_left: int
    window_right: int


class Packed(NamedTuple):
    """What tensor maps and the second launch of a plan are made of."""

    heads: int
    tokens: int
    box_rows: int
    floats: int  # of the workspace: pieces
    ints: int  # and the line
    merge: Launch


@dataclass(frozen=True, slots=True)
class Body:
    """One compiled tile shape: `flash_attention_split_sm90_{dtype}_hdim{head_dim}_{mask}`."""

    mask: str
    head_dim: int

    @property
    def stated(self) -> Stated:
        """Threads, shared memory, block_m (rows) and block_n (keys) of a tile."""
        return launch_facts(CUBIN, self.name(torch.bfloat16))

    def name(self, dtype: torch.dtype, what: str = "") -> str:
        """The function's name; what: "merge" is the second kernel."""
        return f"{CUBIN}_{common.DTYPE_TOKENS[dtype]}_hdim{self.head_dim}_{what or self.mask}"


def body_of(problem: Problem) -> Body:
    """The kernel for a problem."""
    is_windowed = problem.window[0] >= 0 or problem.softcap != 0
    width = next(each for each in WIDTHS if each >= problem.widest_head)
    return Body("window" if is_windowed else "causal", width)


def pack(seqlen_q: int, group: int, block_m: int) -> tuple[int, int, int]:
    """(heads, tokens, tiles): heads of a group that share a tile, tokens of it, tiles of a group.

    The fewest tiles, and of those the most heads. heads divides the group.
    """
    best = None
    for heads in range(1, min(group, block_m) + 1):
        if group % heads == 0:
            tokens = block_m // heads
            tiles = -(-seqlen_q // tokens) * (group // heads)
            if best is None or tiles <= best[2]:
                best = heads, tokens, tiles
    assert best is not None
    return best


def blocks_seen(sizes: Sizes, tokens: int, block_n: int) -> int:
    """Blocks of keys that a tile of `tokens` sees, at most."""
    keys = sizes.seqlen_k
    if sizes.window_left >= 0:
        right = sizes.window_right if sizes.window_right >= 0 else sizes.seqlen_q
        keys = min(keys, tokens + sizes.window_left + right)
    return -(-keys // block_n)


def _unit_us(width: int, block_m: int, block_n: int) -> float:
    return 4 * block_m * block_n * width / _FLOPS_A_US[width]


def _memory_us(sizes: Sizes, head_dim: int) -> float:
    heads = 2 * sizes.num_kv_heads * sizes.seqlen_k + 2 * sizes.num_heads * sizes.seqlen_q
    return sizes.batch_size * heads * head_dim * 2 / _BYTES_A_US


def whole_us(sizes: Sizes, width: int, block_m: int, block_n: int, num_sms: int) -> float:
    """About how long a block a tile takes, each walking through all keys."""
    tiles = -(-sizes.seqlen_q // block_m) * sizes.batch_size * sizes.num_heads
    a_tile = blocks_seen(sizes, block_m, block_n) * _unit_us(width, block_m, block_n) + _TILE_US
    return max(-(-tiles // num_sms) * a_tile, _memory_us(sizes, width))


def split_us(sizes: Sizes, width: int, block_m: int, block_n: int, num_sms: int) -> float:
    """About how long equal shares and their merge take."""
    group = sizes.num_heads // sizes.num_kv_heads
    _, tokens, tiles = pack(sizes.seqlen_q, group, block_m)
    tiles *= sizes.batch_size * sizes.num_kv_heads
    seen = blocks_seen(sizes, tokens, block_n)
    share = share_of(tiles * seen, num_sms)
    stretches = 1 + max(1, share / max(seen, 1))
    a_share = share * _unit_us(width, block_m, block_n) + stretches * _PIECE_US
    pieces = tiles * seen / share + tiles
    merge = _MERGE_US + pieces * block_m * width * 4 / _BYTES_A_US
    return max(a_share, _memory_us(sizes, width)) + _TILE_US + merge


def share_of(units: int, num_blocks: int) -> int:
    """The units of a block's share, as the kernel finds them."""
    return max(_LEAST_BLOCKS, -(-units // num_blocks))


def sizes_of(problem: Problem) -> Sizes:
    """Sizes as the host knows them: of lengths on the device their mean, or the longest."""
    batch_size = problem.batch_size
    seqlen_q, seqlen_k = problem.seqlens
    seqlen_k = min(seqlen_k, problem.max_seqlen_k)
    total_q, total_k = problem.totals
    if problem.cu_seqlens_q is not None:
        seqlen_q = min(seqlen_q, -(-total_q // batch_size))
    if problem.cu_seqlens_k is not None and problem.block_table is None:
        seqlen_k = min(seqlen_k, -(-total_k // batch_size))
    num_heads, num_kv_heads = problem.q.shape[-2], problem.k.shape[-2]
    return Sizes(batch_size, num_heads, num_kv_heads, seqlen_q, seqlen_k, *problem.window)


def can_take(problem: Problem) -> bool:
    """Whether these kernels take a problem that forward_sm90's take."""
    device, body = device_of(problem.q.device), body_of(problem)
    block_m, block_n = body.stated.sizes["block_m"], body.stated.sizes["block_n"]
    batch_size, (seqlen_q, seqlen_k) = problem.batch_size, problem.seqlens
    num_heads, num_kv_heads = problem.q.shape[-2], problem.k.shape[-2]
    if problem.cu_seqlens_k is not None:
        seqlen_k = max(seqlen_k, problem.totals[1])
    tiles = pack(max(1, seqlen_q), num_heads // num_kv_heads, block_m)[2]
    return (
        (batch_size <= _MAX_BATCH or not _has_lengths(problem))
        and num_heads < _MAX_HEADS
        and device.num_sms <= _MAX_SMS
        and min(batch_size, seqlen_q, seqlen_k) > 0
        and batch_size * num_kv_heads * tiles * (-(-seqlen_k // block_n) + 1) <= _MAX_UNITS
    )


def applies(problem: Problem, whole: Stated, width: int) -> bool:
    """Whether a problem that forward_sm90's kernels take is better off in equal shares.

    whole, width: its kernel there, and the mean of that one's widths.
    """
    if choice is False or not can_take(problem):
        return False
    if choice:
        return True
    sizes = sizes_of(problem)
    # Tiles of a whole prompt differ in their keys, which the others' schedule knows how to order.
    if problem.window[1] >= 0 and sizes.seqlen_k < 2 * sizes.seqlen_q:
        return False
    num_sms = device_of(problem.q.device).num_sms
    theirs = whole_us(sizes, width, whole.sizes["block_m"], whole.sizes["block_n"], num_sms)
    return problem_us(problem) < _GAIN * theirs


def problem_us(problem: Problem) -> float:
    """`split_us` of a problem."""
    body = body_of(problem)
    block_m, block_n = body.stated.sizes["block_m"], body.stated.sizes["block_n"]
    num_sms = device_of(problem.q.device).num_sms
    return split_us(sizes_of(problem), body.head_dim, block_m, block_n, num_sms)


def _has_lengths(problem: Problem) -> bool:
    tables = problem.cu_seqlens_q, problem.cu_seqlens_k, problem.cache_seqlens
    return any(each is not None for each in tables)


def plan(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> Launch:
    """The launch, where `applies`; its `maps` is a `Packed`, with the merge in it."""
    q, k = problem.q, problem.k
    num_heads = q.shape[-2]
    num_kv_heads = k.shape[-2]
    group = num_heads // num_kv_heads
    seqlen_q, seqlen_k = problem.seqlens
    left, right = problem.window
    body = body_of(problem)
    stated = body.stated
    block_m, block_n = stated.sizes["block_m"], stated.sizes["block_n"]
    heads, tokens, tiles = pack(seqlen_q, group, block_m)
    tiles *= problem.batch_size * num_kv_heads
    sizes = sizes_of(problem)._replace(seqlen_k=seqlen_k)
    seen = blocks_seen(sizes, tokens, block_n)
    num_blocks = min(device_of(q.device).num_sms, -(-tiles * (seen + 1) // _LEAST_BLOCKS))
    share = share_of(tiles * seen, num_blocks)
    team = 1
    while team < _MERGE_WARPS and seen > team * _AT_ONCE * share:
        team *= 2
    strips = tiles * (block_m // 16) * (body.head_dim // 32)
    table = problem.block_table
    page_size = k.shape[1] if table is not None else 1
    box_rows = block_n if table is None else math.gcd(page_size, block_n)
    if body.mask == "causal" and right < 0:
        right = _NO_MASK
    places = (*strides_of(out), *lse_strides_of(lse))
    common_numbers = (
        problem.batch_size, num_heads, num_kv_heads, problem.v.shape[-1], seqlen_q, seqlen_k,
        *problem.totals, left, right, heads, tokens, -(-(1 << 16) // heads), _LEAST_BLOCKS,
    )  # fmt: skip
    tables = problem.cu_seqlens_k, table, problem.cache_seqlens
    numbers = (
        *places, 0 if table is None else table.stride(0), *common_numbers,
        k.shape[0],  # where paged: pages
        page_size, box_rows, int(any(each is not None for each in tables)), problem.sink_type,
        *problem.exponents, *problem.small_scores,
    )  # fmt: skip
    merge_name = body.name(q.dtype, "merge")
    merge = Launch(
        common.shipped(CUBIN, merge_name), (-(-strips * team // _MERGE_WARPS), 1, 1),
        launch_facts(CUBIN, merge_name).block, 0,
        (*places, *common_numbers, problem.sink_type, num_blocks, team),
        options={"programmatic": True},
    )  # fmt: skip
    floats = num_blocks * _SLOTS * block_m * (body.head_dim + 2)
    ints = problem.batch_size + 1 if _has_lengths(problem) else 0
    packed = Packed(heads, tokens, box_rows, floats, ints, merge)
    function = common.shipped(CUBIN, body.name(q.dtype))
    return Launch(function, (num_blocks, 1, 1), stated.block, stated.shared_bytes, numbers, packed)


def maps(
    packed: Packed, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[bytes, bytes, bytes]:
    """The descriptors that the launch takes instead of q, k and v."""
    rows = packed.box_rows
    return (
        packed_tensor_map(q, packed.tokens, packed.heads), tensor_map(k, rows), tensor_map(v, rows)
    )  # fmt: skip


def launch(
    planned: Launch, maps: tuple[bytes, ...], q: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, flag: torch.Tensor | None, tables: tuple[Any, Any, Any, Any, Any],
) -> None:  # fmt: skip
    """Run what `plan` made, and the merge.

    flag: `bounds.flag` of the op; tables: cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table,
    sinks.
    """
    packed: Any = planned.maps
    room = torch.empty(packed.floats + packed.ints, dtype=torch.float32, device=q.device)
    line = room[packed.floats :].view(torch.int32) if packed.ints else None
    planned.function(
        planned.grid, planned.block, planned.shared_bytes, None,
        (out, lse, flag, room, line, *maps, *tables, *planned.numbers),
    )  # fmt: skip
    merge = packed.merge
    merge.function(
        merge.grid, merge.block, 0, None,
        (out, lse, flag, room, line, *tables[:3], tables[4], *merge.numbers),
        **merge.options,
    )  # fmt: skip
