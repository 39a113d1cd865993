"""The forward launch of attention on Hopper: which problems, which kernel, which numbers.

Knows the canonical `Problem` and the kernels of csrc/attention/flash_attention_sm90.cu; few queries
over many keys are `forward_split_sm90`'s. Of `Problem` it checks what the launch cannot see, since
descriptors of q, k and v go there instead of tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import TensorError
from ..core import bounds, common
from ..core.counters import counters
from ..core.device import Stated, device_of, launch_facts
from ..core.launch import Launch, nothing
from . import forward_split_sm90 as split
from .problem import SCALES, Options, Problem, is_mappable, lse_strides_of, strides_of, tensor_map
from .tile_costs import heads_a_group, wants_fewer_rows, wider_rows

# False: the portable kernels take everything. For tests and benchmarks.
is_enabled = True

CUBIN = "flash_attention_sm90"
_BOX_ROWS = 8  # the fewest keys a copy brings: the swizzle repeats after so many rows
_FEW, _SHORT, _SHORTER = 32, 320, 256  # tokens: of prompts without masks, of others
# Tokens of a sequence, the mean; columns of narrow heads, and of wide ones, of which two that share
# keys are as if they did not: packed rows are better for others.
_LITTLE, _NARROW, _WIDE = 64, 32, 128
_WIDE_SHORT = 160  # tokens of the longest of those
# Of those in many rounds: the mean from which enough have a second tile there, up to 192 columns,
# of more, and of these where heads share keys.
_WIDE_ROUNDS, _LONG_WIDE, _LONG_WIDEST, _LONG_SHARED = 6, 36, 54, 45
# Of causal tiles: columns of heads that have them of 192 rows, rows of both, and queries up to
# which fewer rows may be better.
_NARROWEST, _ROWS192_WIDEST, _ROWS, _MORE_ROWS, _FEW_ROWS = 64, 96, 128, 192, 1024
_SOME_MORE = 4 / 3  # rounds of tiles of windows
_DEALT_WIDE = 1.5  # of tiles of wide heads that are dealt
NUM_COUNTERS = 2  # the next tile, blocks that are done
# The TMA's limit of a stride, and that of the kernel's 32-bit sums of two lengths and a window.
MAX_TOKENS = 1 << 29
MAX_TILES = 1 << 30


@dataclass(frozen=True, slots=True)
class Body:
    """One compiled tile shape: `flash_attention_sm90_{dtype}_hdim{head_dim}_{mask}{suffix}`.

    longest: it takes sequences of up to so many queries. own_head_dim_v: that of v and out, if not
    head_dim; named `hdim{head_dim}_v{own_head_dim_v}`.
    """

    mask: str
    head_dim: int
    suffix: str = ""
    longest: int = 1 << 30
    own_head_dim_v: int | None = None

    @property
    def head_dim_v(self) -> int:
        """Columns of v and out."""
        return self.own_head_dim_v or self.head_dim

    @property
    def mean_width(self) -> int:
        """Of head_dim and head_dim_v."""
        return (self.head_dim + self.head_dim_v) // 2

    @property
    def stated(self) -> Stated:
        """Threads, shared memory, block_m (queries) and block_n (keys) of a tile."""
        return launch_facts(CUBIN, self.name(torch.bfloat16))

    @property
    def q_rows(self) -> int:
        """Queries of a warpgroup, which one copy brings."""
        sizes = self.stated.sizes
        return sizes["block_m"] // sizes["consumers"]

    def name(self, dtype: torch.dtype) -> str:
        """The function's name."""
        token = common.DTYPE_TOKENS[dtype]
        width = f"hdim{self.head_dim}"
        if self.own_head_dim_v is not None:
            width += f"_v{self.own_head_dim_v}"
        return f"flash_attention_sm90_{token}_{width}_{self.mask}{self.suffix}"


_MASKS = ("full", "causal", "window")
_CAPPED = "_capped"
_ROWS192, _MORE_ROWS_WIDTHS = "_rows192", (96, 112)
# The first that holds a problem is its own; docs/notes/flash_attention_sm90.md says why these.
BODIES = (
    Body("causal", 64, "_short", longest=1280),
    Body("full", 64, "_short"),  # where tiles of 128 rows are better
    Body("window", 64, _CAPPED),  # of bf16
    *(Body(mask, 64) for mask in _MASKS),
    Body("causal", 96),
    Body("window", 96, _ROWS192),
    Body("window", 96, _CAPPED),  # of bf16, of 192 rows
    Body("window", 96),  # of fp16 without softcap
    Body("window", 112, _ROWS192),
    *(Body(mask, 128) for mask in _MASKS),
    Body("window", 160, _CAPPED),  # of bf16
    *(Body(mask, 192, own_head_dim_v=128) for mask in ("full", "causal")),
    *(Body(mask, width) for width in (192, 256) for mask in _MASKS),
)


