"""Contenders of the forward of attention and of decoding, contiguous, varlen, paged or e4m3."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kernel_hub.ops import decode_attention, flash_attention
from kernel_hub.testing.reference_attention import reference_attention

from . import attention_peers as library
from .attention_peers import CUDNN, FA2, FA3, FA4, FLASHINFER
from .attention_shapes import AttentionLot
from .contenders import DTYPES, E4M3, Contender, Expected, Launch, Made, Peer, Source, Written

CACHED = ("paged", "chunked", "decode_contiguous", "decode_paged")
_CACHE_STEP = 64  # what the room of a contiguous cache is a multiple of
_CHECKED_ROWS, _CHECKED_HEADS = 16, 4
# Of the largest output: the rounding of probabilities to e4m3, at other row maxima.
_FP8_SLACK = 2e-2


class Operands(NamedTuple):
    """One input set."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


class Pick(NamedTuple):
    """What is looked at of a sequence: its heads of one key head, and rows of queries."""

    sequence: int
    heads: slice
    kv_head: slice
    rows: tuple[slice, ...]


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3, scale of (batch, heads)) of (batch, seqlen, heads, head_dim); the largest becomes
    448."""
    scale = x.abs().amax((1, 3)).float() / torch.finfo(E4M3).max
    return (x / scale[:, None, :, None]).to(E4M3), scale


def rounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention in fp64, the same with probabilities rounded to e4m3) of (seqlen, heads, head_dim)
    over the rows of one key head; causal: the last query sees the last key."""
    k, v = k[:, 0], v[:, 0]
    scores = torch.einsum("qhd,kd->hqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        at = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
        scores = scores.masked_fill(torch.arange(len(k), device=q.device) > at, -math.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    # 64: the peak is well inside e4m3's normal numbers.
    in_e4m3 = (weights.float() * 64).to(E4M3).double() / 64
    truth, own = ((x @ v / total).transpose(0, 1) for x in (weights, in_e4m3))
    return truth, own


def make(lot: AttentionLot, source: Source) -> Made:
    """The contenders of a case of any family but the backwards."""
    return _Forward(lot, source).made()


class _Forward:
    """Queries, keys and values, and the tables that say where they lie."""

    def __init__(self, lot: AttentionLot, source: Source) -> None:
        self.lot, self.source, self.dtype = lot, source, DTYPES[lot.dtype]
        self.num_heads, self.num_kv_heads, self.head_dim = lot.heads
        self.scale = 1 / math.sqrt(self.head_dim)
        self.is_fp8, self.is_varlen = lot.dtype == "e4m3", lot.family == "varlen"
        self.new, self.longest = max(lot.seqlens_q), max(lot.seqlens_k)
        self.tables = self._tables()
        kept = 2 * self._key_rows() * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        kept = max(kept, lot.num_bytes)
        count = source.num_sets(kept)
        self.is_rotated = source.is_rotated(count, lot.num_bytes)
        self.scales: list[dict[str, torch.Tensor]] = []
        self.sets = [self._operands() for _ in range(count)]
        self.picks = self._picks()
        self.expected = [self._expected(pick) for pick in self.picks]

    def _int32(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.source.device)

    def _tables(self) -> dict[str, Any]:
        """The arguments of our op that say where sequences lie."""
        lot = self.lot
        if self.is_varlen:
            bounds = self._int32([0, *itertools.accumulate(lot.seqlens_q)])
            longest = {"max_seqlen_q": self.new, "max_seqlen_k": self.new}
            return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, **longest}
        tables: dict[str, Any] = {}
        if lot.page_size:
            counts = [-(-length // lot.page_size) for length in lot.seqlens_k]
            order = torch.randperm(sum(counts), device=self.source.device).int()
            tables["block_table"] = order.new_zeros(lot.batch_size, max(counts))
            for row, pages in zip(tables["block_table"], order.split(counts), strict=True):
                row[: len(pages)] = pages
        if lot.page_size or lot.is_ragged or lot.family == "decode_contiguous":
            tables["cache_seqlens"] = self._int32(lot.seqlens_k)
        return tables

    @property
    def room(self) -> int:
        """Tokens that a contiguous cache holds a sequence."""
        has_room = "cache_seqlens" in self.tables
        return -(-self.longest // _CACHE_STEP) * _CACHE_STEP if has_room else self.longest

    def _key_rows(self) -> int:
        lot = self.lot
        if self.is_varlen:
            return sum(lot.seqlens_k)
        if lot.page_size:
            return sum(-(-n // lot.page_size) for n in lot.seqlens_k) * lot.page_size
        return lot.batch_size * self.room

    def _operands(self) -> Operands:
        lot, make_normal = self.lot, self.source.normal
        dtype = torch.bfloat16 if self.is_fp8 else self.dtype
        if self.is_varlen:
            q_rows: tuple[int, ...] = (sum(lot.seqlens_q),)
            k_rows: tuple[int, ...] = q_rows
        else:
            q_rows = (lot.batch_size, self.new)
            paged = (self._key_rows() // lot.page_size, lot.page_size) if lot.page_size else None
            k_rows = paged or (lot.batch_size, self.room)
        q = make_normal(*q_rows, self.num_heads, self.head_dim, dtype=dtype)
        k, v = (
            make_normal(*k_rows, self.num_kv_heads, self.head_dim, dtype=dtype) for _ in range(2)
        )
        out = torch.empty_like(q)
        scales: dict[str, torch.Tensor] = {}
        if self.is_fp8:
            (q, q_scale), (k, k_scale), (v, v_scale) = (quantised(x) for x in (q, k, v))
            # FlashAttention-3 takes q's scales by key head.
            q_scale = q_scale[:, :: self.num_heads // self.num_kv_heads].contiguous()
            scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        self.scales.append(scales)
        return Operands(q, k, v, out)

    # -- what outputs must be

    def _picks(self) -> list[Pick]:
        """The first head of the first sequence, the last of the last, one of the longest."""
        lot, group = self.lot, self.num_heads // self.num_kv_heads
        longest = lot.seqlens_k.index(self.longest)
        places = {(0, 0), (lot.batch_size - 1, self.num_kv_heads - 1), (longest, 0)}
        found = []
        for sequence, head in sorted(places):
            length = lot.seqlens_q[sequence]
            # With keys on the right of a query the reference knows the last ones alone.
            firsts = {0, length // 2, length - _CHECKED_ROWS}
            if not lot.is_causal and max(lot.window) >= 0:
                firsts = {length - _CHECKED_ROWS}
            rows = tuple(
                slice(max(0, x), min(length, max(0, x) + _CHECKED_ROWS)) for x in sorted(firsts)
            )
            heads = slice(head * group, head * group + min(group, _CHECKED_HEADS))
            found.append(Pick(sequence, heads, slice(head, head + 1), rows))
        return found

    def _queries(self, tensor: torch.Tensor, pick: Pick) -> list[torch.Tensor]:
        """The rows of a pick, of q or out."""
        if self.is_varlen:
            start = sum(self.lot.seqlens_q[: pick.sequence])
            of = tensor[start : start + self.lot.seqlens_q[pick.sequence]]
        else:
            of = tensor[pick.sequence]
        return [of[rows, pick.heads] for rows in pick.rows]

    def _keys(self, tensor: torch.Tensor, pick: Pick) -> torch.Tensor:
        """All rows of its sequence, of k or v."""
        length = self.lot.seqlens_k[pick.sequence]
        if self.is_varlen:
            start = sum(self.lot.seqlens_k[: pick.sequence])
            return tensor[start : start + length, pick.kv_head]
        if self.lot.page_size:
            pages = self.tables["block_table"][pick.sequence].long()
            tensor = tensor[:, :, pick.kv_head]
            return tensor[pages[: -(-length // self.lot.page_size)]].flatten(0, 1)[:length]
        return tensor[pick.sequence, :length, pick.kv_head]

    def _expected(self, pick: Pick) -> Expected:
        """Of the queries in a block the last one sees the last key, so they are the reference's
        last queries over the keys before that."""
        given = self.sets[0]
        k, v = self._keys(given.k, pick), self._keys(given.v, pick)
        ahead = len(k) - self.lot.seqlens_q[pick.sequence]
        parts = []
        for q, rows in zip(self._queries(given.q, pick), pick.rows, strict=True):
            seen = ahead + rows.stop if self.lot.is_causal else len(k)
            parts.append(self._attended(pick, q, k[:seen], v[:seen]))
        truth, own = (torch.cat(x) for x in zip(*parts, strict=True))
        return Expected(truth, own, slack=_FP8_SLACK if self.is_fp8 else None)

    def _attended(
        self, pick: Pick, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(truth, the same in the dtype of the operands)."""
        lot = self.lot
        if self.is_fp8:
            scales = (x[pick.sequence, pick.kv_head].double() for x in self.scales[0].values())
            q, k, v = (x.double() * scale for x, scale in zip((q, k, v), scales, strict=True))
            return rounded(q, k, v, lot.is_causal)
        truth, own = (
            reference_attention(
                q[None], k[None], v[None], causal=lot.is_causal, window_size=lot.window,
                softcap=lot.softcap, dtype=dtype,
            )[0][0]
            for dtype in (torch.float64, self.dtype)
        )  # fmt: skip
        return truth, own

    # -- contenders

    def _sample(self, out: torch.Tensor) -> Sequence[torch.Tensor]:
        return [torch.cat(self._queries(out, pick)) for pick in self.picks]

    def made(self) -> Made:
        out = self.sets[0].out
        written = Written([out], lambda: self._sample(out))
        launches = [self._ours(x, i) for i, x in enumerate(self.sets)]
        peers = {name: Peer((name,), make_peer) for name, make_peer in self._peers().items()}
        return Made(Contender(launches, written, self.expected), peers, self.is_rotated)

    def _ours(self, given: Operands, index: int) -> Launch:
        lot, (q, k, v, out) = self.lot, given
        if lot.family.startswith("decode"):
            return functools.partial(decode_attention, q, k, v, **self.tables, out=out)
        options: dict[str, Any] = {**self.tables, **self.scales[index]}
        if max(lot.window) >= 0:
            options["window_size"] = lot.window
        return functools.partial(
            flash_attention, q, k, v, causal=lot.is_causal, softcap=lot.softcap, **options, out=out
        )

    def _peers(self) -> dict[str, Callable[[], Contender]]:
        """Those that take such a case."""
        lot = self.lot
        found: dict[str, Callable[[], Contender]] = {FA3: self._by_fa3}
        if self.is_fp8:
            return found
        is_plain = not (self.tables or lot.softcap or max(lot.window) >= 0)
        is_full = self.new == 1 or not lot.is_causal or lot.seqlens_q == lot.seqlens_k
        if lot.family == "decode_contiguous":  # full caches of whole steps, or their first tokens
            is_plain = not lot.is_ragged
        if is_plain and is_full:
            found[CUDNN] = functools.partial(self._by_torch, CUDNN)
            found[FA2] = functools.partial(self._by_torch, FA2)
        elif self.is_varlen or lot.family == "window":
            found[FA2] = self._by_flash
        if lot.family in ("prefill", "window", "softcap") and library.has_fa4():
            found[FA4] = self._by_fa4
        has_pages = lot.page_size or lot.family == "decode_contiguous"
        if has_pages and self.head_dim in library.FLASHINFER_HEAD_DIMS:
            found[FLASHINFER] = self._by_flashinfer
        return found

    def _returning(self, call_of: Callable[[Operands, int], Launch]) -> Contender:
        """A launch returns its output; the last one of the first set is looked at."""
        kept: dict[str, torch.Tensor] = {}

        def keeping(call: Launch) -> Launch:
            def run() -> None:
                kept["out"] = call()

            return run

        calls = [call_of(x, i) for i, x in enumerate(self.sets)]
        written = Written([], lambda: self._sample(kept["out"]))
        return Contender([keeping(calls[0]), *calls[1:]], written, self.expected)

    def _by_fa3(self) -> Contender:
        """Its own number of splits where keys are many and queries few."""
        lot = self.lot
        has_both = lot.dtype == "bf16" and not lot.page_size and max(lot.window) < 0
        op = library.fa3() if self.is_fp8 or has_both else library.xformers_fa3()
        options: dict[str, Any] = {
            "softmax_scale": self.scale, "is_causal": lot.is_causal and self.new > 1,
            "num_splits": 0 if lot.family in CACHED else 1,
        }  # fmt: skip
        if self.is_varlen:
            options |= self.tables
        else:
            names = {"cache_seqlens": "seqused_k", "block_table": "page_table"}
            options |= {names[name]: table for name, table in self.tables.items()}
        if max(lot.window) >= 0:
            options["window_size_left"], options["window_size_right"] = lot.window
        if lot.softcap:
            options["softcap"] = lot.softcap

        def call_of(given: Operands, index: int) -> Launch:
            scales = {
                name.replace("_scale", "_descale"): x for name, x in self.scales[index].items()
            }
            return lambda: op(given.q, given.k, given.v, **options, **scales)[0]

        return self._returning(call_of)

    def _by_fa4(self) -> Contender:
        op, lot = library.fa4(), self.lot
        window = tuple(None if x < 0 else x for x in lot.window)
        return self._returning(
            lambda given, _: (
                lambda: op(
                    *given[:3], causal=lot.is_causal, window_size=window, softcap=lot.softcap
                )[0]
            )
        )

    def _by_torch(self, name: str) -> Contender:
        causal = self.lot.is_causal and self.new > 1
        filled = self.longest  # of a cache with room for more
        return self._returning(
            lambda given, _: library.sdpa(
                given.q, given.k[:, :filled], given.v[:, :filled], causal, name
            )
        )

    def _by_flash(self) -> Contender:
        lot, bounds = self.lot, self.tables.get("cu_seqlens_q")
        return self._returning(
            lambda given, _: library.torch_flash(
                *given[:3], lot.is_causal, self.scale, bounds, self.new, lot.window
            )
        )

    def _by_flashinfer(self) -> Contender:
        """A contiguous cache is pages of 64 in order."""
        lot, page_size = self.lot, self.lot.page_size or _CACHE_STEP
        table = self.tables.get("block_table")
        if table is None:
            table = torch.arange(lot.batch_size * self.room // page_size, dtype=torch.int32)
            table = table.view(lot.batch_size, -1).to(self.source.device)
        run = library.flashinfer_paged(
            table, lot.seqlens_q, lot.seqlens_k, lot.heads, page_size, self.dtype
        )

        def call_of(given: Operands, _: int) -> Launch:
            q = given.q.flatten(0, 1)
            pages = tuple(x.view(-1, page_size, *x.shape[2:]) for x in given[1:3])
            return lambda: run(q, pages).view(given.q.shape)

        return self._returning(call_of)
