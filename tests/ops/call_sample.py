"""The calls of call_cases.py of sample."""

from __future__ import annotations

import torch
from call_lot import Case, Lot


def call_sample(lot: Lot) -> Case:
    batch, size = lot.one(1, 3, 5), lot.one(8, 40, 100)
    counts = torch.arange(batch, device=lot.device)
    given = lot.maybe(
        ("temperature", lot.randn(batch)), ("top_k", counts.int() + 1),
        ("top_p", lot.randn(batch).abs()), ("bias", lot.randn(batch, size)),
        ("token_bitmask", lot.randn(batch, -(-size // 32)).view(torch.int32)),
    )  # fmt: skip
    outs = {"out": counts + 1, "out_logprob": lot.randn(batch)}
    tensors = {
        "logits": lot.randn(
            batch, size, dtype=lot.one(torch.float16, torch.bfloat16, torch.float32)
        ),
        "seed": counts,
        **given,
    }
    options = {"return_logprob": True, "softcap": lot.one(0.0, 30.0)}
    return Case("sample", {**tensors, **outs}, options, tuple(outs), required=("logits",))