def _choose(problem: Problem) -> Body | None:
    """The row of BODIES for a problem; None where its head_dims are larger than all of them."""
    left, right = problem.window
    mask = "causal" if left < 0 <= right else "full" if left == right == -1 else "window"
    if problem.softcap != 0:
        mask = "window"  # the others have no softcap
    is_capped = problem.softcap != 0 and problem.q.dtype == torch.bfloat16
    head_dim, head_dim_v = problem.q.shape[-1], problem.v.shape[-1]
    larger, is_smaller = _of_more_rows(problem), mask == "full" and wants_fewer_rows(problem)
    if mask == "causal" and _wants_few_rows(problem):
        mask = "window"
    if larger is not None or (mask == "full" and _NARROWEST < problem.widest_head <= 96):
        mask = "window"  # that is open on both sides
    for body in BODIES:
        if (
            body.mask == mask
            and body.head_dim >= head_dim
            and body.head_dim_v >= head_dim_v
            and problem.seqlens[0] <= body.longest
            and not (problem.batch_invariant and body.longest < BODIES[-1].longest)
            and (body.suffix != _CAPPED or is_capped)
            and (body is larger or not (body.suffix and body.head_dim in _MORE_ROWS_WIDTHS))
            and (is_smaller or (body.mask, body.suffix) != ("full", "_short"))
            and (problem.softcap == 0 or is_capped or (body.mask, body.head_dim) != ("window", 96))
        ):
            return body
    return None


def _of_more_rows(problem: Problem) -> Body | None:
    """The body of 192 rows for windows, full attention of 72 to 112 columns, causal of 104 and what
    has a softcap of 72 to 96, where it is better."""
    others = problem.block_table, problem.cache_seqlens
    if any(x is not None for x in others):
        return None
    width, suffix = wider_rows(problem), _CAPPED if problem.softcap != 0 else _ROWS192
    return next((x for x in BODIES if x.suffix == suffix and x.head_dim == width), None)


