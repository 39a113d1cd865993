"""rope, append_kv and qkv_linear with tables that lie, drawn by lot between guard bands.

Rotated by a position that is no row of the table: nan. A token without a place, or outside every
sequence: not written. Where cu_seqlens lie, which sequence a token is of is nobody's business, and
only what must not happen is looked for.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from arena import Arena, outside
from bits import same_bits
from led_outside import check_said, forget

from kernel_hub.ops import append_kv, qkv_linear, rope
from kernel_hub.ops.matmul import paired_plan
from kernel_hub.testing import reference
from kernel_hub.testing.compare import check

E4M3 = torch.float8_e4m3fn
FAR = (2**32, 2**32 + 1, -(2**32), 2**62, -(2**63), 2**63 - 1)


def _positions(generator: random.Random, count: int, rows: int) -> tuple[torch.Tensor, bool]:
    """Rows of a table of `rows`, some of them none; whether there is one of these."""
    kind = generator.choice((torch.int32, torch.int64))
    found = [generator.randrange(rows) for _ in range(count)]
    is_hostile = False
    for i in range(count):
        if generator.random() < 0.2:
            far = FAR if kind == torch.int64 and generator.random() < 0.5 else ()
            found[i] = generator.choice(far) if far else outside(generator, rows)
            is_hostile = True
    return torch.tensor(found, dtype=kind), is_hostile


def _table(seed: torch.Generator, rows: int, half: int, dtype: torch.dtype) -> dict[str, Any]:
    angles = torch.randn(rows, half, generator=seed)
    return {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}


def turned(
    x: torch.Tensor, given: dict[str, Any], positions: torch.Tensor, kind: torch.dtype,
    interleaved: bool,
) -> torch.Tensor:  # fmt: skip
    """(tokens, heads, head_dim) rotated in `kind`; nan where the position is none."""
    rows = given["cos"].shape[0]
    cos, sin = (
        torch.cat((given[name].to(kind), torch.full((1, given[name].shape[1]), math.nan)))
        for name in ("cos", "sin")
    )
    at = torch.where((positions >= 0) & (positions < rows), positions, rows)
    return reference.rope(x, cos, sin, at, interleaved=interleaved, dtype=kind)


def hostile_rope(generator: random.Random, arena: Arena) -> None:
    """One call, drawn, run and checked."""
    choose = generator.choice
    seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
    dtype = choose((torch.float16, torch.bfloat16, torch.float32))
    heads, kv_heads = choose(((8, 2), (3, 1), (1, 1)))
    head_dim = choose((16, 64, 80, 128))
    half = choose((head_dim // 2, head_dim // 4))
    tokens, rows = choose((1, 7, 33)), choose((1, 5, 50))
    interleaved = choose((False, True))
    positions, is_hostile = _positions(generator, tokens, rows)
    given = {
        "q": torch.randn(tokens, heads, head_dim, generator=seed).to(dtype),
        "k": torch.randn(tokens, kv_heads, head_dim, generator=seed).to(dtype),
        **_table(seed, rows, half, choose((torch.float32, dtype))),
        "positions": positions,
    }
    print(dtype, heads, kv_heads, head_dim, half, rows, interleaved, positions)
    on = arena.put_all(**{name: x.to(arena.device) for name, x in given.items()})
    outs = {f"out_{name}": arena.empty(f"out_{name}", given[name].shape, dtype) for name in "qk"}
    forget(on["q"])
    rope(**on, **outs, interleaved=interleaved)
    arena.check()
    for name in "qk":
        truth, own = (
            turned(given[name], given, positions, kind, interleaved)
            for kind in (torch.float64, dtype)
        )
        check(outs[f"out_{name}"].cpu(), truth, own, name=f"out_{name}")
    check_said("rope", on["q"], ("positions",) if is_hostile else ())


class Routing:
    """Where some new tokens go, drawn: tables for append_kv and qkv_linear, and places."""

    def __init__(self, generator: random.Random, kinds: tuple[str, ...]) -> None:
        choose = generator.choice
        self.kind = choose(kinds)
        self.batch = generator.randrange(1, 5)
        self.page_size = choose((1, 8, 16, 24))
        self.tables: dict[str, torch.Tensor] = {}
        self.certain: set[str] = set()
        self.possible: set[str] = set()
        self.has_order = True  # cu_seqlens do not lie
        is_ragged = self.kind == "ragged"
        counts = [generator.randrange(5) if is_ragged else 3 for _ in range(self.batch)]
        if self.kind == "slots":
            counts = [generator.randrange(1, 20)]
        self.total = sum(counts) + (generator.randrange(3) if is_ragged else 0)
        self.total = max(self.total, 1)
        self.leading = (self.batch, 3) if self.kind in ("dense", "paged") else (self.total,)
        columns = generator.randrange(1, 4)
        self.num_pages = self.batch * columns + 1
        if self.kind == "dense":
            self.num_pages, self.page_size = self.batch, generator.randrange(3, 40)
        starts = [0, *itertools.accumulate(counts)]
        if self.kind == "slots":
            self._draw_slots(generator)
            return
        room = self.page_size if self.kind == "dense" else columns * self.page_size
        lengths = [generator.randrange(max(1, room - count + 1)) for count in counts]
        for row in range(self.batch):
            if generator.random() < 0.3:
                lengths[row] = outside(generator, room)
        table = None
        if self.kind != "dense":
            order = generator.sample(range(self.num_pages), self.batch * columns)
            table = [order[row * columns : (row + 1) * columns] for row in range(self.batch)]
            for row, column in itertools.product(range(self.batch), range(columns)):
                if generator.random() < 0.2:
                    table[row][column] = outside(generator, self.num_pages)
            self.tables["block_table"] = torch.tensor(table, dtype=torch.int32)
        self.tables["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
        self.lengths, self.in_sequence = lengths, [-(2**40)] * self.total
        self.places: list[tuple[int, int] | None] = [None] * self.total
        self.inside = [False] * self.total
        for row, (start, end) in enumerate(itertools.pairwise(starts)):
            for token in range(start, end):
                n = self.in_sequence[token] = lengths[row] + token - start
                self.inside[token] = lengths[row] >= 0
                if lengths[row] < 0:
                    continue
                if n >= room:
                    self.certain.add("cache_seqlens")
                    continue
                page, at = (row, n) if table is None else (
                    table[row][n // self.page_size], n % self.page_size
                )  # fmt: skip
                if 0 <= page < self.num_pages:
                    self.places[token] = (page, at)
                else:
                    self.certain.add("block_table")
        if is_ragged:
            if generator.random() < 0.4:
                self.has_order = False
                for i in range(self.batch + 1):
                    if generator.random() < 0.4:
                        starts[i] = outside(generator, self.total + 1)
                generator.shuffle(starts)
                self.certain.clear()
                self.possible = {"cu_seqlens", "cache_seqlens", "block_table", "positions"}
            self.tables["cu_seqlens"] = torch.tensor(starts, dtype=torch.int32)

    def _draw_slots(self, generator: random.Random) -> None:
        kind = generator.choice((torch.int32, torch.int64))
        limit = self.num_pages * self.page_size
        self.total = min(self.total, limit)
        self.leading = (self.total,)
        slots = generator.sample(range(limit), self.total)
        for i in range(self.total):
            if generator.random() < 0.3:
                far = kind == torch.int64 and generator.random() < 0.5
                slots[i] = generator.choice(FAR) if far else outside(generator, limit)
        self.places = [divmod(slot, self.page_size) if 0 <= slot < limit else None
                       for slot in slots]  # fmt: skip
        if any(not -1 <= slot < limit for slot in slots):
            self.certain.add("slot_mapping")
        self.inside = [True] * self.total
        self.in_sequence = list(range(self.total))
        self.tables["slot_mapping"] = torch.tensor(slots, dtype=kind)

    def at(self, generator: random.Random, rows: int, *, always: bool) -> torch.Tensor:
        """The position of each token; drawn too, now and then."""
        if always or generator.random() < 0.5:
            drawn, _ = _positions(generator, self.total, rows)
            self.tables["positions"] = drawn.view(self.leading)
            at = drawn.long()
        else:
            at = torch.tensor(self.in_sequence)
        known = (at >= 0) & (at < rows)
        if not self.has_order:
            return at
        if any(inside and not one for inside, one in zip(self.inside, known, strict=True)):
            self.certain.add("positions")
        return at


def _check_cache(
    name: str, routing: Routing, found: torch.Tensor, before: torch.Tensor, truth: torch.Tensor,
    own: torch.Tensor,
) -> None:  # fmt: skip
    """Each token in its place, and nothing else different."""
    expected, rows = before.clone(), []
    for token, place in enumerate(routing.places):
        if place is not None:
            expected[place] = found[place]
            rows.append(token)
    got = [found[routing.places[token]] for token in rows]  # type: ignore[index]
    if rows:
        check(torch.stack(got).float(), truth[rows], own[rows], name=f"{name}, tokens {rows}")
    same_bits(found.view(torch.uint8), expected.view(torch.uint8), name=f"{name}, elsewhere")


def hostile_append(generator: random.Random, arena: Arena) -> None:
    """One call of append_kv, drawn, run and checked."""
    choose = generator.choice
    seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
    routing = Routing(generator, ("dense", "paged", "ragged", "slots"))
    dtype = choose((torch.float16, torch.bfloat16, torch.float32))
    cache_dtype = choose((dtype, dtype, E4M3))
    kv_heads, group, head_dim = choose((1, 2)), choose((1, 4)), choose((16, 18, 64, 128))
    interleaved, turns = choose((False, True)), choose((False, True))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=seed).to(dtype)

    new = (*routing.leading, kv_heads, head_dim)
    pages = (routing.num_pages, routing.page_size, kv_heads, head_dim)
    given: dict[str, Any] = {"k": randn(*new), "v": randn(*new)}
    if turns:
        given["q"] = randn(*routing.leading, kv_heads * group, head_dim)
        rows = choose((1, 40))
        given |= _table(seed, rows, head_dim // 2, choose((torch.float32, dtype)))
        at = routing.at(generator, rows, always=routing.kind == "slots")
    before = [randn(*pages).to(cache_dtype) for _ in "kv"]
    given |= {"k_cache": before[0], "v_cache": before[1], **routing.tables}
    print(routing.__dict__, dtype, cache_dtype, kv_heads, group, head_dim, interleaved, turns)
    on = arena.put_all(**{name: x.to(arena.device) for name, x in given.items()})
    if turns:
        on["out_q"] = arena.empty("out_q", given["q"].shape, dtype)
    norm: dict[str, torch.Tensor] = {}
    if choose((False, True)):
        kind = choose((dtype, torch.float32))
        norm = {f"{x}_norm_weight": randn(head_dim).to(kind) for x in ("qk" if turns else "k")}
        on |= arena.put_all(**{name: x.to(arena.device) for name, x in norm.items()})
    forget(on["k"])
    append_kv(**on, interleaved=interleaved)
    arena.check()
    check_said("append_kv", on["k"], routing.certain, routing.possible)
    if not routing.has_order:
        return

    def expected(name: str, kind: torch.dtype) -> torch.Tensor:
        x = given[name].flatten(0, -3)
        if f"{name}_norm_weight" in norm:
            x = reference.rms_norm(x, norm[f"{name}_norm_weight"], dtype=kind)
        x = turned(x, given, at, kind, interleaved) if turns and name != "v" else x.to(kind)
        if name != "q" and cache_dtype == E4M3:
            return x.clamp(-448, 448).to(E4M3).to(kind) if kind != torch.float64 else x
        return x

    for name, old in zip("kv", before, strict=True):
        truth, own = (expected(name, kind) for kind in (torch.float64, dtype))
        _check_cache(f"{name}_cache", routing, on[f"{name}_cache"].cpu(), old, truth, own)
    if turns:
        inside = torch.tensor(routing.inside)
        out = on["out_q"].cpu().flatten(0, -3)
        truth, own = (expected("q", kind)[inside] for kind in (torch.float64, dtype))
        check(out[inside], truth, own, name="out_q")
        assert bool((out[~inside].contiguous().view(torch.uint8) == 0xFF).all())


@contextlib.contextmanager
def forcing_qkv(variant: str) -> Iterator[list[tuple[int, int, int]]]:
    """Within, qkv_linear takes `variant` wherever that applies; yields (m, n, k) of these."""
    table, row = paired_plan.TABLES["qkv_linear"], paired_plan.Row(variant, {})
    taken: list[tuple[int, int, int]] = []

    def lookup(gpu: Any, m: int, /, *, n: int, k: int) -> Any:
        if paired_plan._check("qkv_linear", row, gpu.arch, m, n=n, k=k):
            return None
        taken.append((m, n, k))
        return row

    with table.forcing(row), mock.patch.object(table, "lookup", lookup):
        yield taken


def hostile_qkv(generator: random.Random, arena: Arena) -> None:
    """One call of qkv_linear into a cache, drawn, run and checked."""
    choose = generator.choice
    seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
    routing = Routing(generator, ("dense", "paged", "ragged", "slots"))
    dtype = choose((torch.float16, torch.bfloat16))
    heads, kv_heads = choose(((4, 2), (3, 1)))
    head_dim = choose((32, 64))
    hidden, interleaved = choose((64, 136, 520)), choose((False, True))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=seed).to(dtype)

    pages = (routing.num_pages, routing.page_size, kv_heads, head_dim)
    before = [randn(*pages) for _ in "kv"]
    rows = choose((1, 40))
    given: dict[str, Any] = {
        "x": randn(*routing.leading, hidden),
        "w_qkv": randn((heads + 2 * kv_heads) * head_dim, hidden),
        "k_cache": before[0], "v_cache": before[1],
        **_table(seed, rows, head_dim // 2, torch.float32),
    }  # fmt: skip
    at = routing.at(generator, rows, always=routing.kind == "slots")
    given |= routing.tables
    print(routing.__dict__, dtype, heads, kv_heads, head_dim, hidden, interleaved)
    on = arena.put_all(**{name: x.to(arena.device) for name, x in given.items()})
    on["out_q"] = arena.empty("out_q", (*routing.leading, heads, head_dim), dtype)
    forget(on["x"])
    qkv_linear(**on, num_heads=heads, num_kv_heads=kv_heads, interleaved=interleaved)
    arena.check()
    check_said("qkv_linear", on["x"], routing.certain, routing.possible)
    if not routing.has_order:
        return

    def expected(kind: torch.dtype) -> tuple[torch.Tensor, ...]:
        values = given["x"].to(kind).flatten(0, -2) @ given["w_qkv"].to(kind).T
        found = values.view(routing.total, -1, head_dim)
        q, k, v = found.split([heads, kv_heads, kv_heads], 1)
        return (*(turned(part, given, at, kind, interleaved) for part in (q, k)), v)

    truth, own = expected(torch.float64), expected(dtype)
    for i, old in enumerate(before):
        name = f"{'kv'[i]}_cache"
        _check_cache(name, routing, on[name].cpu(), old, truth[i + 1], own[i + 1])
    inside = torch.tensor(routing.inside)
    out = on["out_q"].cpu().flatten(0, -3)
    check(out[inside], truth[0][inside], own[0][inside], name="out_q")
    assert bool((out[~inside].contiguous().view(torch.uint8) == 0xFF).all())
