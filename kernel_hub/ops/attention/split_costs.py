"""About how long attention of few queries over many keys takes on Hopper, in equal shares or not.

What it knows of an H200 is fitted to benchmarks/results/h200_by_lot_caches_*.json
(docs/notes/flash_attention_split_sm90.md).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from .problem import Problem

LEAST_BLOCKS = 2  # of a share: a piece costs as much as one to begin and to merge
# Of a multiprocessor: of the kernels in shares, and of whole tiles by the mean of head_dim and v's
# own.
_FLOPS_A_US = {64: 3.8e6, 128: 5.1e6, 256: 5.65e6}
_WHOLE_FLOPS_A_US = {64: 3.8e6, 96: 4.6e6, 128: 5.5e6, 160: 5.6e6, 192: 5.9e6, 256: 6.2e6}
_FULL_FLOPS_A_US = 4.3e6  # of 64 columns without masks, in tiles of 192 rows
_BYTES_A_US = 4.2e6
# Both launches or one; a stretch of a tile, its first keys and its end; pieces of 128 columns, one
# from each multiprocessor, out, in again and merged.
_START_US, _STRETCH_US, _PIECES_US = 4.5, 2.3, 4.2
_L2_BYTES = 36e6
# Of lengths that only the device knows, all are as long as the longest, or all but that one are
# about this part of it: where caches differ, few are as long.
_RAGGED, _EVEN = 0.25, 0.9


class Sizes(NamedTuple):
    """A problem, as plans see it. mean: keys of a sequence; seqlen_k: of the longest. head_dim: the
    mean of q's and v's."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    window_left: int
    window_right: int
    mean: float
    head_dim: float

    @property
    def evenness(self) -> float:
        """The mean of lengths by the longest; of a window's keys each sequence has all."""
        return 1.0 if self.window_left >= 0 else self.mean / max(self.seqlen_k, 1)


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
    def unit_us(self) -> float:
        """Of a block of keys."""
        return 4 * self.block_m * self.block_n * self.width / _FLOPS_A_US[self.width]


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


def _key_bytes(sizes: Sizes) -> float:
    return 4 * sizes.batch_size * sizes.num_kv_heads * sizes.mean * sizes.head_dim


def _memory_us(sizes: Sizes) -> float:
    queries = 4 * sizes.batch_size * sizes.num_heads * sizes.seqlen_q * sizes.head_dim
    return (_key_bytes(sizes) + queries) / _BYTES_A_US


