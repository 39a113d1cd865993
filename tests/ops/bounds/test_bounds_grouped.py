"""grouped_linear stays inside its tensors, whatever its offsets say."""

from __future__ import annotations

import random

import pytest
from arena import SEED, Arena
from hostile_grouped import HostileGroups
from ways import Way

LOTS = 40


@pytest.mark.parametrize("lot", range(LOTS))
def test_hostile_offsets(way: Way, lot: int) -> None:
    generator = random.Random(f"{SEED} grouped {lot}")
    print(f"KERNEL_HUB_SEED={SEED}, lot {lot}")
    with Arena(way.device, generator) as arena:
        HostileGroups(generator, arena).run()