def _wants_few_rows(problem: Problem) -> bool:
    """Whether tiles of 128 rows, which of 96 columns windows alone have, are better for a causal
    prompt: where those of 192 leave more rows empty, or are too few."""
    head_dim, seqlen_q = problem.widest_head, problem.seqlens[0]
    if not _NARROWEST < head_dim <= _ROWS192_WIDEST or problem.has_lengths:
        return False
    if problem.batch_invariant or _ROWS < seqlen_q <= _MORE_ROWS:
        return False
    num_sms = device_of(problem.q.device).num_sms
    tiles = -(-seqlen_q // _ROWS) * problem.batch_size * problem.q.shape[-2]
    return (
        seqlen_q <= _ROWS
        or (seqlen_q <= _FEW_ROWS and tiles < 3 * num_sms)
        or (seqlen_q <= _FEW_ROWS * 3 // 2 and tiles <= num_sms)
    )


def applies(problem: Problem, out: torch.Tensor) -> bool:
    """Whether these kernels take the problem on a GPU of compute capability 9.0."""
    return problem.q.is_cuda and not is_short(problem) and fits(problem, out)


def is_short(problem: Problem) -> bool:
    """Whether the portable kernels are quicker: tiles of 128 or 192 queries are half empty, and no
    two blocks share a multiprocessor (docs/notes/flash_attention_sm90.md)."""
    longest = max(problem.seqlens)
    others = problem.cache_seqlens, problem.block_table, problem.sinks
    if problem.batch_invariant or any(x is not None for x in others):
        return False
    if longest > _SHORT:
        return False
    head_dim, num_heads = problem.widest_head, problem.q.shape[-2]
    pairs, num_sms = problem.batch_size * num_heads, device_of(problem.q.device).num_sms
    is_one_round = pairs <= num_sms
    if (mean := _mean_tokens(problem)) <= _LITTLE:
        is_wide = head_dim > _WIDE
        if is_wide and is_one_round and longest > _WIDE_SHORT:
            return False
        long = _LONG_WIDEST if num_heads == problem.k.shape[-2] else _LONG_SHARED
        long = _LONG_WIDE if head_dim <= _MORE_ROWS else long
        if is_wide and pairs > _WIDE_ROUNDS * num_sms and longest > _ROWS and mean > long:
            return False
        return num_heads <= (1 + is_wide) * problem.k.shape[-2]
    if problem.has_lengths:  # those of few heads alone that have no tile of 192 rows each
        is_alone = num_heads == problem.k.shape[-2] and max(problem.window) < 0
        return is_alone and problem.softcap == 0 and head_dim <= 64 and is_one_round
    is_told = problem.softcap != 0 and problem.q.dtype == torch.bfloat16  # tiny scores
    if problem.seqlens[0] < _FEW or (is_told and head_dim <= 64):
        return False
    if head_dim > 64:
        return _fills_little(problem, pairs / num_sms)
    left, right = problem.window  # causal ones have tiles of 128 queries
    is_masked = left >= 0 or right >= 0 or problem.softcap != 0
    is_few = pairs <= 2 * num_sms and longest <= _ROWS
    if not is_masked and head_dim > _NARROW:
        return is_few
    is_roomy = is_masked or longest > _SHORTER or longest <= _MORE_ROWS
    if is_roomy and problem.seqlens[0] > _ROWS and _has_many_rows(problem):
        return False
    if longest > _SHORTER and (is_masked or min(problem.seqlens) <= _SHORTER):
        return False
    return head_dim <= _NARROW or (problem.softcap == 0 and (left >= 0 or is_few))


def _has_many_rows(problem: Problem) -> bool:
    """Whether tiles of 192 rows, of which more than one is short of full, take several rounds; of
    full attention: or tiles of 128, two at a time, more than one, or these more than half of one
    and those no more than one."""
    num_sms, seqlen_q = device_of(problem.q.device).num_sms, problem.seqlens[0]
    left, right = problem.window
    pairs = problem.batch_size * problem.q.shape[-2]
    tiles, smaller = (-(-seqlen_q // rows) * pairs for rows in (_MORE_ROWS, _ROWS))
    if left >= 0:
        return right > 0 and seqlen_q <= _MORE_ROWS and tiles > _SOME_MORE * num_sms
    if right >= 0 or problem.softcap != 0:
        return tiles > 2 * num_sms or (right < 0 and pairs > num_sms)
    is_one = seqlen_q > 2 * _ROWS and tiles <= num_sms < smaller
    return is_one or smaller > 2 * num_sms


def _fills_little(problem: Problem, rounds: float) -> bool:
    """The same of wider heads that are alone, for the first rounds of tiles: those of 96 columns,
    which are of 192 rows or for windows too, and a second block of few keys."""
    left, right = problem.window
    if problem.softcap != 0 or left >= 0 or problem.q.shape[-2] != problem.k.shape[-2]:
        return False
    head_dim, longest = problem.widest_head, max(problem.seqlens)
    if right >= 0:
        return head_dim <= _ROWS192_WIDEST and longest <= _ROWS and rounds <= 2
    if head_dim <= _ROWS192_WIDEST:
        return longest <= _ROWS and rounds <= 2
    # Where tiles of 64 rows, three a head, have a multiprocessor each, those are.
    is_some = 1 / 3 < rounds <= 1
    return head_dim <= _WIDE and _ROWS < min(problem.seqlens) <= longest <= 160 and is_some


def _mean_tokens(problem: Problem) -> float:
    """Of a sequence: queries or keys, whichever are more."""
    tables, every = (
        (problem.cu_seqlens_q, problem.cu_seqlens_k),
        zip(problem.seqlens, problem.totals, strict=True),
    )
    means = (
        longest if table is None else min(longest, total / max(1, problem.batch_size))
        for table, (longest, total) in zip(tables, every, strict=True)
    )
    return max(means)


def fits(problem: Problem, out: torch.Tensor) -> bool:
    """`applies`, wherever the tensors are.

    Lengths on the device (cu_seqlens, cache_seqlens) may be anything: rows beyond them are masked,
    and cleared where they hold what is not the sequence's.
    """
    q, k, v = problem.q, problem.k, problem.v
    body = _choose(problem)
    if body is None:
        return False
    num_rows = max(1, -(-problem.max_seqlen_q // body.q_rows))
    return (
        q.dtype in common.HALF
        and problem.alibi_slopes is None
        and (problem.block_table is None or k.shape[1] % _BOX_ROWS == 0)
        and (problem.softcap == 0 or SCALES[0] <= problem.softcap <= SCALES[1])
        and SCALES[0] <= problem.softmax_scale <= SCALES[1]
        and max(*q.shape[:-2], *k.shape[:-2], *problem.seqlens) <= MAX_TOKENS
        and num_rows * problem.batch_size * q.shape[-2] <= MAX_TILES
        and all(is_mappable(tensor) for tensor in (q, k, v, out))
    )


def whole_us(problem: Problem) -> tuple[float, ...]:
    """About how long whole tiles take, of a problem that fits, for each of `sizes_of` it."""
    body = _choose(problem)
    assert body is not None, problem.widest_head
    return split.whole_us(problem, body.stated, body.mean_width)


def plan(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> Launch:
    """The launch, where `applies`."""
    q, k = problem.q, problem.k
    num_heads, head_dim = q.shape[-2:]
    num_kv_heads = k.shape[-2]
    seqlen_q, seqlen_k = problem.seqlens
    tables = problem.cu_seqlens_k, problem.block_table, problem.cache_seqlens
    body = _choose(problem)
    if body is None:
        raise TensorError(f"flash_attention: head_dim {head_dim}: no kernel of Hopper's for it")
    # Shares are of a launch: whole tiles alone add keys in an order that is the row's own.
    may_split = not problem.batch_invariant
    if may_split and split.applies(problem, body.stated, body.mean_width):
        return split.plan(problem, out, lse, body.stated.sizes["block_m"])
    table = problem.block_table
    page_size = k.shape[1] if table is not None else 1
    # A block of keys is whole boxes, and so is a page.
    stated = body.stated
    block_n = stated.sizes["block_n"]
    box_rows = block_n if table is None else math.gcd(page_size, block_n)
    num_tiles = -(-seqlen_q // stated.sizes["block_m"]) * problem.batch_size * num_heads
    together = heads_a_group(problem, min(seqlen_k, problem.max_seqlen_k))
    if is_dealt(problem, num_tiles, stated.sizes["block_m"]):
        together = -problem.batch_size * num_heads
    numbers = (
        *strides_of(out),
        *lse_strides_of(lse),
        0 if table is None else table.stride(0),
        problem.batch_size,
        num_heads,
        num_kv_heads,
        problem.v.shape[-1],
        seqlen_q,
        seqlen_k,
        *problem.totals,
        k.shape[0],  # where paged: pages
        page_size,
        box_rows,
        *problem.window,
        together,
        int(any(each is not None for each in tables)),
        problem.sink_type,
        *problem.exponents,
        *problem.small_scores,
    )
    num_sms = device_of(q.device).num_sms
    grid = (min(num_tiles, num_sms), 1, 1)
    # Begun early, the next launch takes what this one leaves: of two multiprocessors that share
    # their way to the L2 often both, which wide heads wait for.
    is_early = problem.widest_head <= _WIDE or not num_sms / 2 < grid[0] < num_sms
    function = common.shipped(CUBIN, body.name(q.dtype)) if num_tiles else nothing
    return Launch(
        function, grid, stated.block, stated.shared_bytes, numbers, (body.q_rows, box_rows),
        {"programmatic": is_early},
    )  # fmt: skip


def is_dealt(problem: Problem, num_tiles: int, block_m: int) -> bool:
    """Whether each block's tiles are known from the start: those of no more than two rounds that
    see ever fewer keys. Who asks for the second one early may have the longest first."""
    left, right = problem.window
    is_ordered = left < 0 <= right and not problem.has_lengths and problem.seqlens[0] > block_m
    rounds = num_tiles / device_of(problem.q.device).num_sms
    return is_ordered and 1 < rounds <= (2 if problem.widest_head <= _ROWS else _DEALT_WIDE)


def maps(
    planned: Launch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[bytes, bytes, bytes]:
    """The descriptors that the launch takes instead of q, k and v."""
    if isinstance(planned.maps, split.Packed):
        return split.maps(planned.maps, q, k, v)
    q_rows, box_rows = planned.maps
    return tensor_map(q, q_rows), tensor_map(k, box_rows), tensor_map(v, box_rows)


def launch(
    planned: Launch, maps: tuple[bytes, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor | None, options: Options,
) -> None:  # fmt: skip
    """Run what `plan` made of tensors of these shapes and strides, dtypes and devices."""
    tables = (
        options.cu_seqlens_q, options.cu_seqlens_k, options.cache_seqlens, options.block_table,
        options.sinks,
    )  # fmt: skip
    run(planned, maps, q, out, lse, bounds.flag("flash_attention", q), tables)


def run(
    planned: Launch, maps: tuple[bytes, ...], q: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, flag: torch.Tensor | None, tables: tuple[Any, Any, Any, Any, Any],
) -> None:  # fmt: skip
    """The same of an op's own flag and tables: cu_seqlens_q, cu_seqlens_k, cache_seqlens,
    block_table, sinks."""
    function, grid, block, shared_bytes, numbers, packed, options = planned
    if isinstance(packed, split.Packed):
        split.launch(planned, maps, q, out, lse, flag, tables)
        return
    params = (out, lse, flag, *maps, *tables, counters(q.device, NUM_COUNTERS), *numbers)
    function(grid, block, shared_bytes, None, params, **options)
