"""moe_permute and moe_combine stay inside their tensors, whatever their tables say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from arena import drawn
from hostile_moe import hostile_combine, hostile_permute
from ways import Way

LOTS = 25


@pytest.mark.parametrize("lot", range(LOTS))
@pytest.mark.parametrize("draw", [hostile_permute, hostile_combine])
def test_hostile_tables(way: Way, draw: Callable[..., None], lot: int) -> None:
    with drawn(way.device, draw.__name__, lot) as (generator, arena):
        draw(generator, arena)
