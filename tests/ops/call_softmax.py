"""Calls of softmax and log_softmax, drawn by lot (call_cases.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from call_lot import Case, Lot


def _softmax(op: str, lot: Lot) -> Case:
    dtype = lot.one(torch.float16, torch.bfloat16, torch.float32)
    shape = (lot.one(1, 2, 3), lot.one(2, 5), lot.one(7, 16, 40))
    x = lot.randn(*shape, dtype=dtype)
    mask = lot.one(lot.randn(*shape[1:]) > -1, lot.randn(*shape, dtype=dtype))
    return Case(
        op, {"x": x, **lot.maybe(("mask", mask)), "out": torch.empty_like(x)},
        {"scale": lot.one(1.0, 0.5)}, outs=("out",), in_place=frozenset({("out", "x")}),
        required=("x",), differentiable=("x",),
    )  # fmt: skip


SOFTMAX: dict[str, Callable[[Lot], Case]] = {
    op: partial(_softmax, op) for op in ("softmax", "log_softmax")
}
