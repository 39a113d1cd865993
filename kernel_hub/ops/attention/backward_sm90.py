"""The gradients of attention on Hopper: which problems, which kernels, which numbers.

Knows the canonical `Problem` and the kernels of csrc/attention/flash_attention_backward_sm90.cu.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..core import common
from ..core.device import Stated, launch_facts
from ..core.launch import Memory
from .problem import (
    SCALES,
    Gradients,
    Problem,
    is_mappable,
    lse_strides_of,
    strides_of,
    tensor_map,
)  # fmt: skip

# False: the portable kernels take everything. For tests and benchmarks.
is_enabled = True

CUBIN = "flash_attention_backward_sm90"
# q, dout and the sums of dq of the heads that run together stay in the L2 (60 MB on an H200).
_L2_BYTES = 32 << 20
# Columns of shared memory's rows.
_PANEL = 64
_LEAST_HEAD_DIM = 40
# Each kernel waits for the one before it, first of all.
_FOLLOWING = {"programmatic": True}
# That of the kernel's 32-bit sums of two lengths and a window, and of its grid.
_MAX_TOKENS = 1 << 28
_MAX_HEADS = 65535
_MAX_BLOCKS = 1 << 30


class Body(NamedTuple):
    """One compiled tile shape: `flash_attention_backward_sm90_{dtype}_hdim{head_dim}`."""

    head_dim: int
    block_m: int

    @property
    def stated(self) -> Stated:
        """Threads, shared memory and block_n (keys) of the main kernel."""
        return launch_facts(CUBIN, self.name(torch.bfloat16))

    def key_blocks(self, problem: Problem) -> int:
        """Blocks of block_n keys of the longest sequence."""
        return -(-problem.max_seqlen_k // self.stated.sizes["block_n"])

    def name(self, dtype: torch.dtype) -> str:
        """The main function's name."""
        token = common.DTYPE_TOKENS[dtype]
        return f"{CUBIN}_{token}_hdim{self.head_dim}_rows{self.block_m}"

    def rows_names(self, dtype: torch.dtype) -> tuple[str, str]:
        """Those before and after it: delta, by panels of columns, and convert."""
        token, columns = common.DTYPE_TOKENS[dtype], -(-self.head_dim // _PANEL) * _PANEL
        return f"{CUBIN}_{token}_hdim{columns}_delta", f"{CUBIN}_{token}_convert"


BODIES = (
    Body(64, 128), Body(96, 64), Body(128, 64), Body(160, 64), Body(192, 64), Body(256, 64),
)  # fmt: skip


class BackwardLaunch(NamedTuple):
    """One launch of a plan; its parameters are tensors, then the numbers."""

    function: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    numbers: tuple[Any, ...]
    options: Mapping[str, Any] = MappingProxyType({})  # keywords of the launch

    def __call__(self, params: tuple[Any, ...]) -> None:
        """Launch, with the tensors before the numbers."""
        self.function(
            self.grid, self.block, self.shared_bytes, None, (*params, *self.numbers),
            **self.options,
        )  # fmt: skip


class BackwardPlan(NamedTuple):
    """All of a backward that its layouts and options say.

    before: what the rows of queries need, then main, over blocks of keys, then after, which rounds
    dq; each None where it has nothing to do. num_sums, num_rows, num_turns: elements of the
    workspace. boxes: rows of the tensor maps of q and of k; () where kernels take pointers. maps:
    those of addresses that were met.
    parts: the shape of dk and dv of single query heads (..., num_kv_heads, heads of a group,
    head_dim), whose sums the gradients are; or None.
    """

    before: BackwardLaunch | None
    main: BackwardLaunch | None
    after: BackwardLaunch | None
    num_sums: int
    num_rows: int
    num_turns: int
    boxes: tuple[int, ...] = ()
    parts: tuple[int, ...] | None = None
    maps: Memory[tuple[bytes, ...]] = Memory()

    def run(
        self, problem: Problem, given: Gradients, operands: tuple[Any, ...],
        more: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        """Launch. operands: q, k, v and dout as the main kernel takes them; more: what it takes
        besides, before the tables."""
        out, lse, dout, dq, dk, dv = given
        device, flag = dq.device, problem.flag
        cu_q, cu_k = problem.cu_seqlens_q, problem.cu_seqlens_k
        sums = torch.empty(self.num_sums, device=device, dtype=torch.float32)
        delta = torch.empty(self.num_rows, device=device, dtype=torch.float32)
        lse_log2 = torch.empty_like(delta)
        turns = None
        if self.num_turns:
            turns = torch.empty(self.num_turns, device=device, dtype=torch.int32)
        if (step := self.before) is not None:
            step((delta, lse_log2, sums, turns, flag, out, dout, lse, cu_q))
        if (step := self.main) is not None:
            step((
                dk, dv, sums, turns, flag, *operands, lse_log2, delta, *more, cu_q, cu_k,
                problem.cache_seqlens,
            ))  # fmt: skip
        if (step := self.after) is not None:
            step((dq, sums, cu_q))


def choose(head_dim: int) -> Body | None:
    """The smallest head_dim that holds this one; None where there is none, or a narrow head is
    better served by the portable kernel of its own width."""
    if head_dim < _LEAST_HEAD_DIM:
        return None
    return next((body for body in BODIES if body.head_dim >= head_dim), None)


def body_of(problem: Problem) -> Body | None:
    """That of a problem; None where its head_dim has none."""
    return choose(problem.q.shape[-1])


def applies(problem: Problem, given: Gradients) -> bool:
    """Whether these kernels take the problem on a GPU of compute capability 9.0.

    Lengths on the device (cu_seqlens, cache_seqlens) may be anything.
    """
    return problem.q.is_cuda and fits(problem, given)


def fits(problem: Problem, given: Gradients) -> bool:
    """Whether they can take it, wherever the tensors are."""
    q, k, v = problem.q, problem.k, problem.v
    body = body_of(problem)
    return (
        q.dtype in common.HALF
        and body is not None
        and problem.alibi_slopes is None
        and problem.block_table is None
        and problem.softcap == 0
        and SCALES[0] <= problem.softmax_scale <= SCALES[1]
        and max(*q.shape[:-2], *k.shape[:-2], problem.max_seqlen_q) <= _MAX_TOKENS
        and q.shape[-2] <= _MAX_HEADS
        and body.key_blocks(problem) * problem.batch_size * q.shape[-2] <= _MAX_BLOCKS
        and all(is_mappable(tensor) for tensor in (q, k, v, *given) if tensor is not given.lse)
    )


def plan(
    problem: Problem, given: Gradients, *, heads_a_block: int, deterministic: bool
) -> BackwardPlan:
    """The launches where `applies`. dk and dv have one head for each heads_a_block query heads."""
    q, k = problem.q, problem.k
    out, lse, dout, dq, dk, dv = given
    cu_q = problem.cu_seqlens_q
    batch_size, head_dim, num_heads = problem.batch_size, q.shape[-1], q.shape[-2]
    seqlen_q, seqlen_k = problem.max_seqlen_q, problem.max_seqlen_k
    total_q, total_k = problem.totals
    is_causal = problem.window_right >= 0
    body = body_of(problem)
    assert body is not None
    name, stated = body.name(q.dtype), body.stated
    delta, convert = body.rows_names(q.dtype)
    rows = launch_facts(CUBIN, delta)  # and of the other, over the same tiles

    # Each sequence starts a new block of the workspace.
    blocks_q = -(-seqlen_q // body.block_m)
    num_blocks_q = batch_size * blocks_q
    if cu_q is not None:
        num_blocks_q = q.shape[0] // body.block_m + batch_size
    num_rows = num_heads * num_blocks_q * body.block_m

    row_tiles = blocks_q * body.block_m // rows.sizes["block_m"]
    rows_grid = (row_tiles * batch_size, num_heads, 1)
    before = main = after = None
    if rows_grid[0] * num_heads > 0:
        place = (
            num_blocks_q, row_tiles, seqlen_q, total_q, head_dim, body.head_dim, body.block_m
        )  # fmt: skip
        before = BackwardLaunch(
            common.shipped(CUBIN, delta), rows_grid, rows.block, rows.shared_bytes,
            (*strides_of(out), *strides_of(dout), *lse_strides_of(lse), *place), _FOLLOWING,
        )  # fmt: skip
        after = BackwardLaunch(
            common.shipped(CUBIN, convert), rows_grid, rows.block, rows.shared_bytes,
            (*strides_of(dq), *place, float(problem.softmax_scale)), _FOLLOWING,
        )  # fmt: skip

    key_blocks = body.key_blocks(problem)
    num_pairs = batch_size * num_heads // heads_a_block
    # Causal: the blocks with the most queries first, but those of a few heads after another.
    pairs_a_group = 1
    if is_causal and not deterministic:
        pair_bytes = (2 * q.element_size() + 4) * heads_a_block * seqlen_q * body.head_dim
        pairs_a_group = max(1, min(num_pairs, _L2_BYTES // max(1, pair_bytes)))
    if key_blocks * num_pairs > 0:
        main = BackwardLaunch(
            common.shipped(CUBIN, name), (key_blocks * num_pairs, 1, 1), stated.block,
            stated.shared_bytes,
            (
                *strides_of(dk), *strides_of(dv),
                num_blocks_q, key_blocks, num_pairs, pairs_a_group, seqlen_q, seqlen_k,
                total_q, total_k, num_heads, num_heads // k.shape[-2], heads_a_block, head_dim,
                problem.window_left, problem.window_right, float(problem.softmax_scale),
            ),
            _FOLLOWING,
        )  # fmt: skip
    num_turns = 2 * num_heads * num_blocks_q if deterministic else 0
    boxes = body.block_m, stated.sizes["block_n"]
    return BackwardPlan(
        before, main, after, num_rows * body.head_dim, num_rows, num_turns, boxes, maps=Memory()
    )


def launch(
    plan: BackwardPlan, problem: Problem, given: Gradients, addresses: tuple[int, ...]
) -> None:
    """The three kernels of a plan, q, k, v and dout, which lie at `addresses`, by tensor maps."""
    operands = plan.maps.get(addresses)
    if operands is None:
        tensors, (rows, keys) = (*problem[:3], given.dout), plan.boxes
        made = zip(tensors, (rows, keys, keys, rows), strict=True)
        operands = plan.maps.keep(addresses, tuple([tensor_map(x, box) for x, box in made]))
    plan.run(problem, given, operands)
