"""decode_attention stays inside its tensors, whatever its tables say."""

from __future__ import annotations

import random

import pytest
import torch
from arena import SEED, Arena, drawn
from decode_in_shares import in_shares
from hostile_decode import HostileStep
from ways import Way

LOTS, LOTS_FP32, LOTS_BYTES = 40, 12, 24
LOTS_IN_SHARES = 12


@pytest.mark.parametrize("lot", range(LOTS))
def test_hostile_tables(way: Way, lot: int) -> None:
    with drawn(way.device, "decode", lot) as (generator, arena):
        step = HostileStep(generator, arena)
        print(f"{step.drawn}, lengths {step.lengths}")
        step.run()


@pytest.mark.parametrize("lot", range(LOTS_FP32))
def test_hostile_tables_fp32(way: Way, lot: int) -> None:
    with drawn(way.device, "decode fp32", lot) as (generator, arena):
        head_dim = generator.choice((16, 48, 64, 128))
        step = HostileStep(
            generator, arena, dtype=torch.float32, is_e4m3=False, head_dim=head_dim, softcap=0.0
        )
        print(f"{step.drawn}, lengths {step.lengths}")
        step.run()


@pytest.mark.parametrize("lot", range(LOTS_BYTES))
def test_hostile_tables_of_bytes(way: Way, lot: int) -> None:
    """New tokens without a page: their lanes left a warp that met behind them."""
    with drawn(way.device, "decode bytes", lot) as (generator, arena):
        step = HostileStep(
            generator, arena, is_e4m3=True, dtype=torch.bfloat16, appends=True,
            page_size=generator.choice((1, 4, 16, 24)),
        )  # fmt: skip
        print(f"{step.drawn}, lengths {step.lengths}")
        step.run()


@pytest.mark.parametrize("lot", range(LOTS_IN_SHARES))
def test_hostile_tables_in_shares(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, lot: int
) -> None:
    with (
        drawn(hopper_way.device, "decode in shares", lot) as (generator, arena),
        in_shares(monkeypatch, hopper_way) as taken,
    ):
        step = HostileStep(
            generator, arena, is_e4m3=False, appends=False, turns=False, num_splits=0,
            page_size=generator.choice((0, 8, 16, 24)),  # in boxes of 8 rows
        )  # fmt: skip
        print(f"{step.drawn}, lengths {step.lengths}")
        step.run()
        assert taken


def test_a_page_number_past_the_cache_writes_nothing(way: Way) -> None:
    """It wrote 128 elements into a neighbour."""
    generator = random.Random(f"{SEED} decode")
    with Arena(way.device, generator) as arena:
        step = HostileStep(
            generator, arena, page_size=16, pages=2, batch=1, head_dim=128, kv_heads=1,
            appends=True, seqlen_q=1, bad_lengths=False, bad_pages=False,
        )  # fmt: skip
        assert step.table is not None
        step.table[0] = [3, 3]
        step.given["block_table"].fill_(3)
        step.run()
