"""Layer normalisation of rows, and what models join to it (csrc/rowwise/layer_norm.cu)."""

from __future__ import annotations

from typing import Literal

import torch

from ..core import common
from .norm import Norm, NormGiven, Outs

_is_quick, _MOST = common.is_quick, common.MAX_NUMBER


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    eps: float = 1e-5, *, residual: torch.Tensor | None = None, adds_after: bool = False,
    weight_offset: float = 0.0, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None, out_scale: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None, deterministic: bool | Literal["batch"] = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:  # fmt: skip
    """Take each row's mean off, divide by its standard deviation, scale and shift.

        residual_out = x + residual                       (rounded, equal to torch's own add)
        centred = s - mean(s),  s = residual_out or x
        normed = centred / sqrt(mean(centred**2) + eps) * (weight + weight_offset) + bias
        out = normed, or with adds_after: out = residual + normed,  s = x
        e4m3, int8: out_scale = max(|normed|) / 448 or 127,  out = round(normed / out_scale)

    computed in fp32 and rounded once.

    x: (..., hidden_size), fp16, bf16 or fp32, on the GPU or the CPU; last dimension contiguous, the
        leading ones in at most two separately strided groups.
    weight, bias: (hidden_size,), the dtype of x or fp32, both the same; None is 1 and 0.
    eps: added to the variance; at least 0.
    residual: like x; strides of its own.
    adds_after: the residual is added to what was normed, not before.
    weight_offset: added to the weight.
    out_dtype: None (of `out`, else of x), the dtype of x, torch.float8_e4m3fn or torch.int8: each
        row by its scale, which is nan where the row has a nan or an infinity.
    out, out_scale, residual_out: where to write: like x in out_dtype; x.shape[:-1], fp32; like x.
        out or residual_out may be x or residual itself; no other overlap with anything else.
    deterministic: "batch": a row's bits depend on it alone, not on how many there are.

    Returns out; with out_scale behind it where it is quantised, and residual_out behind that where
    a residual is added before. A CUDA tensor runs the shipped cubin on torch's current stream; a
    CPU tensor runs a reference in torch. No backward. Raises TensorError naming the argument that
    does not fit.
    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    batch_invariant = deterministic is not False and common.is_batch(_norm.op, deterministic)
    if (
        residual is out_dtype is out is out_scale is residual_out is None
        and adds_after is False
        and type(eps) is type(weight_offset) is float
        and 0.0 <= eps <= _MOST
        and -_MOST <= weight_offset <= _MOST
        and _is_quick(x)
        and (weight is None or _is_quick(weight))
        and (bias is None or _is_quick(bias))
    ):
        try:
            return _norm.cuda_plain(x, weight, bias, eps, weight_offset, batch_invariant)
        except common.FOREIGN:
            _norm.operands.check_tensors((x,), (weight, bias, None, None, None, None))
            plain = NormGiven(x, weight, bias, None, eps, weight_offset, False, batch_invariant)
            _norm.check(plain, Outs(None, None, None))
            raise
    given = NormGiven(x, weight, bias, residual, eps, weight_offset, adds_after, batch_invariant)
    found: torch.Tensor | tuple[torch.Tensor, ...] = _norm(
        given, out_dtype, Outs(out, out_scale, residual_out)
    )
    return found


def _normed(s: torch.Tensor, eps: float) -> torch.Tensor:
    """On the CPU, of rows in fp32."""
    centred = s - s.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)


_norm = Norm("layer_norm", kernels="layer_norm", num_sums=2, normed=_normed)
