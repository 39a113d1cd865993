"""What mla_decode refuses.

`check` reads shapes only; `check_values` reads lengths and tables on the device and waits for it.
"""

from __future__ import annotations

import torch

from ..core import common
from ..core.kv_cache import check_aligned, check_block_table, check_held
from .mla_plan import KEY_DIM, LATENT_DIM, MAX_SEQLEN_Q, MlaGiven

_OP = "mla_decode"
_MAX_TOKENS = 2**30


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
    check_aligned(_OP, "q", q)
    common.check_tensor(_OP, "kv_cache", kv_cache)
    leading = tuple(kv_cache.shape[:2])
    if kv_cache.dim() not in (3, 4):
        first = "batch_size, max_seqlen" if block_table is None else "num_pages, page_size"
        raise common.refuse(_OP, "kv_cache", f"shape ({first}, {KEY_DIM})", kv_cache)
    if block_table is None:
        leading = (batch_size, leading[1])
    heads = (1,) if kv_cache.dim() == 4 else ()
    common.check_like(_OP, "kv_cache", kv_cache, (*leading, *heads, KEY_DIM), q)
    check_aligned(_OP, "kv_cache", kv_cache)
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
        check_aligned(_OP, "out", out)


def check_values(given: MlaGiven) -> None:
    """Lengths that fit the cache, and pages that exist; below 0 is a finished row."""
    check_held(_OP, given.kv_cache, given.cache_seqlens, given.block_table)
