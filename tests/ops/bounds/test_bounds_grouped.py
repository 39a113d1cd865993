"""grouped_linear stays inside its tensors, whatever its offsets say."""

from __future__ import annotations

import pytest
from arena import drawn
from hostile_grouped import HostileGroups
from ways import Way

LOTS = 40


@pytest.mark.parametrize("lot", range(LOTS))
def test_hostile_offsets(way: Way, lot: int) -> None:
    with drawn(way.device, "grouped", lot) as (generator, arena):
        HostileGroups(generator, arena).run()
