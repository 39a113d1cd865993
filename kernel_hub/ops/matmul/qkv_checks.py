"""What qkv_linear refuses; reads shapes only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...errors import TensorError
from ..core import common
from ..core.rotary import check_rotation

OP = "qkv_linear"
_DTYPES = (torch.float16, torch.bfloat16)
_INDICES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of one call."""

    x: Any
    w_qkv: Any
    bias: Any
    cos: Any
    sin: Any
    positions: Any
    k_cache: Any
    v_cache: Any
    cache_seqlens: Any
    block_table: Any
    slot_mapping: Any
    cu_seqlens: Any
    out_q: Any
    out_k: Any  # None where there is a cache
    out_v: Any
    num_heads: int
    num_kv_heads: int
    interleaved: bool
    rotary_dim: int

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return int(self.w_qkv.shape[0] // self.total_heads)

    @property
    def total_heads(self) -> int:
        """Of queries, keys and values."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def batch_and_seqlen(self) -> tuple[int, int]:
        """Sequences, and tokens from one to the next of a dense x."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.shape[0] - 1, max(1, self.x.shape[0])
        if self.x.dim() == 3:
            return self.x.shape[0], max(1, self.x.shape[1])
        return 1, max(1, self.x.shape[0])


def check(given: Given) -> None:
    """Raise TensorError for whatever does not fit."""
    x, w = given.x, given.w_qkv
    check_heads(x, w, given.num_heads, given.num_kv_heads)
    if x.dtype not in _DTYPES:
        raise common.refuse(OP, "x", "dtype float16 or bfloat16", x)
    if x.dim() not in (2, 3):
        expected = "shape (batch, seqlen, hidden_size) or (total, hidden_size)"
        raise common.refuse(OP, "x", expected, x)
    k = x.shape[-1]
    if k % 8:
        raise common.refuse(OP, "x", "a hidden_size that is a multiple of 8", x)
    common.check_like(OP, "w_qkv", w, w.shape, x)
    if max(*w.shape) > common.MAX_SIZE or x.shape[:-1].numel() > common.MAX_SIZE:
        raise common.refuse(OP, "w_qkv", f"sizes of at most {common.MAX_SIZE}", w)
    if given.bias is not None:
        common.check_like(OP, "bias", given.bias, (w.shape[0],), x)
    _check_sequences(given)
    _check_targets(given)
    _check_rotation(given)
    for name in ("bias", "out_q", "out_k", "out_v", "k_cache", "v_cache"):
        _check_aligned(name, getattr(given, name))


def check_heads(x: Any, w: Any, num_heads: Any, num_kv_heads: Any) -> None:
    """w_qkv must hold whole heads of a multiple of 32."""
    common.check_data(OP, "x", x)
    common.check_data(OP, "w_qkv", w)
    k = x.shape[-1]
    for argument, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if not isinstance(value, int) or not 1 <= value <= common.MAX_SIZE:
            raise common.refuse(OP, argument, "a number of at least 1", f"{value!r:.60}")
    total = num_heads + 2 * num_kv_heads
    if w.dim() != 2 or w.shape[0] == 0 or w.shape[0] % (32 * total):
        expected = (
            f"shape ((num_heads + 2 * num_kv_heads) * head_dim, {k}): {total} heads of a head_dim "
            "that is a multiple of 32"
        )
        raise common.refuse(OP, "w_qkv", expected, w)
    if w.shape[1] != k:
        raise common.refuse(OP, "w_qkv", f"shape ({w.shape[0]}, {k})", w)


def _check_sequences(given: Given) -> None:
    x, cu_seqlens, cache_seqlens = given.x, given.cu_seqlens, given.cache_seqlens
    if cu_seqlens is not None:
        common.check_tensor(OP, "cu_seqlens", cu_seqlens)
        if x.dim() != 2:
            expected = "shape (total, hidden_size) where cu_seqlens is given"
            raise common.refuse(OP, "x", expected, x)
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
            raise common.refuse(OP, "cu_seqlens", "shape (batch + 1,)", cu_seqlens)
        common.check_like(OP, "cu_seqlens", cu_seqlens, cu_seqlens.shape, x, dtypes=(torch.int32,))
    if cache_seqlens is not None:
        if x.dim() == 2 and cu_seqlens is None:
            expected = "None, as nothing says which sequence a token is of (give cu_seqlens)"
            raise common.refuse(OP, "cache_seqlens", expected, cache_seqlens)
        batch = (given.batch_and_seqlen[0],)
        common.check_like(OP, "cache_seqlens", cache_seqlens, batch, x, dtypes=(torch.int32,))


def _check_targets(given: Given) -> None:
    x, k_cache = given.x, given.k_cache
    leading, head_dim = x.shape[:-1], given.head_dim
    shape = (*leading, given.num_kv_heads, head_dim)
    outs = [("out_q", given.out_q, (*leading, given.num_heads, head_dim))]
    if k_cache is None:
        for argument in ("v_cache", "block_table", "slot_mapping"):
            if getattr(given, argument) is not None:
                expected = "None where k_cache is None"
                raise common.refuse(OP, argument, expected, getattr(given, argument))
        outs += [("out_k", given.out_k, shape), ("out_v", given.out_v, shape)]
    else:
        for argument in ("out_k", "out_v"):
            if getattr(given, argument) is not None:
                expected = "None, as keys and values go into the cache"
                raise common.refuse(OP, argument, expected, getattr(given, argument))
        _check_caches(given)
    for argument, out, expected_shape in outs:
        common.check_like(OP, argument, out, expected_shape, x)
        common.check_output(OP, argument, out)


def _check_caches(given: Given) -> None:
    x, k_cache, block_table = given.x, given.k_cache, given.block_table
    common.check_tensor(OP, "k_cache", k_cache)
    last = (given.num_kv_heads, given.head_dim)
    if k_cache.dim() != 4:
        expected = f"shape (pages or batch, page_size or max_seqlen, {last[0]}, {last[1]})"
        raise common.refuse(OP, "k_cache", expected, k_cache)
    for argument, cache in (("k_cache", k_cache), ("v_cache", given.v_cache)):
        common.check_like(OP, argument, cache, (*k_cache.shape[:2], *last), x)
        common.check_output(OP, argument, cache)
        if max(cache.shape[:2]) > common.MAX_SIZE:
            raise common.refuse(OP, argument, f"at most {common.MAX_SIZE} pages and rows", cache)
    batch_size, _ = given.batch_and_seqlen
    if given.slot_mapping is not None:
        if block_table is not None:
            raise TensorError(f"{OP}: block_table: expected None where slot_mapping is given")
        _check_tokens("slot_mapping", given.slot_mapping, x)
        if k_cache.shape[0] * k_cache.shape[1] >= 2**31:
            raise common.refuse(OP, "k_cache", "fewer than 2**31 slots with slot_mapping", k_cache)
        return
    if x.dim() == 2 and given.cu_seqlens is None:
        expected = "cu_seqlens or slot_mapping with it, or shape (batch, seqlen, hidden_size)"
        raise common.refuse(OP, "x", expected, x)
    if block_table is not None:
        common.check_tensor(OP, "block_table", block_table)
        if block_table.dim() != 2:
            raise common.refuse(OP, "block_table", "shape (batch, max_pages)", block_table)
        shape = (batch_size, block_table.shape[1])
        common.check_like(OP, "block_table", block_table, shape, x, dtypes=(torch.int32,))
        if k_cache.shape[1] * block_table.shape[1] >= 2**31:
            raise common.refuse(OP, "block_table", "fewer than 2**31 tokens a row", block_table)
    elif k_cache.shape[0] != batch_size:
        expected = f"one row of pages for each of {batch_size} sequences (or a block_table)"
        raise common.refuse(OP, "k_cache", expected, k_cache)


def _check_rotation(given: Given) -> None:
    x, cos, sin, rotary_dim = given.x, given.cos, given.sin, given.rotary_dim
    check_rotation(
        OP, cos, sin, given.interleaved, rotary_dim, given.head_dim, x, step=16, least=1,
        positions=given.positions,
    )  # fmt: skip
    if cos is None:
        return
    for argument, table in (("cos", cos), ("sin", sin)):
        address = table.data_ptr() if common.is_plain(table) else 0
        if address % (2 * table.element_size()) or table.stride(0) % 2:
            expected = "rows that begin at an even element (copy it first)"
            raise common.refuse(OP, argument, expected, table)
        if table.shape[0] * table.stride(0) >= 2**31:
            raise common.refuse(OP, argument, "a table of fewer than 2**31 elements", table)
    if given.positions is not None:
        _check_tokens("positions", given.positions, x)
    elif x.dim() == 2 and given.cu_seqlens is None:
        raise TensorError(
            f"{OP}: positions: expected one for each of {x.shape[0]} tokens, as neither cu_seqlens "
            "nor a batch dimension of x says which sequence they are of, found None"
        )


def _check_tokens(argument: str, indices: Any, x: Any) -> None:
    """One index for each token: the leading dimensions of x, or all of them as one."""
    common.check_tensor(OP, argument, indices)
    shape = (x.shape[:-1].numel(),) if indices.dim() == 1 else x.shape[:-1]
    common.check_like(OP, argument, indices, shape, x, dtypes=_INDICES)
    if not indices.is_contiguous():
        raise common.refuse(OP, argument, "a contiguous tensor", indices)


def _check_aligned(argument: str, tensor: Any) -> None:
    """Heads must begin at multiples of 16 bytes, where an address says anything."""
    if tensor is None or tensor.numel() == 0:
        return
    steps = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    is_real = common.is_plain(tensor)
    if any(step % 8 for step in steps) or (is_real and tensor.data_ptr() % common.VEC_BYTES):
        expected = "heads that begin at multiples of 16 bytes (copy it first)"
        raise common.refuse(OP, argument, expected, tensor)
