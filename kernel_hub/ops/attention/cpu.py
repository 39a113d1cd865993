"""Attention and its gradients on CPU tensors, in fp32 by torch: a sequence and a block of queries
at a time, so that no matrix of all scores is ever there. Takes what the CUDA launches take.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..core import common
from .problem import Problem

# Scores held at once, in elements.
_MAX_SCORES = 1 << 22


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Where one sequence lies: its rows of q (and out), its keys, and how to find its lse."""

    index: int
    queries: slice
    keys: slice
    seqlen_q: int
    seqlen_k: int
    is_live: bool = True  # not of a length below 0, a finished or padding row


def _sequences(problem: Problem) -> Iterator[_Sequence]:
    batch_size = problem.batch_size
    if problem.cu_seqlens_q is not None:
        queries = list(itertools.pairwise(problem.cu_seqlens_q.tolist()))
    else:
        queries = [(0, problem.q.shape[1])] * batch_size
    if problem.cu_seqlens_k is not None:
        keys = list(itertools.pairwise(problem.cu_seqlens_k.tolist()))
    elif problem.block_table is not None:
        keys = [(0, problem.block_table.shape[1] * problem.k.shape[1])] * batch_size
    else:
        keys = [(0, problem.k.shape[1])] * batch_size
    if problem.cache_seqlens is not None:
        lengths = problem.cache_seqlens.tolist()
        keys = [(start, start + length) for (start, _), length in zip(keys, lengths, strict=True)]
    is_live = [start <= end for start, end in keys]
    keys = [(start, max(start, end)) for start, end in keys]
    for index in range(batch_size):
        (q_start, q_end), (k_start, k_end) = queries[index], keys[index]
        yield _Sequence(
            index, slice(q_start, q_end), slice(k_start, k_end), q_end - q_start, k_end - k_start,
            is_live[index],
        )  # fmt: skip


def _rows_of(x: torch.Tensor, index: int, rows: slice, is_varlen: bool) -> torch.Tensor:
    return x[rows] if is_varlen else x[index, rows]


