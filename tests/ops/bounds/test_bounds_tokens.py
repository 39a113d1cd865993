"""embedding stays inside its tensors, whatever its tables say."""

from __future__ import annotations

import pytest
from arena import drawn
from hostile_tokens import hostile_embedding
from ways import Way

LOTS = 40


@pytest.mark.parametrize("lot", range(LOTS))
def test_hostile_tables(way: Way, lot: int) -> None:
    with drawn(way.device, "hostile_embedding", lot) as (generator, arena):
        hostile_embedding(generator, arena)
