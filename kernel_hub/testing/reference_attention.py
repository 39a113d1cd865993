"""What the attention ops compute, written plainly in torch, in any precision, sequence by sequence.

fp64 gives the truth, the tensor's own dtype the budget of `compare`. The whole matrix of scores of
a sequence is there at once; autograd works through it. Written apart from the ops' own CPU paths.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch


def reference_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False,
    softmax_scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    block_table: torch.Tensor | None = None, cache_seqlens: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, layout: str = "bshd", dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out in `dtype`, lse in at least fp32), the arguments being those of `flash_attention`.

    v, and with it out, may have a head_dim of its own. max_seqlen_q and max_seqlen_k are not needed
    here. Rows of q, k and v outside every sequence are
    not read, and their rows of out are nan: no one may ask for them.
    """
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) if x.dim() == 4 else x for x in (q, k, v))
    num_heads, head_dim = q.shape[-2:]
    head_dim_v = v.shape[-1]
    group = num_heads // k.shape[-2]
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    left, right = window_size
    right = 0 if causal else right
    queries = _sequences(q, cu_seqlens_q)
    if block_table is not None:
        keys, values = _paged(k, block_table), _paged(v, block_table)
    else:
        keys, values = _sequences(k, cu_seqlens_k), _sequences(v, cu_seqlens_k)
    if cache_seqlens is not None:
        lengths = cache_seqlens.tolist()
        keys = [x[:length] for x, length in zip(keys, lengths, strict=True)]
        values = [x[:length] for x, length in zip(values, lengths, strict=True)]
    outs, lses = [], []
    for index, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
        slopes = None
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[index]
        out, lse = _one_sequence(
            query.to(dtype), key.to(dtype), value.to(dtype), group, scale, left, right, softcap,
            slopes, sinks,
        )  # fmt: skip
        outs.append(out)
        lses.append(lse)
    kind = torch.promote_types(dtype, torch.float32)
    if cu_seqlens_q is not None:
        bounds = cu_seqlens_q.tolist()
        missing = q.shape[0] - bounds[-1]
        outs.append(q.new_full((missing, num_heads, head_dim_v), math.nan, dtype=dtype))
        lses.append(q.new_full((num_heads, missing), math.nan, dtype=kind))
        return torch.cat(outs), torch.cat(lses, 1)
    if not outs:
        empty = q.new_zeros((*q.shape[:-1], head_dim_v), dtype=dtype)
        return (
            empty.transpose(1, 2) if layout == "bhsd" else empty,
            q.new_zeros((0, num_heads, q.shape[1]), dtype=kind),
        )
    out, lse = torch.stack(outs), torch.stack(lses)
    return (out.transpose(1, 2) if layout == "bhsd" else out), lse


def reference_attention_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, *,
    dtype: torch.dtype = torch.float64, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) in `dtype` for the gradient `dout` of out, by autograd; 0 outside sequences."""
    inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        out, _ = reference_attention(*inputs, **options, dtype=dtype)
        dout = dout.to(dtype)
        if options.get("cu_seqlens_q") is not None:
            total = int(options["cu_seqlens_q"][-1])
            out, dout = out[:total], dout[:total]
        grads = torch.autograd.grad(out, inputs, dout, allow_unused=True)
    dq, dk, dv = (
        torch.zeros_like(x) if grad is None else grad for x, grad in zip(inputs, grads, strict=True)
    )
    return dq, dk, dv


def reference_mla_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, *, cache_seqlens: torch.Tensor, softmax_scale: float,
    block_table: torch.Tensor | None = None, dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out in `dtype`, lse), the arguments being those of `mla_decode`."""
    pages = kv_cache.flatten(2)  # where it has a dimension of one head
    caches = list(pages.unbind(0)) if block_table is None else _paged(pages, block_table)
    kind, outs, lses = torch.promote_types(dtype, torch.float32), [], []
    for query, cache, length in zip(q, caches, cache_seqlens.tolist(), strict=True):
        keys = cache[: max(length, 0)].to(dtype)
        scores = (query.to(dtype) * softmax_scale).transpose(0, 1) @ keys.T
        places = torch.arange(len(keys), device=q.device)
        last = torch.arange(query.shape[0], device=q.device)[:, None] + len(keys) - query.shape[0]
        scores = scores.masked_fill(places > last, -math.inf)
        highest = scores.new_zeros(scores.shape[:-1]) if not len(keys) else scores.amax(-1)
        highest = highest.masked_fill(highest == -math.inf, 0.0)
        weights = torch.exp(scores - highest[..., None])
        total = weights.sum(-1)
        safe = total.masked_fill(total == 0, 1.0)
        outs.append(((weights / safe[..., None]) @ keys[:, :512]).transpose(0, 1))
        lses.append(highest.to(kind) + torch.log(total.to(kind)))
    return torch.stack(outs), torch.stack(lses)


