"""Contenders of linear in 16 bits, bare and with its epilogues."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kernel_hub.ops import linear

from .contenders import DTYPES, Contender, Expected, Launch, Made, Peer, Source, Written, product
from .product_peers import CUBLAS, CUBLASLT, DEEPGEMM, deep_gemm, through_lt
from .shapes import BIAS, FP32, RESIDUAL, Lot

IN_PLACE = "in place"
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu, "silu": functional.silu, "relu": functional.relu,
    "gelu by tanh": functools.partial(functional.gelu, approximate="tanh"),
}  # fmt: skip
_INTO: dict[str, Callable[[torch.Tensor], Any]] = {
    "gelu": lambda x: torch.ops.aten.gelu_(x),
    "silu": lambda x: functional.silu(x, inplace=True),
    "relu": torch.relu_,
}


@dataclass(frozen=True)
class Epilogue:
    """out = activation(product + bias) + residual; is_in_place: the residual is out."""

    bias: torch.Tensor | None
    activation: str | None
    residual: torch.Tensor | None
    is_in_place: bool

    def of(self, rows: torch.Tensor, values: torch.Tensor, activation: str | None) -> torch.Tensor:
        """The epilogue of sampled rows, in the dtype of `values`."""
        if self.bias is not None:
            values = values + self.bias.to(values.dtype)
        if activation is not None:
            values = _ACTIVATIONS[activation](values)
        if self.residual is not None:
            values = values + self.residual[rows].to(values.dtype)
        return values

    def expected(
        self, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
        activation: str | None,
    ) -> Expected:  # fmt: skip
        """Of the sampled rows; torch's own is rounded as out is."""
        own = torch.float32 if out.dtype == torch.float32 else a.dtype
        truth, rounded = (
            self.of(rows, product(a[rows], b, dtype), activation) for dtype in (torch.float64, own)
        )
        return Expected(truth, rounded, k=a.shape[-1])


Set = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make(lot: Lot, source: Source) -> Made:
    """The contenders of a case of 'linear' or 'epilogues'."""
    dtype = DTYPES[lot.dtype]
    out_dtype = torch.float32 if FP32 in lot.options else dtype
    sets: list[Set] = [
        (
            source.rows(lot.m, lot.k, dtype=dtype, options=lot.options),
            source.weight(lot.n, lot.k, dtype=dtype),
            source.empty(lot.m, lot.n, dtype=out_dtype),
        )
        for _ in range(source.num_sets(lot.num_bytes))
    ]
    words = {*lot.kind.split(), *lot.options}
    with_residual = RESIDUAL in words
    epilogue = Epilogue(
        source.normal(lot.n, dtype=dtype) if BIAS in words else None,
        next((name for name in _INTO if name in words), None),
        source.normal(lot.m, lot.n, dtype=out_dtype) if with_residual else None,
        lot.kind.endswith(IN_PLACE),
    )
    if epilogue.is_in_place and epilogue.residual is not None:
        for _, _, out in sets:
            out.copy_(epilogue.residual)
    return _Makers(lot, source, sets, epilogue).made()


