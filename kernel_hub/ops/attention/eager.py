"""From the arguments of a call to its launches: plans of calls seen before, outputs, CUDA or CPU.

Takes q, k, v as (..., tokens, heads, head_dim) already; knows nothing of layouts or autograd.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.launch import Launch, Memory, Plans, nothing
from . import checks as checks
from . import cpu, forward_portable
from . import forward_sm90 as sm90
from .backward import portable as backward_portable
from .backward import sm90 as backward_sm90
from .backward.sm90 import BackwardPlan, Tables
from .problem import Options, Problem

_empty_like = torch.empty_like
_lse_like = torch.empty_like  # by a name of its own, for tests
_float32 = torch.float32

_LOW_BITS = common.VEC_BYTES - 1

cuda_backward = backward_portable.backward
launch_backward = backward_portable.launch
cpu_backward = cpu.backward


class AttentionPlan(NamedTuple):
    """All that layouts and options say of a call."""

    numbers: checks.Numbers
    out: torch.Tensor | None  # what one is made like where none is given
    lse: torch.Tensor | None  # and this, where it is needed
    launch: Launch
    spans: common.Spans  # for each set of addresses that was met, its tensor maps
    gradients: Memory[BackwardPlan]
    known_gradients: Memory[BackwardPlan]  # of outs and gradients that were made for a call alone


_plans: Plans[AttentionPlan] = Plans()


def new_like(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised, with the order of x's dimensions in memory, without its gaps."""
    out = _empty_like(x)
    return out if out.stride(-1) == 1 else _empty_like(x, memory_format=torch.contiguous_format)


def new_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`new_like` of q, with the head_dim of v."""
    head_dim = v.shape[-1]
    return new_like(q if q.shape[-1] == head_dim else q[..., :1].expand(*q.shape[:-1], head_dim))


def new_lse(q: torch.Tensor) -> torch.Tensor:
    """Uninitialised (batch_size, num_heads, seqlen_q), or of ragged rows (num_heads, total_q)."""
    if q.dim() == 3:
        return q.new_empty((q.shape[1], q.shape[0]), dtype=_float32)
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=_float32)


_cpu_lse = new_lse  # by a name of its own, for tests


def registered_lse(q: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """What an op whose schema has no None returns for it."""
    return q.new_empty((0,), dtype=_float32) if lse is None else lse


def addresses_and_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: Options,
    more: tuple[Any, ...],
) -> tuple[tuple[int, ...], tuple[Any, ...]]:  # fmt: skip
    """Where the tensors of a call lie (in the order of `checks.spans_of`; tables only where there
    is an out that they could meet), and what its plan depends on, `more` being a part of it.

    The key says whether every address is aligned; what a call allocates itself always is.
    """
    at: tuple[int, ...] = q.data_ptr(), k.data_ptr(), v.data_ptr()
    low_bits = at[0] | at[1] | at[2]
    key: tuple[Any, ...] = (
        q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device(),
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
    )  # fmt: skip
    if out is not None:
        at += (out.data_ptr(),)
        low_bits |= at[3]
        key += (out.dtype, out.get_device(), out.shape, out.stride())
    (causal, softmax_scale, window_size, softcap, alibi_slopes, cu_seqlens_q, cu_seqlens_k,
     max_seqlen_q, max_seqlen_k, block_table, cache_seqlens, sinks,
     batch_invariant) = options  # fmt: skip
    # Not `tables != (None, ...)`, which would ask each tensor whether it equals None.
    if (
        alibi_slopes
        is cu_seqlens_q
        is cu_seqlens_k
        is block_table
        is cache_seqlens
        is sinks
        is None
    ):
        return at, (*key, low_bits & 15 == 0, more, options)
    tables = (alibi_slopes, cu_seqlens_q, cu_seqlens_k, block_table, cache_seqlens, sinks)
    if out is not None:
        at += tuple([t.data_ptr() for t in tables if t is not None])
    return at, (
        *key, low_bits & 15 == 0, more, causal, softmax_scale, window_size, softcap, max_seqlen_q,
        max_seqlen_k, batch_invariant, None if sinks is None else sinks.dtype,
        *[None if t is None else (t.shape, t.stride()) for t in tables],
    )  # fmt: skip


def problem_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, numbers: checks.Numbers, options: Options
) -> Problem:
    """The `Problem` of arguments that were checked and resolved to `numbers`."""
    return Problem(
        q, k, v, *numbers, options.alibi_slopes, options.cu_seqlens_q, options.cu_seqlens_k,
        options.cache_seqlens, options.block_table, options.sinks, options.batch_invariant,
    )  # fmt: skip


def forward(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None,
    need_lse: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(out, lse or None), out being written if given."""
    return (cuda_forward if q.is_cuda else cpu_forward)(op, q, k, v, out, need_lse, options)[:2]


