"""How decode_attention is called: what it refuses, what debugging checks, torch.compile."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same_bits
from decode_step import E4M3, Step
from refused import check_refused
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import decode_attention
from kernel_hub.ops.kv_cache import decode_plan

Q, CACHE = torch.ones(2, 1, 4, 64).half(), torch.ones(2, 32, 2, 64).half()
LENS = torch.ones(2, dtype=torch.int32)
NEW, TABLE = torch.ones(2, 1, 2, 64).half(), torch.ones(40, 32)
PAGES = torch.zeros(2, 4, dtype=torch.int32)
OUT = torch.ones(1, 1, 4, 64).half().expand(2, 1, 4, 64)


def refused(q: Any = Q, k: Any = CACHE, v: Any = CACHE, lens: Any = LENS, **options: Any) -> Any:
    return lambda: decode_attention(q, k, v, cache_seqlens=lens, **options)


REFUSED: list[tuple[Callable[[], object], list[str]]] = [
    (refused(q=Q.float()), ["k_cache", "dtype float32", "float16"]),
    (refused(q=Q[0]), ["q", "(batch_size, seqlen_q, num_heads, head_dim)", "(1, 4, 64)"]),
    (refused(q=Q.repeat(1, 17, 1, 1)), ["q", "1 to 16 tokens", "(2, 17, 4, 64)"]),
    (refused(q=torch.ones(2, 1, 4, 264).half()), ["q", "head_dim 16 to 256", "264"]),
    (refused(q=Q[..., :20]), ["q", "multiples of 8", "20"]),
    (refused(q=Q[:, :, :3]), ["k_cache", "divides num_heads = 3", "(2, 32, 2, 64)"]),
    (refused(k=CACHE[:1]), ["k_cache", "shape (2, 32, 2, 64)", "shape (1, 32, 2, 64)"]),
    (refused(k=CACHE.bfloat16()), ["k_cache", "float16, float8_e4m3fn or int8", "bfloat16"]),
    (refused(v=CACHE[:, :31]), ["v_cache", "shape (2, 32, 2, 64)", "shape (2, 31, 2, 64)"]),
    (refused(v=CACHE.to(E4M3)), ["v_cache", "dtype float16", "float8_e4m3fn"]),
    (refused(k=CACHE.mT.contiguous().mT), ["k_cache", "contiguous last", "strides"]),
    (refused(k=torch.ones(2, 32, 2, 68).half()[..., :64]), ["k_cache", "16 bytes", "(4352, 136"]),
    (refused(k=torch.ones(8193).half()[1:].view(2, 32, 2, 64)), ["k_cache", "aligned to 16"]),
    (refused(lens=LENS.long()), ["cache_seqlens", "dtype int32", "int64"]),
    (refused(lens=LENS[:1]), ["cache_seqlens", "shape (2,)", "shape (1,)"]),
    (refused(k=CACHE[0]), ["k_cache", "(batch_size, max_seqlen, num_kv_heads, head_dim)"]),
    (lambda: decode_attention(Q, CACHE, CACHE, cache_seqlens=LENS, k=NEW), ["v", "k is one"]),
    (lambda: decode_attention(Q, CACHE, CACHE, cache_seqlens=LENS, k=NEW, v=NEW[..., :32]),
     ["v", "shape (2, 1, 2, 64)", "shape (2, 1, 2, 32)"]),
    (refused(block_table=PAGES[0]), ["block_table", "(batch_size, max_pages)", "shape (4,)"]),
    (refused(block_table=PAGES.long()), ["block_table", "dtype int32", "int64"]),
    (refused(k=CACHE[:, :0], v=CACHE[:, :0], block_table=PAGES), ["page_size of 1 to 256"]),
    (refused(cos=TABLE), ["sin", "a torch tensor", "NoneType"]),
    (refused(cos=TABLE, sin=TABLE[:39]), ["sin", "shape (40, 32)", "shape (39, 32)"]),
    (refused(cos=TABLE, sin=TABLE, rotary_dim=66), ["rotary_dim", "head_dim = 64", "66"]),
    (refused(rotary_dim=64), ["rotary_dim", "0 or None where cos is None", "64"]),
    (refused(sin=TABLE), ["sin", "None where cos is None"]),
    (refused(qkv_bias=torch.ones(64).half()), ["qkv_bias", "shape (512,)", "shape (64,)"]),
    (refused(alibi_slopes=torch.ones(3)), ["alibi_slopes", "shape (4,)", "shape (3,)"]),
    (refused(sinks=torch.ones(2)), ["sinks", "shape (4,)", "shape (2,)"]),
    (refused(sinks=torch.ones(4).int()), ["sinks", "float32", "int32"]),
    (refused(sinks=torch.ones(4).requires_grad_()), ["sinks", "no backward", "sinks.detach()"]),
    (refused(window_size=(-2, 0)), ["window_size", "from -1", "(-2, 0)"]),
    (refused(softcap=-1.0), ["softcap", "at least 0", "-1.0"]),
    (refused(num_splits=-1), ["num_splits", "at least 0", "-1"]),
    (refused(out=OUT), ["out", "do not overlap", "strides (0,"]),
    (refused(k_scale=torch.ones(2)), ["k_scale", "None for a cache of float16"]),
    (refused(k=CACHE.to(E4M3), v=CACHE.to(E4M3), k_scale=torch.ones(3)), ["k_scale", "(2,)"]),
    (refused(q=Q[..., :24], k=CACHE[..., :24].contiguous().to(E4M3),
             v=CACHE[..., :24].contiguous().to(E4M3)), ["k_cache", "multiple of 16 for e4m3"]),
    (refused(q=Q.clone().requires_grad_()), ["q", "no backward", "q.detach()"]),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_refusals(way: Way, index: int) -> None:
    check_refused("decode_attention", *REFUSED[index])


def test_what_debugging_checks(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
    step = Step(way, [40, 9], append=True, page_size=16)
    step.run()
    step.options["cache_seqlens"][1] = 320
    with pytest.raises(TensorError, match="cache_seqlens: expected 0 to 319 at index 1, found 320"):
        step.run()
    step.options["cache_seqlens"][1] = 9
    step.table[0, 2] = 99
    with pytest.raises(TensorError, match=r"block_table: expected pages .* at \[0, 2\], found 99"):
        step.run()
    step.table[0, 2] = 1
    step.table[1, 3] = 99  # beyond the sequence: nobody reads it
    step.run()


def test_every_kernel_is_chosen() -> None:
    chosen = {
        decode_plan.choose_variant(head_dim, cache_bytes, rows, is_general, is_sm90)
        for cache_bytes in (1, 2, 4)
        for head_dim in range(16, 129 if cache_bytes == 4 else 257, 8)
        for rows in (1, 16, 17, 128)
        for is_general in (False, True)
        for is_sm90 in (False, True)
    } | {
        decode_plan.choose_variant(head_dim, 1, rows, False, scaled=scaled)
        for scaled in ("_int8", "_e4m3_tokens")
        for head_dim in (64, 80, 256)
        for rows in (1, 40)
    }
    assert chosen == set(decode_plan.VARIANTS)
    assert decode_plan.choose_variant(192, 2, 1, False).head_dim == 256


def rounds_of(units: int, fine_units: int) -> int:
    """The most of Work::shares_of, of lengths that are alike."""
    return 1 if units <= 12 * fine_units else 2 if units <= 24 * fine_units else 4


@pytest.mark.parametrize("items", [1, 2, 8, 32, 64, 100, 120, 132, 200, 512, 4096])
@pytest.mark.parametrize("max_units", [1, 2, 16, 128, 2048])
def test_the_grid_holds_every_part(items: int, max_units: int) -> None:
    # Work::splits_of, for lengths that are the worst: all just above what earns one part more.
    tokens = 64 * max_units
    caches = decode_plan.Caches(items, tokens, tokens, 512, 512 * tokens * items)
    split = decode_plan.choose_split(caches, 64, 0, 132, 132)
    assert split.num_blocks <= items * max_units
    if split.num_splits:
        return
    shares = [split.parallel]
    if (units := items * max_units) > split.fine_units:
        shares += [
            decode_plan.shares_of(items, fewer, split.fine_units, 132)
            for fewer in (split.fine_units + 1, 12 * split.fine_units + 1, units)
            if fewer <= units
        ]
        if items <= 132 and units > 2 * split.fine_units:  # of one length
            for rounds in range(1, rounds_of(units, split.fine_units) + 1):
                shares.append(264 * rounds // items * items - items // 4)
    for each in shares:
        parts = max(1, -int(-(each / items - 0.125) // 1))
        assert items * min(parts, max_units) <= split.num_blocks
        assert (items if min(parts, max_units) > 1 else 0) <= split.num_merges


@pytest.mark.parametrize("items", [1, 2, 5, 7, 8, 20, 44, 66])
@pytest.mark.parametrize("times", [10, 20, 50])
@pytest.mark.parametrize("num_sms", [132, 114, 78])
def test_the_grid_holds_items_nearly_alike(items: int, times: int, num_sms: int) -> None:
    max_units = times * decode_plan.FINE_BYTES // (512 * 64) // items
    caches = decode_plan.Caches(items, 64 * max_units, 64 * max_units, 512, 1 << 30)
    split = decode_plan.choose_split(caches, 64, 0, num_sms, num_sms)
    drawn = random.Random(f"alike {items} {num_sms}")
    assert split.num_blocks >= 2 * num_sms
    for _ in range(200):
        least = drawn.uniform(0.85, 1)
        others = (drawn.choice((1, least, drawn.uniform(least, 1))) for _ in range(items - 1))
        lengths = [max_units, *(round(max_units * other) for other in others)]
        longest = max_units * items / sum(lengths)
        if longest > 1.125 or sum(lengths) <= 2 * split.fine_units:
            continue
        # Work::shares_of and splits_of: as many parts as there are places, or fewer, of any round.
        for rounds in range(1, rounds_of(sum(lengths), split.fine_units) + 1):
            places = 2 * num_sms * rounds
            each = min(places // items - 0.25, (places // items + 0.12) / longest)
            workers = max(items * each, places - 0.875 * items) / sum(lengths)
            parts = [math.ceil(length * workers - 0.125) for length in lengths]
            assert sum(parts) <= min(places, split.num_blocks)


def test_the_grid_holds_empty_caches_among_others_alike() -> None:
    # A cache of no tokens is a part though its share is less than an eighth of one: of one length
    # by the mean, nine of them are one part more than there are places.
    lengths = [3000] * 80 + [2415] * 8 + [1] * 9
    tokens, token_bytes = 64 * 3000, 34
    caches = decode_plan.Caches(97, tokens, tokens, token_bytes, 1 << 30)
    split = decode_plan.choose_split(caches, 64, 0, 132, 132)
    units = sum(lengths)
    assert 12 * split.fine_units < units < 97 * 3000 < 24 * split.fine_units  # two rounds
    assert 1.125 * units >= 97 * 3000
    # Work::shares_of and splits_of, which takes five parts of each in two rounds.
    workers = (4 * 132 - 0.875 * 97) / units
    parts = [max(1, math.ceil(length * workers - 0.125)) for length in lengths]
    assert 4 * 132 < sum(parts) <= split.num_blocks


def split_on_h200(
    batch: int, kv_heads: int, tokens: int, head_dim: int = 128, window: int = 1 << 30
) -> decode_plan.Split:
    """Of steps with one row a kv head."""
    variant = decode_plan.choose_variant(head_dim, 2, 1, False, is_sm90=True)
    items, seen = batch * kv_heads, min(tokens, window)
    caches = decode_plan.Caches(items, tokens, seen, 4 * head_dim, 4 * head_dim * seen * items)
    blocks = decode_plan.blocks_for(variant, caches, head_dim, 132)
    return decode_plan.choose_split(caches, variant.unit, 0, blocks, 132)


@pytest.mark.parametrize("tokens", [4096, 65_536, 1 << 20])
@pytest.mark.parametrize("heads", [1, 8, 20, 40])
def test_one_sequence_is_cut_for_multiprocessors(heads: int, tokens: int) -> None:
    caches = decode_plan.Caches(heads, tokens, tokens, 512, 512 * tokens * heads, alone=1)
    split = decode_plan.choose_split(caches, 64, 0, 132, 132)
    parts = split.num_splits or split.parallel // heads
    assert heads * min(132, parts) >= decode_plan.FULL * 132 or tokens < 64 * 132
    # No block is without a part but those of a cut that rounds up.
    assert split.num_splits or split.num_blocks <= split.parallel + heads
    assert split.num_splits or split.fine_units >= heads * tokens // 64


@pytest.mark.parametrize(("heads", "blocks", "parts"), [(8, 132, 16), (32, 264, 8), (16, 264, 8)])
def test_one_sequence_of_several_tokens_looks_for_no_lengths(
    heads: int, blocks: int, parts: int
) -> None:
    caches = decode_plan.Caches(heads, 15_488, 15_488, 896, 896 * 15_488 * heads)
    of = [caches._replace(alone=tokens) for tokens in (0, 1, 8)]
    splits = [decode_plan.choose_split(each, 64, 0, blocks, 132).num_splits for each in of]
    assert splits == [0, 0, parts]


def test_fp32_takes_both_places() -> None:
    variant = decode_plan.choose_variant(128, 4, 4, False)
    caches = decode_plan.Caches(32, 4096, 4096, 1024, 1024 * 4096 * 32)
    assert decode_plan.blocks_for(variant, caches, 128, 132) == 264


def test_who_finds_equal_shares() -> None:
    # Parts that may be long, of which none is known to be; long crowds; not what a window hides.
    assert split_on_h200(31, 4, 5248, 192).num_splits == 0
    assert split_on_h200(192, 1, 6576).num_splits == 0
    assert split_on_h200(512, 1, 8192).num_splits == 0
    assert split_on_h200(64, 1, 512).num_splits == 2
    assert split_on_h200(512, 1, 4096).num_splits == 1
    assert split_on_h200(31, 4, 5248, 192, window=256).num_splits == 1
    assert split_on_h200(2, 4, 4096).num_splits > 1


def test_who_stays_whole() -> None:
    # A part less saves less than its merge takes; and more than it takes.
    assert split_on_h200(7, 8, 128).num_splits == 1
    assert split_on_h200(2, 4, 512).num_splits > 1


def test_who_has_two_blocks_a_multiprocessor() -> None:
    assert split_on_h200(4, 8, 124_426, 224).parallel == 256
    assert split_on_h200(4, 8, 124_426, 128).parallel == 128  # enough under way
    assert split_on_h200(16, 8, 124_426, 192).parallel == 128  # many items
    assert split_on_h200(4, 8, 1024, 192).num_splits == 4  # little to read


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_compile(device: str) -> None:
    torch._dynamo.reset()
    way = Way("gpu" if device == "cuda" else "emulated", device)
    options: dict[str, Any] = {"append": True, "rope": 128, "bias": True, "page_size": 16}
    eager, traced = (Step(way, [100, 0, 33], torch.float16, **options) for _ in range(2))

    def step(
        q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = decode_attention(q, k_cache, v_cache, **options, return_lse=True)
        return out * 2, lse

    def arguments(of: Step) -> tuple[Any, ...]:
        return (of.q, *(cache.tensor for cache in of.caches), of.options)

    expected = step(*arguments(eager))
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(*arguments(traced))
    for a, b in zip(found, expected, strict=True):
        same_bits(a, b)
    for which in (0, 1):
        same_bits(traced.caches[which].tensor, eager.caches[which].tensor)
    traced.check_appended()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_registered_op_passes_opcheck(device: str) -> None:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).half().to(device)

    q, new, cache = randn(2, 1, 4, 64), randn(2, 1, 2, 64), randn(2, 20, 2, 64)
    lengths = torch.tensor([7, 0], dtype=torch.int32, device=device)
    table = randn(20, 32)
    lse = torch.empty(2, 4, 1, device=device)
    mask = torch.ones(2, 1, dtype=torch.int64, device=device)
    for added, last, tables in (
        ((None,) * 6, None, (None, None)),
        ((new, new * 2, None, table, table, None), lse, (randn(4), mask)),
    ):
        rotary_dim = 0 if added[0] is None else 64
        torch.library.opcheck(
            torch.ops.kernel_hub.decode_attention.default,
            (q, cache, cache.clone(), lengths, *added, None, None, None, *tables, False, rotary_dim,
             0.1, -1, 0.0, 0, torch.empty_like(q), last),
        )  # fmt: skip
