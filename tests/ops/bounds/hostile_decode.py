"""One decode step whose tables lie: drawn by lot, run between guard bands, held against fp64.

A key or value on a page that is not there is 0, a new token without a place is not written. A
length below 0 is a finished row: nothing read or written, out 0. What comes of a sequence whose
length is more than there is room for is its own business.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from arena import Arena, outside
from bits import same_bits
from led_outside import check_said, forget

from kernel_hub.ops import decode_attention
from kernel_hub.testing import reference
from kernel_hub.testing.compare import check

E4M3 = torch.float8_e4m3fn
MOST = 1 << 30  # a length beyond it counts as it


def drawn_table(
    generator: random.Random, num_pages: int, batch: int, columns: int, has_bad: bool
) -> list[list[int]]:
    """Pages of each sequence; has_bad: some of them are none of the cache."""
    order = generator.sample(range(num_pages), batch * columns)
    table = [order[row * columns : (row + 1) * columns] for row in range(batch)]
    for row in table if has_bad else ():
        for column in range(columns):
            if generator.random() < 0.25:
                row[column] = outside(generator, num_pages)
    return table


class HostileStep:
    """The arguments, drawn; `run` calls the op and checks all that it did."""

    def __init__(self, generator: random.Random, arena: Arena, **fixed: Any) -> None:
        choose, self.arena = generator.choice, arena
        seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
        drawn = {
            "dtype": choose((torch.float16, torch.bfloat16)), "is_e4m3": generator.random() < 0.25,
            "head_dim": choose((16, 48, 64, 128, 160, 256)), "batch": generator.randrange(1, 5),
            "kv_heads": choose((1, 2)), "group": choose((1, 2, 4, 24)),
            "seqlen_q": choose((1, 1, 2, 5)), "page_size": choose((0, 1, 4, 8, 16, 24)),
            "pages": generator.randrange(1, 9), "appends": generator.random() < 0.6,
            "turns": generator.random() < 0.4, "num_splits": choose((0, 1, 3)),
            "softcap": choose((0.0, 0.0, 0.0, 5.0)), "window_left": choose((-1, -1, -1, 7, 40)),
            "bad_pages": generator.random() < 0.8, "bad_lengths": generator.random() < 0.5,
        }  # fmt: skip
        drawn |= fixed
        self.drawn = drawn
        batch, seqlen_q, head_dim = drawn["batch"], drawn["seqlen_q"], drawn["head_dim"]
        kv_heads, dtype = drawn["kv_heads"], drawn["dtype"]
        heads = kv_heads * drawn["group"]
        self.page_size = drawn["page_size"]
        num_new = seqlen_q if drawn["appends"] else 0
        columns = drawn["pages"]
        self.room = columns * self.page_size if self.page_size else generator.randrange(20, 150)
        self.lengths = [generator.randrange(max(1, self.room - num_new + 1)) for _ in range(batch)]
        if drawn["bad_lengths"]:
            for row in range(batch):
                if generator.random() < 0.5:
                    self.lengths[row] = outside(generator, self.room - num_new + 1)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=seed)

        cache_dtype = E4M3 if drawn["is_e4m3"] else dtype
        num_pages = batch * columns + 1 if self.page_size else batch
        shape = (num_pages, self.page_size or self.room, kv_heads, head_dim)
        caches = [randn(*shape).to(cache_dtype) for _ in range(2)]
        self.table: list[list[int]] | None = None
        if self.page_size:
            self.table = drawn_table(generator, num_pages, batch, columns, drawn["bad_pages"])
        new = (batch, seqlen_q, kv_heads, head_dim)
        given: dict[str, Any] = {
            "q": randn(batch, seqlen_q, heads, head_dim).to(dtype),
            "k_cache": caches[0], "v_cache": caches[1],
            "cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32),
        }  # fmt: skip
        if self.table is not None:
            given["block_table"] = torch.tensor(self.table, dtype=torch.int32)
        if drawn["appends"]:
            given |= {"k": randn(*new).to(dtype), "v": randn(*new).to(dtype)}
        if drawn["turns"]:
            angles = randn(self.room, head_dim // 2)
            given |= {"cos": angles.cos(), "sin": angles.sin()}
        self.device_free = given
        self.old = [cache.clone() for cache in caches]
        self.given = {
            name: arena.put(name, value.to(arena.device)) for name, value in given.items()
        }
        self.options = {
            "num_splits": drawn["num_splits"], "softcap": drawn["softcap"],
            "window_size": (drawn["window_left"], -1),
        }  # fmt: skip

    def place(self, row: int, token: int) -> tuple[int, int] | None:
        """(page, row in the page) of a token, or none."""
        if not 0 <= token < self.room:
            return None
        if self.table is None:
            return row, token
        page = self.table[row][token // self.page_size]
        if not 0 <= page < self.old[0].shape[0]:
            return None
        return page, token % self.page_size

    def _turned(self, name: str, kind: torch.dtype) -> torch.Tensor:
        """q or k of the new tokens, in `kind`."""
        given = self.device_free
        x = given[name].to(kind)
        if not self.drawn["turns"]:
            return x
        at = torch.tensor(self.firsts())[:, None] + torch.arange(x.shape[1])
        rows = given["cos"].shape[0]
        cos, sin = (  # a row of nan for positions outside
            torch.cat((given[name], torch.full((1, given[name].shape[1]), math.nan)))
            for name in ("cos", "sin")
        )
        at = torch.where((at >= 0) & (at < rows), at, rows)
        return reference.rope(x, cos, sin, at, dtype=kind)

    def firsts(self) -> list[int]:
        """The position of each sequence's first new token; before the start where it is none."""
        seqlen_q = self.drawn["seqlen_q"]
        appended = 0 if self.drawn["appends"] else seqlen_q
        return [
            -seqlen_q if length < 0 else min(length, MOST) - appended for length in self.lengths
        ]

    def _attention(self, caches: list[torch.Tensor], kind: torch.dtype) -> torch.Tensor:
        """out in `kind`, from caches as they are after the step."""
        q = self._turned("q", kind)
        group, outs = self.drawn["group"], []
        for row, first in enumerate(self.firsts()):
            count = min(max(first + q.shape[1], 0), self.room)
            places = [self.place(row, token) for token in range(count)]
            keys, values = (
                torch.stack(
                    [torch.zeros(x.shape[2:], dtype=kind)]
                    + [torch.zeros(x.shape[2:], dtype=kind) if at is None else x[at].to(kind)
                       for at in places]
                )[1:].repeat_interleave(group, 1)
                for x in (x.to(kind) for x in caches)
            )  # fmt: skip
            scores = torch.einsum("qhd,khd->hqk", q[row], keys) / math.sqrt(q.shape[-1])
            if self.drawn["softcap"]:
                scores = self.drawn["softcap"] * torch.tanh(scores / self.drawn["softcap"])
            distance = first + torch.arange(q.shape[1])[:, None] - torch.arange(count)
            seen = distance >= 0
            if self.drawn["window_left"] >= 0:
                seen &= distance <= self.drawn["window_left"]
            scores = scores.masked_fill(~seen, -math.inf)
            weights = torch.softmax(scores, -1)
            weights = torch.where(seen.any(-1, keepdim=True), weights, weights.new_zeros(()))
            outs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.stack(outs)

    def run(self) -> None:
        """Call the op; its output, its caches and everything around them must be right."""
        q = self.given["q"]
        out = self.arena.empty("out", q.shape, q.dtype)
        forget(q)
        decode_attention(**self.given, **self.options, out=out)
        self.arena.check()
        self._check_said(q)
        found = [self.given[name].cpu() for name in ("k_cache", "v_cache")]
        if self.drawn["appends"]:
            self._check_caches(found)
        truth, own = (self._attention(found, kind) for kind in (torch.float64, q.dtype))
        num_new = self.drawn["seqlen_q"] if self.drawn["appends"] else 0
        fits = [length <= self.room - num_new for length in self.lengths]
        check(out.cpu()[fits], truth[fits], own[fits])

    def _check_said(self, q: torch.Tensor) -> None:
        """The flag names the tables that lied, where a window did not hide it."""
        num_new = self.drawn["seqlen_q"] if self.drawn["appends"] else 0
        certain, possible = set(), {"block_table"}
        if any(length < 0 for length in self.lengths):
            possible.add("cache_seqlens")  # attention's kernels tell of it
        if any(length > self.room - num_new for length in self.lengths):
            certain.add("cache_seqlens")
        for row, length in enumerate(self.lengths):
            count = min(length + num_new, self.room) if length >= 0 else 0
            if any(self.place(row, token) is None for token in range(count)):
                (possible if self.drawn["window_left"] >= 0 else certain).add("block_table")
        if not self.table or all(
            0 <= page < self.old[0].shape[0] for pages in self.table for page in pages
        ):
            possible.discard("block_table")
        check_said("decode_attention", q, certain, possible)

    def _check_caches(self, found: list[torch.Tensor]) -> None:
        """New tokens are in their places, and nothing else is different."""
        for name, cache, before in zip(("k", "v"), found, self.old, strict=True):
            expected = before.clone()
            for kind in (torch.float64, self.drawn["dtype"]):
                new = self._turned(name, kind) if name == "k" else self.device_free[name].to(kind)
                written = torch.stack([new[0, 0], *self._written(new, cache, expected)])
                if kind == torch.float64:
                    truth = written
                else:
                    own = written.float().to(cache.dtype).float()
            is_written = torch.stack([truth[0], *self._written(None, cache, expected)])
            check(is_written[1:].float(), truth[1:], own[1:], name=f"{name}_cache")
            same_bits(
                cache.view(torch.uint8), expected.view(torch.uint8),
                name=f"{name}_cache, where nothing goes",
            )  # fmt: skip

    def _written(
        self, new: torch.Tensor | None, cache: torch.Tensor, expected: torch.Tensor
    ) -> list[torch.Tensor]:
        """Of each new token that has a place: its row of `new`, or of the cache."""
        rows = []
        for row, first in enumerate(self.firsts()):
            for i in range(self.drawn["seqlen_q"]):
                at = self.place(row, first + i)
                if at is not None:
                    expected[at] = cache[at]
                    rows.append(cache[at].double() if new is None else new[row, i])
        return rows
