"""One attention problem in canonical form, as the forward and backward launches take it.

Layouts, packing and paging are views and tables here; nothing was copied to get them. Below it, how
rows of heads lie in memory: strides, and the tensor maps of Hopper's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..core import bounds, common, tensor_maps
from ..core.device import device_of
from ..core.tensor_maps import Boxes

TABLES = (
    "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "block_table", "cache_seqlens", "sinks"
)  # fmt: skip
# Masked scores are -inf times the scale, which fp32 must hold as a normal number.
SCALES = (1e-20, 1e20)
PANEL_BYTES = 128  # of a row of shared memory: the span of the swizzle
_MAX_STRIDE_BYTES = 1 << 40
_WIDEST = 1 << 29  # window: a sum with two lengths stays in 32 bits
# tanh(x) for |x| <= _SMALL_TANH: x, x^3, x^5, x^7 times these, relative error 6e-7.
_SMALL_TANH = 0.5
_TANH_TERMS = 0.99999946, -0.33326318, 0.13190297, -0.04440223
_TANH_SCALES = 1e-4, 1e4  # whose seventh power is a float
_LAST_TERMS = 1e-36, 1e36  # whose precision fp32 holds
_NO_SMALL_SCORES = (0.0,) * (1 + len(_TANH_TERMS))
# Memory is read at: an H200's, and by its peak.
_BYTES_A_US, _OF_PEAK = 4.2e6, 0.86
# Of lengths that only the device knows, all are as long as the longest, or all but that one are
# about this part of it: where caches differ, few are as long.
_RAGGED, _EVEN = 0.3, 0.9
# Steps of up to so many queries, and pages, come with lengths in any case; who adds them to a plain
# cache and more queries has some that are shorter than their room.
_MOST_DECODED = 16


class Options(NamedTuple):
    """What a call of `flash_attention` says besides q, k and v, as it came, in a schema's order."""

    causal: bool = False
    softmax_scale: float | None = None
    window_size: tuple[int, ...] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    block_table: Any = None
    cache_seqlens: Any = None
    sinks: Any = None
    batch_invariant: bool = False

    @property
    def tables(self) -> tuple[Any, ...]:
        """The tensors among them, in the order of TABLES."""
        return (
            self.alibi_slopes, self.cu_seqlens_q, self.cu_seqlens_k, self.block_table,
            self.cache_seqlens, self.sinks,
        )  # fmt: skip


