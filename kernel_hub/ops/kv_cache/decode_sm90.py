"""Decode steps of many rows on Hopper: when attention's kernels take them.

Knows the `DecodeGiven` of a step and the `Problem` of attention; how such a launch is planned and
run is `attention/forward_sm90.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
_START_US, _WINDOW_START_US, _BYTES_A_US = 12.0, 8.0, 3.0e6
_ROWS32_START_US, _ROWS32, _ASKEW, _ASKEW_BYTES = 9.0, 0.65, 0.77, 600e6
# Of more columns than so many and several tokens: what more blocks of rows add, and the part of the
# bytes that another of these does; a launch and items by places, of up to so many columns and more.
_NARROW, _LESS_WIDE, _WIDE_ROWS_US, _WIDE_AGAIN = 128, 192, 3.7, 0.36
_WIDE_US, _WIDEST_US = (9.5, 5.0), (11.9, 2.5)
# By how much attention's tiles that are not cut must be better than the kernel of up to so many
# columns.
_LESS_WIDE_TILES = 1.15
# Of so many columns, several tokens and few rows: a launch, where the caches of several sequences
# may have more tokens than so many, and no more than others.
_LONG_TOKENS, _LONGEST_TOKENS, _LONG_START_US = 8192, 16_384, 14.0
# Of those in clusters, an H200's: tokens of a block's tiles; a launch; these tiles; twice as many
# blocks; a round more, and the part of a mean item's tiles it takes; a part of all tiles.
_CLUSTER_TOKENS, _CLUSTERS_US, _TILES_US, _TWICE_US = 64, 5.6, 0.92, 0.22
_ROUND_US, _ROUND, _WORK_US = 3.9, 0.37, 0.132
# A block of more rows than 16 has few bytes under way.
_FEW_ROWS = 16


def problem_of(given: DecodeGiven) -> Problem:
    """The step as a problem of attention: causal, the lengths on the device."""
    batch_size, seqlen_q = given.q.shape[:2]
    return Problem(
        given.q, given.k_cache, given.v_cache, batch_size, seqlen_q, given.max_tokens,
        given.softmax_scale, given.window_left, 0, given.softcap, given.alibi_slopes,
        cache_seqlens=given.cache_seqlens, block_table=given.block_table, sinks=given.sinks,
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
    is_theirs = is_wide_step(given)
    # Rows that begin within what memory reads at once, 64 bytes: blocks of one head read more.
    is_askew = 64 < q.shape[-1] <= _NARROW and 2 * q.shape[-1] % 64 != 0
    is_long = is_long_step(given)
    is_alone = is_one and not (is_slow or is_theirs or is_askew or is_long)
    if choice is False or (choice is None and is_alone):
        return False
    problem = problem_of(given)
    if not can_take(given, problem):
        return False
    if choice:
        return True
    if is_askew and rows <= _FEW_ROWS:
        if min(costs.key_bytes(each) for each in costs.sizes_of(problem)) < _ASKEW_BYTES:
            return False
        way = split.best_way(problem)
        return not way.is_cut and way.us < decode_us(problem, variant.rows)
    if is_theirs:
        return tiles_us(given) < wide_us(problem)
    ours_us = long_us(problem) if is_long else decode_us(problem, variant.rows)
    return split.best_way(problem).us < ours_us


def can_take(given: DecodeGiven, problem: Problem) -> bool:
    """Whether their kernels compute all that the step does."""
    q = given.q
    extras = (given.k, given.cos, given.qkv_bias, given.tree_mask)
    if any(x is not None for x in extras) or given.num_splits:
        return False
    if given.k_cache.dtype != q.dtype or q.dtype == torch.float32:
        return False
    if not (sm90.is_enabled and device_of(q.device).has_wgmma):
        return False
    return sm90.applies(problem, given.out) and split.can_take(problem)


def tiles_us(given: DecodeGiven) -> float:
    """About how long they take; infinite where they cannot."""
    problem = problem_of(given)
    if choice is False or not can_take(given, problem):
        return math.inf
    way = split.best_way(problem)
    is_less_wide = _NARROW < given.q.shape[-1] <= _LESS_WIDE
    return way.us * (_LESS_WIDE_TILES if is_less_wide and not way.is_cut else 1.0)


def is_wide_step(given: DecodeGiven) -> bool:
    """Whether it is of several tokens and many columns."""
    return given.q.shape[1] > 1 and given.q.shape[-1] > _NARROW


def is_long_step(given: DecodeGiven) -> bool:
    """Whether it is of several tokens and sequences, few rows of `_NARROW` columns, long caches."""
    q = given.q
    is_few = q.shape[1] * q.shape[2] <= _FEW_ROWS * given.k_cache.shape[2]
    is_step = min(q.shape[:2]) > 1 and q.shape[-1] == _NARROW
    return is_step and is_few and _LONG_TOKENS < given.max_tokens <= _LONGEST_TOKENS


def long_us(problem: Problem) -> float:
    """About how long the decode kernel takes of such steps."""
    every = costs.sizes_of(problem)
    return mean_of(_LONG_START_US + costs.key_bytes(x) / x.bytes_a_us for x in every)


def wide_us(problem: Problem) -> float:
    """About how long the decode kernel takes of such steps."""
    rows = problem.max_seqlen_q * (problem.q.shape[-2] // problem.k.shape[-2])
    reads, num_sms = -(-rows // _FEW_ROWS), device_of(problem.q.device).num_sms
    items = reads * problem.batch_size * problem.k.shape[-2]
    start_us, items_us = _WIDE_US if problem.q.shape[-1] <= _LESS_WIDE else _WIDEST_US
    start_us += (reads > 1) * _WIDE_ROWS_US + items_us * items / (2 * num_sms)
    times = 1 + _WIDE_AGAIN * (reads - 1)
    every = costs.sizes_of(problem)
    return mean_of(start_us + times * costs.key_bytes(x) / x.bytes_a_us for x in every)


def wide_blocks(
    every: Sequence[costs.Sizes], items: int, num_sms: int, places: Mapping[int, float]
) -> tuple[float, int]:  # fmt: skip
    """(about how long the short kernels take of such steps, of which a block has a multiprocessor;
    blocks of a cluster); places: of clusters, a multiprocessor."""
    ways = []
    for blocks, share in places.items():
        each_us, rounds = [], math.ceil(items / (num_sms * share))
        for each in every:
            tokens = _CLUSTER_TOKENS * blocks
            tiles = -(-each.seqlen_k // tokens)
            mean = min(tiles, each.mean / tokens + 0.5)
            one_us = _CLUSTERS_US + _TWICE_US * math.log2(blocks) + _TILES_US * tiles
            one_us += (_ROUND_US + _ROUND * _TILES_US * mean) * (rounds - 1)
            each_us.append(one_us + _WORK_US * 4 * items * each.mean / _CLUSTER_TOKENS / num_sms)
        ways.append((mean_of(each_us), blocks))
    return min(ways)


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
    return split.plan(problem_of(given), given.out, lse)


def maps(planned: Launch, given: DecodeGiven) -> tuple[bytes, ...]:
    """What depends on addresses: the descriptors of q and the caches."""
    return sm90.maps(planned, given.q, given.k_cache, given.v_cache)
