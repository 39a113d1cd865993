"""Decode steps on Hopper whose items, a cluster each, are merged in the launch itself
(csrc/kv_cache/decode_attention_sm90.cu): when, and by how many blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..core import common
from ..core.device import device_of, launch_sizes
from ..core.launch import Launch
from .decode_plan import Caches, DecodeGiven

# Whether these kernels are used: None where they are faster, True wherever they can. For tests.
choice: bool | None = None

CUBIN = "decode_attention_sm90"
MAX_HEAD_DIM, PAGE_MULTIPLE = 128, 16
_VECTOR, _OUT_VECTOR = 8, 4  # elements that are read, or written, at once
_SENT_BYTES = 24  # four columns of a row, its maximum and its sum
_BARRIER_BYTES = 8
_MOST_BLOCKS = 8  # a cluster of 16 waits for a place
# Of all items, and of an item that is one of more than two a multiprocessor: longer ones are cut
# evenly by the other kernel.
_SHORT_TOKENS, _SHORT_BYTES, _CROWDED_BYTES = 2048, 70 << 20, 128 << 10
# Of an item of one block, whose longest is waited for: 15 us a thousand.
_ALONE_TOKENS = 1024


def can_take(given: DecodeGiven) -> bool:
    """Whether the step is one that they compute: attention alone, of few rows."""
    q, k_cache, out = given.q, given.k_cache, given.out
    extras = (given.k, given.cos, given.qkv_bias, given.alibi_slopes)
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
        and rows_of(given) <= sizes_of(given)["block_m"]
        and q.shape[0] < 1 << 16
        and k_cache.shape[2] < 1 << 16
        and q.data_ptr() % common.VEC_BYTES == 0
        and out.data_ptr() % common.VEC_BYTES == 0
        and common.is_aligned(_VECTOR, *q.stride()[:3])
        and common.is_aligned(_OUT_VECTOR, *out.stride()[:3])
    )


def rows_of(given: DecodeGiven) -> int:
    """Tokens x query heads of a kv head."""
    return int(given.q.shape[1] * (given.q.shape[2] // given.k_cache.shape[2]))


def shape_for(given: DecodeGiven, caches: Caches) -> tuple[int, int]:
    """(warps of a block, blocks of a cluster); (0, 0): the step is not for these kernels."""
    if choice is False or not can_take(given):
        return 0, 0
    return best_shape(caches, device_of(given.q.device).num_sms, choice is True)


def best_shape(caches: Caches, num_sms: int, is_forced: bool = False) -> tuple[int, int]:
    """The same of caches that these kernels can take, as measured on an H200
    (docs/notes/decode_attention.md). is_forced: however slow.

    A block of four warps shares a multiprocessor with two more, one of eight has it alone, and
    clusters of those find no room where they are many.
    """
    items, tokens = caches.items, caches.tokens
    if not is_forced and not _is_short(caches, num_sms):
        return 0, 0
    is_few, is_long = 16 * items <= num_sms, tokens > 1024
    if (is_few and tokens > 512) or (is_long and num_sms < 4 * items and 2 * items <= num_sms):
        return 8, 8 if is_few else 2
    blocks = 1
    while blocks < _MOST_BLOCKS and 2 * blocks * items <= num_sms and 64 * blocks < tokens:
        blocks *= 2
    if blocks == 1 and caches.token_bytes <= 256 and items <= num_sms and tokens > 64:
        return 4, 2  # of head_dim 64 four blocks share one
    if blocks == 1 and tokens > _ALONE_TOKENS and not is_forced:
        return 0, 0
    return 4, blocks


def _is_short(caches: Caches, num_sms: int) -> bool:
    items, tokens = caches.items, caches.tokens
    if items > num_sms:  # one block each
        most = _CROWDED_BYTES if items > 2 * num_sms else _CROWDED_BYTES // 2
        return tokens * caches.token_bytes <= most
    fills = num_sms // 2 < 16 * items <= num_sms  # by one cluster of eight each
    return tokens <= _SHORT_TOKENS * (2 if fills else 1) and caches.num_bytes <= _SHORT_BYTES


def plan(
    given: DecodeGiven, tokens: int, shape: tuple[int, int], numbers: tuple[int | float, ...]
) -> Launch:
    """The launch, which takes the parameters of the other kernel."""
    warps, blocks = shape
    return Launch(
        common.shipped(CUBIN, name(given)), (blocks, given.k_cache.shape[2], given.q.shape[0]),
        (32 * warps, 1, 1), shared_bytes(sizes_of(given), tokens, rows_of(given), shape), numbers,
        options={"programmatic": True, "cluster": (blocks, 1, 1)},
    )  # fmt: skip


def name(given: DecodeGiven) -> str:
    """The function for a step."""
    width = 64 if given.q.shape[-1] <= 64 else 128
    return f"{CUBIN}_{common.DTYPE_TOKENS[given.q.dtype]}_hdim{width}"


def sizes_of(given: DecodeGiven) -> Mapping[str, int]:
    """What it states."""
    return launch_sizes(CUBIN, name(given))


def shared_bytes(sizes: Mapping[str, int], tokens: int, rows: int, shape: tuple[int, int]) -> int:
    """Of a block: a ring no longer than the cache, or what the warps merge; what is sent to it."""
    warps, blocks = shape
    tile, width = sizes["block_n"], sizes["head_dim"]
    pairs = sizes["stages"] if tokens > blocks * warps * tile else 1
    ring = pairs * 2 * tile * width * sizes["element_bytes"]
    merged = sizes["block_m"] * (width + 10) * 4
    share = -(-rows * width // _OUT_VECTOR // blocks)
    return warps * max(ring, merged) + blocks * share * _SENT_BYTES + _BARRIER_BYTES
