"""Attention as torch.library ops, with their gradients: what torch.compile and export work with;
and the gradients of eager calls, without the dispatcher.

Each takes q, k, v as (..., tokens, heads, head_dim); the public op turns layouts into strides.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import TensorError
from ..core import common
from . import checks as checks
from . import eager as run
from .problem import TABLES, Options

OPTIONS = (
    "bool causal, float? softmax_scale, SymInt[] window_size, float softcap, "
    "Tensor? alibi_slopes, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, Tensor? block_table, Tensor? cache_seqlens, Tensor? sinks, "
    "bool batch_invariant"
)
NUM_OPTIONS = len(Options._fields)
_OP = "flash_attention"
DOUT = common.Operands(_OP, "dout", has_backward=True)
_Pair = tuple[torch.Tensor, torch.Tensor]


def options_of(*given: Any) -> Options:
    """Those of a schema, whose list of numbers becomes the tuple that plans are kept by."""
    options = Options(*given)
    return options._replace(window_size=tuple(options.window_size))


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *options, _, need_lse = rest
    out, lse = run.forward(_OP, q, k, v, None, need_lse, options_of(*options))
    return out, run.registered_lse(q, lse)


def _forward_fake(q: Any, k: Any, v: Any, *rest: Any) -> _Pair:
    *given, _, need_lse = rest
    options = Options(*given)
    checks.resolve(_OP, q, k, v, options)
    lse = run.registered_lse(q, run.new_lse(q) if need_lse else None)
    return run.new_out(q, v), lse


def _forward_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
    *options, need_lse, out = rest
    _, lse = run.forward(_OP, q, k, v, out, need_lse, options_of(*options))
    return run.registered_lse(q, lse)


def _forward_out_fake(q: Any, k: Any, v: Any, *rest: Any) -> torch.Tensor:
    *given, need_lse, out = rest
    options = Options(*given)
    checks.resolve(_OP, q, k, v, options)
    checks.check_out_layout(_OP, out, q, v)
    return run.registered_lse(q, run.new_lse(q) if need_lse else None)


def _backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    *options, deterministic = rest
    grads = run.new_like(q), run.new_like(k), run.new_like(v)
    run.backward(_OP, dout, (q, k, v), out, lse, grads, deterministic, options_of(*options))
    return grads


def _backward_fake(dout: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return run.new_like(q), run.new_like(k), run.new_like(v)


def split_packed(
    qkv: torch.Tensor, num_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The heads of q, k and v in (..., num_heads + 2 * num_kv_heads, head_dim)."""
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), -2)
    return q, k, v


def _packed(qkv: torch.Tensor, num_heads: int, num_kv_heads: int, *rest: Any) -> _Pair:
    return _forward(*split_packed(qkv, num_heads, num_kv_heads), *rest)


def _packed_fake(qkv: Any, num_heads: int, num_kv_heads: int, *rest: Any) -> _Pair:
    return _forward_fake(*split_packed(qkv, num_heads, num_kv_heads), *rest)


def packed_backward(
    dout: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, num_heads: int,
    num_kv_heads: int, *rest: Any,
) -> torch.Tensor:  # fmt: skip
    *options, deterministic = rest
    dqkv = run.new_like(qkv)
    run.backward(
        _OP, dout, split_packed(qkv, num_heads, num_kv_heads), out, lse,
        split_packed(dqkv, num_heads, num_kv_heads), deterministic, options_of(*options),
    )  # fmt: skip
    return dqkv


def _packed_backward_fake(dout: Any, qkv: Any, *rest: Any) -> torch.Tensor:
    return run.new_like(qkv)


def define(schema: str, run: Any, fake: Any) -> Any:
    """An op whose implementation asks itself where its tensors are."""
    return common.define(schema, cuda=run, cpu=run, fake=fake)


forward_op = define(
    f"flash_attention(Tensor q, Tensor k, Tensor v, {OPTIONS}, bool deterministic, "
    "bool need_lse) -> (Tensor, Tensor)",
    _forward, _forward_fake,
)  # fmt: skip
forward_out_op = define(
    f"flash_attention_out(Tensor q, Tensor k, Tensor v, {OPTIONS}, bool need_lse, "
    "Tensor(a!) out) -> Tensor",
    _forward_out, _forward_out_fake,
)  # fmt: skip
backward_op = define(
    "flash_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{OPTIONS}, bool deterministic) -> (Tensor, Tensor, Tensor)",
    _backward, _backward_fake,
)  # fmt: skip
packed_op = define(
    f"flash_attention_qkvpacked(Tensor qkv, SymInt num_heads, SymInt num_kv_heads, {OPTIONS}, "
    "bool deterministic, bool need_lse) -> (Tensor, Tensor)",
    _packed, _packed_fake,
)  # fmt: skip
packed_backward_op = define(
    "flash_attention_qkvpacked_backward(Tensor dout, Tensor qkv, Tensor out, Tensor lse, "
    f"SymInt num_heads, SymInt num_kv_heads, {OPTIONS}, bool deterministic) -> Tensor",
    packed_backward, _packed_backward_fake,
)  # fmt: skip


def check_gradients(op: str, need_lse: bool, block_table: Any, alibi_slopes: Any) -> None:
    """What autograd cannot follow."""
    if block_table is not None:
        raise TensorError(
            f"{op}: block_table: paged keys have no backward; call it under torch.no_grad()"
        )
    if isinstance(alibi_slopes, torch.Tensor) and alibi_slopes.requires_grad:
        raise TensorError(f"{op}: alibi_slopes: requires grad, but has no gradient here; detach it")
    if not need_lse:
        raise TensorError(f"{op}: need_lse: expected True where gradients are needed, found False")


