"""What `kernel-hub bench` times around an engine's step, beside torch."""

from __future__ import annotations

import torch
from torch.nn import functional

from .. import ops
from .beside_op import Inputs, Op, Sizes, Tensors


def _make_copies(s: Sizes, t: Tensors) -> Inputs:
    shape = (2 * s["pairs"], s["page"], s["kv_heads"], s["head_dim"])
    pairs = t.count(2 * s["pairs"]).view(-1, 2)
    return {"k_cache": t.normal(*shape), "v_cache": t.normal(*shape), "pairs": pairs}


def _copy_blocks(i: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    ops.copy_blocks(i["k_cache"], i["v_cache"], i["pairs"])
    return i["k_cache"], i["v_cache"]


def _copied(i: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    for cache in (i["k_cache"], i["v_cache"]):
        cache[i["pairs"][:, 1]] = cache[i["pairs"][:, 0]]
    return i["k_cache"], i["v_cache"]


TOKENS: dict[str, Op] = {
    "embedding": Op(
        {"tokens": 8192, "vocabulary": 128256, "hidden": 4096},
        lambda s, t: {
            "ids": t.count(s["tokens"]) * 7919 % s["vocabulary"],
            "weight": t.normal(s["vocabulary"], s["hidden"]),
        },
        lambda i: ops.embedding(i["ids"], i["weight"]),
        lambda i: functional.embedding(i["ids"], i["weight"]),
    ),
    "verify_draft": Op(
        {"batch": 32, "drafts": 4, "vocabulary": 128256},
        # Greedy: draws differ from one to the other.
        lambda s, t: {
            "x": t.normal(s["batch"], s["drafts"] + 1, s["vocabulary"]),
            "ids": t.count(s["batch"] * s["drafts"]).view(s["batch"], s["drafts"]),
            "temperature": t.fp32(s["batch"]).zero_(), "seed": t.count(s["batch"]),
        },
        lambda i: ops.verify_draft(
            i["ids"], i["x"], temperature=i["temperature"], seed=i["seed"]
        )[1].long(),
        lambda i: (i["x"].argmax(-1)[:, :-1] == i["ids"]).long().cumprod(-1).sum(-1),
    ),
    "cu_seqlens": Op(
        {"batch": 1024},
        lambda s, t: {"lengths": t.count(s["batch"], torch.int32) % 5 - 1},
        lambda i: ops.cu_seqlens(i["lengths"])[1:],
        lambda i: i["lengths"].clamp(min=0).cumsum(0, dtype=torch.int32),
    ),
    "copy_blocks": Op(
        {"pairs": 256, "page": 16, "kv_heads": 8, "head_dim": 128}, _make_copies, _copy_blocks,
        _copied,
    ),
}  # fmt: skip
