"""transformers' attention "kernel_hub": what it calls where its own SDPA would run."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import TensorError
from ...ops import decode_attention, flash_attention
from . import counts
from .masks import Seen, decode, dense, is_encoded

NAME = "kernel_hub"
DTYPES = (torch.float16, torch.bfloat16)
# What decode_attention takes at once; more tokens are a prompt.
MOST_NEW_TOKENS = 16


def refused_head(dtype: torch.dtype, head_dim: int) -> str | None:
    """Why attention of such heads is not ours, in words; None: it is."""
    if dtype not in DTYPES:
        return f"dtype {str(dtype).removeprefix('torch.')}: float16 or bfloat16 are taken"
    if not 16 <= head_dim <= 256 or head_dim % 8:
        return f"head_dim {head_dim}: 16 to 256 in multiples of 8 are taken"
    return None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    cache: Any = None,
    position_bias: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    query: (batch_size, num_heads, seqlen_q, head_dim); key, value: (batch_size, num_kv_heads,
        seqlen_k, head_dim), with the tokens of the cache; values may have a head_dim of their own.
    attention_mask: what `masks.lengths_mask` made, with lengths, left pads and the window (what
        sliding_window says is in it); a dense mask, bool or added to scores; None: causal where
        `is_causal`, or module.is_causal, says so.

    s_aux: sinks, (num_heads,), as gpt-oss has them.

    Returns (out, None), out (batch_size, seqlen_q, num_heads, head_dim of values). What the kernels
    lack (dropout, dense masks, fp32, head_dim beyond 256, a bias of scores, gradients of sinks)
    runs by torch, and `report()` counts it. Raises TensorError for paged caches.
    """
    if cache is not None:
        raise TensorError(
            f"attention of {type(module).__name__}: cache: expected None, found "
            f"{type(cache).__name__}: continuous batching is not taken by this door"
        )
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    seen = (
        decode(attention_mask)
        if attention_mask is not None and is_encoded(attention_mask)
        else None
    )
    if attention_mask is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        seen = Seen(bool(is_causal) and seqlen_q > 1, 0, None, None)
        if seen.is_causal and seqlen_k > seqlen_q:
            # Without a mask these are keys of a static cache that are not there yet.
            key, value, seqlen_k = key[:, :, :seqlen_q], value[:, :, :seqlen_q], seqlen_q
    reason = refused_head(query.dtype, query.shape[-1])
    reason = reason or refused_head(value.dtype, value.shape[-1])
    if seen is None:
        reason = "a mask that is no lengths and left pads"
    elif dropout:
        reason = "dropout"
    elif position_bias is not None:
        reason = "position_bias"
    elif s_aux is not None and s_aux.requires_grad and torch.is_grad_enabled():
        reason = "sinks that require grad"
    if reason is not None or seen is None:
        counts.passed("attention", str(reason))
        mask = attention_mask
        if seen is not None:
            is_plain = not seen.window and seen.starts is seen.ends is None
            mask = None
            if not is_plain or (seen.is_causal and seqlen_q != seqlen_k):
                mask = dense(seen, query.shape[0], seqlen_q, seqlen_k, query.device)
        causal = seen is not None and seen.is_causal and mask is None
        out = _by_torch(
            query, key, value, mask, causal, dropout, scaling, softcap, position_bias, s_aux
        )
    else:
        out = _ours(query, key, value, seen, scaling, softcap or 0.0, s_aux)
    return out, None


def _ours(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: Seen,
    scaling: float | None, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    seqlen_q = query.shape[2]
    needs_grad = torch.is_grad_enabled() and (
        query.requires_grad or key.requires_grad or value.requires_grad
    )
    left, right = (seen.window - 1, 0) if seen.is_causal else (seen.window, seen.window)
    if not seen.window:
        left = right = -1
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    if (
        seen.is_causal
        and seen.ends is not None
        and seen.starts is None
        and seqlen_q <= MOST_NEW_TOKENS
        and key.shape[-1] == value.shape[-1]
        and not needs_grad
    ):
        counts.took("decode_attention")
        return decode_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
            cache_seqlens=seen.ends, softmax_scale=scaling, window_size=(left, -1),
            softcap=softcap, sinks=sinks,
        )  # fmt: skip
    counts.took("flash_attention")
    options: dict[str, Any] = {
        "causal": seen.is_causal, "softmax_scale": scaling, "window_size": (left, right),
        "softcap": softcap, "sinks": sinks,
    }  # fmt: skip
    if seen.starts is not None:
        return _left_padded(query, key, value, seen, needs_grad, options)
    out = flash_attention(query, key, value, layout="bhsd", cache_seqlens=seen.ends, **options)
    return out.transpose(1, 2)


def _left_padded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: Seen, needs_grad: bool,
    options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Keys from `starts` on, where they lie: sequences of tokens, and between them gaps that have
    keys and no queries. Queries of pads come before the first key, and see none."""
    batch_size, num_heads, seqlen_q, head_dim = query.shape
    seqlen_k = key.shape[2]
    if needs_grad:
        step = seqlen_k
        rows = [x.transpose(1, 2).reshape(-1, *x.shape[1::2]) for x in (key, value)]
    else:
        steps = {_rows_apart(x) for x in (key, value)}
        if len(steps) > 1 or None in steps:
            key, value = key.contiguous(), value.contiguous()
        step = _rows_apart(key) or 0
        rows = [_as_rows(x, step) for x in (key, value)]
    assert seen.starts is not None and seen.ends is not None
    first = torch.arange(batch_size, dtype=torch.int32, device=key.device)[:, None]
    bounds = torch.stack((seen.starts, seen.ends), -1)
    cu_seqlens_k = (bounds + first * step).flatten()
    cu_seqlens_q = torch.cat((first, first + 1), -1).flatten() * seqlen_q
    out = flash_attention(
        query.transpose(1, 2).reshape(batch_size * seqlen_q, num_heads, head_dim), *rows,
        cu_seqlens_q=cu_seqlens_q.int(), cu_seqlens_k=cu_seqlens_k.int(), max_seqlen_q=seqlen_q,
        # NOTE: a gap is longer, but has no query.
        max_seqlen_k=seqlen_k, **options,
    )  # fmt: skip
    return out.view(batch_size, seqlen_q, *out.shape[1:])


def _rows_apart(x: torch.Tensor) -> int | None:
    """How many tokens' places lie between two sequences of (batch_size, heads, tokens, head_dim);
    None where that is no whole number, or tokens share places."""
    batch_stride, _, token_stride, _ = x.stride()
    if x.shape[0] == 1:
        return x.shape[2]
    if token_stride == 0 or batch_stride % token_stride or batch_stride < x.shape[2] * token_stride:
        return None
    return batch_stride // token_stride


def _as_rows(x: torch.Tensor, step: int) -> torch.Tensor:
    """All that lies between the first token and the last as (rows, heads, head_dim), not copied:
    token t of sequence b is row b * step + t."""
    batch_size, num_kv_heads, seqlen_k, head_dim = x.shape
    rows = (batch_size - 1) * step + seqlen_k
    return x.as_strided((rows, num_kv_heads, head_dim), (x.stride(2), x.stride(1), 1))


def _by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    is_causal: bool, dropout: float, scaling: float | None, softcap: float | None,
    position_bias: torch.Tensor | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The same by torch's own ops. mask: bool, or added to scores; is_causal: where it is None and
    there are as many keys as queries."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if mask is not None:
        mask = mask[..., : key.shape[2]]
    if softcap is None and position_bias is None and sinks is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=is_causal
        )
        return out.transpose(1, 2).contiguous()
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    weights = torch.nn.functional.dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous()
