"""append_kv against fp64: every way to say where tokens go, rotation, fp8 caches, bad tables."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from bits import same_bits
from ways import DTYPES, Way

from kernel_hub.ops import append_kv, rope
from kernel_hub.testing import reference
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

E4M3 = torch.float8_e4m3fn
MAX_POSITION = 70
LENGTHS, PAST = (3, 0, 7, 1), (5, 9, 0, 31)
MODES = ["contiguous", "dense paged", "paged", "slots", "no past"]
# (num_heads, num_kv_heads, head_dim, rotary_dim): GQA, partial rotation, odd sizes
SHAPES = [
    (8, 2, 128, 128), (5, 1, 64, 32), (4, 4, 80, 16), (0, 8, 128, 128), (3, 3, 40, 20),
    (2, 1, 127, 126), (1, 1, 2, 2), (2, 2, 96, 0), (32, 8, 64, 64), (4, 1, 256, 64),
]  # fmt: skip


class Append:
    """Inputs of one call in one of MODES, and poisoned caches and outputs."""

    def __init__(
        self, way: Way, mode: str, dtype: torch.dtype = torch.bfloat16, *,
        shape: tuple[int, int, int, int] = (8, 2, 64, 64), cache: torch.dtype | None = None,
        layout: str = "half", table32: bool = True, page_size: int = 8, shift: int = 0,
        norm: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        num_heads, num_kv_heads, head_dim, rotary_dim = shape
        self.way, self.dtype, self.cache_dtype = way, dtype, cache or dtype
        self.norm = norm or {}
        batch, generator = len(LENGTHS), torch.Generator().manual_seed(3)
        past: torch.Tensor | None = torch.tensor(PAST, dtype=torch.int32, device=way.device)
        lengths = list(LENGTHS)
        self.options: dict[str, Any] = {}
        if mode in ("contiguous", "dense paged", "no past"):
            leading: tuple[int, ...] = (batch, 4)
            lengths = [4] * batch
        else:
            leading = (sum(lengths) + 2,)  # two tokens of padding
        total = sum(lengths)
        pages: tuple[int, int] = (batch, 40)
        if mode == "no past":
            past = None
        if mode in ("dense paged", "paged"):
            pages = (batch * 5 + 3, page_size)
            order = torch.randperm(pages[0], generator=generator)[: batch * 5].view(batch, 5)
            self.options["block_table"] = order.to(torch.int32).to(way.device)
        if mode == "slots":
            pages = (48 // page_size, page_size)
            slots = torch.randperm(pages[0] * page_size, generator=generator)[: total + 2]
            slots[2], slots[total:] = -1, -1
            self.options["slot_mapping"] = slots.to(way.device)
        if len(leading) == 1:
            starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            self.options["cu_seqlens"] = starts.to(way.device)
        self.options["cache_seqlens"] = past
        self.total = total
        if layout != "plain":
            half, table = rotary_dim // 2, torch.float32 if table32 else dtype
            angles = torch.arange(MAX_POSITION)[:, None] * 50.0 ** -torch.linspace(0, 1, half)
            self.options["cos"] = angles.cos().to(table).to(way.device)
            self.options["sin"] = angles.sin().to(table).to(way.device)
            self.options["interleaved"] = layout == "interleaved"
        if self.cache_dtype == E4M3:
            scales = torch.rand(2, num_kv_heads, generator=generator) + 0.01
            self.options["k_scale"], self.options["v_scale"] = scales.to(way.device)
        rows = (*leading, num_kv_heads, head_dim)
        self.k, self.v = (way.randn(*rows, dtype=dtype, seed=seed) for seed in (1, 2))
        self.q = None
        if num_heads and (layout != "plain" or self.norm.get("q_norm_weight") is not None):
            self.q = way.randn(*leading, num_heads, head_dim, dtype=dtype, seed=4)
        cache_shape = (*pages, num_kv_heads, head_dim)
        self.caches = [
            Guarded(cache_shape, self.cache_dtype, way.device, shift=shift) for _ in "kv"
        ]
        self.out_q = None if self.q is None else self.guarded(self.q)
        self.out_k = self.guarded(self.k) if layout != "plain" or self.norm else None

    def guarded(self, x: torch.Tensor) -> Guarded:
        return Guarded(x.shape, self.dtype, self.way.device)

    def run(self, **more: Any) -> None:
        outs = {
            name: None if out is None else out.tensor
            for name, out in (("out_q", self.out_q), ("out_k", self.out_k))
        }
        k_cache, v_cache = (cache.tensor for cache in self.caches)
        options = {**self.options, **self.norm, "q": self.q, **outs, **more}
        out_q = append_kv(self.k, self.v, k_cache, v_cache, **options)
        assert out_q is options["out_q"] or self.q is not None

    def inside(self) -> torch.Tensor:
        """Which tokens are of a sequence, and of none that is finished."""
        found = torch.zeros(self.k.shape[:-2].numel(), dtype=torch.bool)
        starts = self.options.get("cu_seqlens")
        if starts is None:
            seqlen = self.k.shape[-3] if self.k.dim() == 4 else len(found)
            starts = torch.arange(0, len(found) + 1, seqlen)
        past = self.options.get("cache_seqlens")
        for row, (start, end) in enumerate(itertools.pairwise(starts.tolist())):
            found[start:end] = past is None or int(past[row]) >= 0
        return found.to(self.way.device)

    def turned(
        self, x: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """q or k of all tokens, normed where it is to be, and rotated, in `dtype`."""
        if weight is not None:
            offset = self.norm.get("weight_offset", 0.0)
            x = reference.rms_norm(
                x, weight, self.norm.get("eps", 1e-6), weight_offset=offset, dtype=dtype
            )
        if "cos" not in self.options:
            return x.to(dtype)
        return reference.rope(
            x, self.options["cos"], self.options["sin"], rows,
            interleaved=self.options["interleaved"], dtype=dtype,
        )  # fmt: skip

    def check(self) -> None:
        """The caches and outputs against fp64, and untouched where no token goes."""
        empty = [torch.full_like(cache.tensor, float("nan")) for cache in self.caches]
        norm = {name: value for name, value in self.norm.items() if name != "q_norm_weight"}
        truth, own = (
            reference.append_kv(self.k, self.v, *empty, **self.options, **norm, dtype=dtype)
            for dtype in (torch.float64, self.dtype)
        )
        *_, at, places = truth
        untouched = torch.ones(self.caches[0].tensor.shape[:2], dtype=torch.bool)
        for place in places:
            if place is not None:
                untouched[place] = False
        for cache, expected, budget, name in zip(
            self.caches, truth[:2], own[:2], ("k_cache", "v_cache"), strict=True
        ):
            cache.check(name)
            check(cache.tensor, expected, budget, name=name)
            rest = cache.tensor.view(torch.uint8)[untouched.to(self.way.device)]
            assert bool((rest == 255).all()), f"{name}: written where no token goes"
        inside, rows = self.inside(), torch.tensor(at, device=self.way.device)
        for out, x, name in ((self.out_q, self.q, "out_q"), (self.out_k, self.k, "out_k")):
            if out is None or x is None:
                continue
            out.check(name)
            turned = [
                self.turned(x.flatten(0, -3), rows, self.norm.get(f"{name[-1]}_norm_weight"), kind)
                for kind in (torch.float64, self.dtype)
            ]
            flat = out.tensor.flatten(0, -3)
            check(flat[inside], turned[0][inside], turned[1][inside], name=name)
            assert bool(flat[~inside].isnan().all()), f"{name}: padding was written"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["plain", "half", "interleaved"])
@pytest.mark.parametrize("cache", ["own", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(
    way: Way, dtype: torch.dtype, cache: str, layout: str, shape: tuple[int, int, int, int]
) -> None:
    number = SHAPES.index(shape) + DTYPES.index(dtype) + len(layout)
    for i, mode in enumerate(MODES):
        if not way.is_gpu and (i + number) % 2:
            continue
        call = Append(
            way, mode, dtype, shape=shape, layout=layout, cache=E4M3 if cache == "e4m3" else None,
            table32=bool((number + i) % 3), page_size=(8, 1, 16, 7)[number % 4],
        )  # fmt: skip
        call.run()
        call.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_unaligned(way: Way, dtype: torch.dtype, mode: str) -> None:
    for cache in (None, E4M3):
        call = Append(way, mode, dtype, cache=cache, shift=3)
        call.run()
        call.check()


@pytest.mark.parametrize("mode", MODES)
def test_free_strides(way: Way, mode: str) -> None:
    """A packed projection in, queries and keys in place, a cache of heads before rows."""
    for cache in (None, E4M3):
        call = Append(way, mode, cache=cache)
        assert call.q is not None
        packed = torch.cat((call.q, call.k, call.v), -2).contiguous()
        q, k, v = packed.split((8, 2, 2), -2)
        caches = [
            Guarded([c.tensor.shape[i] for i in (0, 2, 1, 3)], call.cache_dtype, way.device)
            for c in call.caches
        ]
        turned = [c.tensor.transpose(1, 2) for c in caches]
        assert append_kv(k, v, *turned, **call.options, q=q, out_q=q, out_k=k) is q
        for mine, theirs in zip(caches, call.caches, strict=True):
            mine.check()
            theirs.tensor.view(torch.uint8).copy_(mine.tensor.transpose(1, 2).view(torch.uint8))
        assert call.out_q is not None and call.out_k is not None
        for out, x in ((call.out_q, q), (call.out_k, k)):
            out.tensor[: call.total].copy_(x[: call.total])
        assert bool(torch.equal(v, call.v))
        call.check()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("size", [(64, 32), (80, 16), (96, 96), (24, 8)], ids=str)
def test_many_tokens(
    way: Way, layout: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose threads take heads round after round, and whose warps have several of them."""
    monkeypatch.setattr(importlib.import_module("kernel_hub.ops.kv_cache.append_plan"), "_WARPS", 0)
    for mode, heads, cache in itertools.product(("no past", "paged"), (24, 5), (None, E4M3)):
        call = Append(way, mode, shape=(heads, 4, *size), layout=layout, cache=cache)
        call.run()
        call.check()