def options_of(problem: Any) -> dict[str, Any]:
    """The keyword arguments of the references that say what a `ops.attention.problem.Problem` says
    beside q, k and v."""
    return {
        "softmax_scale": problem.softmax_scale,
        "window_size": (problem.window_left, problem.window_right),
        "softcap": problem.softcap,
        "alibi_slopes": problem.alibi_slopes,
        "cu_seqlens_q": problem.cu_seqlens_q,
        "cu_seqlens_k": problem.cu_seqlens_k,
        "cache_seqlens": problem.cache_seqlens,
        "block_table": problem.block_table,
        "sinks": problem.sinks,
    }


def reference_of(
    problem: Any, *, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of a `Problem`."""
    return reference_attention(problem.q, problem.k, problem.v, **options_of(problem), dtype=dtype)


def reference_backward_of(
    problem: Any, dout: torch.Tensor, *, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of a `Problem`."""
    options = options_of(problem)
    return reference_attention_backward(
        problem.q, problem.k, problem.v, dout, **options, dtype=dtype
    )


def _sequences(x: torch.Tensor, bounds: torch.Tensor | None) -> list[torch.Tensor]:
    """Each sequence's (seqlen, heads, head_dim)."""
    if bounds is None:
        return list(x.unbind(0))
    starts = bounds.tolist()
    return [x[start:end] for start, end in itertools.pairwise(starts)]


def _paged(pages: torch.Tensor, block_table: torch.Tensor) -> list[torch.Tensor]:
    """The same out of pages (num_pages, page_size, heads, head_dim); entries beyond the pages may
    be anything where no length reaches them, so they are clamped."""
    inside = block_table.long().clamp(0, max(0, pages.shape[0] - 1))
    if pages.shape[0] == 0:
        return [pages.flatten(0, 1) for _ in inside]
    return [pages[row].flatten(0, 1) for row in inside]


def _one_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: int, scale: float, left: int,
    right: int, softcap: float, slopes: torch.Tensor | None, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out (seqlen_q, num_heads, head_dim), lse (num_heads, seqlen_q)), in the dtype of q."""
    (seqlen_q, num_heads, head_dim), (seqlen_k, num_kv_heads, _) = q.shape, k.shape
    kind = torch.promote_types(q.dtype, torch.float32)
    # The heads that share keys in one product: a copy of them for each head would be gigabytes.
    shared = (num_kv_heads, group * seqlen_q)
    values = v.transpose(0, 1)
    scores = (q * scale).transpose(0, 1).reshape(*shared, head_dim) @ k.permute(1, 2, 0)
    scores = scores.view(num_heads, seqlen_q, seqlen_k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    # The key that stands at the place of query i: the last query stands at the last key.
    at = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_k - seqlen_q)
    distance = torch.arange(seqlen_k, device=q.device) - at
    if slopes is not None:
        scores = scores - slopes.to(q.dtype)[:, None, None] * distance.abs().to(q.dtype)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:  # as gpt-oss has it: one more key, of no value
        column = sinks.to(q.dtype)[:, None, None].expand(-1, seqlen_q, 1)
        scores = torch.cat((scores, column), -1)
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    elif seqlen_k == 0:
        lse = q.new_full((num_heads, seqlen_q), -math.inf, dtype=kind)
        nothing = (q[..., :1] * 0.0).nan_to_num(0.0)
        return nothing.expand(-1, -1, v.shape[-1]), lse
    highest = scores.detach().amax(-1, keepdim=True)
    highest = highest.masked_fill(highest == -math.inf, 0.0)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    nothing = total == 0
    safe = total.masked_fill(nothing, 1.0)
    out = (weights / safe).view(*shared, weights.shape[-1]) @ values
    out = out.view(num_heads, seqlen_q, v.shape[-1])
    lse = (highest.to(kind) + torch.log(safe.to(kind))).masked_fill(nothing, -math.inf)
    return out.transpose(0, 1), lse.squeeze(-1)
