"""Whole tiles of caches of any lengths, in turn and without a merge: right, and which they are."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from attention_cases import Case, run
from attention_devices import taken
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.ops.attention.packed_tile import PackedTile
from kernel_hub.ops.attention.problem import Problem, Sizes
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.testing.guard import Guarded

SPLIT: Any = importlib.import_module("kernel_hub.ops.attention.forward_split_sm90")
SM90: Any = importlib.import_module("kernel_hub.ops.attention.forward_sm90")
TILES: Any = importlib.import_module("kernel_hub.ops.attention.tile_costs")
AS_THEY_COME, SORTED = 1 << 29, 1 << 30
FEW_ROWS = PackedTile(128, 64, 64)


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("as_they_come", [False, True])
@pytest.mark.parametrize("layout", ["cache", "paged", "varlen_cache"])
def test_emulated(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, layout: str, as_they_come: bool, rows: int
) -> None:
    """A warp of the kernel itself writes what sees no keys."""
    bodies = [body for body in SPLIT.BODIES if body.stated.sizes["block_m"] == rows]
    monkeypatch.setattr(SPLIT, "choice", True)
    monkeypatch.setattr(SPLIT, "cuts_tiles", False)
    monkeypatch.setattr(SPLIT, "alone", True)
    monkeypatch.setattr(SPLIT, "bodies_of", lambda problem: bodies_for(problem, bodies))
    monkeypatch.setattr(TILES, "short_blocks", lambda *_: (1 << 20) * as_they_come)
    monkeypatch.setattr(PackedTile, "whole_of", lambda *given: (given[4], True))
    planned = taken(monkeypatch, SPLIT, lambda planned, *_: planned)
    case = Case(
        num_heads=6, num_kv_heads=2, head_dim=128, causal=True, layout=layout, twice=True,
        lengths_q=(70,) * 9, lengths_k=(100, 900, 0, 70, 33, 1, 64, 5, 300),
    )  # fmt: skip
    forget_all()
    if hopper_way.is_gpu:
        run(case, "cuda")
    else:
        with hopper_attention(monkeypatch, 5):
            run(case, "cpu")
    forget_all()
    assert planned and all(one.maps.merge is None and not one.maps.ints for one in planned)
    assert {one.numbers[20] for one in planned} == {AS_THEY_COME if as_they_come else SORTED}


@pytest.mark.parametrize("heads", [(2, 2), (71, 1)], ids=str)
@pytest.mark.parametrize("begins", [(0, 90, -1, 2**31 - 1, 40, 120), (-(2**31),) * 6, (120,) * 6])
def test_tables_that_lie(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, begins: tuple[int, ...],
    heads: tuple[int, int],
) -> None:  # fmt: skip
    """Lead to nothing outside of the tensors, and say so with a merge and without one."""
    if hopper_way.is_gpu:
        pytest.skip("of guarded memory of the CPU")
    monkeypatch.setattr(SPLIT, "choice", True)
    monkeypatch.setattr(SPLIT, "cuts_tiles", False)
    table = torch.tensor(begins, dtype=torch.int32)
    lengths = torch.tensor((2**31 - 1, -5, 0, 64, 70), dtype=torch.int32)
    q = torch.randn(120, heads[0], 128).bfloat16()
    k, v = torch.randn(2, 5, 70, heads[1], 128).bfloat16()
    tables = {"cu_seqlens_q": table, "cache_seqlens": lengths}
    flags = []
    for alone in (True, False):
        monkeypatch.setattr(SPLIT, "alone", alone)
        out, lse = Guarded(q.shape, q.dtype, "cpu"), Guarded((heads[0], 120), torch.float32, "cpu")
        flag = torch.zeros(1, dtype=torch.int32)
        problem = Problem(q, k, v, 5, 50, 70, 0.1, -1, 0, **tables)
        with hopper_attention(monkeypatch, 3):
            planned = SM90.plan(problem, out.tensor, lse.tensor)
            assert (planned.maps.merge is None) == alone
            maps = SPLIT.maps(planned.maps, q, k, v)
            given = table, None, lengths, None, None
            SPLIT.launch(planned, maps, q, out.tensor, lse.tensor, flag, given)
        out.check("out")
        lse.check("lse")
        flags.append(int(flag))
    assert flags[0] == flags[1] > 0


def bodies_for(problem: Any, bodies: list[Any]) -> list[Any]:
    """Those of the problem's mask and 128 columns."""
    mask = "window" if problem.window[0] >= 0 else "causal"
    return [body for body in bodies if (body.mask, body.head_dim) == (mask, 128)]


def sizes(batch_size: int, mean: float, longest: int = 640) -> Sizes:
    return Sizes(batch_size, 8, 1, 11, longest, -1, 0, mean, 128, has_lengths=True)


def test_which() -> None:
    """As measured on an H200: (as they come, whole)."""
    even, ragged = sizes(64, 640), sizes(64, 200)
    assert FEW_ROWS.whole_of((even, ragged), 10, 0.5, False, True) == (True, True)
    assert FEW_ROWS.whole_of((even, ragged), 10, 2.0, False, True) == (True, True)
    # Known to differ: of more than one round, the longest first.
    assert FEW_ROWS.whole_of((ragged,), 10, 1.3, False, True) == (False, True)
    assert FEW_ROWS.whole_of((even, ragged), 10, 3.0, False, True) == (False, True)
    # Long ones are cut, where they are longer than what a block has.
    assert FEW_ROWS.whole_of((even, ragged), 40, 0.9, False, True) == (False, False)
    assert FEW_ROWS.whole_of((even, ragged), 40, 4.0, False, True) == (False, True)
    assert FEW_ROWS.whole_of((even, ragged), 60, 4.0, False, True) == (False, False)
    chunk = even._replace(seqlen_q=17), ragged._replace(seqlen_q=17)
    assert FEW_ROWS.whole_of(chunk, 40, 4.0, False, True) == (False, False)
    # Prompts are as they were, but that those which are not sorted need no merge.
    assert FEW_ROWS.whole_of((even,), 40, 4.0, False, False) == (False, False)
    assert FEW_ROWS.whole_of((even,), 2, 4.0, True, False) == (True, True)
