"""Sinks of decode_attention against fp64: each kernel, parts and their merge, finished rows."""

from __future__ import annotations

import math
import random

import pytest
import torch
from bits import same_bits
from decode_in_shares import in_shares
from decode_step import E4M3, Step
from drawn_sinks import KINDS, draw_sinks
from ways import Way

from kernel_hub.ops.kv_cache import decode_plan


def drawn(lot: random.Random, way: Way, **more: object) -> Step:
    """A small step of any kind."""
    seqlen_q, appends = lot.choice((1, 1, 2, 5)), lot.random() < 0.5
    lengths = [lot.choice((0, 1, seqlen_q, 63, 64, 200, lot.randrange(300)))
               for _ in range(lot.choice((1, 2, 5)))]  # fmt: skip
    options = {
        "dtype": lot.choice((torch.float16, torch.bfloat16)),
        "heads": lot.choice(((4, 2), (16, 1))),
        "cache_dtype": lot.choice((None, None, E4M3)), "head_dim": lot.choice((64, 80, 128, 256)),
        "seqlen_q": seqlen_q, "page_size": lot.choice((0, 16)), "append": appends,
        "rope": lot.choice((0, 64)) if appends else 0, "seed": lot.randrange(1 << 20), **more,
    }  # fmt: skip
    return Step(way, lengths, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", range(24))
def test_by_lot(way: Way, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lot = random.Random(f"decode sinks {number}")
    if lot.random() < 0.5:  # equal shares, worked out from the lengths, of short caches too
        monkeypatch.setattr(decode_plan, "SHORT_TOKENS", 0)
    step = drawn(lot, way)
    sinks = draw_sinks(lot.choice(list(KINDS)), step.heads[0], number, way.device)
    options = lot.choice(({}, {}, {"window_size": (30, 0)}, {"softcap": 4.0}))
    step.check(sinks=sinks, num_splits=lot.choice((0, 1, 2, 3)), **options)


@pytest.mark.parametrize("number", range(6))
def test_in_shares(hopper_way: Way, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lot = random.Random(f"shares {number}")
    step = drawn(
        lot, hopper_way, heads=(8, 1), cache_dtype=None, append=False, rope=0,
        page_size=lot.choice((0, 64)),
    )  # fmt: skip
    sinks = draw_sinks(lot.choice(list(KINDS)), 8, number, hopper_way.device)
    with in_shares(monkeypatch, hopper_way) as taken:
        step.check(sinks=sinks)
    assert taken


def check_ends(step: Step, num_splits: int = 0) -> None:
    """No keys, finished rows, and sinks of -inf, which are none."""
    device = step.q.device
    sinks = torch.tensor([0.5, -3.0, math.inf, -math.inf], device=device)
    lengths = torch.tensor([0, -1, -300, 40], dtype=torch.int32, device=device)
    step.options["cache_seqlens"] = lengths
    out, lse = step.run(sinks=sinks, num_splits=num_splits)
    assert not bool(out[:3].any())
    torch.testing.assert_close(lse[0, :, 0], sinks, rtol=5e-7, atol=0)
    assert bool((lse[1:3] == -math.inf).all())
    assert not bool(out[3, :, 2].any()) and bool((lse[3, 2] == math.inf).all())
    expected, expected_lse = step.run(num_splits=num_splits)
    same_bits(out[3, :, 3].contiguous(), expected[3, :, 3].contiguous())
    same_bits(lse[3, 3], expected_lse[3, 3], name="lse")
    out, lse = step.run(sinks=torch.full((4,), math.nan, device=device), num_splits=num_splits)
    assert bool(out[3].isnan().all()) and bool(lse[3].isnan().all())


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("page_size", [0, 16])
def test_the_ends(way: Way, page_size: int, num_splits: int) -> None:
    check_ends(Step(way, [0, 0, 0, 40], page_size=page_size), num_splits)


def test_the_ends_in_shares(hopper_way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_shares(monkeypatch, hopper_way) as taken:
        check_ends(Step(hopper_way, [0, 0, 0, 40], head_dim=64))
    assert taken


def test_the_ends_on_the_cpu() -> None:
    check_ends(Step(Way("cpu", "cpu"), [0, 0, 0, 40], page_size=16))


@pytest.mark.parametrize("number", range(6))
def test_the_reference_on_the_cpu(number: int) -> None:
    lot = random.Random(f"cpu {number}")
    step = drawn(lot, Way("cpu", "cpu"))
    step.check(sinks=draw_sinks(lot.choice(list(KINDS)), step.heads[0], number))
