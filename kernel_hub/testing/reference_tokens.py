"""What the ops on tokens as rows compute, written plainly in torch, row by row.

`dtype` is the precision to compute in. Written apart from the ops' own CPU paths on purpose.
"""

from __future__ import annotations

import itertools
import math

import torch


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, *, scale: float | None = None,
    position_weight: torch.Tensor | None = None, positions: torch.Tensor | None = None,
    first_id: int = 0, vocab_size: int | None = None, dtype: torch.dtype = torch.float64,
) -> torch.Tensor:  # fmt: skip
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


def verify_tree(
    ids: list[int], parents: list[int], logits: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """Of each node, the root first, and each token: how probable it is that the path that is kept
    ends there with this token, by what each draft was drawn by."""
    target = logits.double().softmax(-1)
    found = torch.zeros_like(target)
    reached = [1.0] + [0.0] * len(ids)
    for node in range(-1, len(ids)):
        left, chance = target[node + 1], reached[node + 1]
        for child in (c for c, parent in enumerate(parents) if parent == node):
            q = probs[child].double()
            kept = min(1.0, float(left[ids[child]] / q[ids[child]]))
            reached[child + 1] = chance * kept
            chance *= 1 - kept
            left = (left - q).clamp(min=0)
            left = left / left.sum()
        found[node + 1] = chance * left
    return found


def pad_input(x: torch.Tensor, bounds: list[int], seqlen: int) -> torch.Tensor:
    """Sequence by sequence; one whose bounds fall or lie outside has no rows."""
    out = x.new_zeros((len(bounds) - 1, seqlen, *x.shape[1:]))
    for b, (start, end) in enumerate(itertools.pairwise(bounds)):
        if 0 <= start <= end <= len(x):
            rows = x[start : min(end, start + seqlen)]
            out[b, : len(rows)] = rows
    return out


def unpad_input(x: torch.Tensor, bounds: list[int], total: int) -> torch.Tensor:
    """The same the other way, of bounds that do not fall."""
    out = x.new_zeros((total, *x.shape[2:]))
    for b, (start, end) in enumerate(itertools.pairwise(bounds)):
        if 0 <= start <= end <= total:
            rows = x[b, : end - start]
            out[start : start + len(rows)] = rows
    return out


def cu_seqlens(
    lengths: list[int], num_tokens: int, cache_seqlens: list[int] | None = None,
    block_table: list[list[int]] | None = None, page_size: int = 1,
) -> tuple[list[int], list[int], list[int]]:  # fmt: skip
    """(bounds, positions, slots), token by token."""
    bounds, positions, slots = [0], [0] * num_tokens, [-1] * num_tokens
    for row, length in enumerate(lengths):
        bounds.append(bounds[-1] + max(length, 0))
        cached = 0 if cache_seqlens is None else cache_seqlens[row]
        for i in range(min(max(length, 0), num_tokens - bounds[row]) if cached >= 0 else 0):
            at = bounds[row] + i
            positions[at] = cached + i
            pages = [] if block_table is None else block_table[row]
            column = positions[at] // page_size
            if column < len(pages) and pages[column] >= 0:
                slots[at] = pages[column] * page_size + positions[at] % page_size
    return bounds, positions, slots