def test_the_same_as_rope_and_copies(way: Way) -> None:
    call = Append(way, "no past", shape=(8, 2, 128, 128))
    call.run()
    assert call.q is not None and call.out_q is not None and call.out_k is not None
    q, k = rope(call.q, call.k, call.options["cos"], call.options["sin"])
    same_bits(call.out_q.tensor, q)
    same_bits(call.out_k.tensor, k)
    same_bits(call.caches[0].tensor[:, :4], k)
    same_bits(call.caches[1].tensor[:, :4], call.v)


def test_positions(way: Way) -> None:
    for dtype, shape in itertools.product((torch.int32, torch.int64), ((16,), (4, 4))):
        call = Append(way, "dense paged")
        call.options["positions"] = (torch.arange(16).flip(0) * 3).to(dtype).view(shape)
        call.options["positions"] = call.options["positions"].to(way.device)
        call.run()
        call.check()


def test_slots_of_flat_tokens_need_no_sequences(way: Way) -> None:
    for dtype in (torch.int32, torch.int64):
        call = Append(way, "slots")
        del call.options["cu_seqlens"], call.options["cache_seqlens"]
        call.total = call.k.shape[0]
        call.options["slot_mapping"] = call.options["slot_mapping"].to(dtype)
        call.options["positions"] = torch.arange(call.total, device=way.device)
        call.run()
        call.check()


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_position_outside_the_table_is_nan(way: Way, interleaved: bool) -> None:
    call = Append(way, "no past", shape=(2, 2, 64, 32))
    positions = torch.arange(16, device=way.device).view(4, 4)
    positions[1, 2], positions[3, 0] = -1, MAX_POSITION
    call.run(positions=positions, interleaved=interleaved)
    assert call.out_q is not None
    for rows in (call.out_q.tensor, call.caches[0].tensor[:, :4]):
        lost = rows[..., :32].isnan().all(-1).all(-1)
        assert lost.nonzero().tolist() == [[1, 2], [3, 0]]
        assert not bool(rows[..., 32:].isnan().any())
    same_bits(call.caches[1].tensor[:, :4], call.v)


