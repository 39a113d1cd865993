"""What mla_decode refuses.

`check` reads shapes only; `check_values` reads lengths and tables on the device and waits for it.
"""

from __future__ import annotations

import math

import torch

from ..core import common
from ..core.kv_cache import check_block_table
from .mla_plan import KEY_DIM, LATENT_DIM, MAX_SEQLEN_Q, MlaGiven

_OP = "mla_decode"
_MAX_TOKENS = 2**30
_is_tracing = torch.compiler.is_dynamo_compiling


def check(given: MlaGiven) -> None:
    """Raise TensorError for whatever does not fit."""
    q, kv_cache, cache_seqlens, block_table, softmax_scale, num_splits, out, _ = given
    common.check_data(_OP, "q", q, common.HALF)
    if q.dim() != 4:
        raise common.refuse(_OP, "q", f"shape (batch_size, seqlen_q, num_heads, {KEY_DIM})", q)
    batch_size, seqlen_q, num_heads, width = q.shape
    if width != KEY_DIM:
        raise common.refuse(_OP, "q", f"{KEY_DIM} columns ({LATENT_DIM} latent, then rotated)", q)
    if not 1 <= seqlen_q <= MAX_SEQLEN_Q:
        raise common.refuse(_OP, "q", f"1 to {MAX_SEQLEN_Q} tokens a sequence (seqlen_q)", q)
    if max(batch_size, seqlen_q * num_heads) > common.MAX_SIZE:
        raise common.refuse(_OP, "q", f"at most {common.MAX_SIZE} sequences, and heads", q)
    _check_aligned("q", q)
    common.check_tensor(_OP, "kv_cache", kv_cache)
    leading = tuple(kv_cache.shape[:2])
    if kv_cache.dim() not in (3, 4):
        first = "batch_size, max_seqlen" if block_table is None else "num_pages, page_size"
        raise common.refuse(_OP, "kv_cache", f"shape ({first}, {KEY_DIM})", kv_cache)
    if block_table is None:
        leading = (batch_size, leading[1])
    heads = (1,) if kv_cache.dim() == 4 else ()
    common.check_like(_OP, "kv_cache", kv_cache, (*leading, *heads, KEY_DIM), q)
    _check_aligned("kv_cache", kv_cache)
    common.check_like(_OP, "cache_seqlens", cache_seqlens, (batch_size,), q, dtypes=(torch.int32,))
    if batch_size > 1 and cache_seqlens.stride(0) != 1:
        raise common.refuse(_OP, "cache_seqlens", "a contiguous tensor", cache_seqlens)
    room = leading[1]
    if block_table is not None:
        check_block_table(_OP, block_table, batch_size, q)
        if not 1 <= room <= _MAX_TOKENS:
            raise common.refuse(_OP, "kv_cache", "a page_size of 1 token or more", kv_cache)
        room *= block_table.shape[1]
    if room > _MAX_TOKENS:
        raise common.refuse(_OP, "kv_cache", f"at most {_MAX_TOKENS} tokens a sequence", room)
    common.check_number(_OP, "softmax_scale", softmax_scale)
    common.check_count(_OP, "num_splits", num_splits)
    common.check_written(_OP, "out", out, (batch_size, seqlen_q, num_heads, LATENT_DIM), q)
    if out is not None:
        _check_aligned("out", out)


def _check_aligned(argument: str, value: torch.Tensor) -> None:
    """Rows that begin at multiples of 16 bytes, as vectors and tensor maps want them."""
    size = value.element_size()
    pairs = zip(value.stride()[:-1], value.shape[:-1], strict=True)
    if any(n > 1 and stride * size % common.VEC_BYTES for stride, n in pairs):
        raise common.refuse(_OP, argument, "strides that are multiples of 16 bytes", value)
    if _is_tracing() or not common.is_plain(value):
        return
    if value.data_ptr() % common.VEC_BYTES:
        found = f"address {value.data_ptr():#x}"
        raise common.refuse(_OP, argument, "memory aligned to 16 bytes", found)


def check_values(given: MlaGiven) -> None:
    """Lengths that fit the cache, and pages that exist; below 0 is a finished row."""
    kv_cache, block_table = given.kv_cache, given.block_table
    page_size = kv_cache.shape[1]
    capacity = page_size * (1 if block_table is None else block_table.shape[1])
    lengths = given.cache_seqlens.tolist()
    for index, length in enumerate(lengths):
        if length > capacity:
            expected = f"0 to {capacity} at index {index}"
            raise common.refuse(_OP, "cache_seqlens", expected, length)
    if block_table is None:
        return
    for index, (length, pages) in enumerate(zip(lengths, block_table.tolist(), strict=True)):
        for place, page in enumerate(pages[: math.ceil(max(length, 0) / page_size)]):
            if not 0 <= page < kv_cache.shape[0]:
                expected = f"pages from 0 to {kv_cache.shape[0] - 1} at [{index}, {place}]"
                raise common.refuse(_OP, "block_table", expected, page)
