"""How mla_decode is planned: lines of even lengths, rows of a block, parts and their places."""

from __future__ import annotations

import math
import random

import pytest
import torch
from mla_step import KEY_DIM

from kernel_hub.ops.kv_cache import mla_plan


@pytest.mark.parametrize(
    "items, tokens, few, even",
    [
        (64, 4096, True, 128),
        (128, 1024, True, 128),
        (132, 4096, True, 132),
        (100, 4096, True, 132),
        (64, 4096, False, 64),
        (16, 4096, False, 64),
        (12, 4096, False, 60),
        (10, 4096, False, None),
        (76, 2235, False, 66),
        (64, (1 << 31) - 1, True, None),
        (32, 4096, True, None),
        (189, 343, True, 189),
        (165, 1471, True, 132),
    ],
)
def test_lines_of_uniform_caches(items: int, tokens: int, few: bool, even: int | None) -> None:
    variant, blocks = (mla_plan.SM90_FEW[0], 132) if few else (mla_plan.SM90, 66)
    cluster = 1 if few else 2
    line = mla_plan.choose_line(items, tokens, variant, 0, blocks, cluster)
    assert (line and line.even) == even
    assert line is None or line.uneven == blocks
    assert mla_plan.choose_line(items, tokens, variant, 3, blocks, cluster) is None
    assert mla_plan.choose_line(items, tokens, mla_plan.PORTABLE, 0, blocks, cluster) is None


def test_blocks_by_themselves_share_the_memory() -> None:
    # A last round of whole items is shorter where few blocks read: 64 rows, not clusters.
    for blocks, cluster, even in ((132, 1, 229), (132, 2, 132)):
        line = mla_plan.choose_line(229, 4096, mla_plan.SM90, 0, blocks, cluster)
        assert line == (even, blocks)


@pytest.mark.parametrize(
    "num_heads, seqlen_q, rows", [(16, 1, 16), (4, 4, 16), (17, 1, 32), (16, 2, 32), (33, 1, 64)]
)
def test_rows_of_a_block_on_hopper(num_heads: int, seqlen_q: int, rows: int) -> None:
    q, cache = torch.empty(1, seqlen_q, num_heads, KEY_DIM), torch.empty(1, 64, KEY_DIM)
    given = mla_plan.MlaGiven(q, cache, None, None, 1.0, 0, None)
    variant = mla_plan.choose_variant(given, mla_plan.PlannedGpu((9, 0), 132))
    assert variant.stated.sizes["block_m"] == rows


@pytest.mark.parametrize(
    "items, tokens, parts",
    [
        (64, 4096, 2),
        (128, 4096, 1),
        (1, 32768, 128),
        (1, 4096, 32),
        (80, 4096, 3),
        (256, 4096, 1),
        (132, 1024, 1),
    ],
)
def test_uniform_caches_fill_the_blocks(items: int, tokens: int, parts: int) -> None:
    split = mla_plan.choose_split(items, tokens, 64, 0, 132)
    found = split.num_splits or math.ceil(split.parallel / items - 0.125)  # Work::splits_of
    assert found == parts and split.num_blocks >= items * parts


@pytest.mark.parametrize("items", [1, 5, 64, 80, 128, 132, 300])
def test_parts_of_any_lengths_have_a_place(items: int) -> None:
    # As the kernel cuts them; the workspace has room for so many.
    lot = random.Random(items)
    for _ in range(200):
        tiles = lot.choice((17, 64, 512, 4096))
        split = mla_plan.choose_split(items, 64 * tiles, 64, 0, 132)
        units = [max(1, round(tiles * lot.random() ** lot.choice((0, 1, 4)))) for _ in range(items)]
        each = split.parallel / sum(units)
        wanted = [math.ceil(n * each - 0.125) for n in units]
        parts = [
            max(1, min(count, n, max(32, n // 2))) for count, n in zip(wanted, units, strict=True)
        ]
        assert sum(parts) <= split.num_blocks
