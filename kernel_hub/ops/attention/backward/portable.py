"""Launches the gradients of attention (csrc/attention/flash_attention_backward.cu) for a Problem.

Checks nothing and allocates only the workspace: the public op has checked, and owns the outputs.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from ...core import common
from ...core.device import PlannedGpu, Stated, device_of, launch_facts
from ...core.launch import Memory, Plans, nothing
from ..problem import Gradients, Problem, lse_strides_of, strides_of
from . import sm90
from .sm90 import BackwardLaunch, BackwardPlan, Tables

CUBIN = "flash_attention_backward"
_empty_like = torch.empty_like
_LOW_BITS = common.VEC_BYTES - 1
_FEW_WORKS, _ENOUGH_PARTS = 2, 4  # a multiprocessor, where parts are of heads

# The best first: a head_dim takes the first that holds it and fits a block's shared memory.
# Measured on an H200 (docs/notes/flash_attention_backward.md).
_SUFFIXES = ("", "_163k", "_99k")
VARIANTS = (
    *("hdim32", "hdim64"),
    *(f"hdim{width}{suffix}" for width in (96, 128, 160, 192, 256) for suffix in _SUFFIXES),
)


def stated(variant: str) -> Stated:
    """What the main kernel of a variant states of its launches, of either dtype."""
    return launch_facts(CUBIN, f"{CUBIN}_bf16_{variant}")


# By the layouts of q, k and v, where the forward's plan does not bring them.
_plans: Plans[Memory[BackwardPlan]] = Plans()
# (compute capability, dtype, head_dim, whether by Hopper's kernels) that was got ready for.
_are_ready: set[tuple[Any, ...]] = set()


@functools.cache
def choose(head_dim: int, shared_bytes: int) -> str:
    """The variant for a head_dim on a GPU where a block may have so much shared memory."""
    for variant in VARIANTS:
        facts = stated(variant)
        if head_dim <= facts.sizes["head_dim"] and facts.shared_bytes <= shared_bytes:
            return variant
    raise ValueError(f"head_dim {head_dim} is more than 256")


def ask(head_dim: int, dtype: torch.dtype, shared_bytes: int) -> None:
    """Ask the manifest what plans of such a problem do; the answers are kept."""
    named = f"{CUBIN}_{common.DTYPE_TOKENS[dtype]}"
    for step in ("delta", choose(head_dim, shared_bytes), "convert"):
        common.shipped(CUBIN, f"{named}_{step}")
    launch_facts(CUBIN, f"{named}_delta")


def get_ready(problem: Problem) -> None:
    """Begin what the first gradients of such a problem ask of the manifest and of files, under the
    load that the forward waits for."""
    q, head_dim = problem.q, problem.widest_head
    device = device_of(q.device)
    is_sm90 = sm90.is_enabled and device.has_wgmma
    is_sm90 = is_sm90 and problem.alibi_slopes is None and problem.softcap == 0
    key = device.compute_capability, q.dtype, head_dim, is_sm90
    if key in _are_ready:
        return
    _are_ready.add(key)
    if is_sm90:
        common.get_ready(q, sm90.CUBIN, functools.partial(sm90.ask, head_dim, q.dtype))
    else:
        shared_bytes = device.shared_bytes
        common.get_ready(q, CUBIN, functools.partial(ask, head_dim, q.dtype, shared_bytes))


def backward(
    problem: Problem, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dq: torch.Tensor,
    dk: torch.Tensor, dv: torch.Tensor, *, deterministic: bool,
    plans: Memory[BackwardPlan] | None = None,
) -> BackwardPlan | None:  # fmt: skip
    """Write the gradients of (out * dout).sum() into dq, dk, dv; every row of every sequence.

    dq: like problem.q; out, dout: with v's head_dim; dk, dv: like problem.k and v (not paged); any
        strides, the last dimension contiguous (a dout of other strides is copied).
    lse: (batch_size, num_heads, seqlen_q) or (num_heads, total_q), fp32, natural logarithm.
    deterministic: dq too has the same bits in every run; dk and dv always have.
    plans: those of problems like this one, on GPUs like this one.
    Returns the plan of a call with such strides and addresses so aligned, if it was that alone.
    """
    if problem.q.shape[-1] != problem.v.shape[-1]:
        _backward_widened(problem, Gradients(out, lse, dout, dq, dk, dv), deterministic)
        return None
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    if lse.stride(-1) != 1:
        lse = lse.contiguous()
    q, k, v = problem[:3]
    given = Gradients(out, lse, dout, dq, dk, dv)
    if plans is None:
        key = (device_of(q.device), *_layout_of(problem))
        plans = _plans.get(key) or _plans.keep(key, Memory())
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.data_ptr()
    written = out.data_ptr(), dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
    low_bits: Any = 0
    for address in (*addresses, *written):
        low_bits |= address & _LOW_BITS
    if low_bits:
        low_bits = tuple([address & _LOW_BITS for address in (*addresses, *written)])
    key = (
        low_bits, sm90.is_enabled, deterministic, q.stride(), k.stride(), v.stride(),
        out.stride(), lse.stride(), dout.stride(), dq.stride(), dk.stride(), dv.stride(),
    )  # fmt: skip
    plan = plans.get(key)
    if plan is None:
        plan = plans.keep(key, _plan(device_of(q.device), problem, given, deterministic))
    tables = Tables(
        problem.flag, problem.cu_seqlens_q, problem.cu_seqlens_k, problem.cache_seqlens,
        problem.alibi_slopes,
    )  # fmt: skip
    launch(plan, problem[:3], given, tables, addresses)
    return plan


def launch(
    plan: BackwardPlan, qkv: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...],
    tables: Tables, addresses: tuple[int, ...],
) -> None:  # fmt: skip
    """What was planned. given: as `Gradients`; addresses: those of q, k, v and dout."""
    if plan.boxes:
        sm90.launch(plan, qkv, given, tables, addresses)
        return
    made = None
    if (like := plan.parts) is not None:
        # What no kernel writes, past the end of a sequence, must be 0 in the sum.
        has_gaps = tables.cu_seqlens_k is not None or tables.cache_seqlens is not None
        make = torch.zeros_like if has_gaps else _empty_like
        made = make(like), make(like)
    (delta, lse_log2, sums, turns) = [None if x is None else _empty_like(x) for x in plan.workspace]
    out, lse, dout, dq, dk, dv = given
    flag, cu_q, cu_k, cache_seqlens, alibi_slopes = tables
    _run(plan.before, (delta, lse_log2, sums, turns, flag, out, dout, lse, cu_q))
    _run(plan.main, (
        *(made or (dk, dv)), sums, turns, flag, *qkv, dout, lse_log2, delta, alibi_slopes, cu_q,
        cu_k, cache_seqlens,
    ))  # fmt: skip
    _run(plan.after, (dq, sums, cu_q))
    if made is not None:
        for grad, of_heads in zip((dk, dv), made, strict=True):
            torch.sum(of_heads, -2, out=grad)


def _run(step: BackwardLaunch, params: tuple[Any, ...]) -> None:
    function, grid, block, shared_bytes, numbers = step
    function(grid, block, shared_bytes, None, (*params, *numbers))


def _backward_widened(problem: Problem, given: Gradients, deterministic: bool) -> None:
    """The kernels know one head_dim: narrower tensors go there with zeros in what they lack, and of
    their gradients the columns that there are come back."""

    def widened(x: torch.Tensor) -> torch.Tensor:
        missing = problem.widest_head - x.shape[-1]
        return torch.nn.functional.pad(x, (0, missing)) if missing else x

    q, k, v = widened(problem.q), widened(problem.k), widened(problem.v)
    out, lse, dout, *grads = given
    wide = [widened(x) for x in grads]  # with what they hold, which not every row is written over
    backward(
        problem._replace(q=q, k=k, v=v), widened(out), lse, widened(dout), *wide,
        deterministic=deterministic,
    )  # fmt: skip
    for grad, found in zip(grads, wide, strict=True):
        if grad is not found:
            grad.copy_(found[..., : grad.shape[-1]])


def _layout_of(problem: Problem) -> tuple[Any, ...]:
    """What plans depend on besides the GPU and how tensors lie."""
    q, k = problem[:2]
    slopes = problem.alibi_slopes
    return (
        q.dtype, q.shape, k.shape, problem.numbers, None if slopes is None else slopes.stride(),
        problem.cu_seqlens_q is None, problem.cu_seqlens_k is None,
        problem.cache_seqlens is None, problem.block_table is None,
    )  # fmt: skip


def _plan(
    device: PlannedGpu, problem: Problem, given: Gradients, deterministic: bool
) -> BackwardPlan:
    """Choose the kernels and make their launches."""
    if sm90.is_enabled and device.has_wgmma and sm90.applies(problem, given):
        return sm90.plan(problem, given, deterministic=deterministic)
    variant = choose(problem.q.shape[-1], device.shared_bytes)
    (num_heads, head_dim), num_kv_heads = problem.q.shape[-2:], problem.k.shape[-2]
    block_n = stated(variant).sizes["block_n"]
    key_blocks = -(-problem.max_seqlen_k // block_n) * problem.batch_size
    parts, group = None, num_heads // num_kv_heads
    count = parts_of_group(key_blocks * num_kv_heads, group, device.num_sms)
    if count > 1:
        parts = given.dk.new_empty((*problem.k.shape[:-1], count, head_dim))
    return _portable_plan(
        variant, problem, given, heads_a_block=group // count, parts=parts,
        deterministic=deterministic,
    )  # fmt: skip


def parts_of_group(num_works: int, group: int, num_sms: int) -> int:
    """Into how many parts of as many heads a group goes: one, but where works of whole groups are
    few; then the fewest that make enough, as each part is written and read once more."""
    if num_works >= _FEW_WORKS * num_sms:
        return 1
    counts = (n for n in range(2, group) if group % n == 0)
    enough = (n for n in counts if num_works * n >= _ENOUGH_PARTS * num_sms)
    return next(enough, group)


def _is_aligned(*tensors: torch.Tensor) -> bool:
    for tensor in tensors:
        elems = common.VEC_BYTES // tensor.element_size()
        if tensor.data_ptr() % common.VEC_BYTES or any(s % elems for s in strides_of(tensor)):
            return False
    return True


def _portable_plan(
    variant: str, problem: Problem, given: Gradients, *, heads_a_block: int,
    parts: torch.Tensor | None, deterministic: bool,
) -> BackwardPlan:  # fmt: skip
    """The launches with `variant` as the main kernel. One head of its dk and dv for each
    heads_a_block query heads; parts: what they are made like if they are not the gradients
    themselves."""
    q, k, v = problem.q, problem.k, problem.v
    out, lse, dout, dq, dk, dv = given
    if parts is not None:
        dk = dv = parts.flatten(-3, -2)
    batch_size, num_heads, head_dim = problem.batch_size, q.shape[-2], q.shape[-1]
    seqlen_q, seqlen_k = problem.max_seqlen_q, problem.max_seqlen_k
    total_q, total_k = problem.totals
    token = common.DTYPE_TOKENS[q.dtype]

    tiles = stated(variant)
    rows = launch_facts(CUBIN, f"{CUBIN}_{token}_delta")  # and of _convert, over the same tiles
    tile_rows, padded = rows.sizes["block_m"], tiles.sizes["head_dim"]
    row_blocks = -(-seqlen_q // tile_rows)
    num_tiles = batch_size * row_blocks
    if problem.cu_seqlens_q is not None:
        num_tiles = q.shape[0] // tile_rows + batch_size
    num_rows = num_heads * num_tiles * tile_rows

    rows_grid = (row_blocks * batch_size, num_heads, 1)
    place = num_tiles, row_blocks, seqlen_q, total_q, head_dim, padded
    before = _launch_of(
        f"{CUBIN}_{token}_delta", rows_grid, rows,
        (
            *strides_of(out), *strides_of(dout), *lse_strides_of(lse), *place,
            int(_is_aligned(out, dout)),
        ),
    )  # fmt: skip
    after = _launch_of(
        f"{CUBIN}_{token}_convert", rows_grid, rows,
        (*strides_of(dq), *place, int(_is_aligned(dq)), float(problem.softmax_scale)),
    )  # fmt: skip

    key_blocks = -(-seqlen_k // tiles.sizes["block_n"])
    slopes = problem.alibi_slopes
    slopes_stride = slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0
    is_aligned = _is_aligned(q, k, v, dout, dk, dv)
    is_plain = (
        is_aligned and slopes is None and problem.softcap == 0.0 and problem.softmax_scale > 0.0
    )
    main = _launch_of(
        f"{CUBIN}_{token}_{variant}{'' if is_plain else '_general'}",
        (key_blocks * batch_size, num_heads // heads_a_block, 1), tiles,
        (
            *strides_of(dk), *strides_of(dv), *strides_of(q), *strides_of(k), *strides_of(v),
            *strides_of(dout), slopes_stride,
            num_tiles, key_blocks, seqlen_q, seqlen_k, total_q, total_k,
            num_heads // k.shape[-2], heads_a_block, head_dim,
            problem.window_left, problem.window_right, int(is_aligned),
            float(problem.softmax_scale), float(problem.softcap),
        ),
    )  # fmt: skip
    steps = [step.function for step in (before, main, after) if step.function is not nothing]
    common.load_ahead(q, *steps)
    row_values = q.new_empty((num_rows,), dtype=torch.float32)
    sums = q.new_empty((num_rows * padded,), dtype=torch.float32)
    turns = None
    if deterministic:
        turns = common.emptied(q.new_empty((num_heads * num_tiles,), dtype=torch.int32))
    rows_like = common.emptied(row_values)
    return BackwardPlan(
        before, main, after, (rows_like, rows_like, common.emptied(sums), turns),
        parts=None if parts is None else common.emptied(parts),
    )  # fmt: skip


def _launch_of(
    name: str, grid: tuple[int, int, int], facts: Stated, numbers: tuple[Any, ...]
) -> BackwardLaunch:
    function = common.shipped(CUBIN, name) if math.prod(grid) else nothing
    return BackwardLaunch(function, grid, facts.block, facts.shared_bytes, numbers)
