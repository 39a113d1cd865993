"""Draws cases of attention: a seed, a family and a number make one, whatever else is drawn.

Knows no torch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .models import WAYS, Attending, attending, heads_of

PAGES = (16, 32, 64, 128, 256)
FP8_STEP = 16
# A launch at most, on an H200: 2 to 4 ms where the tensor cores are the limit.
_MOST_FLOPS, _MOST_BYTES = 1.6e12, 4 << 30
_MOST_TOKENS = 1 << 16
_DECODED = ("decode_contiguous", "decode_paged")
# In one order of adds: dense, ragged and through windows.
ORDERED = "backward_deterministic"
_TRAINED = ("backward", "backward_eager", ORDERED)
FAMILIES = (
    "prefill", "varlen", "paged", "window", "chunked", "softcap", *_TRAINED, "attention_fp8",
    *_DECODED,
)  # fmt: skip


@dataclass(frozen=True)
class AttentionLot:
    """One case: seqlens_q[b] queries over seqlens_k[b] keys, aligned at the ends.

    heads: of queries, of keys, and head_dim. page_size: 0 is contiguous. window: (left, right)
    keys around a query's place, -1: all. softcap: 0 is none.
    """

    family: str
    number: int
    layer: str
    heads: tuple[int, int, int]
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    dtype: str = "bf16"
    is_causal: bool = True
    page_size: int = 0
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0

    @property
    def name(self) -> str:
        """Of the row; the number is the one that draws it again."""
        lengths = [_span(self.seqlens_q)]
        if self.seqlens_k != self.seqlens_q:
            lengths.append(_span(self.seqlens_k))
        heads, kv_heads, head_dim = self.heads
        words = [
            f"{self.number}: {self.layer}", f"{self.batch_size} x {' over '.join(lengths)}",
            f"h{heads}/{kv_heads} d{head_dim}", "causal" if self.is_causal else "full", self.dtype,
        ]  # fmt: skip
        words += [f"pages of {self.page_size}"] * (self.page_size > 0)
        words += [f"window {self.window[0]},{self.window[1]}"] * (max(self.window) >= 0)
        words += [f"softcap {self.softcap:g}"] * (self.softcap > 0)
        return " ".join(words)

    @property
    def batch_size(self) -> int:
        """Sequences."""
        return len(self.seqlens_q)

    @property
    def is_ragged(self) -> bool:
        """Whether lengths differ between sequences."""
        return len({*self.seqlens_q}) > 1 or len({*self.seqlens_k}) > 1

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees, a head."""
        left, right = self.window
        right = 0 if self.is_causal else right
        return sum(
            _pairs(q, k, left, right) for q, k in zip(self.seqlens_q, self.seqlens_k, strict=True)
        )

    @property
    def num_flops(self) -> int:
        """Two products a pair; five in the backward."""
        products = {"backward": 5, ORDERED: 5, "backward_eager": 7}.get(self.family, 2)
        return 2 * products * self.pairs * self.heads[0] * self.heads[2]

    @property
    def num_bytes(self) -> int:
        """Read and written at least."""
        heads, kv_heads, head_dim = self.heads
        q, k = sum(self.seqlens_q) * heads, sum(self.seqlens_k) * kv_heads
        if self.family in _TRAINED:  # q, out, dout, dq; k, v, dk, dv
            return 2 * head_dim * (4 * q + 4 * k)
        return head_dim * (3 * q + 2 * k if self.dtype == "e4m3" else 4 * q + 4 * k)

    @property
    def is_matrix_bound(self) -> bool:
        """Whether clocks fall under longer load."""
        return self.num_flops > 150 * self.num_bytes

    @property
    def expected_us(self) -> float:
        """About, on an H200."""
        rate = 1000e6 if self.dtype == "e4m3" else 500e6
        return 4 + max(self.num_flops / rate, self.num_bytes / 4.2e6)


def _span(lengths: Sequence[int]) -> str:
    return f"{lengths[0]}" if len({*lengths}) == 1 else f"{min(lengths)}..{max(lengths)}"


