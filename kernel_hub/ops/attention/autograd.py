"""Gradients of attention for eager calls: the registered ops' own, without torch's dispatcher.

The dispatcher's autograd in Python takes ten times as long as the rest of a call.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core import common
from . import eager as run
from . import registered as registered
from .problem import Options

_OP = "flash_attention"
_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _attended(
    ctx: Any, inputs: tuple[torch.Tensor, ...], qkv: _Heads, deterministic: bool, options: Options
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse), with what the gradients of `inputs` need of them."""
    out, lse, ctx.plan = run.attended(_OP, *qkv, None, True, options)
    # Those whose writes torch counts: saved like any tensor that the gradients depend on.
    tables = [x for x in options.tables if x is not None and not x.is_inference()]
    ctx.save_for_backward(*inputs, out, lse, *tables)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.options, ctx.deterministic = options, deterministic
    return out, lse


def _write(ctx: Any, dout: torch.Tensor, qkv: _Heads, given: Any, grads: _Heads) -> None:
    """The gradients, by a launch; given: out and lse, then tables."""
    out, lse = given[:2]
    run.backward(_OP, dout, qkv, out, lse, grads, ctx.deterministic, ctx.options, ctx.plan)


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """(out, lse) of q, k, v."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, deterministic: bool,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        qkv = (q, k, v)
        return _attended(ctx, qkv, qkv, deterministic, options)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: Any) -> tuple[Any, ...]:
        """dq, dk, dv."""
        if dout is None:
            return (None,) * 5
        dout = registered.DOUT.in_memory(dout)
        q, k, v, *given = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants the gradients' gradients: that op refuses
            rest = (*given[:2], *ctx.options, ctx.deterministic)
            return (*registered.backward_op(dout, q, k, v, *rest), None, None)
        grads = run.new_like(q), run.new_like(k), run.new_like(v)
        _write(ctx, dout, (q, k, v), given, grads)
        return (*grads, None, None)


class PackedAttention(torch.autograd.Function):  # type: ignore[misc]
    """(out, lse) of q, k and v in one tensor (..., num_heads + 2 * num_kv_heads, head_dim)."""

    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, num_heads: int, num_kv_heads: int, deterministic: bool,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        ctx.heads = (num_heads, num_kv_heads)
        parts = registered.split_packed(qkv, *ctx.heads)
        return _attended(ctx, (qkv,), parts, deterministic, options)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: Any) -> tuple[Any, ...]:
        """dqkv."""
        if dout is None:
            return (None,) * 5
        dout = registered.DOUT.in_memory(dout)
        qkv, *given = ctx.saved_tensors
        if torch.is_grad_enabled():
            rest = (*given[:2], *ctx.heads, *ctx.options, ctx.deterministic)
            grad = registered.packed_backward_op(dout, qkv, *rest)
        else:
            grad = run.new_like(qkv)
            parts = [registered.split_packed(x, *ctx.heads) for x in (qkv, grad)]
            _write(ctx, dout, parts[0], given, parts[1])
        return grad, None, None, None, None


attend = common.bare_apply(Attention)
