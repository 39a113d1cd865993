"""About how long whole tiles of prompts take on Hopper, to choose among their sizes.

Fitted to what drawn cases took on an H100 (docs/notes/flash_attention_sm90.md).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..core.device import device_of
from .problem import Problem

_START_US = 3.5
_MOST_COUNTED, _LATE = 8, 0.4  # rounds that are counted; of one, that the last takes after more
_APART = 0.35  # the same where tiles differ in their keys, the longest first
_LOOKED_AT = 64  # tiles of a sequence
_NARROWEST, _ROWS = 64, 128
_RAGGED_ROUNDS = 2.4  # of tiles of sequences that differ, for larger ones to be better


class TileCost(NamedTuple):
    """Of so many tokens over blocks of keys: a block takes unit_us, its beginning and end
    begin_us."""

    tokens: int
    block_n: int
    unit_us: float
    begin_us: float


class Prompt(NamedTuple):
    """Heads of all sequences, of a length that is theirs or the mean; a window's bounds, -1: none;
    causal: right is 0."""

    heads: float
    seqlen_q: int
    seqlen_k: int
    left: int
    right: int
    is_ragged: bool = False


def prompt_of(problem: Problem, heads: int, left: int, right: int) -> Prompt | None:
    """As the host knows it; None where there is nothing of it."""
    tables = problem.cu_seqlens_q, problem.cu_seqlens_k
    seqlen_q, seqlen_k = (
        longest if table is None else min(longest, -(-total // max(1, problem.batch_size)))
        for table, longest, total in zip(tables, problem.seqlens, problem.totals, strict=True)
    )
    if min(seqlen_q, seqlen_k, problem.q.numel()) == 0:
        return None
    is_ragged = tables[0] is not None and problem.batch_size > 1
    return Prompt(problem.batch_size * heads, seqlen_q, seqlen_k, left, right, is_ragged)


def rounds_of(prompt: Prompt, tokens: int, num_sms: int) -> float:
    """Of tiles of so many tokens; sequences that differ end within one."""
    tiles = -(-prompt.seqlen_q // tokens) + 0.5 * (prompt.is_ragged and prompt.seqlen_q > tokens)
    return tiles * prompt.heads / num_sms


def prompt_us(prompt: Prompt, tile: TileCost, num_sms: int) -> float:
    """About how long it takes in such tiles."""
    seqlen_q, seqlen_k, tokens = prompt.seqlen_q, prompt.seqlen_k, tile.tokens
    firsts = range(0, seqlen_q, tokens * (seqlen_q // tokens // _LOOKED_AT | 1))
    seen, most = 0, 0
    for first in firsts:
        at = first + seqlen_k - seqlen_q  # the first query's own key
        end, begin = seqlen_k, 0
        if prompt.right >= 0:
            end = min(seqlen_k, at + min(tokens, seqlen_q - first) + prompt.right)
        if prompt.left >= 0:
            begin = max(0, at - prompt.left)
        blocks = max(0, -(-end // tile.block_n) - begin // tile.block_n)
        seen, most = seen + blocks, max(most, blocks)
    mean_us = tile.begin_us + seen / len(firsts) * tile.unit_us
    rounds = rounds_of(prompt, tokens, num_sms)
    if prompt.right == 0:
        longest = tile.begin_us + most * tile.unit_us
        return _START_US + (longest if rounds <= 1 else max(longest, (rounds + _APART) * mean_us))
    rounds = math.ceil(rounds) if rounds <= _MOST_COUNTED else rounds + _LATE
    return _START_US + rounds * mean_us


# Of 128 and of 192 rows, by the width of the larger and whether rows of heads are askew; how much
# faster the larger must be.
_TILES = {
    (96, False): (TileCost(_ROWS, 128, 1.33, 2.3), TileCost(192, 96, 1.38, 2.8), 0.97),
    (96, True): (TileCost(_ROWS, 128, 1.65, 2.3), TileCost(192, 96, 1.40, 2.8), 0.95),
    (112, False): (TileCost(_ROWS, 128, 1.70, 2.6), TileCost(192, 96, 1.50, 2.8), 1.0),
    (112, True): (TileCost(_ROWS, 128, 1.85, 2.6), TileCost(192, 96, 1.45, 2.8), 1.0),
}


def wider_rows(problem: Problem) -> int:
    """Columns of the kernel with tiles of 192 rows that is better for a problem without softcap
    that is not causal; 0: none. K and V are read less often, which counts where rows of heads
    begin between the L2's sectors."""
    head_dim, is_askew = problem.widest_head, problem.widest_head % 16 != 0
    prompt = prompt_of(problem, problem.q.shape[-2], *problem.window)
    width = next((width for width in (96, 112) if _NARROWEST < head_dim <= width), 0)
    if not width or prompt is None or problem.batch_invariant:
        return 0
    fewer, more, surely = _TILES[width, is_askew]
    num_sms = device_of(problem.q.device).num_sms
    if prompt.is_ragged and not (is_askew and rounds_of(prompt, _ROWS, num_sms) > _RAGGED_ROUNDS):
        return 0
    is_better = prompt_us(prompt, more, num_sms) < surely * prompt_us(prompt, fewer, num_sms)
    return width if is_better else 0
