"""The gradients of attention on Hopper: which problems, which kernels, which numbers.

Knows the canonical `Problem` and the kernels of csrc/attention/flash_attention_backward_sm90.cu.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..core import common
from .maps import is_mappable, tensor_map
from .problem import Problem

# False: the portable kernels take everything. For tests and benchmarks.
is_enabled = True

CUBIN = "flash_attention_backward_sm90"
BLOCK_N = 128
_THREADS = 384
_ROWS_THREADS = 128
_TILE_ROWS = 16
_ALIGNMENT_BYTES = 1024
_BARRIER_BYTES = 192 + 128  # and what the block works on
_DTYPES = (torch.float16, torch.bfloat16)
# From so many queries on, blocks of 80 are faster than of 64 (by is_causal).
_TALL_FROM = {False: 768, True: 6144}
# q, dout and the sums of dq of the heads that run together stay in the L2 (60 MB on an H200).
_L2_BYTES = 32 << 20
# A narrow head is better served by the portable kernel of its own width.
_LEAST_HEAD_DIM = 40
# That of the kernel's 32-bit sums of two lengths and a window, and of its grid.
_MAX_TOKENS = 1 << 28
_MAX_HEADS = 65535
_MAX_BLOCKS = 1 << 30
# Masked scores are -inf times the scale, which fp32 must hold as a normal number.
_SCALES = (1e-20, 1e20)


@dataclass(frozen=True, slots=True)
class Body:
    """One compiled tile shape: `flash_attention_backward_sm90_{dtype}_hdim{head_dim}`."""

    head_dim: int
    block_m: int

    @property
    def shared_bytes(self) -> int:
        """k, v; two stages of q and dout, of ds, of lse and delta; dq; barriers; room to align."""
        rows = 2 * BLOCK_N + 4 * self.block_m
        ds_bytes = 2 * 2 * self.block_m * BLOCK_N
        row_bytes = 4 * 4 * self.block_m
        dq_bytes = 4 * self.block_m * self.head_dim
        return (
            2 * rows * self.head_dim
            + ds_bytes
            + dq_bytes
            + row_bytes
            + _BARRIER_BYTES
            + _ALIGNMENT_BYTES
        )

    def name(self, dtype: torch.dtype) -> str:
        """The main function's name; the others' follow by a suffix."""
        token = common.DTYPE_TOKENS[dtype]
        return f"{CUBIN}_{token}_hdim{self.head_dim}_rows{self.block_m}"


# The last screen of csrc/attention/flash_attention_backward_sm90.cu.
BODIES = (Body(64, 128), Body(128, 64), Body(128, 80))


def choose(head_dim: int, seqlen_q: int, is_causal: bool) -> Body | None:
    """The smallest head_dim that holds this one, the rows that take the least time."""
    if not _LEAST_HEAD_DIM <= head_dim <= BODIES[-1].head_dim:
        return None
    if head_dim <= BODIES[0].head_dim:
        return BODIES[0]
    return BODIES[2 if seqlen_q >= _TALL_FROM[is_causal] else 1]


def applies(
    problem: Problem,
    out: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> bool:
    """Whether these kernels take the problem on a GPU of compute capability 9.0.

    Lengths on the device (cu_seqlens, cache_seqlens) may be anything.
    """
    q, k, v = problem.q, problem.k, problem.v
    return (
        q.is_cuda
        and q.dtype in _DTYPES
        and choose(q.shape[-1], 0, False) is not None
        and problem.alibi_slopes is None
        and problem.block_table is None
        and problem.softcap == 0
        and _SCALES[0] <= problem.softmax_scale <= _SCALES[1]
        and max(*q.shape[:-2], *k.shape[:-2], problem.max_seqlen_q) <= _MAX_TOKENS
        and q.shape[-2] <= _MAX_HEADS
        and -(-problem.max_seqlen_k // BLOCK_N) * problem.batch_size * q.shape[-2] <= _MAX_BLOCKS
        and all(is_mappable(tensor) for tensor in (q, k, v, out, dout, dq, dk, dv))
    )


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head); a ragged tensor has one batch."""
    if tensor.dim() == 3:
        return 0, tensor.stride(0), tensor.stride(1)
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


