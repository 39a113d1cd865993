"""Which kernel appends, its launch shape and its integer parameters."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core import common
from ..core.device import device_of
from ..core.kv_cache import batch_and_seqlen
from ..core.launch import Launch
from .append_checks import AppendGiven

_MAX_THREADS = 256  # of a block
_SCALED_THREADS, _SCALED_TOKENS = 96, 768  # the same of more tokens, into int8 or of found scales


def _choose(width: int, num_heads: int, num_kv_heads: int, tokens: int) -> tuple[int, int, int]:
    """(query threads, key-and-value threads, tokens) of a block, a head taking `width` of each.

    Measured on an H200 (docs/notes/append_kv.md).
    """
    pairs = -(-num_heads // 2) + num_kv_heads
    room = max(1, _MAX_THREADS // width)
    rounds = max(1 if tokens <= 512 else 2, -(-pairs // room))
    q_threads, kv_threads = -(-num_heads // (2 * rounds)), -(-num_kv_heads // rounds)
    if q_threads + kv_threads > room:
        q_threads, kv_threads = (room - 1, 1) if num_heads else (0, room)
    block_tokens = 1 if tokens <= 512 else 96 // (width * (q_threads + kv_threads))
    chosen = q_threads, kv_threads, min(max(1, block_tokens), 64)
    lanes = 32 * -(-width * (q_threads + kv_threads) * chosen[2] // 32)
    if tokens > 512 and rounds == 2 and 5 * pairs * width * chosen[2] < 4 * rounds * lanes:
        return _choose_whole(width, num_heads, num_kv_heads) or chosen
    return chosen


def _choose_whole(width: int, num_heads: int, num_kv_heads: int) -> tuple[int, int, int] | None:
    """Likewise, of at most five whole warps in which few threads have nothing; the most that do."""
    pairs, best = -(-num_heads // 2) + num_kv_heads, (0.8, 0, 0, 0)
    for rounds in (2, 3, 4):
        q_threads, kv_threads = -(-num_heads // (2 * rounds)), -(-num_kv_heads // rounds)
        threads = width * (q_threads + kv_threads)
        tokens = 32 // math.gcd(32, threads)
        found = (pairs / (rounds * (q_threads + kv_threads)), q_threads, kv_threads, tokens)
        if tokens * threads <= 160 and found[0] > best[0]:
            best = found
    return best[1:] if best[1] + best[2] else None


def _strides(tensor: Any) -> tuple[int, int, int]:
    """(outer, row, head) strides; (total, heads, head_dim) has no outer one."""
    if tensor is None:
        return 0, 0, 0
    outer = tensor.stride(0) if tensor.dim() == 4 else 0
    return outer, tensor.stride(-3), tensor.stride(-2)


def _choose_normed(
    width: int, num_heads: int, num_kv_heads: int, tokens: int
) -> tuple[int, int, int, int]:
    """The same and the rounds that they make, of whole warps."""
    q_threads, kv_threads, block_tokens = _choose(width, num_heads, num_kv_heads, tokens)
    token_threads = width * (q_threads + kv_threads)
    step = math.lcm(token_threads, 32) // token_threads
    if block_tokens >= step:
        block_tokens = block_tokens // step * step
    else:
        # More of them for keys and values, some without any.
        kv_threads += -token_threads % 32 // width
        block_tokens = max(1, min(block_tokens, 96 // (width * (q_threads + kv_threads))))
    rounds = max(
        -(-num_heads // (2 * q_threads)) if num_heads else 0,
        -(-num_kv_heads // kv_threads) if num_kv_heads else 0,
    )
    return q_threads, kv_threads, block_tokens, rounds


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
    if given.is_normed:
        return _normed_launch(given, is_aligned, heads)
    cos, interleaved, rotary_dim = given.cos, given.interleaved, given.rotary_dim
    strides, sizes = _numbers(given)
    elems = common.VEC_BYTES // k.element_size()
    layout = "plain" if cos is None else "interleaved" if interleaved else "half"
    unit = 2 * elems if layout == "half" else elems
    aligned = (
        is_aligned
        and head_dim % unit == rotary_dim % unit == 0
        and head_dim // unit <= _MAX_THREADS // 2
        and common.is_aligned(elems, *strides)
    )
    if cos is not None:
        pairs_at_once = elems // 2 if interleaved else elems
        table_elems = min(common.VEC_BYTES // cos.element_size(), pairs_at_once)
        aligned = aligned and cos.stride(0) % table_elems == 0
    if not aligned:
        launch = _normed_launch(given, False, heads)
        # No weights before them, no eps and offset behind: only a call that norms gives these.
        whole: tuple[Any, ...] = (None, None, *launch.numbers, 0.0, 0.0)
        return launch._replace(numbers=whole)
    width = head_dim // unit
    q_threads, kv_threads, block_tokens = _choose(width, *heads)
    table = "" if cos is None or cos.dtype == k.dtype else "_table32"
    cache = "" if given.k_cache.dtype == k.dtype else "_to_e4m3"
    function = common.shipped(
        "append_kv", f"append_kv_{common.DTYPE_TOKENS[k.dtype]}{table}_{layout}{cache}_vec"
    )
    grid = (-(-num_tokens // block_tokens), 1, 1)
    block = (width, q_threads + kv_threads, block_tokens)
    options = device_of(k.device).following
    return Launch(function, grid, block, 0, (*strides, *sizes, q_threads), options=options)


def _normed_launch(given: AppendGiven, is_aligned: bool, heads: tuple[int, int, int]) -> Launch:
    """Of the kernels that norm: what others are variants for are parameters here.

    Their scalar ones also append heads that are not normed and that no vectors fit.
    """
    k, strides, sizes = given.k, *_numbers(given)
    width, aligned = _parts_of(given, is_aligned, strides)
    q_threads, kv_threads, block_tokens, rounds = _choose_normed(width, *heads)
    variant = "vec" if aligned else "scalar"
    name = f"append_kv_normed_{common.DTYPE_TOKENS[k.dtype]}_{variant}"
    grid = (-(-heads[2] // block_tokens), 1, 1)
    block = (width, q_threads + kv_threads, block_tokens)
    numbers = (*strides, *sizes, q_threads, rounds, *_flags(given))
    function = common.shipped("append_kv_normed", name)
    options = device_of(k.device).following
    shared_bytes = _shared_bytes(given, width, block_tokens) if aligned else 0
    return Launch(function, grid, block, shared_bytes, numbers, options=options)


def _parts_of(given: AppendGiven, is_aligned: bool, strides: list[int]) -> tuple[int, bool]:
    """Threads of a head that is normed, and whether they take two vectors each of it."""
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
