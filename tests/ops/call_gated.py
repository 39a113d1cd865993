"""The calls of call_cases.py of the products of gate and up."""

from __future__ import annotations

from collections.abc import Callable

import torch
from call_lot import Case, Lot


def _swiglu_linear(lot: Lot) -> Case:
    dtype, m, n, k = (
        lot.one(torch.float16, torch.bfloat16),
        lot.one(1, 3, 7),
        lot.one(32, 64),
        lot.one(8, 32),
    )
    tensors = {
        "a": lot.randn(m, k, dtype=dtype), "b_gate_up": lot.randn(2 * n, k, dtype=dtype),
        "out": lot.randn(m, n, dtype=dtype),
    }  # fmt: skip
    return Case("swiglu_linear", tensors, outs=("out",), required=("a", "b_gate_up"))


def _gated_linear(lot: Lot) -> Case:
    case = _swiglu_linear(lot)
    case.tensors["weight"] = case.tensors.pop("b_gate_up")
    options = {
        "activation": lot.one("silu", "gelu", "gelu_tanh", "swigluoai"), "limit": 2.0,
        "interleaved": lot.one(True, False),
    }  # fmt: skip
    return Case("gated_linear", case.tensors, options, outs=("out",), required=("a", "weight"))


GATED: dict[str, Callable[[Lot], Case]] = {
    "gated_linear": _gated_linear,
    "swiglu_linear": _swiglu_linear,
}
