"""The gated activation of SwiGLU layers (csrc/rowwise/silu_and_mul.cu)."""

from __future__ import annotations

from typing import Any

import torch

from ..core import common
from .gated import Gated, cuda_into

_PLAIN_TYPES = common.PLAIN_TYPES
_is_tracing = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_transform, _forward_ad = common.transform, common.forward_ad


def silu_and_mul(
    x: torch.Tensor, *, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Multiply the second half of each row by the SiLU of the first.

        out[..., j] = silu(x[..., j]) * x[..., size + j],  silu(g) = g / (1 + exp(-g))
        e4m3: out_scale = max(|that|) / 448 of each row,  out = round(that / out_scale)

    computed in fp32 and rounded once.

    x: (..., 2 * size), fp16, bf16 or fp32, on the GPU or the CPU; last dimension contiguous, the
        leading ones in at most two separately strided groups.
    out_dtype: None (of `out`, else of x), the dtype of x or torch.float8_e4m3fn: each row by its
        scale, in which a nan or an infinity of the row shows.
    out: (..., size), in out_dtype, device of x, strides of its own; must not overlap x.
    out_scale: x.shape[:-1], fp32, where out is e4m3; must not overlap the others.

    Returns out, or (out, out_scale) where out is e4m3. A CUDA tensor runs the shipped cubin on
    torch's current stream; a CPU tensor runs a reference in torch. No backward. Raises TensorError
    naming the argument that does not fit.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    try:
        if (
            out is out_dtype is out_scale is None
            and not _is_tracing()
            and type(x) in _PLAIN_TYPES
            and x.is_cuda
            # What `Operands` asks of every other call.
            and _transform() is None
            and _forward_ad._current_level < 0
            and not x.is_neg()
            and not (_is_grad_enabled() and x.requires_grad)
        ):
            return _cuda(x)
    except RuntimeError:
        _gated.check(x)  # names what has no memory or no strides
        raise
    return _gated(x, (), out_dtype, out, out_scale)


def _cuda(x: torch.Tensor) -> torch.Tensor:
    """The product of a CUDA tensor into a new one: the quick way through eager calls."""
    if x.dim() == 0 or x.shape[-1] % 2:
        _gated.check(x)
    out = _gated.new_out(x)
    cuda_into(_gated, x, (), out, None, False)
    return out


def _formula(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


_gated = Gated(
    "silu_and_mul",
    formula=_formula,
)