def _in_turn_us(
    sizes: Sizes, tiles: int, tokens: int, unit_us: float, block_n: int, num_sms: int
) -> float:
    """Whole tiles on all multiprocessors, which end with whole ones where all are alike."""
    rounds: float = -(-tiles // num_sms)
    if sizes.evenness <= _EVEN:
        rounds = max(1.0, tiles * sizes.evenness / num_sms)
    seen: float = blocks_seen(sizes, tokens, block_n)
    if rounds > 1 and sizes.window_left < 0 <= sizes.window_right:  # half see fewer keys
        seen -= min(sizes.seqlen_q, sizes.mean) / 2 / block_n
    return rounds * (seen * unit_us + _STRETCH_US)


def whole_us(sizes: Sizes, width: int, block_m: int, block_n: int, num_sms: int) -> float:
    """forward_sm90's: a block a tile, each walking through all keys."""
    tiles = -(-sizes.seqlen_q // block_m) * sizes.batch_size * sizes.num_heads
    has_mask = max(sizes.window_left, sizes.window_right) >= 0
    flops = _WHOLE_FLOPS_A_US[width] if has_mask or width > 64 else _FULL_FLOPS_A_US
    unit_us = 4 * block_m * block_n * width / flops
    work = _in_turn_us(sizes, tiles, block_m, unit_us, block_n, num_sms)
    return _START_US + max(work, _memory_us(sizes))


def _tiles(sizes: Sizes, tile: PackedTile) -> tuple[int, int]:
    """(tiles, tokens of one)."""
    _, tokens, tiles = tile.pack(sizes.seqlen_q, sizes.num_heads // sizes.num_kv_heads)
    return tiles * sizes.batch_size * sizes.num_kv_heads, tokens


def tiles_us(sizes: Sizes, tile: PackedTile, num_sms: int) -> float:
    """Whole tiles of packed heads in turn: those that run at a time read the same keys. Of whole
    prompts they are forward_sm90's, which knows the order."""
    if sizes.mean < 2 * sizes.seqlen_q:
        return math.inf
    tiles, tokens = _tiles(sizes, tile)
    work = _in_turn_us(sizes, tiles, tokens, tile.unit_us, tile.block_n, num_sms)
    if sizes.evenness <= _EVEN:  # nobody puts the longest first
        work += blocks_seen(sizes, tokens, tile.block_n) * tile.unit_us / 2
    return _START_US + _PIECES_US / 2 + max(work, _memory_us(sizes))


def _read_us(
    sizes: Sizes, tile: PackedTile, tiles: int, seen: float, tiles_a_share: float
) -> float:
    """Reading keys and values where each block walks through tile after tile: blocks of a kv head
    are at different keys, of which the L2 holds some part."""
    num_heads = sizes.batch_size * sizes.num_kv_heads
    blocks_a_head = tiles / num_heads / tiles_a_share
    at_a_time = min(1.0, tiles / tiles_a_share / max(1.0, blocks_a_head) / num_heads)
    held = min(1.0, _L2_BYTES / (at_a_time * _key_bytes(sizes)))
    missed = (1 - held) ** max(0.0, blocks_a_head - 1) if held < 1 else 0.0
    return missed * tiles * seen * tile.block_n * 4 * sizes.head_dim / _BYTES_A_US


def split_us(sizes: Sizes, tile: PackedTile, num_sms: int) -> float:
    """Equal shares and their merge."""
    tiles, tokens = _tiles(sizes, tile)
    seen_mean = max(1.0, blocks_seen(sizes, tokens, tile.block_n) * sizes.evenness)
    share = max(LEAST_BLOCKS, tiles * seen_mean / num_sms)
    tiles_a_share = share / seen_mean
    stretches = 1 + max(1.0, tiles_a_share)
    memory = _memory_us(sizes)
    if tiles_a_share > 1 and sizes.window_left < 0:
        memory = max(memory, _read_us(sizes, tile, tiles, seen_mean, tiles_a_share))
    pieces = min(tiles * seen_mean / share + tiles, 2 * num_sms) / num_sms
    work = max(share * tile.unit_us, memory)
    pieces_us = pieces * _PIECES_US * tile.width / 128
    return _START_US + work + stretches * _STRETCH_US + pieces_us


def sizes_of(problem: Problem) -> tuple[Sizes, ...]:
    """Sizes as the host knows them, of which each may be: as if all were as long as the longest
    first."""
    batch_size = problem.batch_size
    seqlen_q, seqlen_k = problem.seqlens
    seqlen_k = min(seqlen_k, problem.max_seqlen_k)
    total_q, total_k = problem.totals
    if problem.cu_seqlens_q is not None:
        seqlen_q = min(seqlen_q, -(-total_q // batch_size))
    num_heads, num_kv_heads = problem.q.shape[-2], problem.k.shape[-2]
    mean: float = seqlen_k
    is_known = batch_size == 1 or problem.cache_seqlens is None
    if problem.cu_seqlens_k is not None and problem.block_table is None:
        mean, is_known = min(seqlen_k, total_k / batch_size), True
    sizes = Sizes(
        batch_size, num_heads, num_kv_heads, seqlen_q, seqlen_k, *problem.window, mean,
        (problem.q.shape[-1] + problem.v.shape[-1]) / 2,
    )  # fmt: skip
    if is_known:
        return (sizes,)
    ragged = max(mean * (_RAGGED + (1 - _RAGGED) / batch_size), min(mean, seqlen_q))
    return sizes, sizes._replace(mean=ragged)
