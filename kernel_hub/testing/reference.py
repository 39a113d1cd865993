"""What the ops compute, written plainly in torch, in any precision.

Each takes the op's inputs and `dtype`, the precision to compute in: fp64 gives the truth, the
tensor's own dtype the budget of `compare`. Written apart from the ops' own CPU paths on purpose.
"""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * (weight + weight_offset); with residual, of x + residual."""
    if residual is not None:
        x = x + residual
    s = x.to(dtype)
    mean = torch.sum(s * s, dim=-1, keepdim=True) / s.shape[-1]
    return s / torch.sqrt(mean + eps) * (weight.to(dtype) + weight_offset)


def silu_and_mul(x: torch.Tensor, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """silu(gate) * up, gate and up the halves of the last dimension."""
    size = x.shape[-1] // 2
    gate, up = x[..., :size].to(dtype), x[..., size:].to(dtype)
    return gate * torch.sigmoid(gate) * up


def rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The rotation of q or k (..., seqlen, num_heads, head_dim), by complex numbers."""
    seqlen, half = x.shape[-3], cos.shape[-1]
    rows = torch.arange(seqlen, device=x.device) if positions is None else positions.long()
    c = cos.to(dtype)[rows].unsqueeze(-2)
    s = sin.to(dtype)[rows].unsqueeze(-2)
    rotated, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :].to(dtype)
    if interleaved:
        real, imaginary = rotated.unflatten(-1, (half, 2)).unbind(-1)
    else:
        real, imaginary = rotated.unflatten(-1, (2, half)).unbind(-2)
    turned = (real * c - imaginary * s, imaginary * c + real * s)
    dim = -1 if interleaved else -2
    return torch.cat((torch.stack(turned, dim).flatten(-2), rest), -1)
