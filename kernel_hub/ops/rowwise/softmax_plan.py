"""Softmax of rows and its gradient: what is refused, which kernel, its launch shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..core import common
from ..core.device import PlannedGpu, device_of
from ..core.launch import Launch

CUBIN, BACKWARD = "softmax", "softmax_backward"
SHARED_BYTES = 400  # where blocks may share a row, as the source states
# Kinds of rows of 16 bits; vectors of a thread, of those that are not whole ones.
NARROW_KINDS, EDGE_VECS = ("fp16", "bf16"), 1
# Of a block: as many as let a second one of the same multiprocessor load meanwhile, then the most.
_THREADS = (512, 1024)
# Of a cluster; more than _PORTABLE only of a whole GPU, which has so many multiprocessors.
_PORTABLE, _MOST, _WHOLE_GPU = 8, 16, 100
_LOOP_THREADS, _SCALAR_THREADS = 512, 256
# What a block has of shared memory beside a row that it keeps there.
_BESIDE = 2048


class Shape(NamedTuple):
    """How rows are shared among threads."""

    variant: str
    threads: int
    rows_a_block: int = 1
    blocks_a_row: int = 1


def check(op: str, x: Any, mask: Any, out: Any = None) -> None:
    """Everything about the tensors but their addresses."""
    common.check_data(op, "x", x)
    if x.shape[-1] > common.MAX_SIZE:
        raise common.refuse(op, "x", f"a last dimension of at most {common.MAX_SIZE}", x)
    common.check_written(op, "out", out, x.shape, x)
    if mask is None:
        return
    common.check_data(op, "mask", mask, (torch.bool, x.dtype))
    if mask.device != x.device:
        raise common.refuse(op, "mask", f"device {x.device}", mask)
    leading = x.shape[max(0, x.dim() - mask.dim()) : -1]
    fits = mask.dim() <= x.dim() and all(
        n in (1, most) for n, most in zip(mask.shape[:-1], leading, strict=True)
    )
    if not fits or mask.shape[-1] != x.shape[-1]:
        expected = f"a shape that broadcasts to {tuple(x.shape)} along leading dimensions alone"
        raise common.refuse(op, "mask", expected, mask)


def check_gradient(op: str, dout: Any, out: Any, dx: Any = None) -> None:
    """The same of what a gradient is made of."""
    common.check_data(op, "out", out)
    common.check_like(op, "dout", dout, out.shape, out)
    common.check_written(op, "dx", dx, out.shape, out)


def choose(vecs: int, rows: int, a_thread: int, num_sms: int) -> Shape:
    """For rows of `vecs` 16-byte vectors, of which a thread holds up to `a_thread`.

    num_sms: 0 where blocks cannot share a row. docs/notes/softmax.md says why.
    """
    most = 1 if not num_sms else _PORTABLE if num_sms < _WHOLE_GPU else _MOST
    for threads in _THREADS:
        blocks = _power_of_2(-(-vecs // (threads * a_thread)))
        if blocks <= most:
            break
    else:
        return Shape("loop", _LOOP_THREADS)
    if blocks > 1:
        if rows * _PORTABLE <= num_sms:  # few rows have more multiprocessors each
            blocks = max(blocks, _PORTABLE)
        return Shape("vec", 32 * -(-vecs // (32 * blocks * a_thread)), 1, blocks)
    # Many rows want several loads of a thread in flight, few rows many threads.
    each = a_thread if rows > 256 else -(-vecs // _THREADS[-1])
    lanes = -(-vecs // each)
    threads = _power_of_2(lanes) if lanes <= 32 else 32 * -(-lanes // 32)
    return Shape("vec", threads, max(1, 128 // threads) if rows > 256 or threads < 32 else 1)


def is_kept(row_bytes: int, rows: int, gpu: PlannedGpu) -> bool:
    """Whether blocks keep a row each in shared memory: there are many, and each multiprocessor has
    two, one of which loads or writes while the other computes.
    """
    return rows > gpu.num_sms and 2 * (row_bytes + _BESIDE) <= gpu.sm_shared_bytes


def edge_vecs(size: int, elems: int) -> int:
    """Vectors that a row meets at most: it may begin with the last element of one."""
    return (size + 2 * (elems - 1)) // elems


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


def plan(op: str, kind: str, tensors: Sequence[Any], low_bits: int, a_thread: int) -> Launch:
    """The launch.

    kind: what follows the cubin's name; tensors: what is written, what is read like it, and a third
    or None, all of one shape; low_bits: of their addresses, 0 where vectors may be read.
    """
    x = tensors[1]
    if x.numel() == 0:
        return Launch()
    leading, none = x.shape[:-1], (0,) * (x.dim() - 1)
    places = [none if t is None else t.stride()[:-1] for t in tensors]
    sizes, groups = common.collapse(op, leading, places, groups=3)
    order = sorted(range(3), key=lambda i: -sizes[i])  # most along gridDim.x
    rows, middle, outer = (sizes[i] for i in order)
    if middle > common.MAX_GRID_Y or rows * _MOST > common.MAX_GRID_X:
        raise common.refuse(op, "x", "fewer rows that lie apart (call .contiguous() first)", x)
    strides = [[kept[i] for i in order] for kept in groups]
    size, elems = x.shape[-1], common.VEC_BYTES // x.element_size()
    is_aligned = low_bits == 0 and all(
        common.is_aligned(4 if t is not None and t.dtype == torch.bool else elems, size, *kept)
        for t, kept in zip(tensors, strides, strict=True)
    )
    gpu = device_of(x.device)
    num_sms, num_rows = gpu.num_sms if gpu.has_clusters else 0, rows * middle * outer
    is_forward, shared_bytes = op != BACKWARD, 0
    if is_aligned:
        shape = choose(size // elems, num_rows, a_thread, num_sms)
        is_long = shape.variant == "loop" or shape.blocks_a_row > 1
        row_bytes = size * x.element_size()
        if is_long and kind in NARROW_KINDS and is_kept(row_bytes, num_rows, gpu):
            shape, shared_bytes = Shape("loop", _LOOP_THREADS), row_bytes
        if not is_forward and shape.blocks_a_row > _PORTABLE and num_rows > num_sms // 8:
            # Few rows at a time, so that the second read comes from the L2.
            shape = Shape("loop", _LOOP_THREADS, 1, _PORTABLE)
    elif (
        kind in NARROW_KINDS
        and (shape := choose(edge_vecs(size, elems), num_rows, EDGE_VECS, num_sms)).variant == "vec"
    ):
        shape = shape._replace(variant="edges")
    else:
        shape = Shape("scalar", min(_SCALAR_THREADS, 32 * -(-size // 32)))
    function = common.shipped(CUBIN, f"{CUBIN}_{kind}_{shape.variant}")
    numbers = (*strides[0], *strides[1], *strides[2], rows, size, shape.blocks_a_row)
    grid = (-(-rows // shape.rows_a_block) * shape.blocks_a_row, middle, outer)
    block = (shape.threads, shape.rows_a_block, 1)
    if shape.variant in ("vec", "edges") or not is_forward:
        shared_bytes = SHARED_BYTES
    options = gpu.following
    if shape.blocks_a_row > 1:
        options["cluster"] = (shape.blocks_a_row, 1, 1)
    return Launch(function, grid, block, shared_bytes, numbers, options=options)
