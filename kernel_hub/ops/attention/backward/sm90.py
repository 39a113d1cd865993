"""The gradients of attention on Hopper: which problems, which kernels, which numbers.

Knows the canonical `Problem` and the kernels of csrc/attention/flash_attention_backward_sm90.cu.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...core import common
from ...core.device import Stated, device_of, launch_facts
from ...core.launch import Memory
from ..problem import (
    SCALES,
    Gradients,
    Problem,
    is_mappable,
    lse_strides_of,
    strides_of,
    tensor_map,
)  # fmt: skip
from . import ragged
from .turns import Traffic, turns
from .works import Pairs, Parting, parting

_empty_like = torch.empty_like

# False: the portable kernels take everything. For tests and benchmarks.
is_enabled = True

CUBIN = "flash_attention_backward_sm90"
# q, dout and the sums of dq of the heads that run together stay in the L2 (60 MB on an H200).
_L2_BYTES = 32 << 20
# Columns of shared memory's rows.
_PANEL = 64
# Those of the kernel's 32-bit sums of two lengths and a window, and of grids, the last of which has
# 65,535 rows for heads and what adds up parts.
_MAX_TOKENS = 1 << 28
_MAX_HEADS = 1 << 15
_MAX_BLOCKS = 1 << 30
_FEW_WORKS = 2  # a multiprocessor
_TURNS = 2  # of a block of queries and a sum: Workspace::kTurns


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
    Body(32, 128), Body(64, 128), Body(96, 64), Body(112, 64), Body(128, 64), Body(160, 64),
    Body(192, 64), Body(224, 64), Body(256, 64),
)  # fmt: skip


class BackwardLaunch(NamedTuple):
    """One launch of a plan; its parameters are tensors, then the numbers."""

    function: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    numbers: tuple[Any, ...]


class Tables(NamedTuple):
    """What lies on the device beside q, k, v and what is given of their gradients."""

    flag: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    cache_seqlens: torch.Tensor | None
    alibi_slopes: torch.Tensor | None


class BackwardPlan(NamedTuple):
    """All of a backward that its layouts and options say.

    before: what the rows of queries need, then main, over blocks of keys, then after, which rounds
    dq. workspace: what each piece of it is made like. boxes: rows of the tensor maps of q and of k;
    () where kernels take pointers. maps: those of addresses that were met.
    parts: where kernels take pointers, what dk and dv of single query heads (..., num_kv_heads,
    heads of a group, head_dim), whose sums the gradients are, are made like; or None.
    """

    before: BackwardLaunch
    main: BackwardLaunch
    after: BackwardLaunch
    workspace: tuple[torch.Tensor | None, ...]
    boxes: tuple[int, ...] = ()
    parts: torch.Tensor | None = None
    maps: Memory[tuple[bytes, ...]] = Memory()


def choose(head_dim: int) -> Body | None:
    """The smallest head_dim that holds this one; None where there is none."""
    return next((body for body in BODIES if body.head_dim >= head_dim), None)


def body_of(problem: Problem) -> Body | None:
    """That of a problem; None where its head_dim has none."""
    return choose(problem.q.shape[-1])


def functions_of(body: Body, dtype: torch.dtype) -> list[Any]:
    """Its functions in the order of their launches."""
    delta, convert = body.rows_names(dtype)
    return [common.shipped(CUBIN, name) for name in (delta, body.name(dtype), convert)]


def ask(head_dim: int, dtype: torch.dtype) -> None:
    """Ask the manifest what plans of such a problem do; the answers are kept."""
    body = choose(head_dim)
    if body is None:
        return
    functions_of(body, dtype)
    for name in (body.name(torch.bfloat16), body.rows_names(dtype)[0]):
        launch_facts(CUBIN, name)


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
        and min(problem.batch_size, problem.max_seqlen_q, problem.max_seqlen_k) > 0
        and problem.alibi_slopes is None
        and problem.block_table is None
        and problem.softcap == 0
        and SCALES[0] <= problem.softmax_scale <= SCALES[1]
        and max(*q.shape[:-2], *k.shape[:-2], problem.max_seqlen_q) <= _MAX_TOKENS
        and q.shape[-2] <= _MAX_HEADS
        and body.key_blocks(problem) * problem.batch_size * q.shape[-2] <= _MAX_BLOCKS
        and all(is_mappable(tensor) for tensor in (q, k, v, *given) if tensor is not given.lse)
    )


def blocks_go_on(num_works: int, block_n: int, num_sms: int, *, has_turns: bool) -> bool:
    """Whether blocks are one a multiprocessor and take works until there are no more, the next one
    before they have ended the last: in turns others may wait for that, and of few works of wide
    heads they do."""
    return not has_turns or block_n > 64 or num_works > _FEW_WORKS * num_sms


def plan(problem: Problem, given: Gradients, *, deterministic: bool) -> BackwardPlan:
    """The launches where `applies`."""
    q, k = problem.q, problem.k
    out, lse, dout, dq, dk, dv = given
    cu_q = problem.cu_seqlens_q
    batch_size, head_dim, num_heads = problem.batch_size, q.shape[-1], q.shape[-2]
    num_kv_heads = k.shape[-2]
    seqlen_q, seqlen_k = problem.max_seqlen_q, problem.max_seqlen_k
    total_q, total_k = problem.totals
    is_causal = problem.window_right >= 0
    body = body_of(problem)
    assert body is not None
    functions = functions_of(body, q.dtype)
    common.load_ahead(q, *functions)
    stated = body.stated
    # And of the one that converts, over the same tiles.
    rows = launch_facts(CUBIN, body.rows_names(q.dtype)[0])

    # Each sequence starts a new block of the workspace.
    blocks_q = -(-seqlen_q // body.block_m)
    num_blocks_q = batch_size * blocks_q
    if cu_q is not None:
        num_blocks_q = q.shape[0] // body.block_m + batch_size
    num_rows = num_heads * num_blocks_q * body.block_m
    key_blocks, block_n = body.key_blocks(problem), stated.sizes["block_n"]
    num_pairs, group = batch_size * num_kv_heads, num_heads // num_kv_heads
    planned_q = seqlen_q if cu_q is None else ragged.bound(seqlen_q, total_q, batch_size)
    is_ragged = problem.cu_seqlens_k is not None
    planned_k = ragged.bound(seqlen_k, total_k, batch_size) if is_ragged else seqlen_k
    pair_bytes = (2 * q.element_size() + 4) * group * planned_q * body.head_dim
    # Causal: the blocks with the most queries first, but those of a few heads after another.
    most = max(1, _L2_BYTES // max(1, pair_bytes))
    # Of one size: a small group at the end would begin with its longest works.
    together = -(-num_pairs // -(-num_pairs // most))
    num_sms = device_of(q.device).num_sms
    # Where works of fewer rounds are through with more heads.
    drifting = pair_bytes if group > 1 and (is_causal or problem.window_left >= 0) else 0
    about = (
        (planned_q, planned_k), (problem.window_left, problem.window_right),
        (body.block_m, block_n), group,
    )  # fmt: skip
    num_works = key_blocks * num_pairs
    if is_ragged:  # no more than there may be, whatever lengths are
        num_works = min(num_works, (total_k // block_n + batch_size) * num_kv_heads)
    has_turns = deterministic and key_blocks > 2  # sums of two have one order
    goes_on = blocks_go_on(num_works, block_n, num_sms, has_turns=has_turns)
    sums, pairs_a_group, is_staggered = -1, together if is_causal else 1, False
    free = Pairs(num_pairs, pairs_a_group, drifting)
    if has_turns:
        row_bytes = (2 * q.element_size() + 8) * body.head_dim
        sum_bytes = 4 * num_rows * body.head_dim
        read = Traffic(pair_bytes, row_bytes * body.block_m, sum_bytes, block_n == 64)
        if is_ragged:  # as if all were of the longest ones
            total = max(1, round(total_k / planned_k)) * num_kv_heads
            free = Pairs(total, min(total, pairs_a_group), drifting)
        sums, pairs_a_group, parted, is_staggered = turns(
            *about, free, read, num_sms, goes_on=goes_on, is_ragged=is_ragged
        )
        if sums < 0 and key_blocks > -2 * sums:  # those of longer sequences than were planned for
            sums = 1
            parted = parted._replace(blocks=ragged.parts_in_turns(parted.blocks, group))
        if is_ragged and (parted.first > 0 or parted.blocks == 1):
            parted = Parting(num_works, 1)
    elif is_ragged:
        count = ragged.parting(
            about[0], total_k, batch_size, *about[1:], free, num_sms, goes_on=goes_on
        )
        parted = Parting(0 if count > 1 else num_works, count)
    else:
        parted = parting(*about, free, num_sms, goes_on=goes_on)
    if is_ragged:
        pairs_a_group = ragged.together(pairs_a_group, num_kv_heads, batch_size)
    num_turns = _TURNS * max(0, sums) * num_heads * num_blocks_q
    num_ordered = 2 * batch_size if is_ragged else 0
    parts_at = num_rows * (abs(sums) * body.head_dim + 2) + 1 + num_ordered + num_turns
    parts_at = -(-parts_at // 4) * 4  # in units of 16 bytes
    row_tiles = blocks_q * body.block_m // rows.sizes["block_m"]
    num_tiles = row_tiles * batch_size
    if cu_q is not None:  # of the blocks of the workspace
        num_tiles = num_blocks_q * body.block_m // rows.sizes["block_m"]
    # The last kernel also adds up parts of dk and dv, by more blocks of as many rows.
    part_tiles = 2 * (num_works - parted.first) * block_n // rows.sizes["block_m"]
    part_blocks = -(-part_tiles // num_tiles)
    if num_heads + part_blocks >= 1 << 16:  # of a grid
        parted, part_blocks = Parting(num_works, 1), 0
    num_parts = (num_works - parted.first) * parted.blocks
    first_half = -(-key_blocks // 2) if is_staggered else key_blocks
    works = (
        parts_at, key_blocks, num_pairs, pairs_a_group, (num_pairs - 1) % pairs_a_group + 1,
        first_half, num_kv_heads, num_works, *parted,
    )  # fmt: skip
    num_words = parts_at + num_parts * block_n * head_dim  # two of 16 bits, dk and dv
    workspace = q.new_empty((num_words,), dtype=torch.float32)

    place = (
        num_blocks_q, batch_size, row_tiles, seqlen_q, total_q, head_dim, body.head_dim,
        body.block_m,
    )  # fmt: skip
    before = BackwardLaunch(
        functions[0], (num_tiles + is_ragged, num_heads, 1), rows.block, rows.shared_bytes,
        (
            *strides_of(out), *strides_of(dout), *lse_strides_of(lse), *place, seqlen_k, total_k,
            block_n, sums,
        ),
    )  # fmt: skip
    grid = (num_tiles, num_heads + part_blocks, 1)
    after = BackwardLaunch(
        functions[2], grid, rows.block, rows.shared_bytes,
        (
            *strides_of(dq), *strides_of(dk), *strides_of(dv), *works, *place, num_heads, seqlen_k,
            total_k, block_n, sums, float(problem.softmax_scale),
        ),
    )  # fmt: skip

    num_blocks = parted.first + num_parts
    if goes_on:
        num_blocks = min(num_blocks, num_sms)
    main = BackwardLaunch(
        functions[1], (num_blocks, 1, 1), stated.block, stated.shared_bytes,
        (
            *strides_of(dk), *strides_of(dv), *works, num_blocks_q, seqlen_q, seqlen_k, total_q,
            total_k, group, head_dim, problem.window_left, problem.window_right, sums,
            float(problem.softmax_scale),
        ),
    )  # fmt: skip
    boxes = body.block_m, block_n
    return BackwardPlan(before, main, after, (common.emptied(workspace),), boxes, None, Memory())


def launch(
    plan: BackwardPlan, qkv: tuple[torch.Tensor, ...], given: tuple[torch.Tensor, ...],
    tables: Tables, addresses: tuple[int, ...],
) -> None:  # fmt: skip
    """The three kernels of a plan, q, k, v and dout, which lie at `addresses`, by tensor maps.

    given: as `Gradients`."""
    before, main, after, (like,), boxes, _, maps = plan
    out, lse, dout, dq, dk, dv = given
    flag, cu_seqlens_q, cu_seqlens_k, cache_seqlens, _ = tables
    operands = maps.get(addresses)
    if operands is None:
        rows, keys = boxes
        pairs = zip((*qkv, dout), (rows, keys, keys, rows), strict=True)
        operands = maps.keep(addresses, tuple([tensor_map(x, box) for x, box in pairs]))
    workspace = _empty_like(like)
    # Each kernel waits for the one before it.
    function, grid, block, shared_bytes, numbers = before
    function(
        grid, block, shared_bytes, None,
        (workspace, out, dout, lse, cu_seqlens_q, cu_seqlens_k, *numbers), programmatic=True,
    )  # fmt: skip
    function, grid, block, shared_bytes, numbers = main
    function(
        grid, block, shared_bytes, None,
        (
            dk, dv, workspace, flag, *operands, cu_seqlens_q, cu_seqlens_k, cache_seqlens,
            *numbers,
        ),
        programmatic=True,
    )  # fmt: skip
    function, grid, block, shared_bytes, numbers = after
    function(
        grid, block, shared_bytes, None,
        (dq, workspace, cu_seqlens_q, cu_seqlens_k, dk, dv, *numbers), programmatic=True,
    )  # fmt: skip