class Problem(NamedTuple):
    """softmax(softcap(softmax_scale * q k^T) + alibi, masked) v, per sequence and head.

    q: (batch_size, seqlen_q, num_heads, head_dim), or with cu_seqlens_q (total_q, num_heads,
        head_dim); any strides, the last dimension contiguous, fp16 or bf16.
    k, v: (batch_size, seqlen_k, num_kv_heads, head_dim); with cu_seqlens_k (total_k, num_kv_heads,
        head_dim); with block_table (num_pages, page_size, num_kv_heads, head_dim). v, and out with
        it, may have a head_dim of its own.
    cu_seqlens_q, cu_seqlens_k: (batch_size + 1,) int32, where each sequence starts.
    cache_seqlens: (batch_size,) int32, how many keys each sequence has; None: all there are.
    block_table: (batch_size, max_pages) int32, last dimension contiguous.
    alibi_slopes: (num_heads,) or (batch_size, num_heads) fp32; adds -slope * |distance|.
    max_seqlen_q, max_seqlen_k: upper bounds of the lengths (the lengths themselves where fixed).
    window_left, window_right: query i of a sequence sees keys from i + seqlen_k - seqlen_q -
        window_left to i + seqlen_k - seqlen_q + window_right; -1: no bound. Causal: right is 0.
    softcap: 0: none; else scores become softcap * tanh(scores / softcap), before alibi.
    sinks: (num_heads,) of `common.ELEMENT_TYPES`; exp(sink) joins each row's sum of exponentials.
    batch_invariant: a row's bits depend on its own query and keys alone.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch_size: int
    max_seqlen_q: int
    max_seqlen_k: int
    softmax_scale: float
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    cache_seqlens: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    batch_invariant: bool = False

    @property
    def lengths(self) -> tuple[torch.Tensor | None, ...]:
        """The tables of lengths, places and pages."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.cache_seqlens, self.block_table

    @property
    def sink_type(self) -> int:
        """Of the sinks' elements, as kernels number them; 0 where there are none."""
        return 0 if self.sinks is None else common.ELEMENT_TYPES.index(self.sinks.dtype)

    @property
    def has_lengths(self) -> bool:
        """Whether sequences have lengths of their own, which the device knows."""
        tables = self.cu_seqlens_q, self.cu_seqlens_k, self.cache_seqlens
        return any(each is not None for each in tables)

    @property
    def numbers(self) -> tuple[int, int, int, float, int, int, float]:
        """What `checks.resolve` said of the call."""
        return (
            self.batch_size, self.max_seqlen_q, self.max_seqlen_k, self.softmax_scale,
            self.window_left, self.window_right, self.softcap,
        )  # fmt: skip

    @property
    def flag(self) -> torch.Tensor | None:
        """Where launches leave what tables led outside."""
        return bounds.flag("flash_attention", self.q)

    @property
    def seqlens(self) -> tuple[int, int]:
        """Queries and keys of the longest sequence, as far as the host knows."""
        seqlen_q = self.q.shape[1] if self.cu_seqlens_q is None else self.max_seqlen_q
        if self.block_table is not None:
            room = self.block_table.shape[1] * self.k.shape[1]
            has_lengths = self.cache_seqlens is not None
            return seqlen_q, room if has_lengths else min(room, self.max_seqlen_k)
        return seqlen_q, self.k.shape[1] if self.cu_seqlens_k is None else self.max_seqlen_k

    @property
    def window(self) -> tuple[int, int]:
        """(left, right). One wider than the sequence is no bound; so the sums stay in 32 bits."""
        if self.batch_invariant:  # which kernel it is must not depend on lengths
            return min(self.window_left, _WIDEST), min(self.window_right, _WIDEST)
        seqlen_q, seqlen_k = self.seqlens
        left = self.window_left if self.window_left < max(seqlen_k, 1) else -1
        right = self.window_right if self.window_right < max(seqlen_q, 1) else -1
        return left, right

    @property
    def exponents(self) -> tuple[float, float]:
        """What scores are multiplied by for powers of two: (scale, 0), or with a softcap what
        tanh's results and twice its arguments are."""
        log2e = math.log2(math.e)
        if not self.softcap:
            return self.softmax_scale * log2e, 0.0
        return self.softcap * log2e, 2 * log2e * self.softmax_scale / self.softcap

    @property
    def small_scores(self) -> tuple[float, ...]:
        """The largest |score| for which the exponent with a softcap is a polynomial of odd powers,
        and its terms; zeros where fp32 does not hold them, or without a softcap."""
        if self.batch_invariant:  # a warp takes the polynomial where it does for all of its rows
            return (-1.0, *_NO_SMALL_SCORES[1:])
        scale = self.softmax_scale / self.softcap if self.softcap else 0.0
        if not _TANH_SCALES[0] <= scale <= _TANH_SCALES[1]:
            return _NO_SMALL_SCORES
        factor = self.softcap * math.log2(math.e)
        powers = (factor * scale ** (2 * i + 1) for i in range(len(_TANH_TERMS)))
        terms = [term * power for term, power in zip(_TANH_TERMS, powers, strict=True)]
        if not _LAST_TERMS[0] <= abs(terms[-1]) <= _LAST_TERMS[1]:
            return _NO_SMALL_SCORES
        return _SMALL_TANH / scale, *terms

    @property
    def widest_head(self) -> int:
        """What a kernel that has one width must hold: head_dim, or v's own if that is more."""
        return max(self.q.shape[-1], self.v.shape[-1])

    @property
    def totals(self) -> tuple[int, int]:
        """The rows of q and k that cu_seqlens_q and cu_seqlens_k tell apart."""
        return self.q.shape[0], self.k.shape[0]


