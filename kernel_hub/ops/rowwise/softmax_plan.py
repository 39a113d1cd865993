"""Softmax of rows and its gradient: what is refused, which kernel, its launch shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..core import common
from ..core.device import PlannedGpu, device_of
from ..core.launch import Launch

CUBIN, BACKWARD = "softmax", "softmax_backward"
SHARED_BYTES = 400  # as the source states, beside a row that is kept
_NARROW_ELEMS = 8  # of a vector of 16 bits
# Of rows that are not whole vectors: columns of a thread at most, of which it has fours;
# of one of a row of up to _SHORT.
COLUMNS, _FOUR = 20, 4
# Rows of fewer lanes than a warp; of more columns than a warp has; that many rows rather have kept.
_SHORT, _WARP, _LONG = 128, 32 * COLUMNS, 4096
_SHORT_THREADS_AN_SM = 256  # up to which short rows have four columns a thread
# Of a block: as many as let a second one of the same multiprocessor load meanwhile, then the most.
_THREADS = (512, 1024)
# Of a cluster; more than _PORTABLE only of a whole GPU, which has so many multiprocessors.
_PORTABLE, _MOST, _WHOLE_GPU = 8, 16, 100
# Of a block that reads its part of a row twice, of all such on a multiprocessor.
_PASS_THREADS, _PASS_THREADS_AN_SM = 640, 1280
_PART_VECS, _PARTS_AN_SM = 512, 3  # how small parts of rows become, so that there are so many
_FEW_PARTS_AN_SM, _MOST_PARTS_AN_SM = 4, 6  # among which threads are shared out
_RESERVED = 1024  # of shared memory, beside what a block asks for
_ROUNDED = 4096  # of a part of a row, whose threads have as many vectors each


class Shape(NamedTuple):
    """How rows are shared among threads."""

    variant: str
    threads: int
    rows_a_block: int = 1
    blocks_a_row: int = 1
    kept_bytes: int = 0  # of a block's part of a row, in shared memory


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
        return Shape("loop", _PASS_THREADS)
    if blocks > 1:
        if rows * _PORTABLE <= num_sms:  # few rows have more multiprocessors each
            blocks = max(blocks, _PORTABLE)
        return Shape("vec", 32 * -(-vecs // (32 * blocks * a_thread)), 1, blocks)
    # Many rows want several loads of a thread in flight, few rows many threads.
    each = a_thread if rows > 256 else -(-vecs // _THREADS[-1])
    lanes = -(-vecs // each)
    threads = _power_of_2(lanes) if lanes <= 32 else 32 * -(-lanes // 32)
    return Shape("vec", threads, max(1, 128 // threads) if rows > 256 or threads < 32 else 1)


def are_resident(shape: Shape, rows: int, num_sms: int) -> bool:
    """Whether all blocks that hold rows in registers run at once: 1,024 threads each have room."""
    return rows * shape.blocks_a_row * shape.threads <= _THREADS[-1] * num_sms


def choose_passes(vecs: int, rows: int, tensors: int, gpu: PlannedGpu) -> Shape:
    """For rows that are read from shared memory, or twice.

    vecs: of one of the `tensors` that are read. A row is shared until there are enough blocks for
    all multiprocessors, and until each has room for two rows, or three parts of rows, of which one
    loads or writes while another computes.
    """
    whole = gpu.num_sms >= _WHOLE_GPU
    most = 1 if not gpu.has_clusters else _MOST if whole else _PORTABLE
    bytes_a_row = tensors * common.VEC_BYTES * vecs

    def room(blocks: int) -> int:
        each = gpu.sm_shared_bytes // 2 if blocks == 1 else gpu.sm_shared_bytes // 3 - _ROUNDED
        return each - _RESERVED - SHARED_BYTES

    blocks = 1
    while blocks < most and (
        bytes_a_row > room(blocks) * blocks
        or (rows * blocks < _PARTS_AN_SM * gpu.num_sms and vecs >= 2 * _PART_VECS * blocks)
    ):
        blocks *= 2
    is_alone = rows * blocks <= gpu.num_sms
    part = -(-vecs // blocks)
    resident = gpu.sm_shared_bytes // (bytes_a_row // blocks + SHARED_BYTES + _RESERVED)
    there = max(_FEW_PARTS_AN_SM, -(-rows * blocks // gpu.num_sms))
    resident = 1 if is_alone else max(2, min(_MOST_PARTS_AN_SM, resident, there))
    each = -(-part // min(_PASS_THREADS, _PASS_THREADS_AN_SM // resident // 64 * 64))
    threads = 32 * -(-part // (32 * each))
    kept_bytes = tensors * common.VEC_BYTES * each * threads
    has_room = SHARED_BYTES + kept_bytes <= gpu.shared_bytes if is_alone else kept_bytes <= room(1)
    return Shape("loop", threads, 1, blocks, kept_bytes if has_room else 0)


def choose_any(
    vecs: int, rows: int, held: tuple[str, int, int] | None, op: str, gpu: PlannedGpu
) -> Shape:
    """held: (the kernel that holds rows in registers, what it has of a row, of a thread at most) if
    one takes them.
    """
    tensors = 2 if op == BACKWARD else 1
    if held is None:
        return choose_passes(vecs, rows, tensors, gpu)
    variant, units, a_thread = held
    shape = choose(units, rows, a_thread, gpu.num_sms if gpu.has_clusters else 0)
    is_shared = shape.blocks_a_row > 1 and not are_resident(shape, rows, gpu.num_sms)
    if shape.variant == "loop" or is_shared:
        return choose_passes(vecs, rows, tensors, gpu)
    if variant == "edges" and shape.blocks_a_row == 1:
        shape = choose_columns(units, rows, gpu.num_sms)
        if units > _LONG and not are_resident(shape, rows, gpu.num_sms):
            return choose_passes(vecs, rows, tensors, gpu)
        return shape
    return shape._replace(variant=variant)


def choose_columns(size: int, rows: int, num_sms: int) -> Shape:
    """For rows that are not whole vectors.

    Measured on an H200 (docs/notes/softmax.md): a warp a row where it has that many; of longer ones
    the fewest columns a thread, from eight on, with which all rows run at once, else the most.
    """
    if size <= _SHORT:
        lanes = -(-size // _FOUR)
        if rows * lanes > _SHORT_THREADS_AN_SM * num_sms:
            lanes = -(-size // (2 * _FOUR))
        threads = _power_of_2(lanes)
        return Shape("edges", threads, 128 // threads)
    if size <= _WARP:
        return Shape("warps", 32, 4)
    for each in range(2 * _FOUR, COLUMNS + 1, _FOUR):
        shape = Shape("edges", 32 * -(-size // (32 * each)))
        if shape.threads <= _THREADS[-1] and are_resident(shape, rows, num_sms):
            break
    return shape


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
    gpu, num_rows = device_of(x.device), rows * middle * outer
    is_narrow = elems == _NARROW_ELEMS
    vecs = size // elems if is_aligned else edge_vecs(size, elems)
    held: tuple[str, int, int] | None = None
    if is_aligned or (is_narrow and op == BACKWARD):
        held = ("vec", vecs, a_thread)
    elif op != BACKWARD:
        held = ("edges", size, COLUMNS)
    shape = choose_any(vecs, num_rows, held, op, gpu)
    function = common.shipped(CUBIN, f"{CUBIN}_{kind}_{shape.variant}")
    numbers = (*strides[0], *strides[1], *strides[2], rows, size, shape.blocks_a_row)
    grid = (-(-rows // shape.rows_a_block) * shape.blocks_a_row, middle, outer)
    block = (shape.threads, shape.rows_a_block, 1)
    options = gpu.following
    if shape.blocks_a_row > 1:
        options["cluster"] = (shape.blocks_a_row, 1, 1)
    shared_bytes = SHARED_BYTES + shape.kept_bytes
    return Launch(function, grid, block, shared_bytes, numbers, options=options)
