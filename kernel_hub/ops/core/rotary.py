"""Rotation by position: what is asked of its tables, and the rotation itself on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import TensorError
from . import common


def check_rotation(
    op: str, cos: Any, sin: Any, interleaved: Any, rotary_dim: Any, head_dim: int,
    like: torch.Tensor, *, step: int = 2, least: int = 0, **others: Any,
) -> None:  # fmt: skip
    """cos and sin must be tables that rotate `rotary_dim` elements of a head, or both None.

    like: has their device, and their dtype where it is not fp32; step, least: rotary_dim is a
    multiple of one and not below the other; others: arguments that are None where cos is.
    """
    common.check_flag(op, "interleaved", interleaved)
    common.check_count(op, "rotary_dim", rotary_dim)
    if cos is None:
        for argument, value in (("sin", sin), *others.items()):
            if value is not None:
                raise common.refuse(op, argument, "None where cos is None", value)
        if rotary_dim:
            raise common.refuse(op, "rotary_dim", "0 or None where cos is None", rotary_dim)
        return
    common.check_tensor(op, "cos", cos)
    if cos.dim() != 2:
        raise common.refuse(op, "cos", "shape (max_position, rotary_dim // 2)", cos)
    # NOTE: kernels read row 0 for a position that no row is for, and make it nan.
    if rotary_dim and not cos.shape[0] and 0 not in like.shape[: max(1, like.dim() - 2)]:
        raise common.refuse(op, "cos", "at least one row", cos)
    if rotary_dim % step or not least <= rotary_dim <= head_dim:
        expected = "an even number" if step == 2 else f"a multiple of {step}"
        raise TensorError(
            f"{op}: rotary_dim: expected {expected} up to head_dim = {head_dim}, found "
            f"{rotary_dim} (it is twice the last dimension of cos unless given)"
        )
    shape = (cos.shape[0], rotary_dim // 2)
    for argument, table in (("cos", cos), ("sin", sin)):
        common.check_like(op, argument, table, shape, like, dtypes=(torch.float32, like.dtype))
    if cos.dtype != sin.dtype or cos.stride() != sin.stride():
        raise common.refuse(op, "sin", f"the dtype and strides of cos ({common.say(cos)})", sin)


def rotated(
    x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, positions: torch.Tensor,
    interleaved: bool, rotary_dim: int,
) -> torch.Tensor:  # fmt: skip
    """x (..., heads, head_dim) in fp32, rotated at `positions` (...); nan outside the tables."""
    if cos is None or sin is None:
        return x.float()
    inside = (positions >= 0) & (positions < cos.shape[0])
    rows = torch.where(inside, positions, 0).long()
    c, s = (
        torch.where(inside[..., None], table.float()[rows], torch.nan)[..., None, :]
        for table in (cos, sin)
    )
    half = rotary_dim // 2
    first = slice(0, rotary_dim, 2) if interleaved else slice(0, half)
    second = slice(1, rotary_dim, 2) if interleaved else slice(half, rotary_dim)
    a, b = x[..., first].float(), x[..., second].float()
    out = x.to(torch.float32, copy=True)
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out
