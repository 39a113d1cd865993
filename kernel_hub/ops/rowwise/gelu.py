"""The GELU (csrc/rowwise/gelu.cu)."""

from __future__ import annotations

from typing import Any

import torch

from ..core import common
from .gated import GELU_FORMS, Gated


def gelu(
    x: torch.Tensor, *, approximate: str = "none", out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None, out_scale: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """The Gaussian error linear unit.

        "none":  out = x / 2 * (1 + erf(x / sqrt(2)))
        "tanh":  out = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))
        e4m3:    out_scale = max(|that|) / 448 of each row,  out = round(that / out_scale)

    computed in fp32 and rounded once.

    x: (..., size), fp16, bf16 or fp32, on the GPU or the CPU; last dimension contiguous, the
        leading ones in at most two separately strided groups.
    approximate: "none" or "tanh", as torch.nn.functional.gelu has it.
    out_dtype: None (of `out`, else of x), the dtype of x or torch.float8_e4m3fn: each row by its
        scale, in which a nan or an infinity of the row shows.
    out: like x in out_dtype, strides of its own; may be x itself (in place), no other overlap.
    out_scale: x.shape[:-1], fp32, where out is e4m3; must not overlap the others.

    Returns out, or (out, out_scale) where out is e4m3. A CUDA tensor runs the shipped cubin on
    torch's current stream; a CPU tensor runs a reference in torch. No backward. Raises TensorError
    naming the argument that does not fit.
    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    is_tanh = common.check_choice(_gelu.op, "approximate", approximate, GELU_FORMS)
    return _gelu(x, (is_tanh,), out_dtype, out, out_scale)


_gelu = Gated(
    "gelu",
    "bool is_tanh",
    parts=1,
    formula=lambda x, is_tanh: torch.nn.functional.gelu(
        x, approximate="tanh" if is_tanh else "none"
    ),
    numbers=lambda is_tanh: (int(is_tanh),),
)
