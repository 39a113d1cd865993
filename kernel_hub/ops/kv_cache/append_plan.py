"""Which kernel appends, its launch shape and its integer parameters."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from ..core import common
from ..core.device import device_of
from ..core.kv_cache import batch_and_seqlen
from ..core.launch import Launch
from .append_checks import AppendGiven

_MAX_THREADS = 256  # of a block
_SLOTS = 4  # the heads of a thread of vectors at a time
_WIDTHS = 4, 8, 12, 16, 24, 32, 48, 64  # lanes of a head: fours that fill blocks of 64 or 96
_ROUNDS = 0.5, 1, 2, 4  # of four heads of a thread that has them; half: of two
_VEC_SIZE = 512  # the largest head that vectors take
_WARPS = 2800  # as many a GPU has at once
_FEW = 0.5  # of these, of two heads a thread
_SCALED_THREADS, _SCALED_TOKENS = 96, 768  # the same of more tokens, into int8 or of found scales


def _strides(tensor: Any) -> tuple[int, int, int]:
    """(outer, row, head) strides; (total, heads, head_dim) has no outer one."""
    if tensor is None:
        return 0, 0, 0
    outer = tensor.stride(0) if tensor.dim() == 4 else 0
    return outer, tensor.stride(-3), tensor.stride(-2)


def launch_of(given: AppendGiven, is_aligned: bool) -> Launch:
    """Choose the kernel, its launch shape and its integer parameters, for checked arguments."""
    k = given.k
    num_tokens = k.shape[:-2].numel()
    num_heads = 0 if given.q is None else given.q.shape[-2]
    num_kv_heads, head_dim = k.shape[-2:]
    batch_size, _ = batch_and_seqlen(k.shape[:-2], given.cu_seqlens)
    if num_tokens * (num_heads + num_kv_heads) * head_dim == 0 or batch_size == 0:
        return Launch()
    heads = (num_heads, num_kv_heads, num_tokens)
    if given.is_scaled:
        return _scaled_launch(given, is_aligned, heads)
    strides, sizes = _numbers(given)
    name = f"append_kv_{common.DTYPE_TOKENS[k.dtype]}"
    if _takes_fours(given, is_aligned, strides):
        name += "_interleaved" if given.interleaved else "_half"
        is_own = given.k_cache.dtype == k.dtype
        name += "_vec" if is_own else "_to_e4m3_vec"
        is_apart = is_own and not given.is_normed  # or lanes sum squares, or share scales
        parts, rounds, grid, block = _vec_shape(head_dim, *heads, is_apart)
    else:
        name += "_scalar"
        parts, rounds, grid, block = _scalar_shape(head_dim, *heads)
    numbers: tuple[Any, ...] = (*strides, *sizes, parts, rounds, *_flags(given))
    if not given.is_normed:  # the weights before them, eps and offset behind, which such calls lack
        numbers = (None, None, *numbers, 0.0, 0.0)
    options = device_of(k.device).following
    return Launch(common.shipped("append_kv", name), grid, block, 0, numbers, options=options)


def _takes_fours(given: AppendGiven, is_aligned: bool, strides: list[int]) -> bool:
    """Whether lanes may take a head by fours, every pair of the rotation in one lane."""
    head_dim, cos = given.k.shape[-1], given.cos
    return (
        is_aligned
        and head_dim <= _VEC_SIZE
        and head_dim % 8 == given.rotary_dim % 8 == 0
        and common.is_aligned(4, *strides)
        and (cos is None or cos.stride(0) % 4 == 0)
    )


def _vec_shape(
    head_dim: int, num_heads: int, num_kv_heads: int, tokens: int, is_apart: bool = False
) -> tuple[int, int, tuple[int, int, int], tuple[int, int, int]]:
    """The parts of a token's queries, the heads of a thread at a time, grid and block.

    is_apart: the lanes of a head share nothing, so need be no fours, nor a block be full of them.
    groups: heads of a token that a block has side by side, other tokens' beside them where these
    are fewer than it has room for; rounds: one after another, or half of one. Chosen by warps, of
    which a last wave is not full, and what each does: rounds, and the setup before, which weighs
    as much as one.
    Measured on an H200 (docs/notes/append_kv.md).
    """
    least = head_dim // 8
    width = next(width for width in _WIDTHS if width >= least)
    threads = 96 if width % 3 == 0 else 64
    room = threads // width
    most = max(1, room // 2)
    groups_of = [most >> i for i in range(most.bit_length())]
    shapes = [*itertools.product([width], [room], groups_of, _ROUNDS)]
    if is_apart and (more := 64 // least) * threads > 64 * room:
        shapes += itertools.product([least], [more], range(more, 0, -1), _ROUNDS)

    def parts_of(groups: int, rounds: float) -> tuple[int, int]:
        at_once = int(_SLOTS * groups * rounds)
        return -(-num_heads // at_once), -(-num_kv_heads // (at_once // 2))

    def cost(shape: tuple[int, int, int, float]) -> tuple[float, float]:
        width, room, groups, rounds = shape
        parts = sum(parts_of(groups, rounds))
        blocks = tokens * parts / (room // groups)
        warps = -(-width * room // 32) * blocks
        if rounds < 1 and warps > _FEW * _WARPS:
            return math.inf, warps
        # A token's heads lie side by side in memory, those of several tokens do not.
        weight = 1.1 if groups == 1 and room > 2 else 1.0
        work = weight * (1.0 + sum(parts_of(groups, 1)) / parts)
        return (max(warps, _WARPS) + _WARPS) * work, warps

    width, room, groups, rounds = min(shapes, key=cost)
    block_tokens = room // groups
    # Fewer parts take more rounds: as many as there are heads for.
    parts = [min(of, common.MAX_GRID_Y // 2) for of in parts_of(groups, rounds)]
    grid = (-(-tokens // block_tokens), sum(parts), 1)
    return parts[0], int(_SLOTS * min(1, rounds)), grid, (width, groups, block_tokens)


def _scalar_shape(
    head_dim: int, num_heads: int, num_kv_heads: int, tokens: int
) -> tuple[int, int, tuple[int, int, int], tuple[int, int, int]]:
    """Threads of queries, rounds, grid and block: whole warps, each with whole heads."""
    width = min(32, 1 << (-(-head_dim // 2) - 1).bit_length())
    room, step = _MAX_THREADS // width, 32 // width
    pairs = -(-num_heads // 2) + num_kv_heads
    rounds = -(-pairs // room)
    q_threads, kv_threads = -(-num_heads // (2 * rounds)), -(-num_kv_heads // rounds)
    if q_threads + kv_threads > room:
        q_threads, kv_threads = (room - 1, 1) if num_heads else (0, room)
    kv_threads += -(q_threads + kv_threads) % step
    rounds = max(
        -(-num_heads // (2 * q_threads)) if num_heads else 0,
        -(-num_kv_heads // kv_threads) if num_kv_heads else 0,
    )
    return q_threads, rounds, (tokens, 1, 1), (width, q_threads + kv_threads, 1)


def _parts_of(given: AppendGiven, is_aligned: bool, strides: list[int]) -> tuple[int, bool]:
    """Threads of a head into int8 or of found scales, and whether by two vectors each of it."""
    k, cos, rotary_dim, interleaved = given.k, given.cos, given.rotary_dim, given.interleaved
    head_dim = k.shape[-1]
    elems = common.VEC_BYTES // k.element_size()
    width = -(-head_dim // (2 * elems))
    aligned = (
        is_aligned
        and head_dim % (2 * elems) == 0
        and rotary_dim % (elems if interleaved else 2 * elems) == 0
        and width <= 32
        and common.is_aligned(elems, *strides)
        and (cos is None or cos.stride(0) % (elems // 2) == 0)
    )
    if not aligned:
        width = min(32, -(-head_dim // 2))
    return 1 << (width - 1).bit_length(), aligned


def _shared_bytes(given: AppendGiven, width: int, block_tokens: int) -> int:
    """Of vectors: the weights, and the angles of each token's, as floats."""
    elems = common.VEC_BYTES // given.k.element_size()
    return 4 * 2 * (given.k.shape[-1] + block_tokens * width * elems)


