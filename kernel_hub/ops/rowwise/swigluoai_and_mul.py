"""The clamped gate of gpt-oss' experts (csrc/rowwise/swigluoai_and_mul.cu)."""

from __future__ import annotations

from typing import Any

import torch

from ..core import common
from .gated import Gated


def swigluoai_and_mul(
    x: torch.Tensor, alpha: float = 1.702, limit: float = 7.0, *, interleaved: bool = True,
    out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """The clamped and shifted SwiGLU of gpt-oss: gates from above, what they multiply both ways.

        gate = min(g, limit),  up = min(max(u, -limit), limit)
        out[..., j] = (up + 1) * gate / (1 + exp(-alpha * gate))
        g, u = x[..., 2 * j], x[..., 2 * j + 1]; not interleaved: x[..., j], x[..., size + j]
        e4m3: out_scale = max(|that|) / 448 of each row,  out = round(that / out_scale)

    computed in fp32 and rounded once.

    x: (..., 2 * size), fp16, bf16 or fp32, on the GPU or the CPU; last dimension contiguous, the
        leading ones in at most two separately strided groups.
    alpha: the slope of the sigmoid. limit: of gate and up, at least 0.
    interleaved: gate and up take turns, as in gpt-oss' weights; otherwise they are halves of a row.
    out_dtype: None (of `out`, else of x), the dtype of x or torch.float8_e4m3fn: each row by its
        scale, in which a nan or an infinity of the row shows.
    out: (..., size), in out_dtype, device of x, strides of its own; must not overlap x.
    out_scale: x.shape[:-1], fp32, where out is e4m3; must not overlap the others.

    Returns out, or (out, out_scale) where out is e4m3. A CUDA tensor runs the shipped cubin on
    torch's current stream; a CPU tensor runs a reference in torch. No backward. Raises TensorError
    naming the argument that does not fit.
    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025.
    """
    op = _gated.op
    alpha = common.check_number(op, "alpha", alpha)
    limit = common.check_number(op, "limit", limit, least=0.0)
    common.check_flag(op, "interleaved", interleaved)
    return _gated(x, (alpha, limit, bool(interleaved)), out_dtype, out, out_scale)


def _formula(x: torch.Tensor, alpha: float, limit: float, interleaved: bool) -> torch.Tensor:
    gate, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


_gated = Gated(
    "swigluoai_and_mul",
    "float alpha, float limit, bool interleaved",
    formula=_formula,
    numbers=lambda alpha, limit, interleaved: (alpha, limit, int(interleaved)),
    has_wide=False,
)
