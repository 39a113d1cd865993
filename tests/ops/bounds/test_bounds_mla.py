"""mla_decode stays inside its tensors, whatever its tables say."""

from __future__ import annotations

import pytest
from arena import drawn
from hostile_mla import HostileLatents
from ways import Way

LOTS = 16


@pytest.mark.parametrize("lot", range(LOTS))
def test_hostile_tables(way: Way, lot: int) -> None:
    with drawn(way.device, "mla", lot) as (generator, arena):
        step = HostileLatents(generator, arena)
        print(f"{step.drawn}, lengths {step.lengths}")
        step.run()


@pytest.mark.parametrize("lot", range(LOTS))
def test_hostile_tables_on_hopper(hopper_way: Way, lot: int) -> None:
    with drawn(hopper_way.device, "mla on hopper", lot) as (generator, arena):
        step = HostileLatents(generator, arena, page_size=generator.choice((0, 8, 16, 24, 64)))
        print(f"{step.drawn}, lengths {step.lengths}")
        step.run()
