"""From checked arguments to the launches: plans of calls seen before, outputs, CUDA or CPU.

Takes q, k, v as (..., tokens, heads, head_dim) already; knows nothing of layouts or autograd.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.launch import Plans
from . import backward_portable, cpu, forward_portable
from . import checks as checks
from .problem import Problem

# What a call's shapes, strides and options were checked and resolved to.
_plans: Plans[checks.Numbers] = Plans()
_empty_like = torch.empty_like
_float32 = torch.float32

cuda_forward = forward_portable.forward
cuda_backward = backward_portable.backward
cpu_backward = cpu.backward


def cpu_forward(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Looks at the lengths first: nothing waits for it, and torch's error would name none."""
    checks.check_values("flash_attention", problem, is_strict=False)
    cpu.forward(problem, out, lse)


def new_like(x: torch.Tensor) -> torch.Tensor:
    """Uninitialised, with the order of x's dimensions in memory, without its gaps."""
    out = _empty_like(x)
    return out if out.stride(-1) == 1 else _empty_like(x, memory_format=torch.contiguous_format)


def new_lse(q: torch.Tensor, is_varlen: bool) -> torch.Tensor:
    """Uninitialised (batch_size, num_heads, seqlen_q) or (num_heads, total_q)."""
    if is_varlen:
        return q.new_empty((q.shape[1], q.shape[0]), dtype=_float32)
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=_float32)


def problem_of(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    softmax_scale: float | None,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    *,
    dtypes: tuple[torch.dtype, ...] = checks.DTYPES,
) -> Problem:
    """The `Problem` of a call, checked unless a call like it was."""
    tables = (alibi_slopes, cu_seqlens_q, cu_seqlens_k, block_table, cache_seqlens)
    key: tuple[Any, ...] = (
        q.dtype, q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(),
        causal, softmax_scale, window_size, softcap, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    # Not `tables != (None, ...)`, which would ask each tensor whether it equals None.
    has_tables = not (
        alibi_slopes is cu_seqlens_q is cu_seqlens_k is block_table is cache_seqlens is None
    )
    if has_tables:
        key += tuple([None if t is None else (t.shape, t.stride()) for t in tables])
    try:
        plan = _plans.get(key) if q.is_cuda else None
    except TypeError:  # something that is no number, which the checks will name
        plan = None
    if plan is None:
        plan = checks.resolve(
            op, q, k, v, causal, softmax_scale, window_size, softcap, alibi_slopes, cu_seqlens_q,
            cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, cache_seqlens, dtypes=dtypes,
        )  # fmt: skip
        if q.is_cuda:
            _plans.keep(key, plan)
    batch_size, longest_q, longest_k, scale, left, right, cap = plan
    if not has_tables:
        return Problem(q, k, v, batch_size, longest_q, longest_k, scale, left, right, cap)
    problem = Problem(
        q, k, v, batch_size, longest_q, longest_k, scale, left, right, cap,
        alibi_slopes, cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table,
    )  # fmt: skip
    if common.is_debugging():
        checks.check_values(op, problem)
    return problem


def forward(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    need_lse: bool,
    options: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, lse or None), out being written if given. `options`: those of `problem_of`."""
    problem = problem_of(op, q, k, v, *options)
    if out is None:
        out = _empty_like(q)
        if out.stride(-1) != 1:
            out = new_like(q)
    else:
        checks.check_out(op, out, q, k, v, *options[4:7], *options[9:])
    lse = new_lse(q, problem.cu_seqlens_q is not None) if need_lse else None
    if out.numel() == 0:
        return out, lse
    try:
        (cuda_forward if q.is_cuda else cpu_forward)(problem, out, lse)
    except KernelHubError:
        # The launch checks devices and dtypes; this names them.
        checks.resolve(op, q, k, v, *options)
        raise
    report(problem)
    return out, lse


def report(problem: Problem) -> None:
    """Under KERNEL_HUB_DEBUG=1: raise TensorError where tables led a launch outside."""
    if common.is_debugging():
        bounds.report(problem.q)


def _gradient_rows(dout: torch.Tensor) -> torch.Tensor:
    """dout as the kernels read it: sums and broadcasts come in with strides of 0."""
    step = common.VEC_BYTES // dout.element_size()
    is_readable = (
        dout.stride(-1) == 1
        and common.is_aligned(step, *dout.stride()[:-1])
        and dout.data_ptr() % common.VEC_BYTES == 0
    )
    return dout if is_readable else dout.contiguous()


def backward(
    op: str,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    deterministic: bool,
    options: tuple[Any, ...],
) -> None:
    """Write dq, dk and dv; rows outside every sequence become 0."""
    problem = problem_of(op, q, k, v, *options)
    # Only the lengths on the device say which rows no kernel writes.
    if problem.cu_seqlens_q is not None or q.numel() == 0 or k.numel() == 0:
        dq.zero_()
    if problem.cu_seqlens_k is not None or problem.cache_seqlens is not None or q.numel() == 0:
        dk.zero_()
        dv.zero_()
    if q.numel() == 0 or k.numel() == 0:
        return
    (cuda_backward if q.is_cuda else cpu_backward)(
        problem, out, lse, _gradient_rows(dout), dq, dk, dv, deterministic=deterministic
    )
    report(problem)
