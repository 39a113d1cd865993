"""Hopper's own forward kernels without a GPU: their source in the emulator, held against fp64."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
from attention_cases import Case, run
from attention_split_random import EMULATED, random_split_case
from emulated_attention import hopper_attention
from ways import Way

SM90: Any = importlib.import_module("kernel_hub.ops.attention.forward_sm90")
DRAWN = 12


@pytest.fixture
def blocks(hopper_way: Way, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The blocks of each launch."""
    if hopper_way.is_gpu:
        pytest.skip("test_flash_attention_sm90.py does that with larger cases")
    taken: list[int] = []
    launch = SM90.launch

    def counted(planned: Any, *given: Any) -> None:
        taken.append(planned.grid[0])
        launch(planned, *given)

    monkeypatch.setattr(SM90, "launch", counted)
    yield taken


@pytest.mark.parametrize("index", range(DRAWN))
def test_drawn(blocks: list[int], monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    generator = random.Random(f"whole {index}")
    with hopper_attention(monkeypatch, generator.choice((1, 2, 5, 13))):
        run(random_split_case(generator, EMULATED), "cpu")
    assert blocks


@pytest.mark.parametrize("head_dim", [64, 256])
def test_many_tiles_without_keys(
    blocks: list[int], monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    # More than the ring of tiles has places; and, causal, first blocks that a warpgroup leaves out.
    case = Case(head_dim=head_dim, causal=True, lengths_q=(1100,), lengths_k=(70,))
    with hopper_attention(monkeypatch, 1):
        run(case, "cpu")
        lengths = (0, 0, 0, 0, 0, 130)
        run(dataclasses.replace(case, layout="varlen_cache", lengths_q=(130,) * 6,
            lengths_k=lengths), "cpu")  # fmt: skip
    assert blocks == [1, 1]