def launch(
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    *,
    heads_a_block: int,
    deterministic: bool,
) -> None:
    """The three kernels, where `applies`. dk and dv have one head for each heads_a_block query
    heads."""
    q, k, v = problem.q, problem.k, problem.v
    cu_q, cu_k = problem.cu_seqlens_q, problem.cu_seqlens_k
    batch_size, head_dim, num_heads = problem.batch_size, q.shape[-1], q.shape[-2]
    seqlen_q, seqlen_k = problem.max_seqlen_q, problem.max_seqlen_k
    total_q, total_k = problem.totals
    is_causal = problem.window_right >= 0
    body = choose(head_dim, seqlen_q, is_causal)
    assert body is not None
    name = body.name(q.dtype)

    # Each sequence starts a new block of the workspace.
    blocks_q = -(-seqlen_q // body.block_m)
    num_blocks_q = batch_size * blocks_q
    if cu_q is not None:
        num_blocks_q = q.shape[0] // body.block_m + batch_size
    num_rows = num_heads * num_blocks_q * body.block_m
    workspace = functools.partial(torch.empty, device=q.device, dtype=torch.float32)
    sums = workspace(num_rows * body.head_dim)
    delta, lse_log2 = workspace(num_rows), workspace(num_rows)
    turns = None
    if deterministic:
        turns = workspace(2 * num_heads * num_blocks_q, dtype=torch.int32)

    row_tiles = blocks_q * body.block_m // _TILE_ROWS
    rows_grid = (row_tiles * batch_size, num_heads, 1)
    has_rows = rows_grid[0] * num_heads > 0
    if has_rows:
        lse_strides = (0, lse.stride(0)) if lse.dim() == 2 else (lse.stride(0), lse.stride(1))
        common.shipped(CUBIN, f"{name}_delta")(
            rows_grid, (_ROWS_THREADS, 1, 1), 0, None,
            (
                delta, lse_log2, sums, turns, problem.flag, out, dout, lse, cu_q,
                *_strides(out), *_strides(dout), *lse_strides,
                num_blocks_q, row_tiles, seqlen_q, total_q, head_dim,
            ),
        )  # fmt: skip

    key_blocks = -(-seqlen_k // BLOCK_N)
    num_pairs = batch_size * num_heads // heads_a_block
    # Causal: the blocks with the most queries first, but those of a few heads after another.
    pairs_a_group = 1
    if is_causal and not deterministic:
        pair_bytes = (2 * q.element_size() + 4) * heads_a_block * seqlen_q * body.head_dim
        pairs_a_group = max(1, min(num_pairs, _L2_BYTES // max(1, pair_bytes)))
    if key_blocks * num_pairs > 0:
        common.shipped(CUBIN, name)(
            (key_blocks * num_pairs, 1, 1), (_THREADS, 1, 1),
            body.shared_bytes, None,
            (
                dk, dv, sums, turns, problem.flag,
                tensor_map(q, body.block_m), tensor_map(k, BLOCK_N),
                tensor_map(v, BLOCK_N), tensor_map(dout, body.block_m), lse_log2, delta, cu_q, cu_k,
                problem.cache_seqlens,
                *_strides(dk), *_strides(dv), num_blocks_q, key_blocks, num_pairs, pairs_a_group,
                seqlen_q, seqlen_k, total_q, total_k,
                num_heads, num_heads // k.shape[-2], heads_a_block, head_dim,
                problem.window_left, problem.window_right, float(problem.softmax_scale),
            ),
        )  # fmt: skip

    if has_rows:
        common.shipped(CUBIN, f"{name}_convert")(
            rows_grid, (_ROWS_THREADS, 1, 1), 0, None,
            (
                dq, sums, cu_q, *_strides(dq), num_blocks_q, row_tiles, seqlen_q, total_q,
                head_dim, float(problem.softmax_scale),
            ),
        )  # fmt: skip
