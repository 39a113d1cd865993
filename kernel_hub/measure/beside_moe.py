"""What `kernel-hub bench` times of a mixture of experts, beside torch."""

from __future__ import annotations

from .. import ops
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


MOE: dict[str, Op] = {
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
}  # fmt: skip