def attended(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None,
    need_lse: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None, AttentionPlan | None]:  # fmt: skip
    """`forward`'s, and the plan there was for it, which `backward` goes on with."""
    return (cuda_forward if q.is_cuda else cpu_forward)(op, q, k, v, out, need_lse, options)


def cuda_forward(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None,
    need_lse: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None, AttentionPlan]:  # fmt: skip
    """By one launch."""
    more = (not need_lse, sm90.is_enabled)
    addresses, key = addresses_and_key(q, k, v, out, options, more)
    try:
        plan = _plans.get(key)
    except TypeError:  # something that is no number, which the checks will name
        plan = None
    if plan is None:
        plan = _plans.keep(key, _plan(op, q, k, v, out, need_lse, options))
    maps = plan.spans.apart.get(addresses)
    if maps is None:
        plan.spans.refuse(addresses)
        maps = sm90.maps(plan.launch, q, k, v) if plan.launch.maps else ()
        plan.spans.keep(addresses, maps)
    is_debugging = common.is_debugging() and checks.read_tables(
        op, problem_of(q, k, v, plan.numbers, options)
    )
    if out is None:
        assert plan.out is not None
        out = _empty_like(plan.out)
    lse = None if plan.lse is None else _lse_like(plan.lse)
    try:
        launch(plan.launch, maps, q, k, v, out, lse, options)
    except KernelHubError:
        # The launch checks devices and dtypes; this names them.
        checks.resolve(op, q, k, v, options)
        raise
    if is_debugging:  # raises TensorError where tables led the launch outside
        bounds.report(q, *checks.finished(options.cache_seqlens))
    return out, lse, plan


def launch(
    planned: Launch, maps: tuple[Any, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor | None, options: Options,
) -> None:  # fmt: skip
    """What was planned, of tensors of which nothing is read but where they lie."""
    run = sm90.launch if maps else forward_portable.launch
    run(planned, maps, q, k, v, out, lse, options)


def plan_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, need_lse: bool, options: Options
) -> AttentionPlan | None:
    """The plan there is of `cuda_forward` of these without `out`; None: there is none."""
    more = (not need_lse, sm90.is_enabled)
    return _plans.get(addresses_and_key(q, k, v, None, options, more)[1])


def _plan(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None,
    need_lse: bool, options: Options,
) -> AttentionPlan:  # fmt: skip
    """Check everything that does not lie on the device, and choose the launch."""
    numbers = checks.resolve(op, q, k, v, options)
    spans = checks.spans_of(q, k, v, out, options)
    to: torch.Tensor = new_out(q, v) if out is None else out
    if out is not None:
        checks.check_out_layout(op, out, q, v)
    lse = new_lse(q) if need_lse else None
    problem = problem_of(q, k, v, numbers, options)
    launch = forward_portable.plan(problem, to, lse) if to.numel() else Launch()
    if lse is not None and launch.function is not nothing and any(map(_needs_gradient, (q, k, v))):
        common.load_ahead(q, launch.function)  # first, so that the other thread is under its wait
        backward_portable.get_ready(problem)
    return attention_plan(numbers, to if out is None else None, lse, launch, spans)


def _needs_gradient(x: torch.Tensor) -> bool:
    """Whether it, or what it is a slice of: within a Function's forward no slice says so itself."""
    base = x._base
    return x.requires_grad or (base is not None and base.requires_grad)


def attention_plan(
    numbers: checks.Numbers, made: torch.Tensor | None, lse: torch.Tensor | None, launch: Launch,
    spans: common.Spans,
) -> AttentionPlan:  # fmt: skip
    """The plan of a call. made, lse: what was made for it alone; None where there is none."""
    like = [None if x is None else common.emptied(x) for x in (made, lse)]
    return AttentionPlan(numbers, like[0], like[1], launch, spans, Memory(), Memory())


