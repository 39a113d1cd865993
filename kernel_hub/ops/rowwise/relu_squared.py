"""The squared ReLU (csrc/rowwise/relu_squared.cu)."""

from __future__ import annotations

from typing import Any

import torch

from .gated import Gated


def relu_squared(
    x: torch.Tensor, *, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """The square of what is above 0.

        out = max(x, 0)**2
        e4m3: out_scale = max(|that|) / 448 of each row,  out = round(that / out_scale)

    computed in fp32 and rounded once.

    x: (..., size), fp16, bf16 or fp32, on the GPU or the CPU; last dimension contiguous, the
        leading ones in at most two separately strided groups.
    out_dtype: None (of `out`, else of x), the dtype of x or torch.float8_e4m3fn: each row by its
        scale, in which a nan or an infinity of the row shows.
    out: like x in out_dtype, strides of its own; may be x itself (in place), no other overlap.
    out_scale: x.shape[:-1], fp32, where out is e4m3; must not overlap the others.

    Returns out, or (out, out_scale) where out is e4m3. A CUDA tensor runs the shipped cubin on
    torch's current stream; a CPU tensor runs a reference in torch. No backward. Raises TensorError
    naming the argument that does not fit.
    Source: So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021.
    """
    return _relu_squared(x, (), out_dtype, out, out_scale)


_relu_squared = Gated(
    "relu_squared",
    parts=1,
    formula=lambda x: torch.relu(x).square(),
)