def _keys_of(problem: Problem, x: torch.Tensor, sequence: _Sequence) -> torch.Tensor:
    """(num_kv_heads, seqlen_k, head_dim) in fp32."""
    if problem.block_table is None:
        rows = _rows_of(x, sequence.index, sequence.keys, problem.cu_seqlens_k is not None)
    else:
        num_pages = -(-sequence.seqlen_k // x.shape[1])
        pages = problem.block_table[sequence.index, :num_pages].long()
        rows = x[pages].flatten(0, 1)[: sequence.seqlen_k]
    return rows.transpose(0, 1).float()


def _by_kv_head(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """(rows, num_heads, head_dim) -> (num_kv_heads, group, rows, head_dim) in fp32."""
    return x.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)


def _lse_of(problem: Problem, lse: torch.Tensor, sequence: _Sequence) -> torch.Tensor:
    """The view (num_heads, seqlen_q) of a sequence's lse."""
    if problem.cu_seqlens_q is not None:
        return lse[:, sequence.queries]
    return lse[sequence.index]


def _blocks(problem: Problem, sequence: _Sequence) -> Iterator[tuple[slice, slice]]:
    """(queries, the keys any of them sees), within the sequence."""
    heads, seqlen_q, seqlen_k = problem.q.shape[-2], sequence.seqlen_q, sequence.seqlen_k
    size = max(16, _MAX_SCORES // max(1, heads * seqlen_k))
    offset = seqlen_k - seqlen_q
    for start in range(0, seqlen_q, size):
        end = min(start + size, seqlen_q)
        low, high = 0, seqlen_k
        if problem.window_left >= 0:
            low = max(0, start + offset - problem.window_left)
        if problem.window_right >= 0:
            high = min(seqlen_k, end + offset + problem.window_right)
        yield slice(start, end), slice(low, max(low, high))


def _scores(
    problem: Problem, sequence: _Sequence, q: torch.Tensor, k: torch.Tensor, rows: slice,
    cols: slice,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(masked scores (num_kv_heads, group, rows, cols), tanh(scores / softcap) or None)."""
    scores = (q @ k[:, None, cols].transpose(-1, -2)).mul_(problem.softmax_scale)
    squashed = None
    if problem.softcap > 0:
        squashed = torch.tanh(scores / problem.softcap)
        scores = squashed * problem.softcap
    offset = sequence.seqlen_k - sequence.seqlen_q
    at = torch.arange(rows.start + offset, rows.stop + offset)[:, None]
    distance = torch.arange(cols.start, cols.stop) - at
    if problem.alibi_slopes is not None:
        slopes = problem.alibi_slopes
        slopes = slopes if slopes.dim() == 1 else slopes[sequence.index]
        scores = scores - slopes.view(k.shape[0], -1, 1, 1) * distance.abs()
    if problem.window_left >= 0:
        scores = scores.masked_fill(distance < -problem.window_left, -math.inf)
    if problem.window_right >= 0:
        scores = scores.masked_fill(distance > problem.window_right, -math.inf)
    return scores, squashed


@common.in_own_dtypes
def forward(problem: Problem, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Write out and lse; rows outside every sequence are left alone."""
    num_kv_heads = problem.k.shape[-2]
    is_varlen = problem.cu_seqlens_q is not None
    for sequence in _sequences(problem):
        k, v = _keys_of(problem, problem.k, sequence), _keys_of(problem, problem.v, sequence)
        queries = _rows_of(problem.q, sequence.index, sequence.queries, is_varlen)
        outs = _rows_of(out, sequence.index, sequence.queries, is_varlen)
        for rows, cols in _blocks(problem, sequence):
            q = _by_kv_head(queries[rows], num_kv_heads)
            scores, _ = _scores(problem, sequence, q, k, rows, cols)
            total = torch.logsumexp(scores, -1, keepdim=True)
            if problem.sinks is not None and sequence.is_live:
                sinks = problem.sinks.float().view(num_kv_heads, -1, 1, 1)
                total = torch.logaddexp(total, sinks)
            weights = torch.exp(scores - total.masked_fill(total == -math.inf, 0.0))
            found = weights @ v[:, None, cols]
            outs[rows] = found.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
            if lse is not None:
                _lse_of(problem, lse, sequence)[:, rows] = total.squeeze(-1).flatten(0, 1)


@common.in_own_dtypes
def backward(
    problem: Problem, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, dq: torch.Tensor,
    dk: torch.Tensor, dv: torch.Tensor, *, deterministic: bool, plans: object = None,
) -> None:  # fmt: skip
    """Write the gradients of every sequence's rows; always deterministic."""
    del deterministic, plans
    num_kv_heads = problem.k.shape[-2]
    is_varlen, k_is_varlen = problem.cu_seqlens_q is not None, problem.cu_seqlens_k is not None
    for sequence in _sequences(problem):
        index = sequence.index
        k, v = _keys_of(problem, problem.k, sequence), _keys_of(problem, problem.v, sequence)
        k_sum, v_sum = torch.zeros_like(k), torch.zeros_like(v)
        queries, outs, douts, dqs = (
            _rows_of(x, index, sequence.queries, is_varlen) for x in (problem.q, out, dout, dq)
        )
        lses = _lse_of(problem, lse, sequence).unflatten(0, (num_kv_heads, -1))[..., None]
        for rows, cols in _blocks(problem, sequence):
            q, o, do = (_by_kv_head(x[rows], num_kv_heads) for x in (queries, outs, douts))
            scores, squashed = _scores(problem, sequence, q, k, rows, cols)
            total = lses[:, :, rows]
            weights = torch.exp(scores - total.masked_fill(total == -math.inf, 0.0))
            v_sum[:, cols] += (weights.transpose(-1, -2) @ do).sum(1)
            delta = (o * do).sum(-1, keepdim=True)
            dscores = weights * (do @ v[:, None, cols].transpose(-1, -2) - delta)
            if squashed is not None:
                dscores = dscores * (1 - squashed * squashed)
            dscores = dscores * problem.softmax_scale
            k_sum[:, cols] += (dscores.transpose(-1, -2) @ q).sum(1)
            found = dscores @ k[:, None, cols]
            dqs[rows] = found.permute(2, 0, 1, 3).flatten(1, 2).to(dq.dtype)
        for grad, found in ((dk, k_sum), (dv, v_sum)):
            rows_of_grad = _rows_of(grad, index, sequence.keys, k_is_varlen)
            rows_of_grad.copy_(found.transpose(0, 1))