class _Makers:
    """Makes each contender of a case on the same operands."""

    def __init__(self, lot: Lot, source: Source, sets: Sequence[Set], epilogue: Epilogue) -> None:
        self.lot, self.sets, self.epilogue = lot, sets, epilogue
        self.rows = source.some(lot.m)
        self.is_rotated = source.is_rotated(len(sets), lot.num_bytes)
        self._expected: dict[str | None, Expected] = {}

    def made(self) -> Made:
        e = self.epilogue
        ours = self.contender(self._ours)
        peers = {}
        tail = "".join(
            f" + {word}" for word in (e.bias is not None and "bias", e.activation,
                                      e.residual is not None and "residual") if word
        )  # fmt: skip
        is_fp32 = self.sets[0][2].dtype == torch.float32
        if e.bias is None or is_fp32:
            peers[f"{CUBLAS}{tail}"] = self.peer((CUBLAS,), self._separate)
            peers[f"{CUBLASLT}{tail}"] = self.peer((CUBLASLT,), self._separate, lt=True)
        else:
            last = tail.removeprefix(" + bias")
            peers[f"{CUBLASLT} addmm{last}"] = self.peer((CUBLASLT,), self._addmm)
            peers[f"{CUBLAS}{tail}"] = self.peer((CUBLAS,), self._separate)
            if e.activation in ("gelu", "relu"):
                last = last.removeprefix(f" + {e.activation}")
                by = "gelu by tanh" if e.activation == "gelu" else "relu"
                name = f"{CUBLASLT} _addmm_activation, {by}{last}"
                peers[name] = self.peer((CUBLASLT,), self._activated, activation=by)
        if tail == " + residual" and not is_fp32:
            peers[f"{CUBLAS} addmm of residual"] = self.peer((CUBLAS,), self._accumulating)
        if not tail and self.lot.dtype == "bf16":
            peers[DEEPGEMM] = self.peer((DEEPGEMM,), self._deep)
        return Made(ours, peers, self.is_rotated)

    def contender(
        self, launch_of: Callable[..., Launch], activation: str | None = None, lt: bool = False
    ) -> Contender:
        """activation: the one it computes, where that is not the one asked for."""
        e, (a, b, out) = self.epilogue, self.sets[0]
        activation = activation or e.activation
        if activation not in self._expected:
            self._expected[activation] = e.expected(self.rows, a, b, out, activation)

        def reset() -> None:
            if e.is_in_place and e.residual is not None:
                out.copy_(e.residual)

        written = Written([out], lambda: [out[self.rows]], reset)
        launches = [launch_of(*one) for one in self.sets]
        launches = [through_lt(launch) for launch in launches] if lt else launches
        return Contender(launches, written, [self._expected[activation]])

    def peer(
        self, needs: tuple[str, ...], launch_of: Callable[..., Launch],
        activation: str | None = None, lt: bool = False,
    ) -> Peer:  # fmt: skip
        return Peer(needs, functools.partial(self.contender, launch_of, activation, lt))

    def _residual(self, out: torch.Tensor) -> torch.Tensor | None:
        return out if self.epilogue.is_in_place else self.epilogue.residual

    def _ours(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        e = self.epilogue
        return functools.partial(
            linear, a, b, e.bias, activation=e.activation, residual=self._residual(out), out=out
        )

    def _separate(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        """A product, then a kernel of torch's for each part of the epilogue."""
        e, turned = self.epilogue, b.T
        options = {"out_dtype": out.dtype} if out.dtype != a.dtype else {}
        # Where out is the residual, the product has a place of its own.
        to = torch.empty_like(out) if e.is_in_place else out

        def run() -> None:
            torch.mm(a, turned, out=to, **options)
            if e.bias is not None:
                to.add_(e.bias)
            self._finish(to, out)

        return run

    def _addmm(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        """The bias fused by torch; the rest apart."""
        turned, bias = b.T, self.epilogue.bias

        def run() -> None:
            torch.addmm(bias, a, turned, out=out)
            self._finish(out, out)

        return run

    def _activated(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        """Bias and activation fused."""
        e, turned = self.epilogue, b.T
        use_gelu = e.activation == "gelu"

        def run() -> None:
            torch._addmm_activation(e.bias, a, turned, use_gelu=use_gelu, out=out)
            if e.residual is not None:
                out.add_(e.residual)

        return run

    def _accumulating(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        """The residual as what the product is added to; torch copies it where it is not out."""
        turned = b.T
        if self.epilogue.is_in_place:
            return functools.partial(out.addmm_, a, turned)
        return functools.partial(torch.addmm, self.epilogue.residual, a, turned, out=out)

    def _deep(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
        return functools.partial(deep_gemm().bf16_gemm_nt, a, b, out)

    def _finish(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """What of the epilogue follows the bias, in place; values may be elsewhere than out."""
        e = self.epilogue
        if e.activation is not None:
            _INTO[e.activation](values)
        if values is not out:
            out.add_(values)
        elif e.residual is not None:
            out.add_(e.residual)