def _save(ctx: Any, tensors: tuple[Any, ...], rest: tuple[Any, ...]) -> None:
    *given, ctx.deterministic, need_lse = rest
    options = Options(*given)
    check_gradients(_OP, need_lse, options.block_table, options.alibi_slopes)
    ctx.save_for_backward(*tensors, *options.tables)
    none: dict[str, Any] = dict.fromkeys(TABLES)
    ctx.options = options._replace(**none)


def _saved(ctx: Any, count: int) -> tuple[tuple[Any, ...], list[Any]]:
    saved = ctx.saved_tensors
    tables = dict(zip(TABLES, saved[count:], strict=True))
    return saved[:count], [*ctx.options._replace(**tables), ctx.deterministic]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    _save(ctx, (*inputs[:3], *output), inputs[3:])


def _grad(ctx: Any, dout: torch.Tensor, dlse: Any) -> tuple[Any, ...]:
    DOUT.check_tangents(dout)
    tensors, rest = _saved(ctx, 5)
    return (*backward_op(dout, *tensors, *rest), *(None,) * (NUM_OPTIONS + 2))


def _packed_setup(ctx: Any, inputs: tuple[Any, ...], output: _Pair) -> None:
    _save(ctx, (inputs[0], *output), inputs[3:])
    ctx.heads = inputs[1:3]


def _packed_grad(ctx: Any, dout: torch.Tensor, dlse: Any) -> tuple[Any, ...]:
    DOUT.check_tangents(dout)
    tensors, rest = _saved(ctx, 3)
    return (packed_backward_op(dout, *tensors, *ctx.heads, *rest), *(None,) * (NUM_OPTIONS + 4))


def _no_double(ctx: Any, *grads: Any) -> None:
    raise TensorError(f"{_OP}: the gradients of its gradients (double backward) are not there")


def _no_vmap(info: Any, in_dims: Any, *arguments: Any) -> None:
    raise TensorError(
        f"{_OP}: torch.func.vmap is not supported; batch_size is a dimension of q, k and v"
    )


for _op, _backward_of, _setup_of in (
    (forward_op, _grad, _setup),
    (packed_op, _packed_grad, _packed_setup),
    (backward_op, _no_double, None),
    (packed_backward_op, _no_double, None),
):
    torch.library.register_autograd(
        _op.name(), _backward_of, setup_context=_setup_of, lib=common.LIBRARY
    )
if hasattr(torch.library, "register_vmap"):  # torch 2.5; earlier ones say there is no rule
    for _op in (forward_op, forward_out_op, packed_op, backward_op, packed_backward_op):
        torch.library.register_vmap(_op.name(), _no_vmap, lib=common.LIBRARY)


# ---- the same gradients for eager calls ----
# NOTE: the dispatcher's autograd in Python takes ten times as long as the rest of a call.
_new_grad = run.new_like  # by a name of its own, for tests
_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _attended(
    ctx: Any, inputs: tuple[torch.Tensor, ...], qkv: _Heads, deterministic: bool,
    return_lse: bool, options: Options,
) -> Any:  # fmt: skip
    """out, or (out, lse), with what the gradients of `inputs` need of them."""
    out, lse, plan = run.attended(_OP, *qkv, None, True, options)
    # Those whose writes torch counts: saved like any tensor that the gradients depend on.
    tables = [x for x in options.tables if x is not None and not x.is_inference()]
    ctx.save_for_backward(*inputs, out, lse, *tables)
    ctx.set_materialize_grads(False)
    ctx.call = deterministic, options, plan
    if not return_lse:  # a result less for autograd to follow: 5 us
        return out
    ctx.mark_non_differentiable(lse)
    return out, lse


def _write(ctx: Any, dout: torch.Tensor, qkv: _Heads, given: Any, grads: _Heads) -> None:
    """The gradients, by a launch; given: out and lse, then tables."""
    run.backward(_OP, dout, qkv, given[0], given[1], grads, *ctx.call)


@common.bare_backward
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
        dout = DOUT.in_memory(dout)
        q, k, v, *given = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody wants the gradients' gradients: that op refuses
            deterministic, options, _ = ctx.call
            rest = (*given[:2], *options, deterministic)
            return (*backward_op(dout, q, k, v, *rest), None, None, None)
        grads = _new_grad(q), _new_grad(k), _new_grad(v)
        _write(ctx, dout, (q, k, v), given, grads)
        return (*grads, None, None, None)


@common.bare_backward
class PackedAttention(torch.autograd.Function):  # type: ignore[misc]
    """The same of one tensor (..., num_heads + 2 * num_kv_heads, head_dim)."""

    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, num_heads: int, num_kv_heads: int, *rest: Any) -> Any:
        """rest: as above."""
        ctx.heads = (num_heads, num_kv_heads)
        return _attended(ctx, (qkv,), split_packed(qkv, *ctx.heads), *rest)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: Any = None) -> tuple[Any, ...]:
        """dqkv."""
        if dout is None:
            return (None,) * 6
        dout = DOUT.in_memory(dout)
        qkv, *given = ctx.saved_tensors
        if torch.is_grad_enabled():
            deterministic, options, _ = ctx.call
            rest = (*given[:2], *ctx.heads, *options, deterministic)
            grad = packed_backward_op(dout, qkv, *rest)
        else:
            grad = _new_grad(qkv)
            parts = [split_packed(x, *ctx.heads) for x in (qkv, grad)]
            _write(ctx, dout, parts[0], given, parts[1])
        return grad, None, None, None, None, None


attend = common.bare_apply(Attention)
