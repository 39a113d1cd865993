"""Ops of tokens, and copy_blocks, stay inside their tensors, whatever their tables say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from arena import drawn
from hostile_tokens import (
    hostile_copies,
    hostile_embedding,
    hostile_rows,
    hostile_tree,
    hostile_verify,
)
from ways import Way

LOTS = 40


@pytest.mark.parametrize("lot", range(LOTS))
@pytest.mark.parametrize(
    "draw", [hostile_copies, hostile_embedding, hostile_rows, hostile_tree, hostile_verify]
)
def test_hostile_tables(way: Way, draw: Callable[..., None], lot: int) -> None:
    with drawn(way.device, draw.__name__, lot) as (generator, arena):
        draw(generator, arena)
