"""Launches the gradients of attention (csrc/attention/flash_attention_backward.cu) for a Problem.

Checks nothing and allocates only the workspace: the public op has checked, and owns the outputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..core import common
from ..core.device import device_of
from . import backward_sm90 as sm90
from .problem import Problem

CUBIN = "flash_attention_backward"
_TILE_ROWS = 16
_ROWS_THREADS = 128


@dataclass(frozen=True, slots=True)
class Tiles:
    """One variant's tiles: the numbers of its EXPORT_BACKWARD line, in that order."""

    head_dim: int
    block_m: int
    block_n: int
    warps: int
    warps_n: int
    warps_dkv: int
    warps_dq: int
    stages_q: int
    stages_dout: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: k, v; q, dout; ds and perhaps p; lse and delta."""
        scores = (1 if self.warps_n == self.warps else 2) * (2 if self.stages_q == 3 else 1)
        rows = 2 * self.block_n + (self.stages_q + self.stages_dout) * self.block_m
        values = rows * self.head_dim + scores * self.block_m * self.block_n
        return 2 * values + 16 * self.block_m + 64


@dataclass(frozen=True, slots=True)
class Variant:
    """What follows the dtype in a function's name, and its tiles."""

    suffix: str
    tiles: Tiles

    @property
    def name(self) -> str:
        return f"hdim{self.tiles.head_dim}{self.suffix}"


# The best first: a head_dim takes the first that holds it and fits a block's shared memory.
# Measured on an H200 (docs/notes/flash_attention_backward.md).
#             head_dim  block_m  block_n  warps  warps_n  warps_dkv  warps_dq  stages_q  stages_dout
VARIANTS = (
    Variant("",      Tiles(32,  64, 128, 4, 4, 4, 2, 2, 2)),
    Variant("",      Tiles(64,  64, 128, 4, 4, 4, 2, 2, 2)),
    Variant("",      Tiles(96,  64, 128, 8, 4, 4, 4, 3, 3)),
    Variant("_163k", Tiles(96,  64, 128, 8, 4, 4, 4, 2, 2)),
    Variant("_99k",  Tiles(96,  64,  64, 4, 4, 4, 2, 2, 2)),
    Variant("",      Tiles(128, 64, 128, 8, 4, 4, 2, 3, 3)),
    Variant("_163k", Tiles(128, 64, 128, 8, 4, 4, 2, 2, 2)),
    Variant("_99k",  Tiles(128, 64,  64, 4, 4, 4, 2, 2, 1)),
    Variant("",      Tiles(160, 64,  64, 8, 2, 4, 4, 3, 3)),
    Variant("_163k", Tiles(160, 64,  64, 8, 2, 4, 4, 2, 2)),
    Variant("_99k",  Tiles(160, 64,  64, 8, 2, 4, 4, 1, 1)),
    Variant("",      Tiles(192, 64,  64, 8, 2, 2, 2, 3, 3)),
    Variant("_163k", Tiles(192, 64,  64, 8, 2, 2, 2, 2, 2)),
    Variant("_99k",  Tiles(192, 32,  64, 8, 4, 2, 2, 2, 1)),
    Variant("",      Tiles(256, 64,  64, 8, 2, 2, 2, 2, 2)),
    Variant("_163k", Tiles(256, 64,  64, 8, 2, 2, 2, 1, 1)),
    Variant("_99k",  Tiles(256, 32,  32, 4, 2, 2, 2, 2, 1)),
)  # fmt: skip


@functools.cache
def choose(head_dim: int, shared_bytes: int) -> Variant:
    """The variant for a head_dim on a GPU where a block may have so much shared memory."""
    for variant in VARIANTS:
        tiles = variant.tiles
        if head_dim <= tiles.head_dim and tiles.shared_bytes <= shared_bytes:
            return variant
    raise ValueError(f"head_dim {head_dim} is more than 256")


