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
_new_grad = run.new_like  # by a name of its own, for tests
_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _attended(
    ctx: Any, inputs: tuple[torch.Tensor, ...], qkv: _Heads, deterministic: bool,
    return_lse: bool, options: Options,
) -> Any:  # fmt: skip
    """out, or (out, lse), with what the gradients of `inputs` need of them."""
    out, lse, ctx.plan = run.attended(_OP, *qkv, None, True, options)
    # Those whose writes torch counts: saved like any tensor that the gradients depend on.
    tables = [x for x in options.tables if x is not None and not x.is_inference()]
    ctx.save_for_backward(*inputs, out, lse, *tables)
    ctx.set_materialize_grads(False)
    ctx.options, ctx.deterministic = options, deterministic
    if not return_lse:  # a result less for autograd to follow: 5 us
        return out
    ctx.mark_non_differentiable(lse)
    return out, lse


def _write(ctx: Any, dout: torch.Tensor, qkv: _Heads, given: Any, grads: _Heads) -> None:
    """The gradients, by a launch; given: out and lse, then tables."""
    out, lse = given[:2]
    run.backward(_OP, dout, qkv, out, lse, grads, ctx.deterministic, ctx.options, ctx.plan)


class Attention(torch.autograd.Function):  # type: ignore[misc]
    """out, or (out, lse), of q, k, v."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        """rest: deterministic, return_lse, options."""
        qkv = (q, k, v)
        return _attended(ctx, qkv, qkv, *rest)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: Any = None) -> tuple[Any, ...]:
        """dq, dk, dv."""
        if dout is None:
            return (None,) * 6
        dout = registered.DOUT.in_memory(dout)
        q, k, v, *given = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants the gradients' gradients: that op refuses
            rest = (*given[:2], *ctx.options, ctx.deterministic)
            return (*registered.backward_op(dout, q, k, v, *rest), None, None, None)
        grads = _new_grad(q), _new_grad(k), _new_grad(v)
        _write(ctx, dout, (q, k, v), given, grads)
        return (*grads, None, None, None)


class PackedAttention(torch.autograd.Function):  # type: ignore[misc]
    """The same of one tensor (..., num_heads + 2 * num_kv_heads, head_dim)."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, num_heads: int, num_kv_heads: int, *rest: Any) -> Any:
        """rest: as above."""
        ctx.heads = (num_heads, num_kv_heads)
        return _attended(ctx, (qkv,), registered.split_packed(qkv, *ctx.heads), *rest)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: Any = None) -> tuple[Any, ...]:
        """dqkv."""
        if dout is None:
            return (None,) * 6
        dout = registered.DOUT.in_memory(dout)
        qkv, *given = ctx.saved_tensors
        if torch.is_grad_enabled():
            rest = (*given[:2], *ctx.heads, *ctx.options, ctx.deterministic)
            grad = registered.packed_backward_op(dout, qkv, *rest)
        else:
            grad = _new_grad(qkv)
            parts = [registered.split_packed(x, *ctx.heads) for x in (qkv, grad)]
            _write(ctx, dout, parts[0], given, parts[1])
        return grad, None, None, None, None, None


attend = common.bare_apply(Attention)
