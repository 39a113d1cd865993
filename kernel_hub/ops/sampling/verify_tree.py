"""Trees of drafts verified (csrc/sampling/verify_tree.cu)."""

from __future__ import annotations

import torch

from .verification import Verification, VerifyGiven


def verify_tree(
    draft_ids: torch.Tensor, parents: torch.Tensor, target_logits: torch.Tensor,
    draft_probs: torch.Tensor | None = None, *, temperature: torch.Tensor | None = None,
    seed: torch.Tensor | None = None, offset: torch.Tensor | None = None,
    out_ids: torch.Tensor | None = None, num_accepted: torch.Tensor | None = None,
    path: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Which path of each row's tree of drafts the target keeps, and its own token behind it.

        p = softmax(target_logits[v + 1] / temperature)  behind draft v; v = -1: behind none
        of the drafts c whose parent is v, in order:  c is kept where u[c] * q[c, id] < p[id]
        else p = max(p - q[c], 0) / sum of it, and the next is tried;  q = draft_probs
        then the same behind the one that is kept; where none is, one token from what is left of p

    so that what comes out is distributed as if the target alone had drawn it, where each draft was
    drawn by its q whatever its siblings are. A tree of one child each is `verify_draft`'s chain,
    with the same tokens. Without draft_probs each draft is certain of itself: x is drawn from p as
    `ops.sample(target_logits[:, v + 1], temperature=..., seed=seed, offset=offset + v + 1)` draws
    it, and the first child that is x is kept. Where temperature is not above 0, x is the largest,
    the first of equal ones.

    draft_ids: (batch, num_drafts) int64, the last dimension contiguous, at most 128 drafts; -1
        where there is none. One that is no token of the vocabulary is none either.
    parents: (batch, num_drafts) int32, the last dimension contiguous: the place of the draft that
        each comes behind, below its own, -1 for the root. A draft with another is not in the tree.
    target_logits: (batch, num_drafts + 1, vocab_size), fp16, bf16 or fp32, on the GPU or the CPU,
        rows evenly spaced: behind the root, then behind each draft. -inf, nan, +inf and rows where
        nothing is left as `verify_draft` has them.
    draft_probs: (batch, num_drafts, vocab_size) fp32, rows evenly spaced, each with the sum 1: what
        each draft was drawn by.
    temperature: (batch,) fp32; None: 1.
    seed, offset: (batch,) int64. Without seeds they come from torch's generator of the device;
        without offsets they are 0. Behind draft v is drawn by (seed, offset + v + 1).
    out_ids: (batch, num_drafts + 1) int64, contiguous: the drafts that are kept, the token after
        them, -1; must not overlap anything, as the others.
    num_accepted: (batch,) int32.
    path: (batch, num_drafts) int32, contiguous: the places of the drafts that are kept, -1.

    Returns (out_ids, num_accepted, path). A CUDA tensor runs the shipped cubin on torch's current
    stream, once, without a wait of the host; a CPU tensor runs a reference in torch, with the same
    result. With KERNEL_HUB_DEBUG=1 each call waits, and refuses a draft that is neither a token nor
    -1 and a parent that is not before its child. No backward. Raises TensorError naming the
    argument that does not fit.
    Source: Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based
    Speculative Inference and Verification", 2024.
    """
    given = VerifyGiven(
        draft_ids, parents, target_logits, draft_probs, temperature, seed, offset, out_ids,
        num_accepted, path,
    )  # fmt: skip
    found = _verification(given, draft_ids, parents, target_logits)
    return found.out_ids, found.num_accepted, found.path


_verification = Verification(
    "verify_tree",
    "verify_tree(Tensor draft_ids, Tensor parents, Tensor target_logits, Tensor? draft_probs, "
    "Tensor? temperature, Tensor? seed, Tensor? offset, Tensor(a!) out_ids, "
    "Tensor(b!) num_accepted, Tensor(c!) path) -> ()",
    most_drafts=128,
)  # fmt: skip
