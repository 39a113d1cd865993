"""What decode_attention refuses.

`check` reads shapes only; `check_values` reads lengths and tables on the device and waits for it.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import TensorError
from ..core import common
from ..core.kv_cache import (
    BYTES,
    check_alibi,
    check_aligned,
    check_block_table,
    check_cache_scales,
    check_held,
    check_sinks,
)
from ..core.rotary import check_rotation
from .decode_plan import MAX_HEAD_DIM, MAX_HEAD_DIM_FP32, MAX_SEQLEN_Q, DecodeGiven

_OP = "decode_attention"
_MAX_TOKENS = 2**30


def check(given: DecodeGiven, window_right: Any = 0) -> None:
    """Raise TensorError for whatever does not fit."""
    (q, k_cache, v_cache, cache_seqlens, k, v, _, cos, sin, qkv_bias, _, _,
     alibi_slopes, sinks, tree_mask, interleaved, rotary_dim, softmax_scale, window_left, softcap,
     num_splits, out, *_) = given  # fmt: skip
    common.check_data(_OP, "q", q, (*common.HALF, torch.float32))
    if q.dim() != 4:
        raise common.refuse(_OP, "q", "shape (batch_size, seqlen_q, num_heads, head_dim)", q)
    batch_size, seqlen_q, num_heads, head_dim = q.shape
    if not 1 <= seqlen_q <= MAX_SEQLEN_Q:
        raise common.refuse(_OP, "q", f"1 to {MAX_SEQLEN_Q} tokens a sequence (seqlen_q)", q)
    most = MAX_HEAD_DIM_FP32 if q.dtype == torch.float32 else MAX_HEAD_DIM
    if head_dim % 8 or not 16 <= head_dim <= most:
        raise common.refuse(_OP, "q", f"head_dim 16 to {most} in multiples of 8", q)
    _check_caches(given)
    num_kv_heads = k_cache.shape[2]
    common.check_like(_OP, "cache_seqlens", cache_seqlens, (batch_size,), q, dtypes=(torch.int32,))
    if (k is None) != (v is None):
        missing, there = ("k", "v") if k is None else ("v", "k")
        raise TensorError(f"{_OP}: {missing}: expected a tensor, as {there} is one, found None")
    if k is not None and given.k_scale_cache is not None:
        expected = "None where k_scale_cache is given: append_kv finds the scales of new tokens"
        raise common.refuse(_OP, "k", expected, k)
    if k is not None:
        shape = (batch_size, seqlen_q, num_kv_heads, head_dim)
        common.check_like(_OP, "k", k, shape, q)
        common.check_like(_OP, "v", v, shape, q)
        for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            common.check_output(_OP, argument, cache)
    check_rotation(_OP, cos, sin, interleaved, rotary_dim, head_dim, q)
    if qkv_bias is not None:
        size = (num_heads + 2 * num_kv_heads) * head_dim
        common.check_like(_OP, "qkv_bias", qkv_bias, (size,), q)
    check_alibi(_OP, alibi_slopes, q, batch_size)
    check_sinks(_OP, sinks, q)
    _check_mask(tree_mask, q)
    common.check_window(_OP, (window_left, window_right))
    common.check_number(_OP, "softmax_scale", softmax_scale)
    common.check_number(_OP, "softcap", softcap, least=0.0)
    common.check_count(_OP, "num_splits", num_splits)
    common.check_written(_OP, "out", out, q.shape, q)


def _check_mask(tree_mask: Any, q: torch.Tensor) -> None:
    if tree_mask is None:
        return
    common.check_tensor(_OP, "tree_mask", tree_mask)
    batch_size, seqlen_q = q.shape[:2]
    if tuple(tree_mask.shape) not in ((seqlen_q,), (batch_size, seqlen_q)):
        expected = f"shape ({seqlen_q},) or ({batch_size}, {seqlen_q})"
        raise common.refuse(_OP, "tree_mask", expected, tree_mask)
    words = (torch.int32, torch.int64)
    common.check_like(_OP, "tree_mask", tree_mask, tree_mask.shape, q, dtypes=words)


def _check_caches(given: DecodeGiven) -> None:
    q, k_cache, v_cache, block_table = given.q, given.k_cache, given.v_cache, given.block_table
    batch_size, _, num_heads, head_dim = q.shape
    common.check_tensor(_OP, "k_cache", k_cache)
    if k_cache.dim() != 4:
        first = "batch_size, max_seqlen" if block_table is None else "num_pages, page_size"
        expected = f"shape ({first}, num_kv_heads, head_dim)"
        raise common.refuse(_OP, "k_cache", expected, k_cache)
    pages, page_size, num_kv_heads, _ = k_cache.shape
    if block_table is None:
        pages = batch_size
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        expected = f"num_kv_heads that divides num_heads = {num_heads}"
        raise common.refuse(_OP, "k_cache", expected, k_cache)
    shape = (pages, page_size, num_kv_heads, head_dim)
    dtypes = (q.dtype,) if q.dtype == torch.float32 else (q.dtype, *BYTES)
    common.check_like(_OP, "k_cache", k_cache, shape, q, dtypes=dtypes)
    common.check_like(_OP, "v_cache", v_cache, shape, q, dtypes=(k_cache.dtype,))
    if head_dim * k_cache.element_size() % common.VEC_BYTES:
        raise common.refuse(_OP, "k_cache", "head_dim a multiple of 16 for e4m3 and int8", k_cache)
    for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_aligned(_OP, argument, cache)
    if block_table is not None:
        check_block_table(_OP, block_table, batch_size, q)
        if not 1 <= page_size <= 256:
            raise common.refuse(_OP, "k_cache", "a page_size of 1 to 256 tokens", k_cache)
        page_size *= block_table.shape[1]
    if page_size > _MAX_TOKENS:
        raise common.refuse(_OP, "k_cache", f"at most {_MAX_TOKENS} tokens a sequence", page_size)
    check_cache_scales(
        _OP, k_cache, given.k_scale, given.v_scale, q, given.k_scale_cache, given.v_scale_cache
    )


def check_values(given: DecodeGiven, *, is_strict: bool = True) -> None:
    """Lengths that fit the cache, and pages that exist; below 0 is a finished row.

    is_strict: new tokens past the end (dropped) are refused too.
    """
    num_new = 0 if given.k is None else given.q.shape[1]
    check_held(
        _OP, given.k_cache, given.cache_seqlens, given.block_table, num_new, is_strict=is_strict
    )
