"""Decode steps of one token with the bits of a prompt's row, a cluster an item
(csrc/kv_cache/decode_ordered_sm90.cu): when, and how they are launched.

What they compute attention's whole tiles compute too, bit for bit: which of both it is may depend
on anything.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import torch

from ...errors import KernelHubError
from ..attention.forward_sm90 import MAX_TOKENS
from ..attention.problem import SCALES
from ..core import bounds, common
from ..core.device import device_of, launch_facts
from ..core.launch import Launch, Plans
from . import decode_checks as checks
from .decode_plan import DecodeGiven
from .decode_short import is_fast_memory

# Whether these kernels are used: None where they are faster, True wherever they can. For tests.
choice: bool | None = None

CUBIN = "decode_ordered_sm90"
HEAD_DIM, PAGE_MULTIPLE, _VECTOR = 128, 16, 8
# Clusters that find a place at once are a fifth of the multiprocessors (132: 26 to 31 of four
# blocks), of eight a ninth (15). From so many tokens on twice as many items are still faster than
# whole tiles, and clusters of eight faster than of four.
_AT_ONCE, _AT_ONCE_WIDE, _LONG, _LONG_WIDE = 5, 9, 1024, 2048
# Where memory is an H200's: of multiprocessors, and in how many rounds from so many tokens on.
_FAST_AT_ONCE, _FAST_ROUNDS = 0.2125, ((4096, 3), (512, 2), (0, 1))
# Blocks of a cluster: None, as many as are faster. For tests.
cluster: int | None = None
_OP = "decode_attention"
_extras_of = attrgetter(
    "k", "v", "cos", "sin", "qkv_bias", "k_scale", "v_scale", "alibi_slopes", "sinks"
)  # fmt: skip
_writes = common.Writes(_OP, "q k_cache v_cache cache_seqlens block_table out", "out")
# A launch and how far its tensors reach; None: the step is for whole tiles.
_plans: Plans[Any] = Plans()


def applies(given: DecodeGiven) -> bool:
    """Whether the step, which was checked, is one that they take, on a GPU."""
    return bool(given.q.is_cuda) and fits(given)


def fits(given: DecodeGiven) -> bool:
    """`applies`, wherever the tensors are."""
    q, k_cache, v_cache, table, out = (
        given.q, given.k_cache, given.v_cache, given.block_table, given.out,
    )  # fmt: skip
    if q.dtype not in common.HALF or k_cache.dtype != q.dtype or q.shape[1] != 1 or not q.numel():
        return False
    if not _is_plain(given):
        return False
    least, most = SCALES
    sizes = (q.shape[0], k_cache.shape[2], q.shape[2] // k_cache.shape[2])
    return (
        q.shape[-1] == HEAD_DIM
        and max(sizes[:2]) < 1 << 16
        and sizes[2] <= 8
        and least <= given.softmax_scale <= most
        and device_of(q.device).has_wgmma
        and (table is None or k_cache.shape[1] % PAGE_MULTIPLE == 0)
        and given.max_tokens <= MAX_TOKENS
        and common.is_aligned(_VECTOR, *k_cache.stride()[:3], *v_cache.stride()[:3])
        and common.is_aligned(_VECTOR, q.stride(0), q.stride(2))
        and (out is None or common.is_aligned(_VECTOR, out.stride(0), out.stride(2)))
    )


def _is_plain(given: DecodeGiven) -> bool:
    """Whether there is attention to all tokens to be done and nothing else: plans do not ask."""
    return (
        given.window_left < 0 and not given.softcap and all(x is None for x in _extras_of(given))
    )  # fmt: skip


def is_faster(given: DecodeGiven) -> bool:
    """Whether they are faster than whole tiles, of a step that they take, as measured
    (docs/notes/batch_attention.md)."""
    items, room = given.q.shape[0] * given.k_cache.shape[2], given.max_tokens
    num_sms = device_of(given.q.device).num_sms
    if is_fast_memory(given):
        rounds = next(rounds for tokens, rounds in _FAST_ROUNDS if room >= tokens)
        return bool(items <= rounds * int(_FAST_AT_ONCE * num_sms))
    most = num_sms // _AT_ONCE
    return bool(items <= (2 * most if room >= _LONG else most))


def is_wide_faster(given: DecodeGiven) -> bool:
    """Whether clusters of eight are, which read more at once, and find fewer places."""
    most = device_of(given.q.device).num_sms // _AT_ONCE_WIDE
    return bool(
        given.q.shape[0] * given.k_cache.shape[2] <= most and given.max_tokens >= _LONG_WIDE
    )


def plan(given: DecodeGiven) -> Launch:
    """The launch, of a step that they take."""
    q, k_cache, v_cache, table, out = (
        given.q, given.k_cache, given.v_cache, given.block_table, given.out,
    )  # fmt: skip
    is_wide = cluster == 8 if cluster else is_wide_faster(given)
    name = f"{CUBIN}_{common.DTYPE_TOKENS[q.dtype]}_hdim{HEAD_DIM}{'_cluster8' * is_wide}"
    stated = launch_facts(CUBIN, name)
    numbers = (
        out.stride(0), out.stride(2), q.stride(0), q.stride(2), *k_cache.stride()[:3],
        *v_cache.stride()[:3], 0 if table is None else table.stride(0), q.shape[2],
        k_cache.shape[2], k_cache.shape[0], k_cache.shape[1], given.max_tokens,
        given.softmax_scale * math.log2(math.e),
    )  # fmt: skip
    return Launch(
        common.shipped(CUBIN, name), (stated.sizes["cluster_n"], k_cache.shape[2], q.shape[0]),
        stated.block, stated.shared_bytes, numbers, options={"programmatic": True},
    )  # fmt: skip


def run(given: DecodeGiven, right: int, return_lse: bool) -> Any:
    """out, or (out, lse); None where the step is for whole tiles. right: of the window."""
    if not _is_plain(given):
        return None
    q, k_cache, v_cache, lengths = given.q, given.k_cache, given.v_cache, given.cache_seqlens
    table, out = given.block_table, given.out
    low_bits = q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()
    low_bits = (low_bits if out is None else low_bits | out.data_ptr()) % common.VEC_BYTES
    tensors = (q, k_cache, v_cache, lengths, table, out)
    key = (
        choice, cluster, low_bits, given.softmax_scale, q.device,
        *[None if x is None else (x.dtype, x.shape, x.stride()) for x in tensors],
    )  # fmt: skip
    found = _plans.get(key, _plans)
    if found is _plans:
        found = _plans.keep(key, None if low_bits else _planned(given, right))
    if found is None:
        return None
    (function, grid, block, shared_bytes, numbers, _, options), spans = found
    if out is None:
        out = q.new_empty(q.shape)
    else:
        addresses = tuple([x.data_ptr() for x in tensors if x is not None])
        if addresses not in spans.apart:
            spans.check(addresses)
    lse = q.new_empty((*q.shape[:3:2], 1), dtype=torch.float32) if return_lse else None
    flag = bounds.flag(_OP, q)
    params = (out, lse, flag, q, k_cache, v_cache, lengths, table, *numbers)
    try:
        function(grid, block, shared_bytes, None, params, **options)
    except KernelHubError:
        checks.check(given, right)  # the launch checks devices and dtypes; this names them
        raise
    if common.is_debugging():
        bounds.report(q)
    if given.out is not None:
        common.written((out,))
    return (out, lse) if return_lse else out


def _planned(given: DecodeGiven, right: int) -> tuple[Launch, common.Spans] | None:
    """None where the step is for whole tiles."""
    checks.check(given, right)
    if choice is False or not applies(given) or not (choice or is_faster(given)):
        return None
    tensors = (given.q, *given[1:4], given.block_table, given.out)
    filled = (
        given if given.out is not None else given._replace(out=given.q.new_empty(given.q.shape))
    )
    return plan(filled), _writes.spans(*tensors)
