"""The calls of call_cases.py of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from call_lot import Case, Lot

_DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def _moe_route(lot: Lot) -> Case:
    tokens, num_experts, k = lot.one(1, 3, 5), lot.one(8, 12, 40), lot.one(1, 2)
    options = {"k": k, "scoring": lot.one("softmax", "sigmoid"), "num_groups": lot.one(1, 4),
               "renormalise": lot.one(True, False)}  # fmt: skip
    tensors = {
        "logits": lot.randn(tokens, num_experts, dtype=lot.one(*_DTYPES)),
        **lot.maybe(("bias", lot.randn(num_experts))), "weights": lot.randn(tokens, k),
        "experts": lot.ints(*range(tokens * k)).view(tokens, k),
    }  # fmt: skip
    return Case("moe_route", tensors, options, ("weights", "experts"), required=("logits",))


def _moe_permute(lot: Lot) -> Case:
    tokens, k, hidden, num_experts = lot.one(1, 3, 5), lot.one(1, 2), lot.one(8, 20), lot.one(2, 5)
    experts = [lot.random.randrange(num_experts) for _ in range(tokens * k)]
    x = lot.randn(tokens, hidden, dtype=lot.one(*_DTYPES))
    tensors = {
        "x": x, "experts": lot.ints(*experts).view(tokens, k),
        "out": x.new_empty(tokens * k, hidden), "offsets": lot.ints(*range(num_experts + 1)),
        "row_id_map": lot.ints(*experts).view(tokens, k),
    }  # fmt: skip
    outs = ("out", "offsets", "row_id_map")
    options = {"num_experts": num_experts}
    return Case("moe_permute", tensors, options, outs, required=("x", "experts"))


def _moe_combine(lot: Lot) -> Case:
    tokens, k, hidden = lot.one(1, 3, 5), lot.one(1, 2), lot.one(8, 20)
    rows = lot.randn(tokens * k, hidden, dtype=lot.one(*_DTYPES))
    tensors = {
        "rows": rows, "row_id_map": lot.ints(*range(tokens * k)).view(tokens, k),
        "weights": lot.randn(tokens, k),
        **lot.maybe(("residual", lot.randn(tokens, hidden).to(rows.dtype))),
        "out": rows.new_empty(tokens, hidden),
    }  # fmt: skip
    in_place = frozenset({("out", "residual")} & {("out", name) for name in tensors})
    required = ("rows", "row_id_map", "weights")
    return Case("moe_combine", tensors, {}, ("out",), (), in_place, required)


MOE: dict[str, Callable[[Lot], Case]] = {
    "moe_combine": _moe_combine,
    "moe_permute": _moe_permute,
    "moe_route": _moe_route,
}
