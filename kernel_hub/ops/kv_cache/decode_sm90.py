"""Decode steps of many rows on Hopper: when attention's kernels take them.

Knows the `DecodeGiven` of a step and the `Problem` of attention; how such a launch is planned and
run is `attention/forward_sm90.py`.
"""

from __future__ import annotations

import math

import torch

from ..attention import forward_sm90 as sm90
from ..attention import forward_split_sm90 as split
from ..attention import split_costs as costs
from ..attention.problem import Problem
from ..core.device import device_of
from ..core.launch import Launch
from .decode_plan import DecodeGiven, Variant

# Whether these kernels are used: None where they are faster, True wherever they can. For tests.
choice: bool | None = None

# What the cost model knows of an H200 (docs/notes/flash_attention_split_sm90.md): a launch and its
# merge, and what a decode kernel reads of whose blocks of rows each reads the cache, or one alone.
_START_US, _BYTES_A_US, _ONE_BYTES_A_US = 12.0, 3.0e6, 4.0e6
# Above so many columns whole tiles of several tokens may be faster than one block of rows of the
# decode kernel, by so much: where lengths are known to differ.
_NARROW, _WHOLE_MARGIN = 128, 1.15
# A block of more rows than 16 has few bytes under way, which large caches ask for.
_FEW_ROWS, _SLOW_BYTES = 16, 210e6


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
    if choice is False or (choice is None and is_one and not is_slow and not is_theirs):
        return False
    extras = (given.k, given.cos, given.qkv_bias)
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
    if rows > variant.rows:
        return split.best_way(problem).us < decode_us(problem, variant.rows)
    *others, sizes = every = costs.sizes_of(problem)
    if is_slow:
        return min(costs.key_bytes(each) for each in every) > _SLOW_BYTES
    if others or not sizes.is_ragged:
        return False
    ours_us = _START_US + costs.key_bytes(sizes) / _ONE_BYTES_A_US
    return _WHOLE_MARGIN * sm90.whole_us(problem)[0] < ours_us


def decode_us(problem: Problem, block_rows: int) -> float:
    """About how long the decode kernel takes: a block reads the cache for `block_rows` rows."""
    rows = problem.max_seqlen_q * (problem.q.shape[-2] // problem.k.shape[-2])
    every = costs.sizes_of(problem)
    reads_us = (-(-rows // block_rows) * costs.key_bytes(each) / _BYTES_A_US for each in every)
    return math.prod(_START_US + each for each in reads_us) ** (1 / len(every))


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
