"""Contenders of grouped_linear and batched_matmul."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kernel_hub.ops import batched_matmul, grouped_linear

from .contenders import DTYPES, Contender, Expected, Launch, Made, Peer, Source, Written, product
from .product_peers import CUBLAS, CUBLASLT, DEEPGEMM, GROUPED_MM, deep_gemm, through_lt
from .shapes import BIAS, FP32, WIDE, Lot

# Spread of the experts' popularity: the busiest of 128 gets about six times its share.
SPREAD = 0.7
_LOOPED, _CHECKED_EXPERTS = 16, 4
_MASKED_BYTES, _MASKED_ROWS = 1 << 28, 256
_MAX_COPIES = 8  # of weights that are smaller than the L2


class Routed(NamedTuple):
    """One routing; counts: rows of each expert."""

    a: torch.Tensor
    weights: torch.Tensor
    offsets: torch.Tensor
    out: torch.Tensor
    counts: list[int]


def counts_of(lot: Lot, seed: int) -> list[int]:
    """Rows of each expert when every token takes its likeliest ones."""
    models, tokens = (
        torch.Generator().manual_seed(random.Random(text).randrange(1 << 31))
        for text in (lot.name, f"{lot.name} {seed}")
    )
    popularity = SPREAD * torch.randn(lot.num_products, generator=models)
    chance = torch.rand(lot.m, lot.num_products, generator=tokens).clamp(1e-9, 1 - 1e-9)
    chosen = (popularity - (-chance.log()).log()).topk(lot.num_chosen, dim=1).indices
    counted: list[int] = torch.bincount(chosen.flatten(), minlength=lot.num_products).tolist()
    return counted


def make_grouped(lot: Lot, source: Source) -> Made:
    """Experts' products in one launch, by torch, by DeepGEMM on padded rows, or one by one."""
    return _Grouped(lot, source).made()


