"""Tiles of 128 rows for full attention of up to 64 columns, of 64 for heads that are alone."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from typing import Any

import pytest
import torch
from attention_cases import Case, run
from attention_devices import taken
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.ops.attention.problem import Problem, sizes_of
from kernel_hub.ops.core.device import PlannedGpu, pretend

SM90: Any = importlib.import_module("kernel_hub.ops.attention.forward_sm90")
SPLIT: Any = importlib.import_module("kernel_hub.ops.attention.forward_split_sm90")
COSTS: Any = importlib.import_module("kernel_hub.ops.attention.tile_costs")


def prompts(batch_size: int, seqlen: int, heads: int, head_dim: int, right: int = -1) -> Problem:
    q = torch.empty(batch_size, seqlen, heads, head_dim, dtype=torch.bfloat16, device="meta")
    return Problem(q, q, q, batch_size, seqlen, seqlen, 0.1, -1, right)


def side_by_side(
    batch_size: int, total: int, longest: int, heads: tuple[int, int], head_dim: int
) -> Problem:
    table = torch.empty(batch_size + 1, dtype=torch.int32, device="meta")
    q, k = (torch.empty(total, n, head_dim, dtype=torch.bfloat16, device="meta") for n in heads)
    tables = {"cu_seqlens_q": table, "cu_seqlens_k": table}
    return Problem(q, k, k, batch_size, longest, longest, 0.1, **tables)


def body(problem: Problem) -> str:
    with pretend(PlannedGpu((9, 0), 132)):
        found = SM90._choose(problem)
    return f"{found.head_dim} {found.mask}{found.suffix}"


FEWER = [
    Case(num_heads=4, num_kv_heads=2, head_dim=40, lengths_q=(200,) * 2),
    Case(num_heads=2, num_kv_heads=2, head_dim=64, lengths_q=(321,), dtype="fp16"),
    Case(num_heads=1, num_kv_heads=1, head_dim=64, lengths_q=(197, 5, 0, 250), layout="varlen"),
]


@pytest.mark.parametrize("case", FEWER, ids=str)
def test_tiles_of_fewer_rows(hopper_way: Way, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Full attention of up to 64 columns."""
    monkeypatch.setattr(SPLIT, "choice", False)
    for name, value in (("wants_fewer_rows", True), ("is_short", False)):
        monkeypatch.setattr(SM90, name, lambda _, value=value: value)
    found = taken(monkeypatch, SM90, lambda planned, *_: planned.function.name)
    case = dataclasses.replace(case, lengths_k=case.lengths_q, twice=True)
    with contextlib.nullcontext() if hopper_way.is_gpu else hopper_attention(monkeypatch, 3):
        run(case, hopper_way.device)
    assert found and all(name.endswith("full_short") for name in found)


def test_who_has_tiles_of_fewer_rows() -> None:
    """us on an H200: 192 rows, 128."""
    for fewer in (
        (2, 1965, 8, 40),  # 52.7, 44.5: 1.33 rounds, 1.94
        (9, 871, 6, 32),  # 36.9, 31.1
        (13, 979, 2, 64),  # 29.4, 25.3
        (658, 92, 4, 40),  # 60.8, 49.5
        (64, 202, 6, 64),  # 32.2, 25.7
    ):
        problem = prompts(*fewer)
        assert body(problem) == "64 full_short"
        assert body(problem._replace(batch_invariant=True)) == "64 full"
    for more in (
        (33, 178, 12, 64),  # 19.3, 25.7
        (4, 2048, 16, 64),  # 143, 157
        (6, 4151, 1, 40),  # 54.7, 84.4
    ):
        assert body(prompts(*more)) == "64 full"
    with pretend(PlannedGpu((9, 0), 132)):
        for is_better, problem in (
            (True, side_by_side(42, 3100, 233, (12, 12), 64)),  # 22.8, 19.4
            (False, side_by_side(86, 25_800, 1003, (3, 3), 64)),  # 33.5, 35.2
            (False, side_by_side(23, 1472, 207, (16, 4), 64)),  # packed 14.2, 15.7
            (False, side_by_side(2, 2240, 1344, (3, 3), 32)),  # in shares 15.0, 18.3
        ):
            assert COSTS.wants_fewer_rows(problem) == is_better


def test_heads_alone_in_tiles_of_few_rows() -> None:
    """us on an H200: tiles of 128 rows, of 64 in turn."""
    for batch_size, seqlen, heads, is_better in (
        (20, 300, 16, True),  # 44.2, 39.3
        (13, 420, 16, True),  # 45.9, 42.4
        (16, 384, 8, False),  # 23.5, 26.1
        (3, 384, 10, False),  # 11.9, 12.5: less than a round
        (64, 330, 32, False),  # 224, 243
    ):
        problem = prompts(batch_size, seqlen, heads, 128, 0)
        with pretend(PlannedGpu((9, 0), 132)):
            sizes = sizes_of(problem)[0]
            whole = COSTS.short_causal_us(sizes, 128, 128, None, 128, 132)
            in_turn = COSTS.short_causal_us(sizes, 128, 64, (1, 64), 64, 264)
        assert (in_turn < whole) == is_better, (batch_size, seqlen)
