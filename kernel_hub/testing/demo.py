"""What `kernel-hub demo` runs: each op on real tensors, held against its reference, and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .. import ops
from . import reference
from .compare import compare

Inputs = dict[str, torch.Tensor]
Outputs = tuple[torch.Tensor, ...]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_A_ROW_A_TOKEN = frozenset({"x", "residual", "q", "k", "positions"})
# The reference is fp64 and makes several temporaries: rows are checked this many at a time.
_CHECKED_ROWS = 1024
_HIDDEN, _INTERMEDIATE, _HEAD_DIM, _HEADS, _KV_HEADS = 4096, 14336, 128, 32, 8


@dataclass(frozen=True)
class Case:
    """One op on one shape and dtype. `num_bytes` is what it reads and writes at least."""

    op: str
    shape: str
    dtype: str
    num_bytes: int
    make: Callable[[], Inputs]
    run: Callable[[Inputs], Outputs]
    refer: Callable[[Inputs, torch.dtype], Outputs]


@dataclass(frozen=True)
class Result:
    """The largest error beside what is allowed, and on a GPU the median time."""

    op: str
    shape: str
    dtype: str
    ok: bool
    error: float
    limit: float
    message: str
    time_us: float | None = None
    terabytes_per_s: float | None = None
    share_of_copy: float | None = None


def cases(device: str, num_tokens: int) -> Iterator[Case]:
    """Every op in every dtype, in the shapes of an 8-billion-parameter Llama."""
    for token, dtype in DTYPES.items():
        size = dtype.itemsize

        def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=dtype)

        row = num_tokens * _HIDDEN * size
        yield Case(
            "rms_norm",
            f"{num_tokens} x {_HIDDEN}",
            token,
            2 * row,
            lambda random=random: {"x": random(num_tokens, _HIDDEN), "weight": random(_HIDDEN)},
            lambda i: (ops.rms_norm(i["x"], i["weight"]),),
            lambda i, dtype: (reference.rms_norm(i["x"], i["weight"], dtype=dtype),),
        )
        yield Case(
            "rms_norm + residual",
            f"{num_tokens} x {_HIDDEN}",
            token,
            4 * row,
            lambda random=random: {
                "x": random(num_tokens, _HIDDEN),
                "residual": random(num_tokens, _HIDDEN),
                "weight": random(_HIDDEN),
            },
            lambda i: ops.rms_norm(i["x"], i["weight"], residual=i["residual"]),
            lambda i, dtype: (
                reference.rms_norm(i["x"], i["weight"], residual=i["residual"], dtype=dtype),
                i["x"].to(dtype) + i["residual"].to(dtype),
            ),
        )
        yield Case(
            "silu_and_mul",
            f"{num_tokens} x 2 x {_INTERMEDIATE}",
            token,
            3 * num_tokens * _INTERMEDIATE * size,
            lambda random=random: {"x": random(num_tokens, 2 * _INTERMEDIATE)},
            lambda i: (ops.silu_and_mul(i["x"]),),
            lambda i, dtype: (reference.silu_and_mul(i["x"], dtype=dtype),),
        )
        yield Case(
            "rope",
            f"{num_tokens} x ({_HEADS} + {_KV_HEADS}) x {_HEAD_DIM}",
            token,
            2 * num_tokens * (_HEADS + _KV_HEADS) * _HEAD_DIM * size,
            lambda random=random: {
                "q": random(num_tokens, _HEADS, _HEAD_DIM),
                "k": random(num_tokens, _KV_HEADS, _HEAD_DIM),
                "positions": torch.arange(num_tokens, device=device),
                **_rotary_table(num_tokens, device),
            },
            lambda i: ops.rope(i["q"], i["k"], i["cos"], i["sin"], i["positions"]),
            lambda i, dtype: tuple(
                reference.rope(i[name], i["cos"], i["sin"], i["positions"], dtype=dtype)
                for name in ("q", "k")
            ),
        )


def _rotary_table(num_positions: int, device: str) -> Inputs:
    frequencies = 10_000.0 ** (-torch.arange(0, _HEAD_DIM, 2, device=device) / _HEAD_DIM)
    angles = torch.arange(num_positions, device=device)[:, None] * frequencies
    return {"cos": angles.cos(), "sin": angles.sin()}


def checked(case: Case, inputs: Inputs) -> Result:
    """Run the op once and compare every element with the fp64 reference."""
    outputs = case.run(inputs)
    ok, error, limit, message = True, 0.0, 0.0, ""
    for start in range(0, len(outputs[0]), _CHECKED_ROWS):
        rows = slice(start, start + _CHECKED_ROWS)
        part = {name: t[rows] if name in _A_ROW_A_TOKEN else t for name, t in inputs.items()}
        truths = case.refer(part, torch.float64)
        owns = case.refer(part, DTYPES[case.dtype])
        for out, truth, own in zip(outputs, truths, owns, strict=True):
            one = compare(out[rows], truth, own, name=case.op)
            worse = one.error / max(one.limit, 1e-30) >= error / max(limit, 1e-30)
            if (worse or not one.ok) and ok:
                ok, error, limit, message = one.ok, one.error, one.limit, one.message
    return Result(case.op, case.shape, case.dtype, ok, error, limit, message)
