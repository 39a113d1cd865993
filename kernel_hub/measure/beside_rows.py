"""What `kernel-hub bench` times beside torch of what moves or chooses rows: mixtures of experts,
tables, pages, drafts."""

from __future__ import annotations

import torch
from torch.nn import functional

from .. import ops
from ..ops import vocab_slices
from ..testing import reference_moe
from .beside_op import Inputs, Op, Sizes, Tensors

_SLOTS = {"tokens": 8192, "hidden": 4096, "experts": 128, "top_k": 8}


def _make_slots(s: Sizes, t: Tensors) -> Inputs:
    logits = t.fp32(s["tokens"], s["experts"])
    experts = logits.topk(s["top_k"], -1)[1].int()
    x = t.normal(s["tokens"], s["hidden"])
    rows, _, row_id_map = ops.moe_permute(x, experts, s["experts"])
    return {
        "x": x, "experts": experts, "num_experts": s["experts"], "rows": rows,
        "row_id_map": row_id_map, "weights": t.fp32(s["tokens"], s["top_k"]).softmax(-1),
    }  # fmt: skip


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


ROWS: dict[str, Op] = {
    "softmax": Op(
        {"tokens": 4096, "vocabulary": 128256},
        lambda s, t: {"x": t.normal(s["tokens"], s["vocabulary"])},
        lambda i: ops.softmax(i["x"]),
        lambda i: i["x"].softmax(-1),
    ),
    "log_softmax": Op(
        {"tokens": 4096, "vocabulary": 128256},
        lambda s, t: {"x": t.normal(s["tokens"], s["vocabulary"])},
        lambda i: ops.log_softmax(i["x"]),
        lambda i: i["x"].log_softmax(-1),
    ),
    "moe_route": Op(
        {"tokens": 8192, "experts": 128, "top_k": 8},
        lambda s, t: {"logits": t.normal(s["tokens"], s["experts"]), "k": s["top_k"]},
        lambda i: ops.moe_route(i["logits"], i["k"])[0],
        lambda i: i["logits"].float().softmax(-1).topk(i["k"], -1)[0],
    ),
    "moe_permute": Op(
        _SLOTS, _make_slots,
        lambda i: ops.moe_permute(i["x"], i["experts"], i["num_experts"])[0],
        lambda i: i["x"][i["experts"].flatten().argsort(stable=True) // i["experts"].shape[1]],
    ),
    "moe_combine": Op(
        _SLOTS, _make_slots,
        lambda i: ops.moe_combine(i["rows"], i["row_id_map"], i["weights"]),
        lambda i: reference_moe.moe_combine(
            i["rows"], i["row_id_map"], i["weights"], dtype=i["rows"].dtype
        ),
    ),
    "embedding": Op(
        {"tokens": 8192, "vocabulary": 128256, "hidden": 4096},
        lambda s, t: {
            "ids": t.count(s["tokens"]) * 7919 % s["vocabulary"],
            "weight": t.normal(s["vocabulary"], s["hidden"]),
        },
        lambda i: ops.embedding(i["ids"], i["weight"]),
        lambda i: functional.embedding(i["ids"], i["weight"]),
    ),
    "sample_slice": Op(
        {"batch": 128, "vocabulary": 16032},
        # One slice, greedy, with the draw behind the exchange.
        lambda s, t: {
            "x": t.normal(s["batch"], s["vocabulary"]), "temperature": t.fp32(s["batch"]).zero_(),
            "seed": t.count(s["batch"]),
        },
        lambda i: vocab_slices.sample_slices(
            ops.sample_slice(i["x"], 0, temperature=i["temperature"], seed=i["seed"])[None],
            i["x"].shape[1], temperature=i["temperature"], seed=i["seed"],
        )[0],
        lambda i: i["x"].argmax(-1),
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
    "verify_tree": Op(
        {"batch": 32, "drafts": 15, "vocabulary": 128256},
        lambda s, t: {
            "x": t.normal(s["batch"], s["drafts"] + 1, s["vocabulary"]),
            "ids": t.count(s["batch"] * s["drafts"]).view(s["batch"], s["drafts"]),
            "parents": ((t.count(s["drafts"], torch.int32) + 1) // 2 - 1).repeat(s["batch"], 1),
            "temperature": t.fp32(s["batch"]).zero_(), "seed": t.count(s["batch"]),
        },
        lambda i: ops.verify_tree(
            i["ids"], i["parents"], i["x"], temperature=i["temperature"], seed=i["seed"]
        )[0][:, 0],
        lambda i: i["x"][:, 0].argmax(-1),
    ),
    "cu_seqlens": Op(
        {"batch": 1024},
        lambda s, t: {"lengths": t.count(s["batch"], torch.int32) % 5 - 1},
        lambda i: ops.cu_seqlens(i["lengths"])[1:],
        lambda i: i["lengths"].clamp(min=0).cumsum(0, dtype=torch.int32),
    ),
    "pad_input": Op(
        {"batch": 64, "seqlen": 512, "hidden": 4096},
        lambda s, t: {
            "x": t.normal(s["batch"] * s["seqlen"], s["hidden"]), "seqlen": s["seqlen"],
            "bounds": t.count(s["batch"] + 1, torch.int32) * s["seqlen"],
        },
        lambda i: ops.pad_input(i["x"], i["bounds"], i["seqlen"]),
        lambda i: i["x"].unflatten(0, (-1, i["seqlen"])).clone(),
    ),
    "unpad_input": Op(
        {"batch": 64, "seqlen": 512, "hidden": 4096},
        lambda s, t: {
            "x": t.normal(s["batch"], s["seqlen"], s["hidden"]),
            "bounds": t.count(s["batch"] + 1, torch.int32) * s["seqlen"],
        },
        lambda i: ops.unpad_input(i["x"], i["bounds"], i["x"].shape[0] * i["x"].shape[1]),
        lambda i: i["x"].flatten(0, 1).clone(),
    ),
    "copy_blocks": Op(
        {"pairs": 256, "page": 16, "kv_heads": 8, "head_dim": 128}, _make_copies, _copy_blocks,
        _copied,
    ),
}  # fmt: skip
