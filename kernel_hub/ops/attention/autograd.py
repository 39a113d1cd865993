"""Gradients of attention for eager calls: the registered ops' own, without torch's dispatcher.

The dispatcher's autograd in Python takes ten times as long as the rest of a call.
"""

from __future__ import annotations

from typing import Any

import torch

from . import eager as run
from . import registered as registered
from .problem import Options

_OP = "flash_attention"


def _tables_of(options: Options) -> list[torch.Tensor]:
    """Those whose writes torch counts: saved like any tensor that the gradients depend on."""
    return [x for x in options.tables if x is not None and not x.is_inference()]


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """(out, lse) of q, k, v."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, deterministic: bool,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        out, lse = run.forward(_OP, q, k, v, None, True, options)
        ctx.save_for_backward(q, k, v, out, lse, *_tables_of(options))
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.rest = (options, deterministic)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: Any) -> tuple[Any, ...]:
        """dq, dk, dv."""
        if dout is None:
            return (None,) * 5
        dout = registered.DOUT.in_memory(dout)
        options, deterministic = ctx.rest
        tensors = ctx.saved_tensors[:5]
        if torch.is_grad_enabled():  # somebody wants the gradients' gradients: that op refuses
            grads = registered.backward_op(dout, *tensors, *options, deterministic)
            return (*grads, None, None)
        q, k, v, out, lse = tensors
        dq, dk, dv = run.new_like(q), run.new_like(k), run.new_like(v)
        run.backward(_OP, dout, (q, k, v), out, lse, (dq, dk, dv), deterministic, options)
        return dq, dk, dv, None, None


class PackedAttention(torch.autograd.Function):  # type: ignore[misc]
    """(out, lse) of q, k and v in one tensor (..., num_heads + 2 * num_kv_heads, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, num_heads: int, num_kv_heads: int, deterministic: bool,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        parts = registered.split_packed(qkv, num_heads, num_kv_heads)
        out, lse = run.forward(_OP, *parts, None, True, options)
        ctx.save_for_backward(qkv, out, lse, *_tables_of(options))
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        ctx.rest = (num_heads, num_kv_heads, *options, deterministic)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: Any) -> tuple[Any, ...]:
        """dqkv."""
        if dout is None:
            return (None,) * 5
        dout = registered.DOUT.in_memory(dout)
        tensors = ctx.saved_tensors[:3]
        if torch.is_grad_enabled():
            grad = registered.packed_backward_op(dout, *tensors, *ctx.rest)
        else:
            grad = registered.packed_backward(dout, *tensors, *ctx.rest)
        return grad, None, None, None, None
