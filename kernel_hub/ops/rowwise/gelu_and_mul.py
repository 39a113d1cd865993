"""The gated activation of GEGLU layers (csrc/rowwise/gelu_and_mul.cu)."""

from __future__ import annotations

from typing import Any

import torch

from ..core import common
from .gated import GELU_FORMS, Gated


def gelu_and_mul(
    x: torch.Tensor, *, approximate: str = "none", out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None, out_scale: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Multiply the second half of each row by the GELU of the first.

        out[..., j] = gelu(x[..., j]) * x[..., size + j]
        "none":  gelu(g) = g / 2 * (1 + erf(g / sqrt(2)))
        "tanh":  gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 * g**3)))
        e4m3:    out_scale = max(|that|) / 448 of each row,  out = round(that / out_scale)

    computed in fp32 and rounded once.

    x: (..., 2 * size), fp16, bf16 or fp32, on the GPU or the CPU; last dimension contiguous, the
        leading ones in at most two separately strided groups.
    approximate: "none" or "tanh", as torch.nn.functional.gelu has it.
    out_dtype: None (of `out`, else of x), the dtype of x or torch.float8_e4m3fn: each row by its
        scale, in which a nan or an infinity of the row shows.
    out: (..., size), in out_dtype, device of x, strides of its own; must not overlap x.
    out_scale: x.shape[:-1], fp32, where out is e4m3; must not overlap the others.

    Returns out, or (out, out_scale) where out is e4m3. A CUDA tensor runs the shipped cubin on
    torch's current stream; a CPU tensor runs a reference in torch. No backward. Raises TensorError
    naming the argument that does not fit.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian Error
    Linear Units", 2016.
    """
    is_tanh = common.check_choice(_gated.op, "approximate", approximate, GELU_FORMS)
    return _gated(x, (is_tanh,), out_dtype, out, out_scale)


def _formula(x: torch.Tensor, is_tanh: bool) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.gelu(gate, approximate="tanh" if is_tanh else "none") * up


_gated = Gated(
    "gelu_and_mul",
    "bool is_tanh",
    formula=_formula,
    numbers=lambda is_tanh: (int(is_tanh),),
)
