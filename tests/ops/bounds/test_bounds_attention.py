"""flash_attention stays inside its tensors, whatever its tables say: forward and backward."""

from __future__ import annotations

import random

import pytest
import torch
from arena import SEED, Arena, drawn
from hostile_attention import LAYOUTS, HostileAttention
from ways import Way

LOTS = 60
DIFFERENTIABLE = [layout for layout in LAYOUTS if "paged" not in layout]


@pytest.mark.parametrize("lot", range(LOTS))
def test_hostile_tables(way: Way, lot: int) -> None:
    with drawn(way.device, "attention", lot) as (generator, arena):
        HostileAttention(generator, arena).forward()


@pytest.mark.parametrize("lot", range(LOTS // 3))
def test_hostile_tables_fp32(way: Way, lot: int) -> None:
    with drawn(way.device, "attention fp32", lot) as (generator, arena):
        head_dim = generator.choice((32, 72, 128))
        HostileAttention(
            generator, arena, dtype=torch.float32, head_dim=head_dim, softcap=0.0
        ).forward()


@pytest.mark.parametrize("lot", range(LOTS // 2))
def test_hostile_tables_backward(way: Way, lot: int) -> None:
    with drawn(way.device, "attention backward", lot) as (generator, arena):
        layout = generator.choice(DIFFERENTIABLE)
        case = HostileAttention(generator, arena, layout=layout)
        case.backward(deterministic=generator.random() < 0.5)


@pytest.mark.parametrize("layout", ["varlen", "varlen_q"])
def test_lengths_past_the_rows_write_nothing(way: Way, layout: str) -> None:
    """It wrote past `out`."""
    generator = random.Random(f"{SEED} attention")
    with Arena(way.device, generator) as arena:
        case = HostileAttention(
            generator, arena, layout=layout, head_dim=64, causal=True, says_longest=False,
            lies=False,
        )  # fmt: skip
        case.given["cu_seqlens_q"][-1] += 300
        case.queries[-1] = None
        case.certain.add("cu_seqlens_q")
        case.forward()