BAD = {
    "past the end": ("contiguous", "cache_seqlens", [39, 40, 2**31 - 1, 36]),
    "past the table": ("dense paged", "cache_seqlens", [39, 40, 2**31 - 1, -1]),
    "pages": ("paged", "block_table", [[23, -1, 5, 2**31 - 1, -(2**31)]] * 4),
    "slots": (
        "slots",
        "slot_mapping",
        [48, -2, 2**31 - 1, -(2**31), 2**40, -(2**40), 47, *[-1] * 6],
    ),
    "32-bit slots": ("slots", "slot_mapping", [48, -2, 2**31 - 1, -(2**31), 7, *[-1] * 8]),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("cache", [None, E4M3], ids=["own", "e4m3"])
def test_tables_that_point_outside_write_nothing_there(
    way: Way, name: str, cache: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, argument, values = BAD[name]
    call = Append(way, mode, cache=cache)
    call.options["positions"] = torch.zeros_like(call.k[..., 0, 0], dtype=torch.int64)
    wide = torch.int64 if name == "slots" else torch.int32
    call.options[argument] = torch.tensor(values, dtype=wide, device=way.device)
    call.run()
    call.check()
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
    with pytest.raises(Exception, match=rf"append_kv: {argument}: expected .*, found"):
        call.run()


@pytest.mark.parametrize("mode", ["contiguous", "dense paged", "paged"])
@pytest.mark.parametrize("cache", [None, E4M3], ids=["own", "e4m3"])
def test_a_length_below_zero_is_a_finished_row(
    way: Way, mode: str, cache: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its tokens goes anywhere, those that would lie behind the start included."""
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")  # nothing to refuse
    for lengths in ([-1, -3, 5, -(2**31)], [0, 2, -7, 3], [-1] * 4):
        call = Append(way, mode, cache=cache)
        call.options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32).to(way.device)
        call.run()
        call.check()


def test_the_same_bits_every_time(way: Way) -> None:
    first = Append(way, "paged", cache=E4M3)
    first.run()
    for _ in range(20 if way.is_gpu else 1):
        again = Append(way, "paged", cache=E4M3)
        again.run()
        for mine, theirs in zip(again.caches, first.caches, strict=True):
            same_bits(mine.tensor, theirs.tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_value_rounds_to_e4m3_as_torch_does(way: Way, dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(1, 64, 16, 64)
    v = values.to(way.device)
    k_cache, v_cache = (torch.zeros(v.shape, dtype=E4M3, device=way.device) for _ in "kv")
    append_kv(v, v, k_cache, v_cache)
    expected = values.float().clamp(-448, 448).to(E4M3)
    nan = values.isnan()
    for cache in (k_cache, v_cache):
        found = cache.cpu()
        assert bool(found.float()[nan].isnan().all())
        same_bits(found.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])


@pytest.mark.parametrize("shape", [(0, 3, 2, 64), (2, 0, 2, 64), (2, 3, 0, 64), (2, 3, 2, 0)])
def test_nothing_to_do(way: Way, shape: tuple[int, ...]) -> None:
    k = way.randn(*shape)
    cache = way.randn(shape[0], 5, *shape[2:])
    before = cache.clone()
    append_kv(k, k, cache, cache.clone())
    if shape[1] == 0:
        same_bits(cache, before)


def test_caches_of_no_rows_and_tables_of_no_pages(way: Way) -> None:
    k = way.randn(2, 3, 2, 64)
    past = torch.zeros(2, dtype=torch.int32, device=way.device)
    for pages, columns in (((2, 0), 4), ((0, 8), 4), ((5, 8), 0)):
        cache = torch.zeros(*pages, 2, 64, device=way.device)
        table = torch.zeros(2, columns, dtype=torch.int32, device=way.device)
        append_kv(k, k, cache, cache.clone(), cache_seqlens=past, block_table=table)
        if cache.numel() == 0:
            slots = torch.zeros(6, dtype=torch.int64, device=way.device)
            append_kv(k, k, cache, cache.clone(), slot_mapping=slots)
        assert not bool(cache.any())


@pytest.mark.gpu
def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    way = Way("gpu", "cuda")
    pages = (1 << 31) // (16 * 8 * 128) + 9
    caches = torch.zeros(2, pages, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    k = way.randn(5, 8, 128, dtype=torch.bfloat16)
    slots = torch.arange(5, device="cuda") + (pages * 16 - 5)
    append_kv(k, k, caches[0], caches[1], slot_mapping=slots)
    for cache in caches:
        same_bits(cache[-1, -5:], k)
        assert not bool(cache[-1, :-5].any())


@pytest.mark.gpu
def test_a_captured_graph_follows_the_tables() -> None:
    way = Way("gpu", "cuda")
    call = Append(way, "paged")
    call.run()
    call.check()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run()
    call.options["cache_seqlens"].copy_(torch.tensor([1, 2, 3, 4]))
    call.options["block_table"].copy_(call.options["block_table"].flip(0).clone())
    for cache in call.caches:
        cache.tensor.view(torch.uint8).fill_(255)
    graph.replay()
    torch.cuda.synchronize()
    call.check()
