"""Drafts of a speculating model verified (csrc/sampling/verify_draft.cu)."""

from __future__ import annotations

import torch

from .verification import Verification, VerifyGiven


def verify_draft(
    draft_ids: torch.Tensor, target_logits: torch.Tensor, draft_probs: torch.Tensor | None = None,
    *, temperature: torch.Tensor | None = None, seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None, out_ids: torch.Tensor | None = None,
    num_accepted: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """How many of each row's drafted tokens the target keeps, and its own token after them.

        p[j] = softmax(target_logits[j] / temperature),  q = draft_probs
        draft_ids[j] is kept where those before it are and u[j] * q[j, id] < p[j, id]
        then one token from max(p[j] - q[j], 0) of the first that is not, or from p behind the last

    so that what comes out is distributed as if the target alone had drawn it. Without draft_probs
    each draft is certain of itself (a greedy model, a lookup in the prompt): x is drawn from p[j]
    as `ops.sample(target_logits[:, j], temperature=..., seed=seed, offset=offset + j)` draws it,
    and a draft that is x is kept: the same tokens as without speculation. Where temperature is not
    above 0, x is the largest, the first of equal ones.

    draft_ids: (batch, num_drafts) int64, the last dimension contiguous; -1 from where a row has
        none on. One that is no token of the vocabulary ends its row's drafts too.
    target_logits: (batch, num_drafts + 1, vocab_size), fp16, bf16 or fp32, on the GPU or the CPU,
        rows evenly spaced: of the position of each draft, then of the one behind. -inf and nan are
        never drawn: where top_k and the like cut, put -inf. +inf shares all of the mass; where
        nothing is left, token 0.
    draft_probs: (batch, num_drafts, vocab_size) fp32, rows evenly spaced, each with the sum 1: what
        the drafts were drawn by.
    temperature: (batch,) fp32; None: 1.
    seed, offset: (batch,) int64. Without seeds they come from torch's generator of the device;
        without offsets they are 0. Position j draws by (seed, offset + j).
    out_ids: (batch, num_drafts + 1) int64, contiguous: the drafts that are kept, the token after
        them, -1; must not overlap anything, as num_accepted.
    num_accepted: (batch,) int32.

    Returns (out_ids, num_accepted). A CUDA tensor runs the shipped cubin on torch's current stream,
    once, without a wait of the host; a CPU tensor runs a reference in torch, with the same result.
    With KERNEL_HUB_DEBUG=1 each call waits, and refuses a draft that is neither a token nor -1. No
    backward. Raises TensorError naming the argument that does not fit.
    Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023;
    Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023.
    """
    given = VerifyGiven(
        draft_ids, None, target_logits, draft_probs, temperature, seed, offset, out_ids,
        num_accepted, None,
    )  # fmt: skip
    found = _verification(given, draft_ids, target_logits)
    return found.out_ids, found.num_accepted


_verification = Verification(
    "verify_draft",
    "verify_draft(Tensor draft_ids, Tensor target_logits, Tensor? draft_probs, "
    "Tensor? temperature, Tensor? seed, Tensor? offset, Tensor(a!) out_ids, "
    "Tensor(b!) num_accepted) -> ()",
)  # fmt: skip
