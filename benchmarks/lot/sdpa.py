"""torch's scaled_dot_product_attention with kernel_hub's door open, beside what torch takes itself.

A contender's first launch opens or closes the door, before any clock runs; whatever looks at an
output leaves it closed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from kernel_hub.integrations import sdpa
from kernel_hub.testing.reference_attention import (
    reference_attention,
    reference_attention_backward,
)

from .contenders import DTYPES, Contender, Expected, Launch, Made, Peer, Source, Written
from .sdpa_shapes import HEADS_FIRST, PACKED, SdpaLot

TORCH = "torch's own choice"
PEERS = (TORCH,)
_CHECKED_ROWS = 64
Operands = tuple[torch.Tensor, ...]


_open = [False]


def _set_door(is_open: bool) -> None:
    if _open[0] != is_open:
        (sdpa.activate if is_open else sdpa.restore)()
        _open[0] = is_open


def make(lot: SdpaLot, source: Source) -> Made:
    """Forward, or with the backward; both contenders make the same call of torch."""
    return _Case(lot, source).made()


class _Case:
    """Input sets, (batch, heads, tokens, head_dim) as torch has them."""

    def __init__(self, lot: SdpaLot, source: Source) -> None:
        self.lot, self.source, self.dtype = lot, source, DTYPES[lot.dtype]
        self.is_training = lot.family == "sdpa_training"
        count = source.num_sets(lot.num_bytes)
        self.is_rotated = source.is_rotated(count, lot.num_bytes)
        self.sets = [self._operands() for _ in range(count)]
        heads, kv_heads, _ = lot.heads
        self.group = heads // kv_heads
        self.expected = self._expected()

    def _operands(self) -> Operands:
        """q, k, v and the gradient of the output."""
        lot, normal = self.lot, functools.partial(self.source.normal, dtype=self.dtype)
        heads, kv_heads, d = lot.heads
        rows = [(lot.seqlen_q, heads), *[(lot.seqlen_k, kv_heads)] * 2]
        if lot.layout == PACKED:
            packed = normal(lot.batch_size, lot.seqlen_q, 3, heads, d)
            made = [x.transpose(1, 2) for x in packed.unbind(2)]
        elif lot.layout == HEADS_FIRST:
            made = [normal(lot.batch_size, count, tokens, d) for tokens, count in rows]
        else:
            made = [normal(lot.batch_size, *each, d).transpose(1, 2) for each in rows]
        gradient = normal(lot.batch_size, lot.seqlen_q, heads, d).transpose(1, 2)
        if self.is_training:
            made = [x.detach().requires_grad_() for x in made]
        return *made, gradient

    def _expected(self) -> list[Expected]:
        """Of the first head of the last sequence: its last queries' outputs, or all gradients."""
        q, k, v, gradient = (x[-1:, :1].detach() for x in self.sets[0])
        options: dict[str, Any] = {"layout": "bhsd", "causal": self.lot.is_causal}
        if not self.is_training:
            truth, own = (
                reference_attention(q[:, :, -_CHECKED_ROWS:], k, v, **options, dtype=dtype)[0]
                for dtype in (torch.float64, self.dtype)
            )
            return [Expected(truth, own)]
        q, gradient = (self.sets[0][i][-1:, : self.group].detach() for i in (0, 3))
        found = [
            reference_attention_backward(q, k, v, gradient, **options, dtype=dtype)
            for dtype in (torch.float64, self.dtype)
        ]
        return [Expected(truth, own) for truth, own in zip(*found, strict=True)]

    def _sample(self, found: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        _set_door(False)
        if not self.is_training:
            return [found[0][-1:, :1, -_CHECKED_ROWS:]]
        return [found[0][-1:, : self.group], *(x[-1:, :1] for x in found[1:])]

    def _call(self, given: Operands) -> Sequence[torch.Tensor]:
        q, k, v, gradient = given
        with torch.set_grad_enabled(self.is_training):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.lot.is_causal, enable_gqa=self.group > 1
            )
            return torch.autograd.grad(out, (q, k, v), gradient) if self.is_training else (out,)

    def _contender(self, is_open: bool) -> Contender:
        kept: dict[str, Sequence[torch.Tensor]] = {}

        def first() -> None:
            _set_door(is_open)
            kept["found"] = self._call(self.sets[0])

        launches: list[Launch] = [
            first, *(functools.partial(self._call, x) for x in self.sets[1:])
        ]  # fmt: skip
        return Contender(launches, Written([], lambda: self._sample(kept["found"])), self.expected)

    def made(self) -> Made:
        peer = Peer((TORCH,), lambda: self._contender(False))
        is_eager = self.lot.family == "sdpa_eager"
        return Made(self._contender(True), {TORCH: peer}, self.is_rotated, is_eager=is_eager)