def _pairs(seqlen_q: int, seqlen_k: int, left: int, right: int) -> int:
    """Places at .. end - 1 of the queries; keys from at - left to at + right that there are."""
    first = seqlen_k - seqlen_q  # the place of the first query
    ends = seqlen_q * seqlen_k
    if right >= 0:  # less those behind at + right
        ends -= _sum_down(seqlen_k - 1 - right - first, seqlen_q)
    if left >= 0:  # less those before at - left
        ends -= _sum_down(seqlen_k - 1 - left, seqlen_q)
    return ends


def _sum_down(most: int, count: int) -> int:
    """most + (most - 1) + ... of at most `count` terms, the positive ones."""
    if most <= 0:
        return 0
    terms = min(most, count)
    return terms * most - terms * (terms - 1) // 2


def draw(family: str, seed: int, number: int) -> AttentionLot:
    """The case `number` of a family under a seed."""
    lots = random.Random(f"{seed} {family} {number}")
    layer, model, heads = _model(lots, family)
    is_causal = lots.random() < (0.85 if model.is_causal else 0.15)
    found = AttentionLot(
        family, number, layer, (*heads, model.head_dim), (1,), (1,),
        "fp16" if lots.random() < 0.25 else "bf16", is_causal,
    )  # fmt: skip
    if family in _DECODED:
        return _decoded(lots, found)
    if family == "chunked":
        return _chunked(lots, found)
    if family == "paged":
        return _paged(lots, found)
    # Two of five of them are like those of the backward.
    kind = lots.choice(("", "", "varlen", "varlen", "window")) if family == ORDERED else family
    if kind == "varlen":
        return _varlen(lots, found)
    if kind == "window":
        left = model.window or lots.choice((64, 127, 255, 511, 1023, 2047, 4095))
        found = replace(found, window=(left, 0 if is_causal else left))
    if family == "softcap":
        # fp16: no peer here caps its scores.
        softcap = model.softcap or lots.choice((15.0, 30.0, 50.0))
        found = replace(found, softcap=softcap, dtype="bf16")
    if family == "attention_fp8":
        found = replace(found, dtype="e4m3")
    if family == "backward_eager":  # where the host can be the limit
        return _alike(lots, found, 4096, 1 << 15)
    longest = 8192 if family in ("backward", ORDERED) else 1 << 15
    return _alike(lots, found, longest, _MOST_TOKENS)


def _model(lots: random.Random, family: str) -> tuple[str, Attending, tuple[int, int]]:
    """(label, model, heads of one slice): half of the time whichever model, else a head_dim first,
    so that rare ones are drawn too."""
    models = [x for x in attending() if not (family == "attention_fp8" and x.head_dim % FP8_STEP)]
    if family in _DECODED or family in ("chunked", "paged"):
        models = [x for x in models if x.is_causal]
    if lots.random() < 0.5:
        head_dim = lots.choice(sorted({x.head_dim for x in models}))
        models = [x for x in models if x.head_dim == head_dim]
    if family in ("window", "softcap") and lots.random() < 0.5:
        special = [x for x in models if (x.window if family == "window" else x.softcap)]
        models = special or models
    while True:
        model, ways = lots.choice(models), lots.choice(WAYS)
        if (heads := heads_of(model, ways)) is not None:
            return f"{model.name}/{ways}" if ways > 1 else model.name, model, heads


