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


def ends(places: int, parts: int, blocks: int, at_once: int) -> bool:
    """Whether all blocks end though so few run at a time: each item is so many places, the block
    that has the last of them waits for the others, and a block has every `blocks`-th place."""
    done: set[int] = set()
    running: list[list[int]] = []  # the place that each is at
    begun = 0
    while begun < blocks or running:
        while begun < blocks and len(running) < at_once:
            running.append([begun])
            begun += 1
        before = len(done)
        for each in list(running):
            first = each[0] // parts * parts
            is_last = each[0] == first + parts - 1
            if is_last and not done.issuperset(range(first, each[0])):
                continue
            done.add(each[0])
            each[0] += blocks
            if each[0] >= places:
                running.remove(each)
        if len(done) == before:
            return False
    return True


def test_nobody_waits_for_ever_where_few_blocks_run_at_a_time() -> None:
    """Of even lengths there may be more places than blocks, and a block waits for one that begins
    after it: two at a time are enough, whatever part of a GPU they have."""
    found = 0
    for num_sms in (132, 114, 78, 66):
        for variant, cluster in ((mla_plan.SM90_FEW[0], 1), (mla_plan.SM90, 1), (mla_plan.SM90, 2)):
            blocks = num_sms // cluster
            for items in range(1, 5 * blocks):
                for tokens in (256, 1024, 3072, 8192, 131072):
                    line = mla_plan.choose_line(items, tokens, variant, 0, blocks, cluster)
                    if line is None or line.even <= blocks or line.even == items:
                        continue
                    for parts in range(2, line.even // items + 1):  # fewer of short caches
                        where = (items, tokens, parts, blocks)
                        assert ends(items * parts, parts, blocks, at_once=2), where
                        found += 1
    assert found > 100
    assert not ends(places=116, parts=4, blocks=66, at_once=1)
