"""flash_attention with tables that lie, drawn by lot between guard bands, held against fp64.

A sequence whose cu_seqlens fall or lie outside has no rows, a key on a page that is not there is 0,
a length counts as the nearest that there is room for. What comes of sequences that are longer than
said, or share rows, is nobody's business.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from arena import Arena, outside
from attention_devices import BACKWARD
from led_outside import check_said, forget

from kernel_hub.ops import flash_attention
from kernel_hub.ops.attention import eager, registered
from kernel_hub.ops.attention.backward import sm90 as hopper_backward
from kernel_hub.testing.compare import check
from kernel_hub.testing.reference_attention import (
    reference_attention,
    reference_attention_backward,
)

LAYOUTS = ("varlen", "varlen_q", "varlen_k", "cache", "varlen_cache", "paged", "varlen_paged")
E4M3 = torch.float8_e4m3fn
Range = tuple[int, int]


@contextmanager
def _allocations_in(arena: Arena) -> Iterator[None]:
    """lse, gradients and workspaces lie in the arena."""

    def lse_like(x: torch.Tensor) -> torch.Tensor:
        return arena.empty("lse", x.shape, x.dtype)

    def new_grad(x: torch.Tensor) -> torch.Tensor:
        return arena.empty("a gradient", x.shape, x.dtype)

    def empty_like(x: torch.Tensor) -> torch.Tensor:
        return arena.empty("a workspace", x.shape, x.dtype)

    with (
        mock.patch.object(eager, "_lse_like", lse_like),
        mock.patch.object(registered, "_new_grad", new_grad),
        mock.patch.object(BACKWARD, "_empty_like", empty_like),
        mock.patch.object(hopper_backward, "_empty_like", empty_like),
    ):
        yield


class HostileAttention:
    """The arguments, drawn."""

    def __init__(self, generator: random.Random, arena: Arena, **fixed: Any) -> None:
        choose, self.arena, self.generator = generator.choice, arena, generator
        self.seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
        self.drawn = {
            "layout": choose(LAYOUTS), "dtype": choose((torch.float16, torch.bfloat16)),
            "head_dim": choose((32, 64, 72, 96, 128, 160, 192, 256)), "kv_heads": choose((1, 2)),
            "own_head_dim_v": choose((None, None, 128, 8 * generator.randrange(2, 33))),
            "group": choose((1, 2, 4)), "batch": generator.randrange(1, 5),
            "causal": choose((False, True)), "window_size": choose(((-1, -1), (-1, -1), (20, 9))),
            "softcap": choose((0.0, 0.0, 4.0)), "page_size": choose((1, 4, 8, 16, 64)),
            "says_longest": choose((False, True)), "lies": generator.random() < 0.85,
        } | fixed  # fmt: skip
        drawn = self.drawn
        if drawn["dtype"] == torch.float32 and drawn["own_head_dim_v"]:
            drawn["own_head_dim_v"] = min(drawn["own_head_dim_v"], 128)
        batch, self.dtype, head_dim = drawn["batch"], drawn["dtype"], drawn["head_dim"]
        kv_heads, heads = drawn["kv_heads"], drawn["kv_heads"] * drawn["group"]
        layout = drawn["layout"]
        self.certain: set[str] = set()
        self.possible: set[str] = set()
        self.tables: dict[str, torch.Tensor] = {}
        self.options: dict[str, Any] = {
            name: drawn[name] for name in ("causal", "window_size", "softcap")
        }
        self.extra: dict[str, Any] = {}
        if "varlen" in layout and layout != "varlen_k":
            self.queries, self.longest_q, total = self._ragged("q", 90)
            q_shape: tuple[int, ...] = (total,)
        else:
            self.longest_q = generator.randrange(1, 90)
            self.queries = [(0, self.longest_q)] * batch
            q_shape = (batch, self.longest_q)
        self.table: list[list[int]] | None = None
        if layout in ("varlen", "varlen_k"):
            self.keys, self.longest_k, total = self._ragged("k", 150)
            k_shape: tuple[int, ...] = (total,)
        elif layout == "varlen_q":
            self.longest_k = generator.randrange(1, 150)
            self.keys, k_shape = [(0, self.longest_k)] * batch, (batch, self.longest_k)
        else:
            k_shape = self._lengths("paged" in layout)
        given = {
            "q": self._randn(*q_shape, heads, head_dim),
            "k": self._randn(*k_shape, kv_heads, head_dim),
            "v": self._randn(*k_shape, kv_heads, drawn["own_head_dim_v"] or head_dim),
        }
        self.free = given
        self.given = arena.put_all(
            **{name: x.to(arena.device) for name, x in (given | self.tables).items()}
        )
        print(drawn, self.queries, self.keys, self.tables, self.extra)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.seed).to(self.dtype)

    def _ragged(self, name: str, most: int) -> tuple[list[Range | None], int, int]:
        """Draws cu_seqlens: (the rows of each sequence, the longest, the rows in all)."""
        generator, table = self.generator, f"cu_seqlens_{name}"
        lengths = [generator.randrange(most) for _ in range(self.drawn["batch"])]
        lengths[0] = max(lengths[0], 1)
        bounds = [0, *itertools.accumulate(lengths)]
        total = bounds[-1] + generator.randrange(3)
        longest = total
        if self.drawn["says_longest"]:
            longest = self.extra[f"max_seqlen_{name}"] = max(lengths)
        if self.drawn["lies"] and generator.random() < 0.7:
            for i in range(len(bounds)):
                if generator.random() < 0.3:
                    bounds[i] = outside(generator, total + 1)
            if generator.random() < 0.4:
                generator.shuffle(bounds)
        self.tables[table] = torch.tensor(bounds, dtype=torch.int32)
        ranges = [
            (start, end) if 0 <= start <= end <= total else None
            for start, end in itertools.pairwise(bounds)
        ]
        if any(one is None or one[1] - one[0] > longest for one in ranges):
            self.certain.add(table)
        return ranges, longest, total

    def _lengths(self, is_paged: bool) -> tuple[int, ...]:
        """Draws cache_seqlens, and pages: the shape of k but for heads and head_dim."""
        generator, batch = self.generator, self.drawn["batch"]
        page_size, lies = self.drawn["page_size"], self.drawn["lies"]
        columns = generator.randrange(1, 6)
        self.longest_k = columns * page_size if is_paged else generator.randrange(1, 150)
        lengths = [generator.randrange(self.longest_k + 1) for _ in range(batch)]
        if lies:
            for row in range(batch):
                if generator.random() < 0.3:
                    lengths[row] = outside(generator, self.longest_k + 1)
                    self.certain.add("cache_seqlens")
        self.tables["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
        self.keys = [(0, min(max(length, 0), self.longest_k)) for length in lengths]
        if not is_paged:
            return batch, self.longest_k
        num_pages = batch * columns + 1
        order = generator.sample(range(num_pages), batch * columns)
        self.table = [order[row * columns : (row + 1) * columns] for row in range(batch)]
        for row, column in itertools.product(range(batch), range(columns)):
            if lies and generator.random() < 0.25:
                self.table[row][column] = outside(generator, num_pages)
                end = self.keys[row]
                assert end is not None
                queries = self.queries[row]
                if queries is not None and column * page_size < end[1] and queries[1] > queries[0]:
                    self.possible.add("block_table")
                    if not self.drawn["causal"] and self.drawn["window_size"] == (-1, -1):
                        self.certain.add("block_table")
        self.tables["block_table"] = torch.tensor(self.table, dtype=torch.int32)
        return num_pages, page_size

    def keys_of(self, name: str, row: int) -> torch.Tensor:
        """(seqlen_k, kv_heads, head_dim) of a sequence."""
        x, found = self.free[name], self.keys[row]
        start, end = found or (0, 0)
        if self.table is None:
            return x[start:end] if x.dim() == 3 else x[row, start:end]
        pages = [
            x[page] if 0 <= page < x.shape[0] else torch.zeros_like(x[0])
            for page in self.table[row]
        ]
        return torch.cat(pages)[:end]

    def is_known(self, row: int) -> bool:
        """Whether a sequence is no longer than said."""
        return all(
            found is None or found[1] - found[0] <= longest
            for found, longest in (
                (self.queries[row], self.longest_q), (self.keys[row], self.longest_k)
            )
        )  # fmt: skip

    def shared_rows(self, ranges: list[Range | None]) -> set[int]:
        """Rows of more than one sequence."""
        count: dict[int, int] = {}
        for found in ranges:
            for i in range(*(found or (0, 0))):
                count[i] = count.get(i, 0) + 1
        return {i for i, times in count.items() if times > 1}

    def sequences(self) -> Iterator[tuple[int, list[int]]]:
        """Of each sequence that is right: its number, and its rows of q that no other has."""
        is_ragged = self.free["q"].dim() == 3
        shared = self.shared_rows(self.queries) if is_ragged else set()
        for row in range(self.drawn["batch"]):
            found = self.queries[row]
            if found is not None and self.is_known(row):
                yield row, [i for i in range(*found) if i not in shared]

    def queries_of(self, x: torch.Tensor, row: int) -> torch.Tensor:
        """The rows of q (or out, dout, dq) of a sequence."""
        return x[slice(*(self.queries[row] or (0, 0)))] if x.dim() == 3 else x[row]

    def forward(self) -> None:
        """Call the op; its output, its lse and everything around them must be right."""
        q = self.given["q"]
        out = self.arena.empty("out", (*q.shape[:-1], self.free["v"].shape[-1]), q.dtype)
        forget(q)
        with _allocations_in(self.arena), torch.no_grad():
            _, lse = flash_attention(
                **self.given, **self.options, **self.extra, out=out, return_lse=True
            )
        self.arena.check()
        check_said("flash_attention", q, self.certain, self.possible)
        found, found_lse = out.cpu(), lse.cpu()
        for row, own_rows in self.sequences():
            start = (self.queries[row] or (0, 0))[0]
            local = [i - start for i in own_rows]
            q_row = self.queries_of(self.free["q"], row)
            keys, values = (self.keys_of(name, row) for name in "kv")
            (truth, truth_lse), (own, _) = (
                reference_attention(
                    q_row[None], keys[None], values[None], **self.options, dtype=kind
                )
                for kind in (torch.float64, self.dtype)
            )
            got = found[own_rows] if found.dim() == 3 else found[row]
            check(got, truth[0][local], own[0][local], name=f"out of sequence {row}")
            got_lse = found_lse[:, own_rows] if found.dim() == 3 else found_lse[row]
            expected = truth_lse[0][:, local]
            check(got_lse, expected, expected.float(), atol=1e-4, name=f"lse of sequence {row}")
        if found.dim() == 3:
            # Rows of no sequence are not written.
            written = {i for one in self.queries for i in range(*(one or (0, 0)))}
            rest = [i for i in range(found.shape[0]) if i not in written]
            assert bool((found[rest].view(torch.uint8) == 0xFF).all())

    def backward(self, *, deterministic: bool) -> None:
        """The same of the gradients."""
        leaves = [self.given[name].requires_grad_() for name in "qkv"]
        rest = {name: x for name, x in self.given.items() if name not in "qkv"}
        dout = self._randn(*self.free["q"].shape[:-1], self.free["v"].shape[-1])
        with _allocations_in(self.arena):
            out = flash_attention(
                *leaves, **rest, **self.options, **self.extra, deterministic=deterministic
            )
            forget(out)
            given = self.arena.put("dout", dout.to(self.arena.device))
            grads = torch.autograd.grad(out, leaves, given)
        self.arena.check()
        said = self.certain - {"block_table"}
        check_said("flash_attention", out, said, self.possible)
        dq, dk, dv = (x.cpu() for x in grads)
        if dq.dim() == 3:
            in_order = [one for one in self.queries if one is not None]
            if any(later[0] < earlier[1] for earlier, later in itertools.pairwise(in_order)):
                return  # they share places of the workspace
        shared_k = self.shared_rows(self.keys) if dk.dim() == 3 else set()
        for row in range(self.drawn["batch"]):
            if not self.is_known(row):
                continue
            q_row, dout_row = (self.queries_of(x, row) for x in (self.free["q"], dout))
            keys, values = (self.keys_of(name, row) for name in "kv")
            if not len(q_row) or not len(keys):
                continue
            truth, own = (
                reference_attention_backward(
                    q_row[None], keys[None], values[None], dout_row[None], **self.options,
                    dtype=kind,
                )
                for kind in (torch.float64, self.dtype)
            )  # fmt: skip
            start, end = self.keys[row] or (0, 0)
            local = [i for i in range(end - start) if dk.dim() == 4 or start + i not in shared_k]
            largest = max(float(x.abs().max()) for x in truth)
            atol = torch.finfo(self.dtype).eps * largest
            got = (
                self.queries_of(dq, row),
                *((x[row] if x.dim() == 4 else x[start:end])[local] for x in (dk, dv)),
            )
            for name, found, exact, rounded in zip(
                ("dq", "dk", "dv"), got, truth, own, strict=True
            ):
                rows = local if name != "dq" else list(range(len(found)))
                check(
                    found, exact[0][rows], rounded[0][rows], atol=atol,
                    name=f"{name} of sequence {row}",
                )  # fmt: skip
        for x, ranges in ((dq, self.queries), (dk, self.keys), (dv, self.keys)):
            if x.dim() == 3:
                taken = {i for one in ranges for i in range(*(one or (0, 0)))}
                free = [i for i in range(x.shape[0]) if i not in taken]
                assert not bool(x[free].any()), "rows of no sequence have gradients"