def _length(lots: random.Random, least: int, most: int) -> int:
    """Log-uniform; odd more than half of the time, whole 64s now and then."""
    found = round(math.exp(lots.uniform(math.log(least), math.log(max(least, most)))))
    chance = lots.random()
    if chance < 0.3:
        found |= 1
    elif chance > 0.85:
        found = -(-found // 64) * 64
    return max(least, min(most, found))


def _fits(lot: AttentionLot) -> bool:
    return lot.num_flops <= _MOST_FLOPS and lot.num_bytes <= _MOST_BYTES


def _alike(lots: random.Random, lot: AttentionLot, longest: int, most_tokens: int) -> AttentionLot:
    """As many sequences of one length as fit, or fewer."""
    length = _length(lots, max(64, 2 * lot.window[0]), longest)
    while not _fits(replace(lot, seqlens_q=(length,), seqlens_k=(length,))):
        length = max(1, round(length * 0.8))
    batch_size = _length(lots, 1, max(1, most_tokens // length))
    while True:
        found = replace(lot, seqlens_q=(length,) * batch_size, seqlens_k=(length,) * batch_size)
        if batch_size == 1 or _fits(found):
            return found
        batch_size = max(1, batch_size * 2 // 3)


def _varlen(lots: random.Random, lot: AttentionLot) -> AttentionLot:
    """Sequences side by side, each of its own length."""
    longest, total = _length(lots, 64, 1 << 14), _length(lots, 512, _MOST_TOKENS)
    lengths = [longest]
    while sum(lengths) < total and len(lengths) < 128:
        lengths.append(_length(lots, max(1, longest // 64), longest))
    lots.shuffle(lengths)
    return _fewer(replace(lot, seqlens_q=tuple(lengths), seqlens_k=tuple(lengths)))


def _fewer(lot: AttentionLot) -> AttentionLot:
    """Without its last sequences until it fits; one sequence is shortened."""
    while not _fits(lot):
        if lot.batch_size > 1:
            keep = lot.batch_size * 3 // 4
            lot = replace(lot, seqlens_q=lot.seqlens_q[:keep], seqlens_k=lot.seqlens_k[:keep])
        else:
            (q,), (k,) = lot.seqlens_q, lot.seqlens_k
            lot = replace(
                lot, seqlens_q=(min(q, max(1, round(0.8 * k))),), seqlens_k=(round(0.8 * k),)
            )
    return lot


def _cached(
    lots: random.Random, lot: AttentionLot, new: int, longest: int, batch_size: int
) -> AttentionLot:
    """Over caches up to `longest`, half of the time each of its own length; by memory."""
    lengths = [longest] * batch_size
    if batch_size > 1 and lots.random() < 0.5:
        lengths = [_length(lots, max(new, longest // 32), longest) for _ in lengths]
    return _fewer(replace(lot, seqlens_q=(new,) * batch_size, seqlens_k=tuple(lengths)))


def _paged(lots: random.Random, lot: AttentionLot) -> AttentionLot:
    """A prompt, or the rest of one whose beginning is in the cache."""
    new = _length(lots, 512, 8192)
    longest = new if lots.random() < 0.4 else new + _length(lots, 64, 1 << 14)
    batch_size = _length(lots, 1, max(1, 2 * 8192 // new))
    lot = replace(lot, page_size=lots.choice(PAGES), is_causal=True)
    return _cached(lots, lot, new, longest, batch_size)


def _chunked(lots: random.Random, lot: AttentionLot) -> AttentionLot:
    """17 to 1,024 new tokens over long caches."""
    new, longest = _length(lots, 17, 1024), _length(lots, 1024, 1 << 16)
    batch_size = _length(lots, 1, 64)
    is_paged = lots.random() < 0.5
    page_size = lots.choice(PAGES) if is_paged else 0
    is_causal = is_paged or lots.random() < 0.85
    lot = replace(lot, page_size=page_size, is_causal=is_causal)
    return _cached(lots, lot, new, max(new, longest), batch_size)


def _decoded(lots: random.Random, lot: AttentionLot) -> AttentionLot:
    """1 to 16 new tokens, one in half of the cases."""
    new = 1 if lots.random() < 0.5 else lots.randrange(2, 17)
    longest = _length(lots, 128, 1 << 17)
    batch_size = _length(lots, 1, 256)
    page_size = lots.choice(PAGES) if lot.family == "decode_paged" else 0
    lot = replace(lot, page_size=page_size, is_causal=True)
    return _cached(lots, lot, new, longest, batch_size)
