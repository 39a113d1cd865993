"""What the ops compute, written plainly in torch, in any precision.

Each takes the op's inputs and `dtype`, the precision to compute in: fp64 gives the truth, the
tensor's own dtype the budget of `compare`. Written apart from the ops' own CPU paths on purpose.
"""

from __future__ import annotations

import itertools

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, adds_after: bool = False, weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # fmt: skip
    """s / sqrt(mean(s**2) + eps) * (weight + weight_offset) + bias, s = x + residual; with
    adds_after s = x, and the residual is added to that. Not quantised."""
    if residual is not None and not adds_after:
        x = x + residual
    s = x.to(dtype)
    mean = torch.sum(s * s, dim=-1, keepdim=True) / s.shape[-1]
    normed = s / torch.sqrt(mean + eps) * (weight.to(dtype) + weight_offset)
    normed = normed if bias is None else normed + bias.to(dtype)
    return normed + residual.to(dtype) if adds_after and residual is not None else normed


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, *, residual: torch.Tensor | None = None, adds_after: bool = False,
    weight_offset: float = 0.0, dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # fmt: skip
    """(s - mean) / sqrt(variance + eps) * (weight + weight_offset) + bias, s = x + residual; with
    adds_after s = x, and the residual is added to that. Not quantised."""
    if residual is not None and not adds_after:
        x = x + residual
    s = x.to(dtype)
    size = s.shape[-1]
    s = s - torch.sum(s, dim=-1, keepdim=True) / size
    normed = s / torch.sqrt(torch.sum(s * s, dim=-1, keepdim=True) / size + eps)
    scale = weight_offset + (1.0 if weight is None else weight.to(dtype))
    normed = normed * scale + (0.0 if bias is None else bias.to(dtype))
    return normed + residual.to(dtype) if adds_after and residual is not None else normed


