"""Caches of int8, and of int8 and e4m3 with a scale a token: written by append_kv and read by
decode_attention, against fp64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bits import same_bits
from drawn_sinks import KINDS, draw_sinks
from refused import check_refused
from ways import Way

from kernel_hub.ops import append_kv, decode_attention, linear, qkv_linear
from kernel_hub.ops.core.kv_cache import BYTES
from kernel_hub.ops.kv_cache import decode_plan
from kernel_hub.testing import reference
from kernel_hub.testing.compare import attention_parts_atol, check
from kernel_hub.testing.guard import Guarded
from kernel_hub.testing.reference_attention import reference_attention

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
HALF = (torch.float16, torch.bfloat16)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


class Caches:
    """Both caches of sequences, in pages or not, and their scales: of tokens or of heads."""

    def __init__(
        self, way: Way, lot: random.Random, kind: torch.dtype, lengths: list[int], kv_heads: int,
        head_dim: int, *, of_tokens: bool, room: int = 0,
    ) -> None:  # fmt: skip
        self.way, self.kind, self.lengths = way, kind, lengths
        self.of_tokens = of_tokens
        most = max([*lengths, 0]) + room + 1
        self.page_size = lot.choice((0, 1, 2, 7, 16, 32, 256))
        pages = len(lengths)
        rows, self.table = most, None
        if self.page_size:
            columns, rows = -(-most // self.page_size), self.page_size
            pages = len(lengths) * columns + 2
            order = torch.randperm(
                pages, generator=torch.Generator().manual_seed(lot.randrange(1 << 20))
            )
            self.table = order[: len(lengths) * columns].view(-1, columns).int().to(way.device)
        seed = lot.randrange(1 << 20)
        shape = (pages, rows, kv_heads, head_dim)
        # What no token has is anything: of scales nan.
        self.caches = [Guarded(shape, kind, way.device) for _ in "kv"]
        for i, cache in enumerate(self.caches):
            noise = 50 * way.randn(*shape, seed=seed + i)
            cache.tensor.copy_(noise.clamp(-127, 127).round().to(kind))
        self.scales = []
        for i in range(2):
            if of_tokens:
                scales = way.randn(*shape[:3], seed=seed + 2 + i).exp2() / 64
                seen = torch.zeros(shape[:2], dtype=torch.bool, device=way.device)
                # Rising or falling: the largest so far is not that of the first tile.
                steep = lot.choice((-8.0, 0.0, 8.0))
                for row, length in enumerate(lengths):
                    where = self.where(row, 0, max(length, 0))
                    seen[where] = True
                    ramp = torch.linspace(-abs(steep), steep - abs(steep), len(where[0])).exp2()
                    scales[where] *= ramp[:, None].to(way.device)
                scales[~seen] = torch.nan
                self.scales.append(Guarded(scales.shape, torch.float32, way.device))
                self.scales[i].tensor.copy_(scales)
            else:
                scales = 0.01 + way.randn(kv_heads, seed=seed + 2 + i).abs() / 32
                self.scales.append(Guarded(scales.shape, torch.float32, way.device))
                self.scales[i].tensor.copy_(scales)

    def where(self, row: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first two indices of tokens of a sequence."""
        at = torch.arange(first, end, device=self.way.device)
        if self.table is None:
            return torch.full_like(at, row), at
        return self.table[row].long()[at // self.page_size], at % self.page_size

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(x.tensor for x in self.caches)

    @property
    def options(self) -> dict[str, Any]:
        suffix = "_cache" if self.of_tokens else ""
        k_scale, v_scale = (x.tensor for x in self.scales)
        return {
            f"k_scale{suffix}": k_scale, f"v_scale{suffix}": v_scale, "block_table": self.table,
        }  # fmt: skip

    def check_bounds(self) -> None:
        for name, each in zip(("k_cache", "v_cache", "k", "v"), self.caches + self.scales,
                              strict=True):  # fmt: skip
            each.check(name)

    def values(self, which: int, row: int, first: int, end: int) -> torch.Tensor:
        """What tokens of a sequence are, in fp64."""
        where = self.where(row, first, end)
        cache = self.tensors[which].float().double()[where]
        scale = self.scales[which].tensor.double()
        return cache * (scale[where][..., None] if self.of_tokens else scale[:, None])


def drawn_lengths(lot: random.Random, *, least: int = 0) -> list[int]:
    lengths = (0, 1, 15, 16, 17, 63, 64, 65, 128, 129, 200, lot.randrange(300))
    return [max(least, lot.choice(lengths)) for _ in range(lot.choice((1, 2, 4)))]


@pytest.mark.parametrize("number", range(24))
def test_decode_by_lot(way: Way, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lot = random.Random(f"scaled decode {number}")
    if lot.random() < 0.5:  # equal shares, worked out from the lengths, of short caches too
        monkeypatch.setattr(decode_plan, "SHORT_TOKENS", 0)
    of_tokens = number % 3 != 0
    kind = lot.choice((INT8, E4M3)) if of_tokens else INT8
    dtype = HALF[number % 2]
    kv_heads, seqlen_q = lot.choice((1, 2, 3)), lot.choice((1, 1, 2, 5))
    heads = kv_heads * lot.choice((1, 2, 4, 8))
    head_dim = lot.choice((16, 64, 64, 80, 128, 128, 192, 256))
    appends = not of_tokens and lot.random() < 0.5
    lengths = drawn_lengths(lot)
    caches = Caches(
        way, lot, kind, lengths, kv_heads, head_dim, of_tokens=of_tokens, room=seqlen_q
    )  # fmt: skip
    given = list(lengths)
    if len(lengths) > 1 and lot.random() < 0.4:
        given[lot.randrange(len(lengths))] = -1  # finished
    q = way.randn(len(lengths), seqlen_q, heads, head_dim, dtype=dtype, seed=number)
    options: dict[str, Any] = {
        "softmax_scale": lot.choice((None, 0.3)), "softcap": lot.choice((0.0, 0.0, 5.0)),
        "window_size": lot.choice(((-1, -1), (-1, -1), (0, 0), (40, 0))),
    }  # fmt: skip
    if lot.random() < 0.4:
        options["sinks"] = draw_sinks(lot.choice(list(KINDS)), heads, number, way.device)
    if lot.random() < 0.3:
        options["alibi_slopes"] = way.randn(heads, seed=number + 1).abs()
    more: dict[str, Any] = {}
    if appends:
        new = [way.randn(len(lengths), seqlen_q, kv_heads, head_dim, dtype=dtype, seed=number + i)
               for i in (2, 3)]  # fmt: skip
        more = {"k": new[0], "v": new[1]}
    before = [x.clone() for x in caches.tensors]
    out = Guarded(q.shape, dtype, way.device)
    _, lse = decode_attention(
        q, *caches.tensors, cache_seqlens=torch.tensor(given, device=way.device, dtype=torch.int32),
        num_splits=lot.choice((0, 0, 1, 3)), out=out.tensor, return_lse=True, **more, **options,
        **caches.options,
    )  # fmt: skip
    out.check()
    caches.check_bounds()
    for which, was in enumerate(before):
        for row, length in enumerate(given):
            if appends and length >= 0:
                where = caches.where(row, length, length + seqlen_q)
                scale = caches.scales[which].tensor[:, None]
                truth = (new[which][row].double() / scale).clamp(-127, 127)
                found = caches.tensors[which][where]
                assert ((found.double() - truth).abs() <= 0.5001).all()
                was[where] = found
        same_bits(bytes_of(caches.tensors[which]), bytes_of(was), name="where nothing goes")
    for row, length in enumerate(given):
        if length < 0:
            assert (out.tensor[row] == 0).all()
            continue
        length += seqlen_q if appends else 0
        keys, values = (caches.values(which, row, 0, length)[None] for which in range(2))
        results = [
            reference_attention(
                q[row : row + 1].to(as_type), keys.to(as_type), values.to(as_type), causal=True,
                dtype=as_type, **options,
            )
            for as_type in (torch.float64, dtype)
        ]  # fmt: skip
        (truth, truth_lse), (own, own_lse) = results
        atol = attention_parts_atol(truth, dtype, options["softcap"])
        check(out.tensor[row : row + 1], truth, own, atol=atol)
        check(lse[row : row + 1], truth_lse, own_lse, atol=2e-3, name="lse")


@pytest.mark.parametrize("number", range(24))
def test_append_by_lot(way: Way, number: int) -> None:
    lot = random.Random(f"scaled append {number}")
    of_tokens = number % 3 != 0
    kind = lot.choice((INT8, E4M3)) if of_tokens else INT8
    dtype = HALF[number % 2]
    kv_heads, seqlen = lot.choice((1, 2, 5)), lot.choice((1, 2, 7))
    heads = kv_heads * lot.choice((1, 3, 8))
    head_dim = lot.choice((16, 64, 80, 127, 128, 256, 520))
    turns, norms = lot.random() < 0.7, lot.random() < 0.6
    lengths = drawn_lengths(lot)
    caches = Caches(way, lot, kind, lengths, kv_heads, head_dim, of_tokens=of_tokens, room=seqlen)
    given = list(lengths)
    if len(lengths) > 1 and lot.random() < 0.4:
        given[lot.randrange(len(lengths))] = -1  # finished
    batch, interleaved = len(lengths), lot.random() < 0.5
    k, v = (way.randn(batch, seqlen, kv_heads, head_dim, dtype=dtype, seed=number + i)
            for i in (1, 2))  # fmt: skip
    if lot.random() < 0.5:
        v[:, :, 0] = 0  # a scale of 0
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(given, dtype=torch.int32)}
    options["cache_seqlens"] = options["cache_seqlens"].to(way.device)
    q = out_q = out_k = None
    if norms:
        weight = way.randn(head_dim, dtype=lot.choice((dtype, torch.float32)), seed=number + 3)
        options |= {"k_norm_weight": weight, "eps": 1e-5, "weight_offset": 1.0}
    positions = torch.tensor(given, device=way.device)[:, None].clamp(min=0) + torch.arange(
        seqlen, device=way.device
    )
    if turns:
        rotary_dim = lot.choice((head_dim // 2 * 2, max(2, head_dim // 32 * 16)))
        angles = 3 * way.randn(max(lengths) + seqlen + 1, rotary_dim // 2, seed=number + 4)
        table = [x.to(lot.choice((dtype, torch.float32))) for x in (angles.cos(), angles.sin())]
        table = [x.to(table[0].dtype) for x in table]
        options |= {"cos": table[0], "sin": table[1], "interleaved": interleaved}
        q = way.randn(batch, seqlen, heads, head_dim, dtype=dtype, seed=number)
        out_q, out_k = (Guarded(x.shape, dtype, way.device) for x in (q, k))
        options |= {"q": q, "out_q": out_q.tensor, "out_k": out_k.tensor}
    before = [x.clone() for x in (*caches.tensors, *(x.tensor for x in caches.scales))]
    append_kv(k, v, *caches.tensors, **options, **caches.options)
    caches.check_bounds()

    def turned(x: torch.Tensor, as_type: torch.dtype, weight: Any = None) -> torch.Tensor:
        x = x.to(as_type)
        if weight is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
            x = x * (weight.to(as_type) + 1.0)
        if not turns:
            return x
        return reference.rope(
            x, *table, positions, interleaved=interleaved, dtype=as_type
        )  # fmt: skip

    live = [row for row, length in enumerate(given) if length >= 0]
    weight = options.get("k_norm_weight")
    keys = turned(k, torch.float64, weight)
    for which, truth in enumerate((keys, v.double())):
        for row in live:
            where = caches.where(row, given[row], given[row] + seqlen)
            scale = caches.scales[which].tensor.double()
            if of_tokens:
                expected = truth[row].abs().amax(-1) / BYTES[kind]
                torch.testing.assert_close(scale[where], expected, rtol=1e-5, atol=0.0)
                before[which + 2][where] = caches.scales[which].tensor[where]
                scale = scale[where]
            scale = scale[..., None]
            found = caches.values(which, row, given[row], given[row] + seqlen)
            most = scale * BYTES[kind]
            held = truth[row].clamp(-most, most) if not of_tokens else truth[row]
            step = scale * 0.5 if kind == INT8 else (held.abs() / 16).maximum(scale / 1024)
            assert ((found - held).abs() <= step * 1.001 + scale * 1e-3).all()
            before[which][where] = caches.tensors[which][where]
    after = (*caches.tensors, *(x.tensor for x in caches.scales))
    for found, was in zip(after, before, strict=True):
        same_bits(bytes_of(found), bytes_of(was), name="where nothing goes")
    for out, x, x_weight in ((out_q, q, None), (out_k, k, weight)):
        if out is None or x is None or not live:
            continue
        out.tensor[[row for row in range(batch) if row not in live]] = 0  # never written
        out.check()
        truth = turned(x, torch.float64, x_weight)[live]
        check(out.tensor[live], truth, turned(x, dtype, x_weight)[live])


def test_heads_that_are_not_finite(way: Way) -> None:
    """All of such a head reads as nan; the others do not."""
    k = way.randn(1, 3, 2, 64, dtype=torch.bfloat16)
    k[0, 0, 0, 5], k[0, 1, 1, 63] = torch.nan, torch.inf
    for kind in (INT8, E4M3):
        cache = torch.zeros(2, 1, 4, 2, 64, device=way.device).to(kind)
        scales = torch.zeros(2, 1, 4, 2, device=way.device)
        append_kv(k, k, *cache, k_scale_cache=scales[0], v_scale_cache=scales[1])
        read = cache.float() * scales[..., None]
        assert not read[:, 0, 0, 0].isfinite().any()
        assert read[:, 0, 1, 1].isnan().any()
        read[:, 0, 0, 0] = read[:, 0, 1, 1] = 0
        assert read.isfinite().all()


def test_small_scales_of_values(way: Way) -> None:
    """Probabilities times such scales would be below what fp16 holds."""
    for kind in (INT8, E4M3):
        cache = way.randn(1, 96, 1, 64).mul(40).clamp(-127, 127).round().to(kind)
        q = way.randn(1, 1, 4, 64, dtype=torch.bfloat16, seed=1)
        scales = torch.full((1, 96, 1), 2e-3, device=way.device)
        small = torch.full((1, 96, 1), 1e-9, device=way.device)
        lengths = torch.tensor([96], dtype=torch.int32, device=way.device)
        given = {"cache_seqlens": lengths, "k_scale_cache": scales}
        out = decode_attention(q, cache, cache, v_scale_cache=small, **given)
        large = decode_attention(q, cache, cache, v_scale_cache=small * 1e9, **given)
        torch.testing.assert_close(out.float() * 1e9, large.float(), rtol=2e-2, atol=1e-2)


K = torch.zeros(2, 1, 2, 64, dtype=torch.bfloat16)
Q = torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16)
CACHE = torch.zeros(2, 8, 2, 64, dtype=INT8)
HEADS, TOKENS = torch.ones(2), torch.zeros(2, 8, 2)
LENGTHS = torch.zeros(2, dtype=torch.int32)
BOTH = {"k_scale_cache": TOKENS, "v_scale_cache": TOKENS.clone()}
REFUSED = [
    ({}, ["k_scale", "a scale a head, or k_scale_cache", "None"]),
    ({"k_scale": HEADS}, ["v_scale", "a scale a head, or v_scale_cache", "None"]),
    ({"k_scale_cache": TOKENS}, ["v_scale_cache", "a tensor, as k_scale_cache is one"]),
    ({**BOTH, "k_scale": HEADS}, ["k_scale", "None where k_scale_cache is given"]),
    ({**BOTH, "v_scale_cache": TOKENS[:, :7]}, ["v_scale_cache", "(2, 8, 2)", "(2, 7, 2)"]),
    ({**BOTH, "v_scale_cache": TOKENS.half()}, ["v_scale_cache", "float32", "float16"]),
    ({"k_scale": HEADS[:1], "v_scale": HEADS}, ["k_scale", "(2,)", "(1,)"]),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_refusals(options: dict[str, Any], words: list[str]) -> None:
    options = {"cache_seqlens": LENGTHS, **options}
    check_refused("append_kv", lambda: append_kv(K, K, CACHE, CACHE.clone(), **options), words)
    check_refused("decode_attention", lambda: decode_attention(Q, CACHE, CACHE, **options), words)


def test_other_refusals() -> None:
    check_refused(
        "decode_attention",
        lambda: decode_attention(Q, CACHE, CACHE, cache_seqlens=LENGTHS, k=K, v=K, **BOTH),
        ["k", "None where k_scale_cache is given", "append_kv"],
    )
    own = K.new_zeros(2, 8, 2, 64)
    check_refused(
        "append_kv", lambda: append_kv(K, K, own, own.clone(), **BOTH),
        ["k_scale_cache", "None for a cache of bfloat16"],
    )  # fmt: skip
    check_refused(
        "append_kv",
        lambda: append_kv(K.float(), K.float(), CACHE, CACHE.clone(), **BOTH),
        ["k_cache", "float32 or float8_e4m3fn", "int8"],
    )
    check_refused(
        "append_kv",
        lambda: append_kv(K, K, CACHE, CACHE.clone(), k_scale_cache=TOKENS, v_scale_cache=TOKENS),
        ["v_scale_cache", "k_scale_cache"],
    )
    batch = {"cache_seqlens": LENGTHS, "deterministic": "batch", **BOTH}
    words = ["k_cache", "the dtype of q where deterministic is 'batch'"]
    check_refused("decode_attention", lambda: decode_attention(Q, CACHE, CACHE, **batch), words)


@pytest.mark.parametrize("of_tokens", [False, True])
def test_registered(way: Way, of_tokens: bool) -> None:
    lot = random.Random(5)
    caches = Caches(way, lot, INT8, [5, 9], 2, 64, of_tokens=of_tokens, room=3)
    lengths = torch.tensor([5, 9], dtype=torch.int32, device=way.device)
    k = way.randn(2, 1, 2, 64, dtype=torch.bfloat16)
    options = {"k_scale": None, "v_scale": None, "k_scale_cache": None, "v_scale_cache": None}
    options |= caches.options
    table = options.pop("block_table")
    scales = [options.pop(x) for x in ("k_scale", "v_scale", "k_scale_cache", "v_scale_cache")]
    torch.library.opcheck(
        torch.ops.kernel_hub.append_kv.default,
        (k, k, *caches.tensors, lengths, table, *[None] * 6, False, 0, *scales[:2], *[None] * 4,
         1e-6, 0.0, *scales[2:]),
    )  # fmt: skip
    q = way.randn(2, 1, 4, 64, dtype=torch.bfloat16)
    torch.library.opcheck(
        torch.ops.kernel_hub.decode_attention.default,
        (q, *caches.tensors, lengths, None, None, table, *[None] * 3, *scales[:2], *[None] * 3,
         False, 0, 0.1, -1, 0.0, 0, torch.empty_like(q), None, *scales[2:]),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [INT8, E4M3], ids=["int8", "e4m3"])
def test_through_qkv_linear(way: Way, kind: torch.dtype) -> None:
    """The bits of the projection appended."""
    x = way.randn(2, 3, 64, dtype=torch.bfloat16)
    w = way.randn(8 * 32, 64, dtype=torch.bfloat16, seed=1) / 8
    for scale in ("_cache", "") if kind == INT8 else ("_cache",):
        found, expected = (
            [torch.zeros(2, 4, 2, 32, device=way.device).to(kind) for _ in "kv"] for _ in "ab"
        )
        scales = [
            [torch.full((2, 4, 2) if scale else (2,), 0.02, device=way.device) for _ in "kv"]
            for _ in "ab"
        ]
        options = [
            {f"k_scale{scale}": k_scale, f"v_scale{scale}": v_scale} for k_scale, v_scale in scales
        ]
        out_q, _, _ = qkv_linear(
            x, w, num_heads=4, num_kv_heads=2, k_cache=found[0], v_cache=found[1], **options[0]
        )
        heads = linear(x, w).view(2, 3, 8, 32)
        append_kv(heads[:, :, 4:6], heads[:, :, 6:], *expected, **options[1])
        same_bits(out_q, heads[:, :, :4].contiguous())
        for mine, theirs in zip((*found, *scales[0]), (*expected, *scales[1]), strict=True):
            assert torch.equal(bytes_of(mine), bytes_of(theirs))
