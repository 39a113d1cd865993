"""What the ops of a mixture of experts compute, written plainly in torch, token by token.

`dtype` is the precision to compute in. Written apart from the ops' own CPU paths on purpose.
"""

from __future__ import annotations

import math

import torch


def moe_route(
    logits: torch.Tensor, k: int, *, scoring: str = "softmax", renormalise: bool = False,
    bias: torch.Tensor | None = None, num_groups: int = 1, top_groups: int = 1, scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(weights, experts), the experts chosen in fp64 whatever the dtype."""
    largest = torch.finfo(torch.float32).max
    x = logits.double().nan_to_num(-largest, largest, -largest)
    scores = x.sigmoid() if scoring == "sigmoid" else x.softmax(-1)
    choices = (x if bias is None else scores + bias.double()).nan_to_num(
        -math.inf, math.inf, -math.inf
    )
    num_experts = logits.shape[1]
    size = num_experts // num_groups
    rows = []
    for own in choices.tolist():
        groups = [sorted(own[g * size : (g + 1) * size], reverse=True) for g in range(num_groups)]
        sums = [each[0] if bias is None else sum(each[:2]) for each in groups]
        worth = [-math.inf if math.isnan(each) else each for each in sums]
        kept = sorted(range(num_groups), key=lambda g, w=worth: (-w[g], g))[:top_groups]  # type: ignore[misc]
        allowed = [e for e in range(num_experts) if e // size in kept]
        rows.append(sorted(allowed, key=lambda e, c=own: (-c[e], e))[:k])  # type: ignore[misc]
    experts = torch.tensor(rows, dtype=torch.long, device=logits.device).view(-1, k)
    x = x.to(dtype)
    weights = (x.sigmoid() if scoring == "sigmoid" else x.softmax(-1)).gather(-1, experts)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts.int()


def moe_permute(
    x: torch.Tensor, experts: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, offsets, row_id_map); as many rows as slots have an expert."""
    k = experts.shape[1]
    slots = list(enumerate(experts.flatten().tolist()))
    order = [slot for e in range(num_experts) for slot, expert in slots if expert == e]
    counts = [sum(expert == e for _, expert in slots) for e in range(num_experts)]
    offsets = torch.tensor([sum(counts[:e]) for e in range(num_experts + 1)], dtype=torch.int32)
    row_id_map = torch.full((len(slots),), -1, dtype=torch.int32)
    row_id_map[order] = torch.arange(len(order), dtype=torch.int32)
    rows = x[[slot // k for slot in order]]
    return rows, offsets.to(x.device), row_id_map.view(experts.shape).to(x.device)


def moe_combine(
    rows: torch.Tensor, row_id_map: torch.Tensor, weights: torch.Tensor, *,
    residual: torch.Tensor | None = None, dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # fmt: skip
    """The weighted sum of each token's rows, and the residual."""
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).to(dtype)
    is_there = (row_id_map >= 0) & (row_id_map < len(rows))
    found = padded[torch.where(is_there, row_id_map, len(rows)).long()]
    out = (found * torch.where(is_there, weights, 0.0)[..., None].to(dtype)).sum(1)
    return out if residual is None else out + residual.to(dtype)
