"""flash_attention stays inside its tensors, whatever its tables say: forward and backward."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest
import torch
from arena import SEED, Arena, drawn
from emulated_attention import hopper_attention
from hostile_attention import LAYOUTS, HostileAttention
from ways import Way

BACKWARD: Any = importlib.import_module("kernel_hub.ops.attention.backward.sm90")
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


@pytest.mark.parametrize("lot", (1, 7, 12, 19, 23, 28))
def test_hostile_tables_backward_of_hopper(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, lot: int
) -> None:
    # Of the same draws; the sane sequence of lot 7 took another's blocks.
    if hopper_way.is_gpu:
        pytest.skip("the test above runs what this GPU chooses")
    monkeypatch.setattr(BACKWARD, "applies", BACKWARD.fits)
    with drawn("cpu", "attention backward", lot) as (generator, arena):
        layout = generator.choice(DIFFERENTIABLE)
        case = HostileAttention(generator, arena, layout=layout)
        with hopper_attention(monkeypatch, 132):
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