class _Grouped:
    """The weights of all experts, and tokens that chose them."""

    def __init__(self, lot: Lot, source: Source) -> None:
        self.lot, self.source, self.dtype = lot, source, DTYPES[lot.dtype]
        self.out_dtype = torch.float32 if FP32 in lot.options else self.dtype
        shape = (lot.num_products, lot.n)
        copies = min(_MAX_COPIES, source.num_sets(2 * lot.num_products * lot.n * lot.k))
        self.weights = [source.weight(*shape, lot.k, dtype=self.dtype) for _ in range(copies)]
        self.bias = source.normal(*shape, dtype=self.dtype) if BIAS in lot.options else None
        fewest, most = (4, 24) if lot.m <= 64 else (2, 8)
        num_sets = min(most, max(fewest, copies, source.num_sets(lot.num_bytes)))
        self.sets = [self._routed(seed) for seed in range(num_sets)]
        self.is_rotated = source.is_rotated(num_sets, lot.num_bytes)
        first = self.sets[0]
        self.starts = [0, *itertools.accumulate(first.counts)]
        busy = [expert for expert, count in enumerate(first.counts) if count]
        picked = random.Random(lot.name).sample(busy, min(_CHECKED_EXPERTS, len(busy)))
        # (expert, its sampled rows, counted from its first)
        self.sampled = [(x, source.some(first.counts[x], x)) for x in sorted(picked)]
        own = torch.float32 if self.out_dtype == torch.float32 else self.dtype
        self.expected = [
            Expected(self._truth(x, rows, torch.float64), self._truth(x, rows, own), k=lot.k)
            for x, rows in self.sampled
        ]

    def _routed(self, seed: int) -> Routed:
        counts = counts_of(self.lot, seed)
        total, device = sum(counts), self.source.device
        offsets = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        a = self.source.rows(total, self.lot.k, dtype=self.dtype, options=self.lot.options)
        out = self.source.empty(total, self.lot.n, dtype=self.out_dtype)
        weights = self.weights[seed % len(self.weights)]
        return Routed(a, weights, offsets.to(device), out, counts)

    def _truth(self, expert: int, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        a = self.sets[0].a[rows + self.starts[expert]]
        values = product(a, self.weights[0][expert], dtype)
        return values if self.bias is None else values + self.bias[expert].to(dtype)

    def made(self) -> Made:
        peers = {}
        tail = " + bias" * (self.bias is not None)
        if self.dtype == torch.bfloat16 and self.out_dtype == self.dtype:
            peers[f"{GROUPED_MM}{tail}"] = Peer((GROUPED_MM,), self._by_torch)
            peers[f"{DEEPGEMM} contiguous{tail}"] = Peer((DEEPGEMM,), self._by_deep_gemm)
            most = max(max(x.counts) for x in self.sets)
            num_bytes = 2 * self.lot.num_products * most * (self.lot.n + self.lot.k)
            if most <= _MASKED_ROWS and num_bytes * len(self.sets) <= _MASKED_BYTES:
                peers[f"{DEEPGEMM} masked{tail}"] = Peer((DEEPGEMM,), self._by_masks)
        if sum(map(bool, self.sets[0].counts)) <= _LOOPED or not peers:
            peers[f"{CUBLAS} loop"] = Peer((CUBLAS,), lambda: self._contender(self._loop))
        return Made(self._contender(self._ours), peers, self.is_rotated)

    def _contender(self, launch_of: Callable[[Routed], Launch]) -> Contender:
        out = self.sets[0].out

        def sample() -> Sequence[torch.Tensor]:
            return [out[rows + self.starts[expert]] for expert, rows in self.sampled]

        launches = [launch_of(x) for x in self.sets]
        return Contender(launches, Written([out], sample), self.expected)

    def _ours(self, given: Routed) -> Launch:
        return functools.partial(
            grouped_linear, given.a, given.weights, given.offsets, bias=self.bias, out=given.out
        )

    def _loop(self, given: Routed) -> Launch:
        """One product an expert: the host must know how many rows each has."""
        parts = []
        start = 0
        options = {} if self.out_dtype == self.dtype else {"out_dtype": self.out_dtype}
        for expert, count in enumerate(given.counts):
            rows = slice(start, start + count)
            if count:
                bias = None if self.bias is None else self.bias[expert]
                parts.append((given.a[rows], given.weights[expert].T, given.out[rows], bias))
            start += count

        def run() -> None:
            for a, b, out, bias in parts:
                if bias is None or options:
                    torch.mm(a, b, out=out, **options)
                    if bias is not None:
                        out.add_(bias)
                else:
                    torch.addmm(bias, a, b, out=out)

        return run

    def _bias_rows(self, given: Routed) -> torch.Tensor | None:
        """Of every row, gathered beforehand."""
        if self.bias is None:
            return None
        counts = torch.tensor(given.counts, device=self.source.device)
        return self.bias.repeat_interleave(counts, 0)

    def _by_torch(self) -> Contender:
        """It returns a new tensor; the last one of the first set is looked at."""
        kept: dict[str, torch.Tensor] = {}

        def launch_of(given: Routed) -> Launch:
            turned = given.weights.transpose(1, 2)
            offsets, bias = given.offsets[1:], self._bias_rows(given)

            def run() -> None:
                out = torch._grouped_mm(given.a, turned, offs=offsets)
                kept["out"] = out if bias is None else out.add_(bias)

            return run

        def sample() -> Sequence[torch.Tensor]:
            return [kept["out"][rows + self.starts[x]] for x, rows in self.sampled]

        launches = [launch_of(x) for x in self.sets]
        return Contender(launches, Written([], sample), self.expected)

    def _by_deep_gemm(self) -> Contender:
        """Rows of each expert padded to whole tiles; padding them is not timed."""
        library = deep_gemm()
        step = library.get_mk_alignment_for_contiguous_layout()
        made = []
        for given in self.sets:
            padded = [-(-count // step) * step for count in given.counts]
            experts = torch.full((sum(padded),), -1, dtype=torch.int32)
            a = torch.zeros(sum(padded), self.lot.k, device=self.source.device, dtype=self.dtype)
            starts = [0, *itertools.accumulate(padded)]
            first = 0
            for expert, count in enumerate(given.counts):
                to = slice(starts[expert], starts[expert] + count)
                experts[to] = expert
                a[to] = given.a[first : first + count]
                first += count
            out = self.source.empty(len(a), self.lot.n, dtype=self.out_dtype)
            bias = self.bias
            if bias is not None:
                bias = bias[experts.clamp(min=0).to(bias.device)]
            made.append((a, given.weights, out, experts.to(a.device), bias, starts))
        _, _, out, _, _, starts = made[0]

        def launch_of(*given: Any) -> Launch:
            *operands, bias = given

            def run() -> None:
                # Not compiled for each (n, k): a compilation takes seconds.
                library.m_grouped_bf16_gemm_nt_contiguous(*operands, compiled_dims="")
                if bias is not None:
                    operands[2].add_(bias)

            return run

        def sample() -> Sequence[torch.Tensor]:
            return [out[rows + starts[expert]] for expert, rows in self.sampled]

        launches = [launch_of(*x[:-1]) for x in made]
        return Contender(launches, Written([out], sample, is_whole=False), self.expected)

    def _by_masks(self) -> Contender:
        """A block of rows for each expert, as high as the highest; filling them is not timed."""
        library, lot = deep_gemm(), self.lot
        most = max(max(x.counts) for x in self.sets)
        expected_m = max(1, -(-lot.rows // lot.num_products))
        made = []
        for given in self.sets:
            shape = (lot.num_products, most)
            a = torch.zeros(*shape, lot.k, device=self.source.device, dtype=self.dtype)
            first = 0
            for expert, count in enumerate(given.counts):
                a[expert, :count] = given.a[first : first + count]
                first += count
            counts = torch.tensor(given.counts, device=self.source.device, dtype=torch.int32)
            out = self.source.empty(*shape, lot.n, dtype=self.out_dtype)
            made.append((a, given.weights, out, counts))
        out = made[0][2]
        bias = None if self.bias is None else self.bias[:, None]

        def launch_of(*operands: Any) -> Launch:
            def run() -> None:
                library.m_grouped_bf16_gemm_nt_masked(*operands, expected_m, compiled_dims="")
                if bias is not None:
                    operands[2].add_(bias)

            return run

        def sample() -> Sequence[torch.Tensor]:
            return [out[expert, rows] for expert, rows in self.sampled]

        launches = [launch_of(*x) for x in made]
        return Contender(launches, Written([out], sample, is_whole=False), self.expected)


def make_batched(lot: Lot, source: Source) -> Made:
    """A product a head; wide rows: those of all heads lie together, token by token."""
    dtype = DTYPES[lot.dtype]
    out_dtype = torch.float32 if FP32 in lot.options else dtype
    batch, m, n, k = lot.num_products, lot.m, lot.n, lot.k

    def rows(count: int) -> torch.Tensor:
        if WIDE in lot.options:
            return source.normal(count, batch, k, dtype=dtype).transpose(0, 1)
        return source.normal(batch, count, k, dtype=dtype)

    sets = [
        (
            rows(m),
            source.weight(batch, n, k, dtype=dtype),
            source.empty(batch, m, n, dtype=out_dtype),
        )
        for _ in range(source.num_sets(lot.num_bytes))
    ]
    a, b, out = sets[0]
    picked = source.some(m)
    heads = {0, batch // 2, batch - 1}
    own = torch.float32 if out_dtype == torch.float32 else dtype
    expected = [
        Expected(product(a[x][picked], b[x], torch.float64), product(a[x][picked], b[x], own), k=k)
        for x in heads
    ]
    written = Written([out], lambda: [out[x][picked] for x in heads])

    def contender(launch_of: Callable[..., Launch], lt: bool = False) -> Contender:
        launches = [launch_of(*one) for one in sets]
        launches = [through_lt(launch) for launch in launches] if lt else launches
        return Contender(launches, written, expected)

    def ours(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        return functools.partial(batched_matmul, a, b, out=out)

    def bmm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        options = {} if out_dtype == dtype else {"out_dtype": out_dtype}
        return functools.partial(torch.bmm, a, b.transpose(1, 2), out=out, **options)

    peers = {
        name: Peer((name,), functools.partial(contender, bmm, name == CUBLASLT))
        for name in (CUBLAS, CUBLASLT)
    }
    return Made(contender(ours), peers, source.is_rotated(len(sets), lot.num_bytes))
