"""Calls of the products, drawn by lot: what they are made of. product_runs.py holds them to fp64.

For tests/gpu_products_grid.py and matmul/test_products_by_lot.py.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

OPS = (
    "linear", "linear_fp32", "linear_fp8", "swiglu_linear", "qkv_linear", "grouped_linear",
    "batched_matmul",
)  # fmt: skip
ACTIVATIONS = (None, "gelu", "silu", "relu")
SCALES = ("none", "tensor", "row", "mixed", "block")
MOST = 5000  # rows, columns and k
# Multiplications and elements of one case: a larger one would take as long as a hundred others.
MAX_WORK, MAX_ELEMENTS = 40_000_000_000, 150_000_000


@dataclass(frozen=True)
class Case:
    """One call. options: what the op's drawing chose, by name; seed: of the tensors."""

    op: str
    dtype: str
    options: dict[str, Any]
    seed: int

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.options.items())
        return f"{self.op}({self.dtype}, {shown}, seed={self.seed})"

    def features(self) -> list[str]:
        """What of the op this case uses, to be counted."""
        words = [self.op, self.dtype]
        for key, value in self.options.items():
            if value is True:
                words.append(key)
            elif isinstance(value, str):
                words.append(f"{key} {value}")
        return words


class Lot(random.Random):
    """What cases draw from; most: the largest size."""

    most = MOST

    def size(self, most: int = 0) -> int:
        """Log-uniform from 1, often beside the edge of a tile."""
        most = most or self.most
        found = int(math.exp(self.uniform(0.0, math.log(most + 1))))
        if found > 40 and self.random() < 0.35:
            found = 16 * round(found / 16) + self.choice((-1, 0, 0, 1))
        return min(found, most)

    def depth(self, step: int = 8) -> int:
        """A k: a multiple of `step`, seldom of 64."""
        return step * self.size(max(1, self.most // step))

    def chance(self, share: float) -> bool:
        """Whether something happens."""
        return self.random() < share

    def room(self, step: int = 8) -> int:
        """Elements between rows: none, or some."""
        return step * self.randrange(1, 9) if self.chance(0.4) else 0

    def shape(self, products: int = 1, weights: int = 1, step: int = 8) -> dict[str, int]:
        """m, n and k. products: so many of them; weights: so many n x k."""
        while True:
            m, n, k = self.size(), self.size(), self.depth(step)
            elements = products * m * (n + k) + weights * n * k
            if m * n * k * products <= MAX_WORK and elements <= MAX_ELEMENTS:
                return {"m": m, "n": n, "k": k}


def _with_epilogue(lot: Lot, step: int = 8) -> dict[str, Any]:
    # Half of them such that rows of out and residual may begin at multiples of 16 bytes.
    shape, room = lot.shape(step=step), lot.choice((1, 8))
    shape["n"] += -shape["n"] % room
    residual = lot.choice(("none", "none", "apart", "in place"))
    return {
        **shape, "bias": lot.chance(0.4), "activation": lot.choice(ACTIVATIONS),
        "residual": residual, "out_room": lot.room(room), "residual_room": lot.room(room),
        "out_shift": lot.chance(0.1),
    }  # fmt: skip


def _rooms(lot: Lot, step: int = 8) -> dict[str, int]:
    return {"a_room": lot.room(step), "b_room": lot.room(step)}


def _linear(lot: Lot) -> dict[str, Any]:
    return {
        **_with_epilogue(lot), "fp32": lot.chance(0.25), "one_row": lot.chance(0.03), **_rooms(lot),
    }  # fmt: skip


def _linear_fp32(lot: Lot) -> dict[str, Any]:
    step = lot.choice((1, 4, 4))  # elements that rows are whole numbers of
    return {
        **_with_epilogue(lot, step), "binades": lot.choice((0, 0, 8, 40)),
        "one_row": lot.chance(0.03), **_rooms(lot, step),
    }  # fmt: skip


def _linear_fp8(lot: Lot) -> dict[str, Any]:
    scales = lot.choice(SCALES)
    return {
        **_with_epilogue(lot, step=16), "out": lot.choice(("bf16", "fp16", "fp32")),
        "scales": scales, "fast": scales != "block" and lot.chance(0.4),
        "turned": lot.chance(0.3), **_rooms(lot, 16),
    }  # fmt: skip


def _swiglu_linear(lot: Lot) -> dict[str, Any]:
    gates = ("silu", "silu", "gelu", "gelu_tanh", "swigluoai")
    return {
        **lot.shape(weights=2), **_rooms(lot), "out_room": lot.room(1),
        "activation": lot.choice(gates), "interleaved": lot.chance(0.3),
    }  # fmt: skip


def _qkv_linear(lot: Lot) -> dict[str, Any]:
    head_dim = lot.choice((32, 64, 64, 96, 128, 128, 128, 192, 256))
    kv_heads, group = lot.choice((1, 1, 2, 3, 8)), lot.choice((1, 2, 4, 5))
    rotary_dim = lot.choice((0, head_dim, head_dim, 16 * lot.randrange(1, head_dim // 16 + 1)))
    most = MAX_ELEMENTS // (head_dim * kv_heads * (group + 2) + lot.most)
    to = lot.choice(("apart", "packed", "slots", "pages"))
    return {
        "m": lot.size(min(lot.most, most)), "k": lot.depth(), "kv_heads": kv_heads,
        "heads": kv_heads * group, "head_dim": head_dim, "rotary_dim": rotary_dim,
        "interleaved": bool(rotary_dim) and lot.chance(0.3), "bias": lot.chance(0.4),
        "wide_table": lot.chance(0.5), "to": to, **_rooms(lot),
        "positions": lot.choice(("int32", "int64", *(["none"] if to == "pages" else []))),
        "page_size": lot.choice((1, 2, 4, 8, 16, 64)), "sequences": lot.choice((1, 2, 3)),
    }  # fmt: skip


def _grouped_linear(lot: Lot) -> dict[str, Any]:
    experts = lot.size(min(64, lot.most))
    return {
        **lot.shape(weights=experts), "experts": experts, "before": lot.choice((0, 0, 1, 17)),
        "behind": lot.choice((0, 0, 1, 40)), "uneven": lot.chance(0.5), "fp32": lot.chance(0.25),
        "bias": lot.chance(0.4), "activation": lot.choice(ACTIVATIONS), **_rooms(lot),
        "out_room": lot.room(1),
    }  # fmt: skip


def _batched_matmul(lot: Lot) -> dict[str, Any]:
    products, inner = lot.size(min(48, lot.most)), lot.choice((1, 1, 2, 3))
    return {
        **lot.shape(products * inner, products * inner), "products": products, "inner": inner,
        "shared": lot.choice(("none", "none", "a", "b")), "fp32": lot.chance(0.25),
        "turned": lot.chance(0.2), **_rooms(lot), "out_room": lot.room(1),
    }  # fmt: skip


_DRAWS = {
    "linear": _linear, "linear_fp32": _linear_fp32, "linear_fp8": _linear_fp8,
    "swiglu_linear": _swiglu_linear, "qkv_linear": _qkv_linear,
    "grouped_linear": _grouped_linear, "batched_matmul": _batched_matmul,
}  # fmt: skip
_DTYPES = {"linear_fp32": ("fp32",), "linear_fp8": ("e4m3",)}


def draw(op: str, seed: object, *, most: int = MOST) -> Case:
    """The case of a seed. op: one of OPS, or 'all'."""
    lot = Lot(repr((seed, most)))
    lot.most = most
    op = lot.choice(OPS) if op == "all" else op
    dtype = lot.choice(_DTYPES.get(op, ("fp16", "bf16")))
    return Case(op, dtype, _DRAWS[op](lot), lot.randrange(1 << 31))
