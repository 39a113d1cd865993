"""Steps of decode_attention that are a cluster an item: which, and whether they are right, for
every number of blocks. On the CPU the kernels' source runs in the emulator."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from bits import same_bits
from decode_step import E4M3, Step, check_nan_stays, check_replays
from drawn_sinks import KINDS, draw_sinks
from ways import Way

from kernel_hub.ops.core.launch import Launch, forget_all
from kernel_hub.ops.kv_cache import decode_short
from kernel_hub.ops.kv_cache.decode_plan import Caches


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches of these kernels, which take all that they can."""
    found: list[Launch] = []
    plan = decode_short.plan

    def kept(*given: Any) -> Launch:
        found.append(plan(*given))
        return found[-1]

    monkeypatch.setattr(decode_short, "plan", kept)
    monkeypatch.setattr(decode_short, "choice", True)
    return found


def in_shape(patch: pytest.MonkeyPatch, warps: int, blocks: int) -> None:
    """Every step in clusters of so many."""
    patch.setattr(
        decode_short, "shape_for",
        lambda given, _: (warps, blocks) if decode_short.can_take(given) else (0, 0),
    )  # fmt: skip
    forget_all()


def drawn(lot: random.Random, way: Way) -> Step:
    """A small step of any kind that they take."""
    heads = lot.choice(((4, 2), (8, 1), (3, 3), (16, 1), (10, 2)))
    seqlen_q = lot.choice([n for n in (1, 1, 2, 5, 16) if n * heads[0] // heads[1] <= 16])
    room = lot.choice((64, 320, 700, 2500 if way.is_gpu else 1300))
    lengths = [lot.choice((0, 1, seqlen_q, 63, 64, room, lot.randrange(room), lot.randrange(room)))
               for _ in range(lot.choice((1, 2, 5)))]  # fmt: skip
    lengths = [min(length, room) for length in lengths]
    return Step(
        way, lengths, lot.choice((torch.float16, torch.bfloat16)), heads=heads, seqlen_q=seqlen_q,
        head_dim=lot.choice((16, 64, 80, 128)), page_size=lot.choice((0, 16, 48, 64, 256)),
        max_seqlen=room, seed=lot.randrange(1 << 20),
    )  # fmt: skip


@pytest.mark.parametrize("number", range(24))
def test_by_lot(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, planned: list[Launch], number: int
) -> None:
    lot = random.Random(f"decode short {number}")
    in_shape(monkeypatch, lot.choice((4, 8)), lot.choice((1, 2, 4, 8)))
    step = drawn(lot, hopper_way)
    options = {}
    if lot.random() < 0.4:
        kind = lot.choice(list(KINDS))
        options["sinks"] = draw_sinks(kind, step.heads[0], number, hopper_way.device)
    step.check(**options)
    first, first_lse = step.run(**options)
    out, lse = step.run(**options)
    same_bits(out, first)
    same_bits(lse, first_lse)
    assert len(planned) == 1


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("blocks", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_kernel_in_clusters(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, planned: list[Launch], dtype: torch.dtype,
    head_dim: int, blocks: int, warps: int,
) -> None:  # fmt: skip
    in_shape(monkeypatch, warps, blocks)
    Step(hopper_way, [300, 0, 5, 129], dtype, heads=(8, 2), head_dim=head_dim).check()
    assert [launch.options["cluster"] for launch in planned] == [(blocks, 1, 1)]


def shape_on_h200(items: int, tokens: int, head_dim: int = 128) -> tuple[int, int]:
    token_bytes = 4 * head_dim
    caches = Caches(items, tokens, tokens, token_bytes, items * tokens * token_bytes)
    return decode_short.best_shape(caches, 132)


def test_which() -> None:
    """Of an H200: what was fastest there; nothing where the other kernel is."""
    assert shape_on_h200(8, 1024) == shape_on_h200(8, 4096) == (8, 8)
    assert shape_on_h200(8, 512) == (4, 8)
    assert shape_on_h200(16, 1024) == (4, 8)
    assert shape_on_h200(32, 2048) == (4, 4)
    assert shape_on_h200(64, 1024) == (4, 2)
    assert shape_on_h200(64, 2048) == (8, 2)
    assert shape_on_h200(128, 1024) == (4, 1)
    assert shape_on_h200(128, 1024, 64) == (4, 2)
    assert shape_on_h200(338, 192, 64) == shape_on_h200(512, 128) == (4, 1)
    for items, tokens in ((8, 4160), (4, 4096), (32, 4096), (128, 2048), (200, 512), (512, 512)):
        assert shape_on_h200(items, tokens) == (0, 0)


def test_finished_rows_and_wrong_lengths(hopper_way: Way, planned: list[Launch]) -> None:
    step = Step(hopper_way, [300, 40, 7], heads=(8, 2), page_size=64)
    expected, _ = step.run()
    step.options["cache_seqlens"][1] = -1
    out, lse = step.run()
    assert not bool(out[1].any()) and bool((lse[1] == -math.inf).all())
    out[1] = expected[1]
    same_bits(out, expected)
    assert len(planned) == 1


def test_a_nan_in_a_query_stays_in_its_row(hopper_way: Way, planned: list[Launch]) -> None:
    check_nan_stays(Step(hopper_way, [200, 70], heads=(4, 1), seqlen_q=2))
    assert planned


def test_what_they_do_not_take(hopper_way: Way, planned: list[Launch]) -> None:
    lengths = [130, 5]
    Step(hopper_way, lengths, append=True).check()
    Step(hopper_way, lengths, head_dim=256).check()
    Step(hopper_way, lengths, heads=(40, 2)).check()
    Step(hopper_way, lengths, page_size=8).check()
    Step(hopper_way, lengths, cache_dtype=E4M3).check()
    step = Step(hopper_way, lengths)
    step.check(window_size=(30, 0))
    step.check(softcap=5.0)
    step.check(num_splits=2)
    assert not planned


@pytest.mark.gpu
def test_graph_with_growing_lengths(monkeypatch: pytest.MonkeyPatch, planned: list[Launch]) -> None:
    for blocks in (1, 2, 8):
        in_shape(monkeypatch, 8, blocks)
        check_replays(Step(Way("gpu", "cuda"), [1, 5, 250], page_size=16), 40, more=1)
    assert len(planned) == 3
