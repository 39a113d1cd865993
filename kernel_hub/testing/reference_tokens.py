"""What the ops on tokens as rows compute, written plainly in torch, row by row.

`dtype` is the precision to compute in. Written apart from the ops' own CPU paths on purpose.
"""

from __future__ import annotations

import math

import torch


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    scale: float | None = None,
    position_weight: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    first_id: int = 0,
    vocab_size: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Rows by ids, zeros where there is none; nan where a position is none."""
    seqlen = ids.shape[-1] if ids.dim() else 1
    last = first_id + len(weight) if vocab_size is None else vocab_size
    rows = []
    for i, id_ in enumerate(ids.flatten().tolist()):
        if not (0 <= id_ < last and first_id <= id_ < first_id + len(weight)):
            rows.append(weight.new_zeros((1, weight.shape[1]), dtype=dtype))
            continue
        row = weight[None, id_ - first_id].to(dtype)
        if scale is not None:
            row = row * torch.tensor(scale, dtype=torch.float32).to(dtype)
        if position_weight is not None:
            at = (
                i % seqlen if positions is None else int(positions.flatten()[i % positions.numel()])
            )
            inside = 0 <= at < len(position_weight)
            row = row + (position_weight[None, at].to(dtype) if inside else math.nan)
        rows.append(row)
    found = torch.cat(rows) if rows else weight.new_zeros((0, weight.shape[1]), dtype=dtype)
    return found.view(*ids.shape, weight.shape[1]).to(weight.device)
