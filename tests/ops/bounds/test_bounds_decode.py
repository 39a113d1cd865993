"""decode_attention stays inside its tensors, whatever its tables say."""

from __future__ import annotations

import random

import pytest
from arena import SEED, Arena, drawn
from hostile_decode import HostileStep
from ways import Way

LOTS = 40


@pytest.mark.parametrize("lot", range(LOTS))
def test_hostile_tables(way: Way, lot: int) -> None:
    with drawn(way.device, "decode", lot) as (generator, arena):
        step = HostileStep(generator, arena)
        print(f"{step.drawn}, lengths {step.lengths}")
        step.run()


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
