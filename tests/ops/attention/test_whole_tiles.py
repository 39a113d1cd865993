"""Whole tiles of caches of any lengths, in turn and without a merge: right, and which they are."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from attention_cases import Case, run
from attention_devices import taken
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.ops.attention.packed_tile import PackedTile
from kernel_hub.ops.attention.problem import Sizes
from kernel_hub.ops.core.launch import forget_all

SPLIT: Any = importlib.import_module("kernel_hub.ops.attention.forward_split_sm90")
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
