"""Decode steps whose bits depend on no batch: as launches of attention, which keeps one order."""

from __future__ import annotations

from typing import Any

from ...errors import TensorError
from ..attention.flash_attention import flash_attention
from ..core import common
from . import decode_checks as checks
from .decode_plan import MAX_SEQLEN_Q, DecodeGiven

_OP = "decode_attention"
_NOT_TAKEN = ("k", "v", "cos", "sin", "qkv_bias", "k_scale", "v_scale")


def decode_alone(given: DecodeGiven, right: int, return_lse: bool) -> Any:
    """out, or (out, lse). right: of the window."""
    q = given.q
    for argument in _NOT_TAKEN:
        value = getattr(given, argument)
        if value is not None:
            raise common.refuse(_OP, argument, "None where deterministic is 'batch'", value)
    if given.num_splits:
        expected = "0 where deterministic is 'batch'"
        raise common.refuse(_OP, "num_splits", expected, given.num_splits)
    try:
        if q.shape[1] > MAX_SEQLEN_Q or given.k_cache.dtype != q.dtype:
            checks.check(given, right)
            expected = f"the dtype of q, {q.dtype}, where deterministic is 'batch'"
            raise common.refuse(_OP, "k_cache", expected, given.k_cache)
        return flash_attention(
            q, given.k_cache, given.v_cache, causal=True, softmax_scale=given.softmax_scale,
            window_size=(given.window_left, 0 if given.window_left >= 0 else -1),
            softcap=given.softcap, alibi_slopes=given.alibi_slopes, block_table=given.block_table,
            cache_seqlens=given.cache_seqlens, sinks=given.sinks, out=given.out,
            return_lse=return_lse, deterministic="batch",
        )  # fmt: skip
    except (TensorError, AttributeError, IndexError):
        checks.check(given, right)  # names what this op calls so
        raise
