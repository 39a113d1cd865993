"""decode_attention on the CPU, by torch, in fp32: sequence by sequence."""

from __future__ import annotations

import math

import torch

from ..core.kv_cache import BYTES, to_bytes
from ..core.rotary import rotated
from .decode_plan import DecodeGiven


def decode_attention(given: DecodeGiven) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) in fp32; new tokens are written to the caches."""
    (q, k_cache, v_cache, cache_seqlens, k, v, block_table, cos, sin, qkv_bias, k_scale, v_scale,
     alibi_slopes, sinks, tree_mask, interleaved, rotary_dim, softmax_scale, window_left, softcap,
     *_) = given  # fmt: skip
    batch_size, seqlen_q, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    # Below 0: a finished or padding row, of no tokens, the new ones included.
    is_live = cache_seqlens >= 0
    lengths = torch.where(is_live, cache_seqlens + (0 if k is None else seqlen_q), 0)
    new = torch.arange(seqlen_q, device=q.device)
    places = lengths[:, None] - seqlen_q + new
    # Which of the new tokens each sees: bits of the mask, or those up to its own.
    sees = (new <= new[:, None]).expand(batch_size, -1, -1)
    if tree_mask is not None:
        sees = (tree_mask[..., None] >> new & 1).bool().expand(batch_size, -1, -1)
    # Its own sequence are the cache and those; it comes behind all others of it.
    positions = lengths[:, None] - seqlen_q + (sees.sum(-1) - 1).clamp(min=0)

    bias = torch.zeros((), device=q.device).expand(num_heads + 2 * num_kv_heads, head_dim)
    if qkv_bias is not None:
        bias = qkv_bias.float().view(num_heads + 2 * num_kv_heads, head_dim)
    q_bias, k_bias, v_bias = bias.split([num_heads, num_kv_heads, num_kv_heads])
    turn = (cos, sin, positions, interleaved, rotary_dim)
    # Rounded as the tensor cores take them.
    queries = rotated(q.float() + q_bias, *turn).to(q.dtype).float()
    if k is not None and v is not None and capacity:
        fits = is_live[:, None] & (places < capacity)
        rows = _rows(places.clamp(0, max(capacity - 1, 0)), k_cache, block_table)
        for cache, scale, new in (
            (k_cache, k_scale, rotated(k.float() + k_bias, *turn)),
            (v_cache, v_scale, v.float() + v_bias),
        ):
            if cache.dtype in BYTES:
                new = to_bytes(new, cache.dtype, scale)
            cache[tuple(row[fits] for row in rows)] = new[fits].to(cache.dtype)

    out = torch.zeros(batch_size, seqlen_q, num_heads, head_dim, device=q.device)
    lse = torch.full((batch_size, num_heads, seqlen_q), -math.inf, device=q.device)
    if sinks is not None:
        lse[is_live] = sinks.float()[:, None]
    for index, length in enumerate(lengths.tolist()):
        length = min(length, capacity)
        if length == 0:
            continue
        at = torch.arange(length, device=q.device)
        table = None if block_table is None else block_table[index : index + 1]
        where = _rows(at[None], k_cache, table, index)
        at_tokens = tuple(row[0] for row in where)
        keys, values = (
            cache[at_tokens].float() * (1 if s is None else s[:, None])
            for cache, s in ((k_cache, k_scale), (v_cache, v_scale))
        )
        if given.k_scale_cache is not None:
            keys = keys * given.k_scale_cache[at_tokens][..., None]
            values = values * given.v_scale_cache[at_tokens][..., None]
        keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
        scores = queries[index].transpose(0, 1) @ keys.transpose(1, 2) * softmax_scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        distance, seen = _seen(at, places[index], positions[index], sees[index])
        if alibi_slopes is not None:
            slopes = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[index]
            scores = scores - slopes[:, None, None] * distance
        if window_left >= 0:
            seen = seen & (distance <= window_left)
        scores = scores.masked_fill(~seen, -math.inf)
        lse[index] = torch.logaddexp(lse[index], torch.logsumexp(scores, -1))
        weights = torch.exp(
            scores - lse[index].masked_fill(lse[index] == -math.inf, 0.0)[..., None]
        )
        out[index] = (weights @ values).transpose(0, 1)
    return out, lse


def _seen(
    keys: torch.Tensor, places: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far before each new token the keys lie in its own sequence, and which it sees.

    keys: places in the cache; places, positions: of the new tokens; sees: (new, new).
    """
    seqlen_q = places.shape[0]
    distance = positions[:, None] - keys
    seen = torch.ones_like(distance, dtype=torch.bool)
    new = keys - places[0]
    is_new = (new >= 0) & (new < seqlen_q)
    # Behind a new key come those of the tokens seen that are after it.
    after = sees.flip(-1).cumsum(-1).flip(-1) - sees.long()
    distance[:, is_new], seen[:, is_new] = after[:, new[is_new]], sees[:, new[is_new]]
    return distance, seen


def _rows(
    positions: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor | None,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where tokens at `positions` (sequences, tokens) lie in a cache: its first two indices."""
    if block_table is None:
        batch = torch.arange(first, first + positions.shape[0], device=positions.device)
        return batch[:, None].expand_as(positions), positions
    page_size = cache.shape[1]
    return block_table.long().gather(1, (positions // page_size).long()), positions % page_size
