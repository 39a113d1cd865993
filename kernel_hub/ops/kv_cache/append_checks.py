"""What append_kv refuses, and where each token goes as torch works it out.

`check` reads shapes only; `check_routing` reads tables on the device and waits for it.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import TensorError
from ..core import common
from ..core.kv_cache import batch_and_seqlen, places
from ..core.rotary import check_rotation

_OP = "append_kv"
_INDICES = (torch.int32, torch.int64)


def check(
    k: Any, v: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, block_table: Any,
    slot_mapping: Any, cu_seqlens: Any, q: Any, cos: Any, sin: Any, positions: Any,
    interleaved: Any, rotary_dim: Any, k_scale: Any, v_scale: Any, out_q: Any, out_k: Any,
) -> None:  # fmt: skip
    """Raise TensorError for whatever does not fit."""
    common.check_data(_OP, "k", k)
    if k.dim() not in (3, 4):
        expected = (
            "shape (batch, seqlen, num_kv_heads, head_dim) or (total, num_kv_heads, head_dim)"
        )
        raise common.refuse(_OP, "k", expected, k)
    common.check_like(_OP, "v", v, k.shape, k)
    num_tokens = k.shape[:-2].numel()
    if num_tokens > common.MAX_SIZE:
        raise common.refuse(_OP, "k", f"at most {common.MAX_SIZE} tokens", k)
    _check_lengths(k, cache_seqlens, cu_seqlens, slot_mapping, block_table)
    batch_size, _ = batch_and_seqlen(k, cu_seqlens)
    _check_caches(k, k_cache, v_cache, k_scale, v_scale)
    if slot_mapping is not None:
        if block_table is not None:
            raise TensorError(f"{_OP}: block_table: expected None where slot_mapping is given")
        _check_tokens("slot_mapping", slot_mapping, k)
        if k_cache.shape[0] * k_cache.shape[1] >= 2**31:
            raise common.refuse(_OP, "k_cache", "fewer than 2**31 slots with slot_mapping", k_cache)
    elif block_table is not None:
        common.check_tensor(_OP, "block_table", block_table)
        if block_table.dim() != 2:
            raise common.refuse(_OP, "block_table", "shape (batch, max_pages)", block_table)
        shape = (batch_size, block_table.shape[1])
        common.check_like(_OP, "block_table", block_table, shape, k, dtypes=(torch.int32,))
        if k_cache.shape[1] * block_table.shape[1] >= 2**31:
            raise common.refuse(_OP, "block_table", "fewer than 2**31 tokens a row", block_table)
    elif k_cache.shape[0] != batch_size:
        expected = f"one row of pages for each of {batch_size} sequences (or a block_table)"
        raise common.refuse(_OP, "k_cache", expected, k_cache)
    if q is not None:
        common.check_tensor(_OP, "q", q)
        heads = q.shape[-2] if q.dim() > 1 else 0
        common.check_like(_OP, "q", q, (*k.shape[:-2], heads, k.shape[-1]), k)
    check_rotation(_OP, cos, sin, interleaved, rotary_dim, k.shape[-1], k, q=q, positions=positions)
    if positions is not None:
        _check_tokens("positions", positions, k)
    if positions is None and cos is not None and k.dim() == 3 and cu_seqlens is None:
        raise TensorError(
            f"{_OP}: positions: expected one for each of {num_tokens} tokens, as neither "
            "cu_seqlens nor a batch dimension of k says which sequence they are of, found None"
        )
    if out_q is not None and q is None:
        raise common.refuse(_OP, "out_q", "None where q is None", out_q)
    for argument, out, x in (("out_q", out_q, q), ("out_k", out_k, k)):
        if out is not None:
            common.check_like(_OP, argument, out, x.shape, x)
            common.check_output(_OP, argument, out)


def _check_lengths(
    k: Any, cache_seqlens: Any, cu_seqlens: Any, slot_mapping: Any, block_table: Any
) -> None:
    if cu_seqlens is not None:
        common.check_tensor(_OP, "cu_seqlens", cu_seqlens)
        if k.dim() != 3:
            expected = "shape (total, num_kv_heads, head_dim) where cu_seqlens is given"
            raise common.refuse(_OP, "k", expected, k)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
            raise common.refuse(_OP, "cu_seqlens", "shape (batch + 1,)", cu_seqlens)
        common.check_like(_OP, "cu_seqlens", cu_seqlens, cu_seqlens.shape, k, dtypes=(torch.int32,))
    elif k.dim() == 3 and slot_mapping is None:
        expected = "cu_seqlens or slot_mapping with it, or shape (batch, seqlen, heads, head_dim)"
        raise common.refuse(_OP, "k", expected, k)
    if cache_seqlens is not None:
        batch_size, _ = batch_and_seqlen(k, cu_seqlens)
        if k.dim() == 3 and cu_seqlens is None:
            expected = "None, as nothing says which sequence a token is of (give cu_seqlens)"
            raise common.refuse(_OP, "cache_seqlens", expected, cache_seqlens)
        common.check_like(
            _OP, "cache_seqlens", cache_seqlens, (batch_size,), k, dtypes=(torch.int32,)
        )


def _check_caches(k: Any, k_cache: Any, v_cache: Any, k_scale: Any, v_scale: Any) -> None:
    common.check_tensor(_OP, "k_cache", k_cache)
    if k_cache.dim() != 4:
        expected = f"shape (pages or batch, page_size or max_seqlen, {k.shape[-2]}, {k.shape[-1]})"
        raise common.refuse(_OP, "k_cache", expected, k_cache)
    shape = (*k_cache.shape[:2], *k.shape[-2:])
    dtypes = (k.dtype, torch.float8_e4m3fn)
    common.check_like(_OP, "k_cache", k_cache, shape, k, dtypes=dtypes)
    common.check_like(_OP, "v_cache", v_cache, k_cache.shape, k, dtypes=(k_cache.dtype,))
    for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        common.check_output(_OP, argument, cache)
        if max(cache.shape[:2]) > common.MAX_SIZE:
            raise common.refuse(_OP, argument, f"at most {common.MAX_SIZE} pages and rows", cache)
    for argument, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            common.check_like(_OP, argument, scale, (k.shape[-2],), k, dtypes=(torch.float32,))
            if k_cache.dtype != torch.float8_e4m3fn:
                expected = f"None with caches of {str(k_cache.dtype).removeprefix('torch.')}"
                raise common.refuse(_OP, argument, expected, scale)


def _check_tokens(argument: str, indices: Any, k: Any) -> None:
    """One index for each token: the leading dimensions of k, or all of them as one."""
    common.check_tensor(_OP, argument, indices)
    shape = (k.shape[:-2].numel(),) if indices.dim() == 1 else k.shape[:-2]
    common.check_like(_OP, argument, indices, shape, k, dtypes=_INDICES)
    if not indices.is_contiguous():
        raise common.refuse(_OP, argument, "a contiguous tensor", indices)


def check_routing(
    k: Any, v: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, block_table: Any,
    slot_mapping: Any, cu_seqlens: Any, q: Any, cos: Any, sin: Any, positions: Any, *rest: Any,
) -> None:  # fmt: skip
    """Raise TensorError where a table points outside the cache (-1 in slot_mapping is meant)."""
    num_tokens = k.shape[:-2].numel()
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        if starts[0] != 0 or starts != sorted(starts) or starts[-1] > num_tokens:
            expected = f"0 first, none less than the one before, at most {num_tokens}"
            raise common.refuse(_OP, "cu_seqlens", expected, _shown(starts))
    found = places(k, k_cache, cache_seqlens, block_table, slot_mapping, cu_seqlens, positions)
    num_pages, page_size = k_cache.shape[:2]
    lost = found.inside & ~found.stored
    if slot_mapping is not None:
        lost &= slot_mapping.flatten() != -1
    if bool(lost.any()):
        token = int(lost.nonzero()[0])
        sequence, index = int(found.batch[token]), int(found.index[token])
        if slot_mapping is not None:
            slot = int(slot_mapping.flatten()[token])
            expected = f"slots 0 to {num_pages * page_size - 1}, or -1"
            raise common.refuse(_OP, "slot_mapping", expected, f"{slot} for token {token}")
        room = page_size if block_table is None else page_size * block_table.shape[1]
        if block_table is not None and 0 <= index < room:
            place = (sequence, index // page_size)
            expected = f"pages 0 to {num_pages - 1}"
            page = int(block_table[place])
            raise common.refuse(_OP, "block_table", expected, f"{page} at {list(place)}")
        expected = f"room for token {index} of sequence {sequence}"
        raise common.refuse(_OP, "cache_seqlens", expected, f"a cache of {room} tokens a sequence")
    if cos is not None:
        unknown = found.inside & ((found.position < 0) | (found.position >= cos.shape[0]))
        if bool(unknown.any()):
            token = int(unknown.nonzero()[0])
            argument = "cos" if positions is None else "positions"
            expected = f"positions 0 to {cos.shape[0] - 1}, the rows of cos"
            position = f"{int(found.position[token])} for token {token}"
            raise common.refuse(_OP, argument, expected, position)


def _shown(values: list[int]) -> str:
    return str(values) if len(values) <= 16 else f"{str(values[:16])[:-1]}, …]"
