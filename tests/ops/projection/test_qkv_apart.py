"""qkv_linear as two launches: a product, then append_kv."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_qkv_linear import CACHES, check_cache, check_qkv, module
from ways import Way

from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.matmul import paired_plan
from kernel_hub.tuning import Gpu


@pytest.fixture
def parted(way: Way, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """qkv_linear as two launches, where they compute the same."""
    choose, parted = module.choose, []

    def choose_apart(*given: Any) -> paired_plan.TileChoice:
        may_part = inspect.signature(choose).bind(*given).arguments["may_part"]
        parted.append(may_part)
        return paired_plan.APART if may_part else choose(*given)

    monkeypatch.setattr(module, "choose", choose_apart)
    forget_all()
    yield way
    forget_all()
    assert any(parted), "all ran in one launch"


@pytest.mark.parametrize("layout", CACHES)
@pytest.mark.parametrize("seqlen", [1, 13])
def test_two_launches_with_caches(parted: Way, layout: str, seqlen: int) -> None:
    check_cache(parted, layout, seqlen)


@pytest.mark.parametrize("number", range(12))
def test_two_launches_by_lot(parted: Way, number: int) -> None:
    lot = random.Random(number)
    head_dim = lot.choice([32, 64, 96, 128])
    heads = lot.randint(1, 5), lot.randint(1, 3), head_dim
    check_qkv(
        parted, lot.choice([1, 5, 17, 70, 131]), heads, 8 * lot.randint(1, 20),
        dtype=lot.choice([torch.float16, torch.bfloat16]),
        rotary_dim=lot.choice([0, 16, head_dim // 2 // 16 * 16, head_dim]),
        interleaved=lot.random() < 0.5, has_bias=lot.random() < 0.5,
    )  # fmt: skip


def test_where_two_launches_are_expected_to_be_quicker() -> None:
    gpu = Gpu((9, 0), 132, "")
    # 207 rows of 5376 by 2048: one launch takes 30.4 us on an H200, a product and an append 15.1.
    assert paired_plan.choose("qkv_linear", gpu, 207, 2048, 5376, True, True) is paired_plan.APART
    assert paired_plan.choose("qkv_linear", gpu, 207, 2048, 5376, True).variant != "apart"
    # Heads that Hopper's body does not take: 79 rows took 40.4 us, two launches 10.4.
    assert paired_plan.choose("qkv_linear", gpu, 79, 2304, 3072, False, True) is paired_plan.APART
    # A decode step stays one launch.
    assert paired_plan.choose("qkv_linear", gpu, 16, 896, 5120, True, True).variant != "apart"
    assert paired_plan.choose("qkv_linear", gpu, 4, 6144, 4096, True, True).variant != "apart"
    before_hopper = Gpu((8, 0), 108, "")
    assert paired_plan.choose("qkv_linear", before_hopper, 79, 2304, 3072, True, True).cubin
