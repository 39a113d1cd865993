"""What append_kv refuses, and how heads are normed and where each token goes as torch works it out.

`check` reads shapes only; `check_routing` reads tables on the device and waits for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core import common
from ..core.kv_cache import BYTES, Places, Tokens, check_cache_scales, check_caches, places
from ..core.rotary import check_rotation

_OP = "append_kv"


class AppendGiven(NamedTuple):
    """The arguments of an append, in the order of its schema."""

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    cache_seqlens: Any
    block_table: Any
    slot_mapping: Any
    cu_seqlens: Any
    q: Any
    cos: Any
    sin: Any
    positions: Any
    interleaved: Any
    rotary_dim: Any
    k_scale: Any
    v_scale: Any
    out_q: Any
    out_k: Any
    q_norm_weight: Any = None
    k_norm_weight: Any = None
    eps: Any = 1e-6
    weight_offset: Any = 0.0
    k_scale_cache: Any = None
    v_scale_cache: Any = None

    @property
    def tensors(self) -> tuple[Any, ...]:
        """Those of them that are tensors."""
        return self[:12] + self[14:20] + self[22:]

    @property
    def is_normed(self) -> bool:
        """Whether heads of q or of k are."""
        return not (self.q_norm_weight is self.k_norm_weight is None)

    @property
    def is_scaled(self) -> bool:
        """Whether bytes other than of e4m3 with scales that are given."""
        return self.k_cache.dtype == torch.int8 or self.k_scale_cache is not None

    @property
    def places(self) -> Places:
        """Where each token goes."""
        return places(
            self.k.shape[:-2], self.k_cache, self.cache_seqlens, self.block_table,
            self.slot_mapping, self.cu_seqlens, self.positions,
        )  # fmt: skip


def check(given: AppendGiven, op: str = _OP) -> None:
    """Raise TensorError for whatever does not fit. op: another's append may only move queries."""
    (k, v, k_cache, v_cache, cache_seqlens, block_table, slot_mapping, cu_seqlens, q, cos, sin,
     positions, interleaved, rotary_dim, k_scale, v_scale, out_q, out_k, *_) = given  # fmt: skip
    common.check_data(_OP, "k", k)
    if k.dim() not in (3, 4):
        expected = (
            "shape (batch, seqlen, num_kv_heads, head_dim) or (total, num_kv_heads, head_dim)"
        )
        raise common.refuse(_OP, "k", expected, k)
    common.check_like(_OP, "v", v, k.shape, k)
    tokens = Tokens(_OP, "k", k, k.shape[:-2], "(total, num_kv_heads, head_dim)")
    if tokens.num_tokens > common.MAX_SIZE:
        raise common.refuse(_OP, "k", f"at most {common.MAX_SIZE} tokens", k)
    tokens.check_sequences(cu_seqlens, cache_seqlens)
    if k.dim() == 3 and cu_seqlens is None and slot_mapping is None:
        expected = "cu_seqlens or slot_mapping with it, or shape (batch, seqlen, heads, head_dim)"
        raise common.refuse(_OP, "k", expected, k)
    dtypes = (k.dtype, *BYTES) if k.dtype in common.HALF else (k.dtype, torch.float8_e4m3fn)
    check_caches(_OP, k_cache, v_cache, k.shape[-2:], k, dtypes)
    scales = k_scale, v_scale, k, given.k_scale_cache, given.v_scale_cache
    check_cache_scales(_OP, k_cache, *scales, is_written=True)
    tokens.check_places(k_cache, cu_seqlens, block_table, slot_mapping)
    if q is not None:
        common.check_tensor(_OP, "q", q)
        heads = q.shape[-2] if q.dim() > 1 else 0
        common.check_like(_OP, "q", q, (*k.shape[:-2], heads, k.shape[-1]), k)
    unused = {"positions": positions}
    if given.q_norm_weight is None and op == _OP:
        unused = {"q": q, **unused}
    check_rotation(_OP, cos, sin, interleaved, rotary_dim, k.shape[-1], k, **unused)
    check_norm(_OP, given, k.shape[-1], k)
    if q is None and given.q_norm_weight is not None:
        raise common.refuse(_OP, "q_norm_weight", "None where q is None", given.q_norm_weight)
    tokens.check_positions(cos, positions, cu_seqlens)
    if out_q is not None and q is None:
        raise common.refuse(_OP, "out_q", "None where q is None", out_q)
    if q is not None:
        common.check_written(_OP, "out_q", out_q, q.shape, q)
    common.check_written(_OP, "out_k", out_k, k.shape, k)


def check_whole(given: AppendGiven) -> None:
    """The registered op makes no tensor."""
    if given.out_q is None and given.q is not None:
        raise common.refuse(_OP, "out_q", "a tensor like q", "None")


def check_norm(op: str, given: Any, head_dim: int, like: torch.Tensor) -> None:
    """The weights of a norm of each head, where given, and its numbers."""
    for argument in ("q_norm_weight", "k_norm_weight"):
        weight = getattr(given, argument)
        if weight is not None:
            dtypes = (torch.float32, like.dtype)
            common.check_like(op, argument, weight, (head_dim,), like, dtypes=dtypes)
    norm_numbers(op, given.eps, given.weight_offset)
    q_weight, k_weight = given.q_norm_weight, given.k_norm_weight
    if q_weight is not None and k_weight is not None and q_weight.dtype != k_weight.dtype:
        expected = f"the dtype of q_norm_weight ({common.say(q_weight)})"
        raise common.refuse(op, "k_norm_weight", expected, k_weight)


def norm_numbers(op: str, eps: Any, weight_offset: Any) -> tuple[float, float]:
    """Both, as numbers that kernels take."""
    return (
        common.check_number(op, "eps", eps, least=0.0),
        common.check_number(op, "weight_offset", weight_offset),
    )


def normed(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float
) -> torch.Tensor:
    """The last dimension of x normed, in fp32; x itself where there is no weight."""
    if weight is None:
        return x
    x = x.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale * (weight.float() + weight_offset)


def check_routing(given: AppendGiven) -> None:
    """Raise TensorError where a table points outside the cache (-1 in slot_mapping is meant)."""
    k_cache, block_table, slot_mapping = given.k_cache, given.block_table, given.slot_mapping
    cu_seqlens, cos, positions = given.cu_seqlens, given.cos, given.positions
    num_tokens = given.k.shape[:-2].numel()
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        if starts[0] != 0 or starts != sorted(starts) or starts[-1] > num_tokens:
            expected = f"0 first, none less than the one before, at most {num_tokens}"
            raise common.refuse(_OP, "cu_seqlens", expected, _shown(starts))
    found = given.places
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
