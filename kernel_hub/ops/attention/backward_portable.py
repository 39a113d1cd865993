"""Launches the gradients of attention (csrc/attention/flash_attention_backward.cu) for a Problem.

Checks nothing and allocates only the workspace: the public op has checked, and owns the outputs.
"""

from __future__ import annotations

import functools

import torch

from ..core import common
from ..core.device import Stated, device_of, launch_facts
from . import backward_sm90 as sm90
from .problem import Gradients, Problem, lse_strides_of, strides_of

CUBIN = "flash_attention_backward"


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


@functools.cache
def choose(head_dim: int, shared_bytes: int) -> str:
    """The variant for a head_dim on a GPU where a block may have so much shared memory."""
    for variant in VARIANTS:
        facts = stated(variant)
        if head_dim <= facts.sizes["head_dim"] and facts.shared_bytes <= shared_bytes:
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
    given = Gradients(out, lse, dout, dq, dk, dv)
    is_hopper = sm90.is_enabled and device.has_wgmma and sm90.applies(problem, given)
    num_heads, num_kv_heads = problem.q.shape[-2], problem.k.shape[-2]
    body = sm90.body_of(problem) if is_hopper else None
    facts = body.stated if body else stated(variant)
    key_blocks = -(-problem.max_seqlen_k // facts.sizes["block_n"]) * problem.batch_size
    # Few blocks: one a query head, which is as many times more; the group's are then summed.
    is_split = num_heads > num_kv_heads and key_blocks * num_kv_heads < 2 * device.num_sms
    if is_split:
        # What no kernel writes, past the end of a sequence, must be 0 in the sum.
        has_gaps = problem.cu_seqlens_k is not None or problem.cache_seqlens is not None
        make = torch.zeros if has_gaps else torch.empty
        shape = (*problem.k.shape[:-2], num_heads, problem.k.shape[-1])
        parts = [make(shape, dtype=dk.dtype, device=dk.device) for _ in (dk, dv)]
        given = given._replace(dk=parts[0], dv=parts[1])
    run = sm90.launch if is_hopper else functools.partial(launch, variant)
    heads_a_block = 1 if is_split else num_heads // num_kv_heads
    run(problem, given, heads_a_block=heads_a_block, deterministic=deterministic)
    if is_split:
        for grad, of_heads in ((dk, given.dk), (dv, given.dv)):
            torch.sum(of_heads.unflatten(-2, (num_kv_heads, -1)), -2, out=grad)


def _is_aligned(*tensors: torch.Tensor) -> bool:
    for tensor in tensors:
        elems = common.VEC_BYTES // tensor.element_size()
        if tensor.data_ptr() % common.VEC_BYTES or any(s % elems for s in strides_of(tensor)):
            return False
    return True


def launch(
    variant: str,
    problem: Problem,
    given: Gradients,
    *,
    heads_a_block: int,
    deterministic: bool,
) -> None:
    """The three kernels, `variant` the main one. dk and dv have one head for each heads_a_block
    query heads."""
    q, k, v = problem.q, problem.k, problem.v
    out, lse, dout, dq, dk, dv = given
    cu_q, cu_k = problem.cu_seqlens_q, problem.cu_seqlens_k
    batch_size, head_dim = problem.batch_size, q.shape[-1]
    num_heads = q.shape[-2]
    seqlen_q, seqlen_k = problem.max_seqlen_q, problem.max_seqlen_k
    total_q, total_k = problem.totals
    token = common.DTYPE_TOKENS[q.dtype]

    tiles = stated(variant)
    rows = launch_facts(CUBIN, f"{CUBIN}_{token}_delta")  # and of _convert, over the same tiles
    tile_rows = rows.sizes["block_m"]
    row_blocks = -(-seqlen_q // tile_rows)
    num_tiles = batch_size * row_blocks if cu_q is None else q.shape[0] // tile_rows + batch_size
    workspace = functools.partial(torch.empty, device=q.device, dtype=torch.float32)
    padded = tiles.sizes["head_dim"]
    sums = workspace(num_heads * num_tiles * tile_rows * padded)
    delta = workspace(num_heads * num_tiles * tile_rows)
    lse_log2 = torch.empty_like(delta)
    turns = workspace(num_heads * num_tiles, dtype=torch.int32) if deterministic else None

    rows_grid = (row_blocks * batch_size, num_heads, 1)
    has_rows = rows_grid[0] * num_heads > 0
    if has_rows:
        common.shipped(CUBIN, f"{CUBIN}_{token}_delta")(
            rows_grid, rows.block, rows.shared_bytes, None,
            (
                delta, lse_log2, sums, turns, problem.flag, out, dout, lse, cu_q,
                *strides_of(out), *strides_of(dout), *lse_strides_of(lse), num_tiles,
                row_blocks, seqlen_q, total_q, head_dim, padded, int(_is_aligned(out, dout)),
            ),
        )  # fmt: skip

    key_blocks = -(-seqlen_k // tiles.sizes["block_n"])
    slopes = problem.alibi_slopes
    slopes_stride = slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0
    is_aligned = _is_aligned(q, k, v, dout, dk, dv)
    is_plain = (
        is_aligned and slopes is None and problem.softcap == 0.0 and problem.softmax_scale > 0.0
    )
    if key_blocks * batch_size * num_heads > 0:
        name = f"{CUBIN}_{token}_{variant}{'' if is_plain else '_general'}"
        common.shipped(CUBIN, name)(
            (key_blocks * batch_size, num_heads // heads_a_block, 1), tiles.block,
            tiles.shared_bytes, None,
            (
                dk, dv, sums, turns, problem.flag, q, k, v, dout, lse_log2, delta, slopes,
                cu_q, cu_k, problem.cache_seqlens,
                *strides_of(dk), *strides_of(dv), *strides_of(q), *strides_of(k), *strides_of(v),
                *strides_of(dout), slopes_stride,
                num_tiles, key_blocks, seqlen_q, seqlen_k, total_q, total_k,
                num_heads // k.shape[-2], heads_a_block, head_dim,
                problem.window_left, problem.window_right, int(is_aligned),
                float(problem.softmax_scale), float(problem.softcap),
            ),
        )  # fmt: skip

    if has_rows:
        common.shipped(CUBIN, f"{CUBIN}_{token}_convert")(
            rows_grid, rows.block, rows.shared_bytes, None,
            (
                dq, sums, cu_q, *strides_of(dq), num_tiles, row_blocks, seqlen_q, total_q, head_dim,
                padded, int(_is_aligned(dq)), float(problem.softmax_scale),
            ),
        )  # fmt: skip
