"""What qkv_linear refuses; reads shapes only."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..core import common
from ..core.kv_cache import BYTES, Tokens, batch_and_seqlen, check_cache_scales, check_caches
from ..core.rotary import check_rotation
from ..kv_cache.append_checks import check_norm

OP = "qkv_linear"


class QkvGiven(NamedTuple):
    """The arguments of one call, in the order of the schema."""

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
    q_norm_weight: Any = None
    k_norm_weight: Any = None
    eps: Any = 1e-6
    weight_offset: Any = 0.0
    batch_invariant: bool = False
    weights_ready: bool = False
    cache_ready: bool = False
    k_scale: Any = None
    v_scale: Any = None
    k_scale_cache: Any = None
    v_scale_cache: Any = None

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Those of them that are tensors."""
        return self[:15] + self[19:21] + self[26:]

    @property
    def is_normed(self) -> bool:
        """Whether heads of q or of k are."""
        return not (self.q_norm_weight is self.k_norm_weight is None)

    @property
    def is_quantised(self) -> bool:
        """Whether the caches are of bytes."""
        return self.k_cache is not None and self.k_cache.dtype in BYTES

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
        return batch_and_seqlen(self.x.shape[:-1], self.cu_seqlens)


def check(given: QkvGiven) -> None:
    """Raise TensorError for whatever does not fit."""
    x, w = given.x, given.w_qkv
    check_heads(x, w, given.num_heads, given.num_kv_heads)
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
    tokens = Tokens(OP, "x", x, x.shape[:-1], "(total, hidden_size)")
    tokens.check_sequences(given.cu_seqlens, given.cache_seqlens)
    _check_targets(given, tokens)
    _check_rotation(given)
    _check_norm(given)
    tokens.check_positions(given.cos, given.positions, given.cu_seqlens)
    for name in ("bias", "out_q", "out_k", "out_v"):
        _check_aligned(name, getattr(given, name))
    if not given.is_quantised:  # append_kv writes those, to any strides
        _check_aligned("k_cache", given.k_cache)
        _check_aligned("v_cache", given.v_cache)


def check_heads(x: Any, w: Any, num_heads: Any, num_kv_heads: Any) -> None:
    """w_qkv must hold whole heads of a multiple of 32."""
    common.check_data(OP, "x", x, common.HALF)
    common.check_data(OP, "w_qkv", w)
    k = x.shape[-1]
    for argument, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        common.check_count(OP, argument, value, least=1)
    total = num_heads + 2 * num_kv_heads
    if w.dim() != 2 or w.shape[0] == 0 or w.shape[0] % (32 * total):
        expected = (
            f"shape ((num_heads + 2 * num_kv_heads) * head_dim, {k}): {total} heads of a head_dim "
            "that is a multiple of 32"
        )
        raise common.refuse(OP, "w_qkv", expected, w)
    if w.shape[1] != k:
        raise common.refuse(OP, "w_qkv", f"shape ({w.shape[0]}, {k})", w)


def _check_targets(given: QkvGiven, tokens: Tokens) -> None:
    x, k_cache = given.x, given.k_cache
    leading, head_dim = x.shape[:-1], given.head_dim
    shape = (*leading, given.num_kv_heads, head_dim)
    outs = [("out_q", given.out_q, (*leading, given.num_heads, head_dim))]
    if k_cache is None:
        for argument in (
            "v_cache", "block_table", "slot_mapping", "k_scale", "v_scale", "k_scale_cache",
            "v_scale_cache",
        ):  # fmt: skip
            if getattr(given, argument) is not None:
                expected = "None where k_cache is None"
                raise common.refuse(OP, argument, expected, getattr(given, argument))
        outs += [("out_k", given.out_k, shape), ("out_v", given.out_v, shape)]
    else:
        for argument in ("out_k", "out_v"):
            if getattr(given, argument) is not None:
                expected = "None, as keys and values go into the cache"
                raise common.refuse(OP, argument, expected, getattr(given, argument))
        heads = (given.num_kv_heads, head_dim)
        check_caches(OP, k_cache, given.v_cache, heads, x, (x.dtype, *BYTES))
        scales = given.k_scale, given.v_scale, x, given.k_scale_cache, given.v_scale_cache
        check_cache_scales(OP, k_cache, *scales, is_written=True)
        if x.dim() == 2 and given.cu_seqlens is None and given.slot_mapping is None:
            expected = "cu_seqlens or slot_mapping with it, or shape (batch, seqlen, hidden_size)"
            raise common.refuse(OP, "x", expected, x)
        tokens.check_places(k_cache, given.cu_seqlens, given.block_table, given.slot_mapping)
    for argument, out, expected_shape in outs:
        common.check_like(OP, argument, out, expected_shape, x)
        common.check_output(OP, argument, out)


def _check_rotation(given: QkvGiven) -> None:
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


def _check_norm(given: QkvGiven) -> None:
    check_norm(OP, given, given.head_dim, given.x)
    is_ragged = given.cu_seqlens is not None or given.cache_seqlens is not None
    if given.is_normed and given.k_cache is None and is_ragged:
        name = "k_norm_weight" if given.q_norm_weight is None else "q_norm_weight"
        expected = "None, or a cache where cu_seqlens or cache_seqlens is given"
        raise common.refuse(OP, name, expected, getattr(given, name))


def _check_aligned(argument: str, tensor: Any) -> None:
    """Heads must begin at multiples of 16 bytes, where an address says anything."""
    if tensor is None or tensor.numel() == 0:
        return
    steps = [s for s, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
    is_real = common.is_plain(tensor)
    if any(step % 8 for step in steps) or (is_real and tensor.data_ptr() % common.VEC_BYTES):
        expected = "heads that begin at multiples of 16 bytes (copy it first)"
        raise common.refuse(OP, argument, expected, tensor)
