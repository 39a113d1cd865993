"""Masks of the trees of drafts that `ops.verify_tree` verifies, for `ops.decode_attention`.

In torch, once a step, on any device; knows no kernel.
"""

from __future__ import annotations

import torch

from .core import common

_OP = "tree_mask"
MAX_DRAFTS = 31  # and the root: of the bits of an int32


def tree_mask(parents: torch.Tensor, *, has_root: bool = True) -> torch.Tensor:
    """Which of a step's new tokens each of them sees: itself, and what it comes behind.

        word[i] = 1 << i | word[parent of i]

    parents: (batch, num_drafts) or (num_drafts,) int32 as `ops.verify_tree` takes them, on any
        device: the place of the draft that each comes behind, below its own; -1 for the root. A
        draft with another is not in the tree, and sees of the new tokens itself alone. At most 31
        drafts; a decode step takes 15 and the root.
    has_root: the step's new tokens are the root (the last token that was kept, which every draft
        sees) and behind it the drafts, as the rows of verify_tree's target_logits; else the drafts
        alone, the root being in the cache.

    Returns (batch, num_drafts + 1), without the root (batch, num_drafts), int32: a tree_mask of
    `ops.decode_attention`; of (num_drafts,) one word a token for every sequence. Nothing waits for
    the device, and a CUDA graph may capture it. Raises TensorError naming the argument that does
    not fit.
    """
    common.check_tensor(_OP, "parents", parents)
    if parents.dtype != torch.int32:
        raise common.refuse(_OP, "parents", "dtype int32", parents)
    if parents.dim() not in (1, 2):
        raise common.refuse(_OP, "parents", "shape (batch, num_drafts) or (num_drafts,)", parents)
    common.check_flag(_OP, "has_root", has_root)
    num_drafts = parents.shape[-1]
    if num_drafts > MAX_DRAFTS:
        raise common.refuse(_OP, "parents", f"at most {MAX_DRAFTS} drafts", parents)
    root = int(has_root)
    one = torch.ones_like(parents, dtype=torch.int64).new_ones((*parents.shape[:-1], 1))
    words = torch.cat([one << i for i in range(root + num_drafts)] or [one[..., :0]], -1)
    for i in range(num_drafts):
        parent, own = parents[..., i : i + 1].long(), words[..., root + i : root + i + 1]
        is_there = (parent >= -root) & (parent < i)
        behind = words.gather(-1, (parent + root).clamp(0, root + i))
        own |= torch.where(is_there, behind, 0)
    return words.int()
