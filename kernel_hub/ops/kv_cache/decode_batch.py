"""Decode steps whose bits depend on no batch: as launches of attention, which keeps one order."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import TensorError
from ..attention.flash_attention import flash_attention
from ..core import common
from ..core.kv_cache import BYTES
from . import decode_checks as checks
from . import decode_ordered
from .decode_plan import MAX_SEQLEN_Q, DecodeGiven

_OP, _ATTENTION = "decode_attention", "flash_attention"
_NOT_TAKEN = (
    "k", "v", "cos", "sin", "qkv_bias", "k_scale", "v_scale", "k_scale_cache", "v_scale_cache",
    "tree_mask",
)  # fmt: skip


def decode_alone(given: DecodeGiven, right: int, return_lse: bool, is_eager: bool) -> Any:
    """out, or (out, lse). right: of the window."""
    q = given.q
    for argument in _NOT_TAKEN:
        value = getattr(given, argument)
        if value is not None:
            _refuse_bytes(given)
            raise common.refuse(_OP, argument, "None where deterministic is 'batch'", value)
    if given.num_splits:
        expected = "0 where deterministic is 'batch'"
        raise common.refuse(_OP, "num_splits", expected, given.num_splits)
    try:
        found = decode_ordered.run(given, right, return_lse) if is_eager else None
        if found is not None:
            return found
        if q.shape[1] > MAX_SEQLEN_Q or given.k_cache.dtype != q.dtype:
            _refuse_bytes(given)
            checks.check(given, right)  # names it
        group = _group(given)
        if group > 1:
            return _by_rows(given, group, return_lse)
        return _attend(
            given, q, given.out, (given.window_left, 0 if given.window_left >= 0 else -1), True,
            return_lse,
        )  # fmt: skip
    except (TensorError, AttributeError, IndexError) as error:
        checks.check(given, right)  # names what this op calls so
        theirs = f"{_ATTENTION}: deterministic: "
        if str(error).startswith(theirs):
            raise TensorError(f"{_OP}: deterministic: {str(error)[len(theirs) :]}") from None
        raise


def _attend(
    given: DecodeGiven, q: Any, out: Any, window: tuple[int, int], causal: bool, return_lse: bool
) -> Any:
    return flash_attention(
        q, given.k_cache, given.v_cache, causal=causal, softmax_scale=given.softmax_scale,
        window_size=window, softcap=given.softcap, alibi_slopes=given.alibi_slopes,
        block_table=given.block_table, cache_seqlens=given.cache_seqlens, sinks=given.sinks,
        out=out, return_lse=return_lse, deterministic="batch",
    )  # fmt: skip


def _refuse_bytes(given: DecodeGiven) -> None:
    """Name caches of e4m3 and int8, before what belongs to them."""
    k_cache = given.k_cache
    if isinstance(k_cache, torch.Tensor) and k_cache.dtype in BYTES:
        expected = "the dtype of q where deterministic is 'batch'"
        raise common.refuse(_OP, "k_cache", expected, k_cache)


def _group(given: DecodeGiven) -> int:
    """The heads that share a head of the cache, where they may be rows of one tile.

    One token's see the same keys, all of them. What a row makes of those does not depend on the
    rows beside it.
    """
    heads, kv_heads = given.q.shape[2], given.k_cache.shape[-2]
    if given.q.shape[1] > 1 or given.window_left >= 0 or given.sinks is not None:
        return 1
    return heads // kv_heads if kv_heads and heads % kv_heads == 0 else 1


def _by_rows(given: DecodeGiven, group: int, return_lse: bool) -> Any:
    """Each head of the cache is read once for its `group` heads, as so many queries.

    A window of group - 1 keys to the right lets the first of them see the last key, in the body
    that masks as the one of a prompt does.
    """
    out = given.q.new_empty(given.q.shape) if given.out is None else given.out
    q, rows = (x[:, 0].unflatten(1, (-1, group)).transpose(1, 2) for x in (given.q, out))
    found = _attend(given, q, rows, (-1, group - 1), False, return_lse)
    return (out, found[1].flatten(1)[..., None]) if return_lse else out