class Gradients(NamedTuple):
    """What a backward reads besides its problem, and dq, dk, dv, which it writes."""

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def strides_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(batch, row, head) of rows of heads; a ragged tensor has one batch."""
    return 0 if tensor.dim() == 3 else tensor.stride(0), tensor.stride(-3), tensor.stride(-2)


def lse_strides_of(lse: torch.Tensor | None) -> tuple[int, int]:
    """(batch, head); a ragged tensor has one batch."""
    if lse is None:
        return 0, 0
    return (0, lse.stride(0)) if lse.dim() == 2 else (lse.stride(0), lse.stride(1))


def is_mappable(tensor: torch.Tensor) -> bool:
    """Whether the TMA takes it: 16-byte aligned, something in it, no element twice."""
    element_bytes = tensor.element_size()
    elems = common.VEC_BYTES // element_bytes
    return (
        tensor.numel() > 0
        and tensor.stride(-1) == 1
        and tensor.shape[-1] % elems == 0
        and tensor.data_ptr() % common.VEC_BYTES == 0
        and all(
            size == 1 or (stride % elems == 0 and 0 < stride * element_bytes < _MAX_STRIDE_BYTES)
            for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        )
    )


def tensor_map(
    tensor: torch.Tensor, rows: int, promotion: str | None = None, panel_bytes: int = PANEL_BYTES
) -> bytes:
    """The tensor map of boxes of `rows` tokens of one head, so many bytes of it wide; promotion: of
    `Boxes`.

    Dimensions: (batch, heads, tokens, head_dim), batch 1 where the tensor has none.
    """
    layout = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    key = (*layout, rows, promotion, panel_bytes)
    return tensor_maps.known.get(key) or tensor_maps.make(
        key, tensor, _boxes(tensor, rows, panel_bytes)._replace(promotion=promotion)
    )


def packed_tensor_map(
    tensor: torch.Tensor, tokens: int, heads: int, panel_bytes: int = PANEL_BYTES
) -> bytes:
    """The tensor map of boxes of `tokens` tokens by `heads` heads, so many bytes of each wide.

    Dimensions: (batch, tokens, heads, head_dim), batch 1 where the tensor has none.
    """
    layout = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    key = (*layout, tokens, heads, panel_bytes)
    return tensor_maps.known.get(key) or tensor_maps.make(
        key, tensor, _packed_boxes(tensor, tokens, heads, panel_bytes)
    )


def _packed_boxes(tensor: torch.Tensor, tokens: int, heads: int, panel_bytes: int) -> Boxes:
    sizes, steps = _layout(tensor)
    panel = panel_bytes // tensor.element_size()
    return Boxes(sizes, (*steps, 1), (1, tokens, heads, panel), swizzle=f"{panel_bytes}B")


def _layout(tensor: torch.Tensor) -> tuple[tuple[int, ...], list[int]]:
    """(batch, tokens, heads, head_dim), and strides of all but the last."""
    sizes, steps = tuple(tensor.shape), tensor.stride()
    if tensor.dim() != 4:
        sizes, steps = (1, *sizes), (0, *steps)
    # A stride along a single element says nothing; the TMA wants a valid one.
    pairs = zip(sizes[:-1], steps[:-1], strict=True)
    return sizes, [step if size > 1 else sizes[-1] for size, step in pairs]


def _boxes(tensor: torch.Tensor, rows: int, panel_bytes: int) -> Boxes:
    sizes, steps = _layout(tensor)
    head_dim = sizes[-1]
    return Boxes(
        (sizes[0], sizes[2], sizes[1], head_dim), (steps[0], steps[2], steps[1], 1),
        (1, 1, rows, panel_bytes // tensor.element_size()), swizzle=f"{panel_bytes}B",
    )  # fmt: skip


class Sizes(NamedTuple):
    """A problem, as plans see it. mean: keys of a sequence; seqlen_k: of the longest. head_dim: the
    mean of q's and v's. has_lengths: tables say how long each is; is_varlen: of
    queries too, and seqlen_q is their mean. bytes_a_us: that the GPU reads."""

    batch_size: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    window_left: int
    window_right: int
    mean: float
    head_dim: float
    has_lengths: bool = False
    is_varlen: bool = False
    bytes_a_us: float = _BYTES_A_US
    has_softcap: bool = False

    @property
    def evenness(self) -> float:
        """The mean of lengths by the longest; of a window's keys each sequence has all."""
        return 1.0 if self.window_left >= 0 else self.mean / max(self.seqlen_k, 1)

    @property
    def is_ragged(self) -> bool:
        """Whether lengths differ much."""
        return self.evenness <= _EVEN

    @property
    def is_prompt(self) -> bool:
        """Whether most of its keys are its queries' own."""
        return self.mean < 2 * self.seqlen_q


def mean_of(estimates: Iterable[float]) -> float:
    """Of what may be, which differs by factors: an estimate for each of `sizes_of`."""
    every = tuple(estimates)
    return math.prod(every) ** (1 / len(every))


def sizes_of(problem: Problem) -> tuple[Sizes, ...]:
    """Sizes as the host knows them, of which each may be: sequences as long as the longest, or
    most of them shorter."""
    batch_size = problem.batch_size
    seqlen_q, seqlen_k = problem.seqlens
    seqlen_k = min(seqlen_k, problem.max_seqlen_k)
    total_q, total_k = problem.totals
    if problem.cu_seqlens_q is not None:
        seqlen_q = min(seqlen_q, -(-total_q // batch_size))
    num_heads, num_kv_heads = problem.q.shape[-2], problem.k.shape[-2]
    mean: float = seqlen_k
    is_known = batch_size == 1 or problem.cache_seqlens is None
    if problem.cu_seqlens_k is not None and problem.block_table is None:
        mean, is_known = min(seqlen_k, total_k / batch_size), True
    sizes = Sizes(
        batch_size, num_heads, num_kv_heads, seqlen_q, seqlen_k, *problem.window, mean,
        (problem.q.shape[-1] + problem.v.shape[-1]) / 2, problem.has_lengths,
        problem.cu_seqlens_q is not None and batch_size > 1,
        device_of(problem.q.device).peak_bytes_a_us * _OF_PEAK, problem.softcap != 0,
    )  # fmt: skip
    if is_known:
        return (sizes,)
    if problem.block_table is not None:
        # All pages that there are, if sequences share none.
        held = problem.k.shape[0] * problem.k.shape[1] / batch_size
        if held < _EVEN * mean:
            return (sizes._replace(mean=max(held, min(mean, seqlen_q))),)
    ragged = max(mean * (_RAGGED + (1 - _RAGGED) / batch_size), min(mean, seqlen_q))
    differing = sizes._replace(mean=ragged)
    if problem.block_table is None and problem.cu_seqlens_k is None and seqlen_q > _MOST_DECODED:
        return (differing,)
    return sizes, differing
