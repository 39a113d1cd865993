"""mla_decode on Hopper: bases of exponents that lag behind, the last tile of an odd count."""

from __future__ import annotations

import pytest
from mla_step import LatentStep
from ways import Way


def test_bases_that_lag_behind_on_hopper(hopper_way: Way) -> None:
    # Scores grow token by token: slower and faster than the base of a row's exponents moves.
    for growth in (0.01, 0.05, 0.4, -0.05):
        step = LatentStep(hopper_way, [390, 300], num_heads=70, softmax_scale=1.0)
        for row, length in enumerate([390, 300]):
            pages = step.options["block_table"][row].long()
            for token in range(length):
                step.kv_cache[pages[token // 64], token % 64, 575] = growth * token
        step.q[..., 575] = 1.0
        step.q[..., :575] *= 0.05
        step.check()


@pytest.mark.parametrize("tiles", [1, 2, 3, 4])
def test_even_tiles_without_odd_ones_on_hopper(hopper_way: Way, tiles: int) -> None:
    # The stages' turns differ afterwards: a part of an odd count, and others behind it.
    lengths = [64 * tiles - 3, 64, 200, 64 * tiles, 1]
    for num_splits in (1, 2):
        LatentStep(hopper_way, lengths, num_heads=70, num_splits=num_splits).check()