def backward(
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    *,
    deterministic: bool,
) -> None:
    """Write the gradients of (out * dout).sum() into dq, dk, dv; every row of every sequence.

    out, dout, dq: like problem.q; dk, dv: like problem.k and v (not paged); any strides, the last
        dimension contiguous (a dout of other strides is copied).
    lse: (batch_size, num_heads, seqlen_q) or (num_heads, total_q), fp32, natural logarithm.
    deterministic: dq too has the same bits in every run; dk and dv always have.
    """
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    if lse.stride(-1) != 1:
        lse = lse.contiguous()
    device = device_of(problem.q.device)
    variant = choose(problem.q.shape[-1], device.shared_bytes)
    is_hopper = (
        sm90.is_enabled and device.has_wgmma and sm90.applies(problem, out, dout, dq, dk, dv)
    )
    num_heads, num_kv_heads = problem.q.shape[-2], problem.k.shape[-2]
    block_n = sm90.BLOCK_N if is_hopper else variant.tiles.block_n
    key_blocks = -(-problem.max_seqlen_k // block_n) * problem.batch_size
    grads = (dk, dv)
    # Few blocks: one a query head, which is as many times more; the group's are then summed.
    is_split = num_heads > num_kv_heads and key_blocks * num_kv_heads < 2 * device.num_sms
    if is_split:
        # What no kernel writes, past the end of a sequence, must be 0 in the sum.
        has_gaps = problem.cu_seqlens_k is not None or problem.cache_seqlens is not None
        make = torch.zeros if has_gaps else torch.empty
        shape = (*problem.k.shape[:-2], num_heads, problem.k.shape[-1])
        grads = tuple(make(shape, dtype=dk.dtype, device=dk.device) for _ in grads)
    run = sm90.launch if is_hopper else functools.partial(launch, variant.name, variant.tiles)
    run(problem, out, lse, dout, dq, *grads, deterministic=deterministic,
        heads_a_block=1 if is_split else num_heads // num_kv_heads)  # fmt: skip
    if is_split:
        for grad, parts in zip((dk, dv), grads, strict=True):
            torch.sum(parts.unflatten(-2, (num_kv_heads, -1)), -2, out=grad)


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head); a ragged tensor has one batch."""
    if tensor.dim() == 3:
        return 0, tensor.stride(0), tensor.stride(1)
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


def _is_aligned(*tensors: torch.Tensor) -> bool:
    for tensor in tensors:
        elems = common.VEC_BYTES // tensor.element_size()
        if tensor.data_ptr() % common.VEC_BYTES or any(s % elems for s in _strides(tensor)):
            return False
    return True


def launch(
    variant: str,
    tiles: Tiles,
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
    """The three kernels, `variant` the main one. dk and dv have one head for each heads_a_block
    query heads."""
    q, k, v = problem.q, problem.k, problem.v
    cu_q, cu_k = problem.cu_seqlens_q, problem.cu_seqlens_k
    batch_size, head_dim = problem.batch_size, q.shape[-1]
    num_heads = q.shape[-2]
    seqlen_q, seqlen_k = problem.max_seqlen_q, problem.max_seqlen_k
    total_q, total_k = problem.totals
    token = common.DTYPE_TOKENS[q.dtype]

    row_blocks = -(-seqlen_q // _TILE_ROWS)
    num_tiles = batch_size * row_blocks if cu_q is None else q.shape[0] // _TILE_ROWS + batch_size
    workspace = functools.partial(torch.empty, device=q.device, dtype=torch.float32)
    padded = tiles.head_dim
    sums = workspace(num_heads * num_tiles * _TILE_ROWS * padded)
    delta = workspace(num_heads * num_tiles * _TILE_ROWS)
    lse_log2 = torch.empty_like(delta)
    turns = workspace(num_heads * num_tiles, dtype=torch.int32) if deterministic else None

    rows_grid = (row_blocks * batch_size, num_heads, 1)
    has_rows = rows_grid[0] * num_heads > 0
    if has_rows:
        lse_strides = (0, lse.stride(0)) if lse.dim() == 2 else (lse.stride(0), lse.stride(1))
        common.shipped(CUBIN, f"{CUBIN}_{token}_delta")(
            rows_grid, (_ROWS_THREADS, 1, 1), 0, None,
            (
                delta, lse_log2, sums, turns, problem.flag, out, dout, lse, cu_q,
                *_strides(out), *_strides(dout), *lse_strides, num_tiles,
                row_blocks, seqlen_q, total_q, head_dim, padded, int(_is_aligned(out, dout)),
            ),
        )  # fmt: skip

    key_blocks = -(-seqlen_k // tiles.block_n)
    slopes = problem.alibi_slopes
    slopes_stride = slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0
    is_aligned = _is_aligned(q, k, v, dout, dk, dv)
    is_plain = (
        is_aligned and slopes is None and problem.softcap == 0.0 and problem.softmax_scale > 0.0
    )
    if key_blocks * batch_size * num_heads > 0:
        name = f"{CUBIN}_{token}_{variant}{'' if is_plain else '_general'}"
        common.shipped(CUBIN, name)(
            (key_blocks * batch_size, num_heads // heads_a_block, 1), (32 * tiles.warps, 1, 1),
            tiles.shared_bytes, None,
            (
                dk, dv, sums, turns, problem.flag, q, k, v, dout, lse_log2, delta, slopes,
                cu_q, cu_k, problem.cache_seqlens,
                *_strides(dk), *_strides(dv), *_strides(q), *_strides(k), *_strides(v),
                *_strides(dout), slopes_stride,
                num_tiles, key_blocks, seqlen_q, seqlen_k, total_q, total_k,
                num_heads // k.shape[-2], heads_a_block, head_dim,
                problem.window_left, problem.window_right, int(is_aligned),
                float(problem.softmax_scale), float(problem.softcap),
            ),
        )  # fmt: skip

    if has_rows:
        common.shipped(CUBIN, f"{CUBIN}_{token}_convert")(
            rows_grid, (_ROWS_THREADS, 1, 1), 0, None,
            (
                dq, sums, cu_q, *_strides(dq), num_tiles, row_blocks, seqlen_q, total_q, head_dim,
                padded, int(_is_aligned(dq)), float(problem.softmax_scale),
            ),
        )  # fmt: skip