def _flags(given: AppendGiven) -> tuple[int, ...]:
    """What others are variants for: the rotation, its tables, the weights, the caches."""
    cos = given.cos
    weight = given.k_norm_weight if given.q_norm_weight is None else given.q_norm_weight
    flags = (
        given.interleaved, cos is not None and cos.dtype == torch.float32,
        weight is not None and weight.dtype == torch.float32,
        given.k_cache.dtype == torch.float8_e4m3fn,
    )  # fmt: skip
    return tuple([int(bool(flag)) for flag in flags])


def _scaled_launch(given: AppendGiven, is_aligned: bool, heads: tuple[int, int, int]) -> Launch:
    """To int8, or with scales that are found: a head a group of `width` threads, whole warps."""
    k, strides, sizes = given.k, *_numbers(given)
    width, aligned = _parts_of(given, is_aligned, strides)
    num_heads, num_kv_heads, num_tokens = heads
    units, step = num_heads + 2 * num_kv_heads, 32 // width
    room = (_SCALED_THREADS if num_tokens > _SCALED_TOKENS else _MAX_THREADS) // width
    rounds = -(-units // room)
    block_heads = -(-units // rounds)
    block_heads += -block_heads % step
    block_tokens = 1
    if num_tokens > 512:
        block_tokens = max(1, 128 // (width * block_heads))
    scales = (given.k_scale_cache, given.v_scale_cache)
    token_strides = [s for x in scales for s in ((0, 0, 0) if x is None else x.stride())]
    numbers: tuple[Any, ...] = (*strides, *sizes, 0, rounds, *_flags(given), *token_strides)
    if given.k_scale_cache is None:  # what calls then leave out, as `_cuda_into` has its arguments
        numbers = (None, None, *numbers)
        if not given.is_normed:
            numbers = (None, None, *numbers, 0.0, 0.0)
    variant = "vec" if aligned else "scalar"
    name = f"append_kv_quantised_{common.DTYPE_TOKENS[k.dtype]}_{variant}"
    return Launch(
        common.shipped("append_kv_quantised", name), (-(-num_tokens // block_tokens), 1, 1),
        (width, block_heads, block_tokens),
        _shared_bytes(given, width, block_tokens) if aligned else 0, numbers,
        options=device_of(k.device).following,
    )  # fmt: skip


def _numbers(given: AppendGiven) -> tuple[list[int], tuple[int, ...]]:
    """The strides of what is read and written by heads; those of tables, and all sizes."""
    (k, v, k_cache, v_cache, _, block_table, slot_mapping, cu_seqlens, q, cos, _, positions,
     _, rotary_dim, _, _, out_q, out_k, *_) = given  # fmt: skip
    batch_size, seqlen = batch_and_seqlen(k.shape[:-2], cu_seqlens)
    page_size, is_paged = k_cache.shape[1], not block_table is slot_mapping is None
    sizes = (
        0 if cos is None else cos.stride(0),
        0 if block_table is None else block_table.stride(0),
        *(k.shape[:-2].numel(), seqlen, batch_size),
        *(0 if q is None else q.shape[-2], *k.shape[-2:], rotary_dim),
        0 if cos is None else cos.shape[0],
        # NOTE: a cache of no rows has no pages either; the kernel divides by page_size, but where
        # sequences have rows of their own: there it is how many.
        *(k_cache.shape[0] if page_size else 0, max(int(is_paged), page_size)),
        # NOTE: a table of no columns has no address either; -1 says that there is none.
        -1 if block_table is None else block_table.shape[1] if page_size else 0,
        0 if positions is None else positions.element_size(),
        0 if slot_mapping is None else slot_mapping.element_size(),
    )
    strides = [s for t in (out_q, out_k, k_cache, v_cache, q, k, v) for s in _strides(t)]
    return strides, sizes