def silu_and_mul(x: torch.Tensor, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """silu(gate) * up, gate and up the halves of the last dimension."""
    size = x.shape[-1] // 2
    gate, up = x[..., :size].to(dtype), x[..., size:].to(dtype)
    return gate * torch.sigmoid(gate) * up


def gelu(
    x: torch.Tensor, *, approximate: str = "none", dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """By erf, or by tanh."""
    return torch.nn.functional.gelu(x.to(dtype), approximate=approximate)


def relu_squared(x: torch.Tensor, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """max(x, 0)**2."""
    return torch.relu(x.to(dtype)).square()


def softmax(
    x: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0, *, is_log: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # fmt: skip
    """Of the last dimension, or its logarithm; a mask is truth or added."""
    s = x.to(dtype) * scale
    if mask is not None:
        is_truth = mask.dtype == torch.bool
        s = s.masked_fill(~mask, -torch.inf) if is_truth else s + mask.to(dtype)
    return (torch.log_softmax if is_log else torch.softmax)(s, -1)


def gelu_and_mul(
    x: torch.Tensor, *, approximate: str = "none", dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """gelu(gate) * up, gate and up the halves of the last dimension."""
    size = x.shape[-1] // 2
    gate, up = x[..., :size].to(dtype), x[..., size:].to(dtype)
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def swigluoai_and_mul(
    x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0, *, interleaved: bool = True,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # fmt: skip
    """(up + 1) * gate * sigmoid(alpha * gate), gate and up clamped, in turns or halves."""
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    gate, up = gate.to(dtype).clamp(max=limit), up.to(dtype).clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


def gated_linear(
    a: torch.Tensor, weight: torch.Tensor, activation: str = "silu", *, alpha: float = 1.702,
    limit: float = 7.0, interleaved: bool = False, dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # fmt: skip
    """The two products, each step rounded to `dtype`, and what joins them."""
    halves = (weight[::2], weight[1::2]) if interleaved else weight.chunk(2)
    both = torch.cat([a.to(dtype) @ half.to(dtype).T for half in halves], -1)
    if activation == "silu":
        return silu_and_mul(both, dtype=dtype)
    if activation == "swigluoai":
        return swigluoai_and_mul(both, alpha, limit, interleaved=False, dtype=dtype)
    form = "tanh" if activation == "gelu_tanh" else "none"
    return gelu_and_mul(both, approximate=form, dtype=dtype)


def quantize_e4m3(
    x: torch.Tensor, per: str = "row", *, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x, the largest magnitude of what shares its scale), for each element; nothing is rounded."""
    x = x.to(dtype)
    largest = x.abs()
    if per == "tensor":
        largest = largest.amax().expand(x.shape)
    elif per == "row":
        largest = largest.amax(-1, keepdim=True).expand(x.shape)
    else:
        for axis in (-1, -2) if per == "128x128" else (-1,):
            parts = largest.split(128, axis)
            spread = [part.amax(axis, keepdim=True).expand_as(part) for part in parts]
            largest = torch.cat(spread, axis)
    return x, largest


def rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None = None, *,
    interleaved: bool = False, dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # fmt: skip
    """The rotation of q or k (..., seqlen, num_heads, head_dim), by complex numbers."""
    seqlen, half = x.shape[-3], cos.shape[-1]
    rows = torch.arange(seqlen, device=x.device) if positions is None else positions.long()
    c = cos.to(dtype)[rows].unsqueeze(-2)
    s = sin.to(dtype)[rows].unsqueeze(-2)
    rotated, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :].to(dtype)
    if interleaved:
        real, imaginary = rotated.unflatten(-1, (half, 2)).unbind(-1)
    else:
        real, imaginary = rotated.unflatten(-1, (2, half)).unbind(-2)
    turned = (real * c - imaginary * s, imaginary * c + real * s)
    dim = -1 if interleaved else -2
    return torch.cat((torch.stack(turned, dim).flatten(-2), rest), -1)


def append_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
    cache_seqlens: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    cos: torch.Tensor | None = None, sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None, interleaved: bool = False,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None, eps: float = 1e-6, weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor, list[int], list[tuple[int, int] | None]]:  # fmt: skip
    """Both caches after the append in `dtype`, each token's position, and its page and row."""
    new_k, new_v = (cache.to(dtype) for cache in (k_cache, v_cache))
    num_tokens, (num_pages, page_size) = k.shape[:-2].numel(), k_cache.shape[:2]
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
    else:
        seqlen = k.shape[1] if k.dim() == 4 else num_tokens
        starts = list(range(0, num_tokens + 1, max(1, seqlen)))
    at: list[int] = [0] * num_tokens
    places: list[tuple[int, int] | None] = [None] * num_tokens
    for b, (start, end) in enumerate(itertools.pairwise(starts)):
        past = 0 if cache_seqlens is None else int(cache_seqlens[b])
        for token in range(start, end if past >= 0 else start):
            n = past + token - start
            at[token] = n if positions is None else int(positions.flatten()[token])
            if slot_mapping is not None:
                slot = int(slot_mapping.flatten()[token])
                page, row = divmod(slot, page_size) if slot >= 0 else (-1, 0)
            elif block_table is not None:
                column, row = divmod(n, page_size)
                inside = 0 <= column < block_table.shape[1]
                page = int(block_table[b, column]) if inside else -1
            else:
                page, row = b, n
            if 0 <= page < num_pages and 0 <= row < page_size:
                places[token] = (page, row)
    keys, values = (x.reshape(num_tokens, *x.shape[-2:]) for x in (k, v))
    if k_norm_weight is not None:
        keys = rms_norm(keys, k_norm_weight, eps, weight_offset=weight_offset, dtype=dtype)
    if cos is not None and sin is not None:
        rows = torch.tensor(at, device=k.device)
        keys = rope(keys, cos, sin, rows, interleaved=interleaved, dtype=dtype)
    for cache, x, scale in ((new_k, keys, k_scale), (new_v, values, v_scale)):
        x = x.to(dtype)
        if k_cache.dtype == torch.float8_e4m3fn:
            x = (x if scale is None else x / scale.to(dtype)[:, None]).clamp(-448, 448)
        for token, place in enumerate(places):
            if place is not None:
                cache[place] = x[token]
    return new_k, new_v, at, places


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, *,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) of both key sets; what a side with lse = -inf holds counts nothing."""
    wide = torch.promote_types(dtype, torch.float32)
    a, b = lse_a.to(wide), lse_b.to(wide)
    lse = torch.logaddexp(a, b)
    out = torch.zeros(out_a.shape, dtype=dtype, device=out_a.device)
    for state, own in ((out_a, a), (out_b, b)):
        weight = (own - lse).exp().nan_to_num(0.0).transpose(-1, -2)[..., None].to(dtype)
        out += torch.where(weight == 0, 0.0, weight * state.to(dtype))
    return out, lse


def verify_draft(
    draft_ids: list[int], target_logits: torch.Tensor, draft_probs: torch.Tensor | None = None, *,
    temperature: float = 1.0,
) -> list[torch.Tensor]:  # fmt: skip
    """Of one row, (num_drafts + 1, vocab_size): by how many drafts are kept, the probability of
    that and each token after them together; in fp64. All of them sum to 1."""
    reached, found = 1.0, []
    for j, row in enumerate(target_logits.double()):
        p = (row / temperature).softmax(-1)
        if j == len(draft_ids):
            found.append(reached * p)
            break
        draft = draft_ids[j]
        q = torch.zeros_like(p) if draft_probs is None else draft_probs[j].double()
        if draft_probs is None:
            q[draft] = 1.0
        kept = min(1.0, float(p[draft] / q[draft])) if q[draft] > 0 else 1.0
        rest = (p - q).clamp(min=0)
        found.append(reached * (1 - kept) * rest / rest.sum().clamp(min=1e-300))
        reached *= kept
    return found


def sample(
    logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0,
    min_p: float = 0.0, softcap: float = 0.0, dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # fmt: skip
    """The probabilities with which the tokens of one row, (vocab_size,), are drawn; 0 of what is
    not kept. Two logits are equal where they were before anything was computed of them."""
    z = logits.to(dtype)
    if softcap:
        z = softcap * (z / softcap).tanh()
    p = (z / temperature).softmax(-1)
    kept = p >= min_p * p.max()
    values = logits.masked_fill(~kept, -torch.inf).sort(descending=True).values
    if 0 < top_k < len(logits):
        kept &= logits >= values[top_k - 1]
    if top_p < 1:
        p = torch.where(kept, p, 0)
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        fewest = order[before < max(top_p, 1e-300) * p.sum()]
        kept &= logits >= logits[fewest].min()
    p = torch.where(kept, p, 0)
    return p / p.sum()
