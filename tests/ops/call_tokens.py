"""The calls of call_cases.py of tokens as rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from call_lot import Case, Lot

_DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def _embedding(lot: Lot) -> Case:
    tokens, hidden, rows = lot.one(1, 3, 5), lot.one(8, 20), lot.one(2, 9)
    weight = lot.randn(rows, hidden, dtype=lot.one(*_DTYPES))
    kind = lot.one(torch.int32, torch.int64)
    ids = lot.ints(*(lot.random.randrange(rows) for _ in range(tokens)), dtype=kind)
    tensors = {"ids": ids, "weight": weight, "out": weight.new_empty(tokens, hidden)}
    if lot.one(True, False):
        tensors["position_weight"] = lot.randn(tokens, hidden, dtype=weight.dtype)
        tensors |= lot.maybe(("positions", lot.ints(*range(tokens), dtype=kind)))
    options = {"scale": lot.one(None, 2.5)}
    return Case("embedding", tensors, options, ("out",), required=("ids", "weight"))


TOKENS: dict[str, Callable[[Lot], Case]] = {
    "embedding": _embedding,
}
