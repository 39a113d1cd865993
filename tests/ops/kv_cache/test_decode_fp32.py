"""decode_attention of fp32 against fp64: sizes, the whole step, parts and merges, refusals."""

from __future__ import annotations

import random

import pytest
import torch
from bits import same_bits
from decode_cases import DecodeCase, run_decode
from decode_step import Step
from drawn_sinks import KINDS, draw_sinks
from refused import check_refused
from ways import Way

from kernel_hub.ops import decode_attention
from kernel_hub.ops.kv_cache import decode_plan

FP32 = torch.float32


def step(way: Way, lengths: list[int], **options: object) -> Step:
    return Step(way, lengths, FP32, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("head_dim", [16, 40, 64, 72, 128])
@pytest.mark.parametrize("heads", [(4, 4), (5, 1), (8, 2), (20, 1)], ids=str)
def test_sizes(way: Way, heads: tuple[int, int], head_dim: int) -> None:
    step(way, [300, 0, 1, 65], heads=heads, head_dim=head_dim).check()


@pytest.mark.parametrize("number", range(16))
def test_by_lot(way: Way, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lot = random.Random(f"decode fp32 {number}")
    if lot.random() < 0.5:  # equal shares, worked out from the lengths, of short caches too
        monkeypatch.setattr(decode_plan, "SHORT_TOKENS", 0)
    seqlen_q, appends = lot.choice((1, 1, 2, 5, 16)), lot.random() < 0.5
    lengths = [lot.choice((0, 1, seqlen_q, 31, 32, 33, 200, lot.randrange(300)))
               for _ in range(lot.choice((1, 2, 5)))]  # fmt: skip
    made = step(
        way, lengths, heads=lot.choice(((4, 2), (16, 1), (6, 2))), seqlen_q=seqlen_q,
        head_dim=lot.choice((64, 80, 128)), page_size=lot.choice((0, 1, 7, 16, 64)),
        append=appends, rope=lot.choice((0, 64, 20)) if appends else 0, bias=lot.random() < 0.3,
        interleaved=lot.random() < 0.5, seed=number,
    )  # fmt: skip
    options = lot.choice((
        {}, {"window_size": (30, 0)}, {"softcap": 4.0}, {"softmax_scale": -0.2},
        {"alibi_slopes": way.randn(made.heads[0], seed=1).abs()},
        {"sinks": draw_sinks(lot.choice(list(KINDS)), made.heads[0], number, way.device)},
    ))  # fmt: skip
    made.check(num_splits=lot.choice((0, 0, 1, 2, 3)), **options)


def test_the_same_bits(way: Way) -> None:
    made = step(way, [290, 33, 7], heads=(8, 2), page_size=16)
    for splits in (0, 3):
        same_bits(made.run(num_splits=splits)[0].clone(), made.run(num_splits=splits)[0])


@pytest.mark.gpu
def test_long_caches(way: Way) -> None:
    step(way, [9000, 20000, 5], heads=(32, 8), max_seqlen=20480, page_size=64).check()


@pytest.mark.gpu
def test_a_maximum_that_stays(way: Way) -> None:
    """A large maximum that stays rescales nothing, by no rounding either, tile after tile."""
    case = DecodeCase(
        dtype="fp32", head_dim=128, num_heads=8, num_kv_heads=8, seqlen_q=2,
        lengths=(63, 2492, 3000), appends=True, has_bias=True, softmax_scale=0.3, num_splits=1,
        seed=533212604,
    )  # fmt: skip
    run_decode(case, way.device)


Q, CACHE = torch.ones(1, 1, 4, 64), torch.ones(1, 32, 2, 64)
LENGTHS = torch.tensor([5], dtype=torch.int32)


def test_refusals(way: Way) -> None:
    e4m3 = CACHE.to(torch.float8_e4m3fn)
    wide = torch.ones(1, 1, 4, 192), torch.ones(1, 32, 2, 192)
    for given, words in (
        ((Q, e4m3, e4m3), ["k_cache", "dtype float32", "float8_e4m3fn"]),
        ((Q, CACHE.half(), CACHE.half()), ["k_cache", "dtype float32", "float16"]),
        ((wide[0], wide[1], wide[1]), ["q", "head_dim 16 to 128", "192"]),
        ((Q.double(), CACHE, CACHE), ["q", "float32", "float64"]),
    ):
        check_refused(
            "decode_attention", lambda x=given: decode_attention(*x, cache_seqlens=LENGTHS), words
        )
