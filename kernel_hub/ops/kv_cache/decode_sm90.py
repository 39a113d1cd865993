"""Decode steps of many rows on Hopper: when attention's kernels take them.

Knows the `DecodeGiven` of a step and the `Problem` of attention; how such a launch is planned and
run is `attention/forward_sm90.py`.
"""

from __future__ import annotations

import torch

from ..attention import forward_sm90 as sm90
from ..attention import forward_split_sm90 as split
from ..attention import split_costs as costs
from ..attention.problem import Problem, mean_of
from ..core.device import device_of
from ..core.launch import Launch
from .decode_plan import DecodeGiven, Variant

# Whether these kernels are used: None where they are faster, True wherever they can. For tests.
choice: bool | None = None

# What the cost model knows of an H200 (docs/notes/decode_attention.md): a launch and its merge, and
# what a decode kernel reads of whose blocks of rows each reads the cache, or one alone. Of what
# memory gives, what one block of 32 rows reads, or of rows askew, where there are so many bytes.
_START_US, _WINDOW_START_US, _BYTES_A_US, _ONE_BYTES_A_US = 12.0, 8.0, 3.0e6, 4.0e6
_ROWS32_START_US, _ROWS32, _ASKEW, _ASKEW_BYTES = 9.0, 0.65, 0.77, 600e6
# Above so many columns whole tiles of several tokens may be faster than one block of rows of the
# decode kernel, by so much: where lengths are known to differ.
_NARROW, _WHOLE_MARGIN = 128, 1.15
# A block of more rows than 16 has few bytes under way.
_FEW_ROWS = 16


def problem_of(given: DecodeGiven) -> Problem:
    """The step as a problem of attention: causal, the lengths on the device."""
    page_size, table = given.k_cache.shape[1], given.block_table
    max_tokens = page_size if table is None else page_size * table.shape[1]
    batch_size, seqlen_q = given.q.shape[:2]
    return Problem(
        given.q, given.k_cache, given.v_cache, batch_size, seqlen_q, max_tokens,
        given.softmax_scale, given.window_left, 0, given.softcap, given.alibi_slopes,
        cache_seqlens=given.cache_seqlens, block_table=table, sinks=given.sinks,
    )  # fmt: skip


def applies(given: DecodeGiven, variant: Variant) -> bool:
    """Whether the step is theirs: of what it does besides attention they know nothing.

    variant: the decode kernel that would take it.
    """
    q, k_cache = given.q, given.k_cache
    rows = q.shape[1] * (q.shape[2] // k_cache.shape[2])
    # One block of rows reads the cache once, as they do; of many, slower where caches are large.
    is_one = rows <= variant.rows
    is_slow = rows > _FEW_ROWS and variant.head_dim == _NARROW
    is_theirs = q.shape[1] > 1 and q.shape[-1] > _NARROW
    # Rows that begin within what memory reads at once, 64 bytes: blocks of one head read more.
    is_askew = 64 < q.shape[-1] <= _NARROW and 2 * q.shape[-1] % 64 != 0
    is_alone = is_one and not is_slow and not is_theirs and not is_askew
    if choice is False or (choice is None and is_alone):
        return False
    extras = (given.k, given.cos, given.qkv_bias, given.tree_mask)
    if any(x is not None for x in extras) or given.num_splits:
        return False
    if k_cache.dtype != q.dtype or q.dtype == torch.float32:
        return False
    problem = problem_of(given)
    if not (sm90.is_enabled and device_of(q.device).has_wgmma):
        return False
    if not (sm90.applies(problem, given.out) and split.can_take(problem)):
        return False
    if choice:
        return True
    *others, sizes = every = costs.sizes_of(problem)
    if is_askew and rows <= _FEW_ROWS:
        if min(costs.key_bytes(each) for each in every) < _ASKEW_BYTES:
            return False
        way = split.best_way(problem)
        return not way.is_cut and way.us < decode_us(problem, variant.rows)
    if rows > variant.rows or is_slow:
        return split.best_way(problem).us < decode_us(problem, variant.rows)
    if others or not sizes.is_ragged:
        return False
    ours_us = _START_US + costs.key_bytes(sizes) / _ONE_BYTES_A_US
    return _WHOLE_MARGIN * sm90.whole_us(problem)[0] < ours_us


def decode_us(problem: Problem, block_rows: int) -> float:
    """About how long the decode kernel takes: a block reads the cache for `block_rows` rows."""
    rows = problem.max_seqlen_q * (problem.q.shape[-2] // problem.k.shape[-2])
    every = costs.sizes_of(problem)
    if rows <= block_rows:
        start_us, part = (_START_US, _ASKEW) if rows <= _FEW_ROWS else (_ROWS32_START_US, _ROWS32)
        return mean_of(start_us + costs.key_bytes(x) / (part * x.bytes_a_us) for x in every)
    start_us = _START_US if problem.window[0] < 0 else _WINDOW_START_US
    reads = -(-rows // block_rows)
    return mean_of(start_us + reads * costs.key_bytes(x) / _BYTES_A_US for x in every)


def plan(given: DecodeGiven) -> Launch:
    """The launch, where `applies`, with lse or without."""
    batch_size, seqlen_q, num_heads, _ = given.q.shape
    lse = torch.empty(batch_size, num_heads, seqlen_q, device="meta")
    problem = problem_of(given)
    is_narrow = given.q.shape[-1] <= _NARROW
    return (split if is_narrow else sm90).plan(problem, given.out, lse)


def maps(planned: Launch, given: DecodeGiven) -> tuple[bytes, ...]:
    """What depends on addresses: the descriptors of q and the caches."""
    return sm90.maps(planned, given.q, given.k_cache, given.v_cache)
