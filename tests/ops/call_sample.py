"""The calls of call_cases.py of sample, of slices and of verify_draft."""

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
        ("prompt_bitmask", lot.randn(batch, -(-size // 32)).view(torch.int32)),
        ("min_p", lot.randn(batch).abs()), ("offset", counts + 5),
    )  # fmt: skip
    if lot.one(True, False):
        given["output_counts"] = (lot.randn(batch, size) * 8).int().clamp(min=0)
        given |= lot.maybe(
            *[
                (f"{kind}_penalty", lot.randn(batch).abs() + 1)
                for kind in ("repetition", "presence", "frequency")
            ]
        )
    outs = {"out": counts + 1, "out_logprob": lot.randn(batch)}
    if lot.one(True, False):
        n = lot.one(1, 4)
        outs |= {
            "out_top_ids": counts[:, None].repeat(1, n),
            "out_top_logprobs": lot.randn(batch, n),
        }
        given |= lot.maybe(("top_n", counts.int()))
    tensors = {
        "logits": lot.randn(
            batch, size, dtype=lot.one(torch.float16, torch.bfloat16, torch.float32)
        ),
        "seed": counts,
        **given,
    }
    options = {"return_logprob": True, "softcap": lot.one(0.0, 30.0)}
    return Case("sample", {**tensors, **outs}, options, tuple(outs), required=("logits",))


def call_slice(lot: Lot) -> Case:
    case = call_sample(lot)
    names = (
        "logits temperature seed offset bias token_bitmask prompt_bitmask output_counts "
        "repetition_penalty presence_penalty frequency_penalty"
    )
    tensors = {name: x for name, x in case.tensors.items() if name in names.split()}
    tensors["out"] = lot.randn(len(tensors["logits"]), 522).view(torch.int32)
    options = {"first_token": lot.one(0, 5, 128000), "softcap": lot.one(0.0, 30.0)}
    return Case("sample_slice", tensors, options, ("out",), required=("logits",))


def call_tree(lot: Lot) -> Case:
    case = call_verify(lot)
    batch, drafts = case.tensors["draft_ids"].shape
    places = lot.ints(*range(-1, drafts - 1)).repeat(batch, 1)
    tensors = {**case.tensors, "parents": places, "path": places.clone()}
    outs, required = ("out_ids", "num_accepted", "path"), ("draft_ids", "parents", "target_logits")
    return Case("verify_tree", tensors, {}, outs, required=required)


def call_verify(lot: Lot) -> Case:
    batch, drafts, size = lot.one(1, 3), lot.one(1, 2, 4), lot.one(8, 40, 100)
    counts = torch.arange(batch, device=lot.device)
    ids = [lot.random.randrange(size) for _ in range(batch * drafts)]
    dtype = lot.one(torch.float16, torch.bfloat16, torch.float32)
    tensors = {
        "draft_ids": lot.ints(*ids, dtype=torch.int64).view(batch, drafts),
        "target_logits": lot.randn(batch, drafts + 1, size, dtype=dtype),
        "seed": counts,
        **lot.maybe(
            ("draft_probs", lot.randn(batch, drafts, size).softmax(-1)),
            ("temperature", lot.randn(batch)), ("offset", counts + 5),
        ),
        "out_ids": counts[:, None].repeat(1, drafts + 1), "num_accepted": counts.int(),
    }  # fmt: skip
    outs, required = ("out_ids", "num_accepted"), ("draft_ids", "target_logits")
    return Case("verify_draft", tensors, {}, outs, required=required)