def cpu_forward(
    op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None,
    need_lse: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None, None]:  # fmt: skip
    """By torch, which would name no table: lengths are looked at first, as nothing waits."""
    problem = problem_of(q, k, v, checks.resolve(op, q, k, v, options), options)
    if common.is_debugging():
        checks.read_tables(op, problem)
    if out is None:
        out = new_out(q, v)
    else:
        checks.check_out(op, q, k, v, out, options)
    lse = _cpu_lse(q) if need_lse else None
    if out.numel():
        checks.check_values("flash_attention", problem, is_strict=False)
        cpu.forward(problem, out, lse)
    return out, lse, None


def _gradient_rows(dout: torch.Tensor) -> torch.Tensor:
    """dout as the kernels read it: sums and broadcasts come in with strides of 0, TMA has none."""
    if dout.is_contiguous() and not dout.data_ptr() % common.VEC_BYTES:
        return dout
    step = common.VEC_BYTES // dout.element_size()
    is_readable = (
        dout.stride(-1) == 1
        and 0 not in dout.stride()
        and common.is_aligned(step, *dout.stride()[:-1])
        and dout.data_ptr() % common.VEC_BYTES == 0
    )
    return dout if is_readable else dout.contiguous()


def backward(
    op: str, dout: torch.Tensor, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor, lse: torch.Tensor, grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    deterministic: bool, options: Options, plan: AttentionPlan | None = None,
) -> None:  # fmt: skip
    """Write the gradients of q, k and v; rows outside every sequence become 0.

    plan: that of the forward which made out and lse, if the caller has it; grads are then this
    library's own too."""
    (q, k, v), (dq, dk, dv) = qkv, grads
    key = None
    if plan is not None:
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr()
        low_bits = addresses[0] | addresses[1] | addresses[2] | addresses[3] | out.data_ptr()
        # Hooks of saved tensors may have brought back what lies otherwise.
        key = (
            low_bits & _LOW_BITS, backward_sm90.is_enabled, deterministic, q.stride(), k.stride(),
            v.stride(), out.stride(), dout.stride(), dq.stride(),
        )  # fmt: skip
        known = plan.known_gradients.get(key)
        if known is not None and not common.is_debugging():
            _, cu_seqlens_q, cu_seqlens_k, cache_seqlens, _ = tables = Tables(
                bounds.flag("flash_attention", q), options.cu_seqlens_q, options.cu_seqlens_k,
                options.cache_seqlens, options.alibi_slopes,
            )  # fmt: skip
            _clear(grads, cu_seqlens_q is not None, not cu_seqlens_k is cache_seqlens is None)
            launch_backward(known, qkv, (out, lse, dout, *grads), tables, addresses)
            return
    checks.check_has_gradient(op, q)
    if plan is None:  # it may still be there
        plan = plan_of(q, k, v, True, options)
    numbers = checks.resolve(op, q, k, v, options) if plan is None else plan.numbers
    problem = problem_of(q, k, v, numbers, options)
    is_debugging = common.is_debugging() and checks.read_tables(op, problem)
    has_queries, has_keys = q.numel() > 0, k.numel() > 0
    # Only the lengths on the device say which rows no kernel writes.
    has_ragged_keys = not problem.cu_seqlens_k is problem.cache_seqlens is None
    _clear(
        grads, problem.cu_seqlens_q is not None or not (has_queries and has_keys),
        has_ragged_keys or not has_queries,
    )  # fmt: skip
    if not (has_queries and has_keys):
        return
    rows = _gradient_rows(dout)
    made = (cuda_backward if q.is_cuda else cpu_backward)(
        problem, out, lse, rows, dq, dk, dv, deterministic=deterministic,
        plans=None if plan is None else plan.gradients,
    )  # fmt: skip
    if key is not None and made is not None and rows is dout and key[0] == 0:
        assert plan is not None
        plan.known_gradients.keep(key, made)
    if is_debugging:
        bounds.report(q, *checks.finished(options.cache_seqlens))


def _clear(grads: tuple[torch.Tensor, ...], of_queries: bool, of_keys: bool) -> None:
    dq, dk, dv = grads
    if of_queries:
        dq.zero_()
    if of_keys:
        dk.zero_()
        dv.zero_()
