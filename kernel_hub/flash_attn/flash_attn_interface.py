"""flash-attn 2.8's functions: its names, positional orders and defaults, on kernel_hub's ops.

Formula, dtypes and strides are those of `kernel_hub.ops.flash_attention`; a head_dim that is not a
multiple of 8, or below 16, is padded. In all of them:

dropout_p: 0.0. softmax_scale: None is 1 / sqrt(head_dim). causal: aligned to the last key.
window_size: (left, right), -1 is no bound. softcap: 0 and less is none.
alibi_slopes: (num_heads,) or (batch_size, num_heads), fp32.
deterministic: of the backward. return_attn_probs: also return lse, (batch_size, num_heads, seqlen)
    or (num_heads, total), fp32, natural, and an empty tensor, as theirs is without dropout.

Raises TensorError naming the argument that does not fit, or that no kernel here knows.
"""

from __future__ import annotations

from typing import Any

import torch

from . import mapping

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _returned(made: tuple[torch.Tensor, torch.Tensor], return_attn_probs: bool) -> Any:
    out, lse = made
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of (batch_size, seqlen, 3, num_heads, head_dim) to itself.

    Returns out, (batch_size, seqlen, num_heads, head_dim).
    """
    op = "flash_attn_qkvpacked_func"
    mapping.check_lacking(op, dropout_p=dropout_p)
    options = mapping.scores(
        qkv, softmax_scale, softcap, window_size, causal=causal,
        alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    return _returned(mapping.attend_packed(op, qkv, options), return_attn_probs)


def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """As `flash_attn_func`, with kv (batch_size, seqlen_k, 2, num_kv_heads, head_dim)."""
    k, v = mapping.halves("flash_attn_kvpacked_func", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of q (batch_size, seqlen_q, num_heads, head_dim) over k and v.

    k, v: (batch_size, seqlen_k, num_kv_heads, head_dim). Returns out, like q.
    """
    op = "flash_attn_func"
    mapping.check_lacking(op, dropout_p=dropout_p)
    mapping.check_one_head_dim(op, q, v)
    options = mapping.scores(
        q, softmax_scale, softcap, window_size, causal=causal,
        alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    return _returned(mapping.attend(op, q, k, v, options), return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of ragged (total, 3, num_heads, head_dim) to itself.

    cu_seqlens: (batch_size + 1,) int32, where each sequence starts. max_seqlen: the longest.
    """
    op = "flash_attn_varlen_qkvpacked_func"
    mapping.check_lacking(op, dropout_p=dropout_p)
    mapping.check_tensors(op, cu_seqlens=cu_seqlens)
    options = mapping.scores(
        qkv, softmax_scale, softcap, window_size, causal=causal,
        alibi_slopes=alibi_slopes, deterministic=deterministic, cu_seqlens=cu_seqlens,
        max_seqlen=mapping.length(max_seqlen),
    )  # fmt: skip
    return _returned(mapping.attend_packed(op, qkv, options), return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """As `flash_attn_varlen_func`, with kv (total_k, 2, num_kv_heads, head_dim)."""
    k, v = mapping.halves("flash_attn_varlen_kvpacked_func", kv, 1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of ragged q (total_q, num_heads, head_dim) over ragged k and v.

    k, v: (total_k, num_kv_heads, head_dim), or pages (num_pages, page_size, num_kv_heads, head_dim)
        with block_table (no backward then).
    cu_seqlens_q, cu_seqlens_k: (batch_size + 1,) int32, where each sequence starts; with
        block_table their differences are the lengths. max_seqlen_q, max_seqlen_k: the longest.
    block_table: (batch_size, max_pages) int32. Pages of 1 to 256 tokens, and larger ones that lie
        one behind the other, are read in place; others are copied first.
    """
    op = "flash_attn_varlen_func"
    mapping.check_lacking(op, dropout_p=dropout_p)
    mapping.check_one_head_dim(op, q, v)
    mapping.check_tensors(op, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    options = mapping.scores(
        q, softmax_scale, softcap, window_size, causal=causal,
        alibi_slopes=alibi_slopes, deterministic=deterministic, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=mapping.length(max_seqlen_q),
        max_seqlen_k=mapping.length(max_seqlen_k),
    )  # fmt: skip
    return _returned(mapping.attend(op, q, k, v, options, block_table), return_attn_probs)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
    v: torch.Tensor | None = None, rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None, cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: torch.Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention over a cache that k and v are written to first, rotated, where they are given.

    q: (batch_size, seqlen_q, num_heads, head_dim).
    k_cache, v_cache: (batch_size_cache, seqlen_cache, num_kv_heads, head_dim), or with block_table
        (num_pages, page_size, num_kv_heads, head_dim); written in place.
    k, v: (batch_size, seqlen_new, num_kv_heads, head_dim), written behind cache_seqlens.
    rotary_cos, rotary_sin: (max_position, rotary_dim / 2), where there is a new k: k is rotated at
        cache_seqlens, cache_seqlens + 1, …, and so is q where causal or a window tells its tokens
        apart; else all of q at cache_seqlens.
    cache_seqlens: how many tokens a cache has; a number, or (batch_size,) int32. None is all.
    cache_batch_idx: (batch_size,) int32: the row of the cache of each sequence.
    block_table: (batch_size, max_pages) int32; see `flash_attn_varlen_func`.
    num_splits: into how many parts a cache is cut for steps of up to 16 tokens; 0 chooses.
    return_softmax_lse: also return lse, (batch_size, num_heads, seqlen_q).

    cache_leftpad must be None. Pads and copies the whole cache where head_dim is no multiple of 8.
    No backward: refuses tensors that require grad. Returns out, or (out, lse).
    """
    op = "flash_attn_with_kvcache"
    mapping.check_lacking(op, cache_leftpad=cache_leftpad)
    mapping.check_one_head_dim(op, q, v_cache, "v_cache")
    options = mapping.scores(
        q, softmax_scale, softcap, window_size, causal=causal,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip
    made = mapping.attend_cached(
        op, q, k_cache, v_cache, k, v, (rotary_cos, rotary_sin, rotary_interleaved), cache_seqlens,
        cache_batch_idx, block_table, options, num_splits,
    )  # fmt: skip
    return made if return_softmax_lse else made[0]
