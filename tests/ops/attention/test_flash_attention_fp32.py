"""flash_attention of fp32 against fp64: every layout and option by lot, its edges, refusals."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from attention_cases import LAYOUTS, SAME_LENGTHS, Case, run
from attention_random import random_case
from bits import same_bits
from refused import check_refused
from ways import Way

from kernel_hub.ops import flash_attention

# A length below a tile, about one of keys, about one of queries, several.
LENGTHS = (1, 7, 31, 32, 33, 63, 64, 65, 130, 199)


def small(lengths: tuple[int, ...], lot: random.Random) -> tuple[int, ...]:
    """As many as `lengths`, as equal as these are."""
    if len(set(lengths)) == 1:
        return (lot.choice(LENGTHS),) * len(lengths)
    return tuple(0 if length == 0 else lot.choice(LENGTHS) for length in lengths)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
def test_layouts(way: Way, layout: str, causal: bool) -> None:
    same = (40, 40) if layout in ("qkvpacked", "gqapacked", "varlen_packed") else (70, 70)
    heads = (2, 2) if layout == "qkvpacked" else (4, 2)
    case = Case(
        layout, "fp32", head_dim=64, num_heads=heads[0], num_kv_heads=heads[1], causal=causal,
        lengths_q=(40, 40), lengths_k=same, seed=len(layout), twice=True,
    )  # fmt: skip
    run(case, way.device)


@pytest.mark.parametrize("head_dim", [16, 40, 64, 96, 120, 128])
def test_head_dims(way: Way, head_dim: int) -> None:
    for layout in ("bshd", "unaligned"):
        run(Case(layout, "fp32", head_dim=head_dim, lengths_q=(65,), lengths_k=(97,)), way.device)


@pytest.mark.parametrize("number", range(24))
def test_by_lot(way: Way, number: int) -> None:
    lot = random.Random(f"attention fp32 {number}")
    case = random_case(lot, backward_share=0.0)
    if not way.is_gpu:
        group = case.num_heads // case.num_kv_heads
        lengths_q, lengths_k = small(case.lengths_q, lot), small(case.lengths_k, lot)
        if case.layout in SAME_LENGTHS:
            lengths_k = lengths_q
        case = replace(
            case, lengths_q=lengths_q, lengths_k=lengths_k, num_heads=group, num_kv_heads=1
        )
    own = case.own_head_dim_v and min(case.own_head_dim_v, 128)
    case = replace(case, dtype="fp32", head_dim=min(case.head_dim, 128), own_head_dim_v=own)
    run(replace(case, magnitude=1.0), way.device)


def test_the_same_bits(way: Way) -> None:
    q, k, v = (way.randn(2, 70, 2, 64, seed=i) for i in range(3))
    same_bits(flash_attention(q, k, v, causal=True), flash_attention(q, k, v, causal=True))


@pytest.mark.gpu
def test_larger(way: Way) -> None:
    case = Case(
        "bshd", "fp32", head_dim=128, num_heads=16, num_kv_heads=4, lengths_q=(2048,) * 2,
        lengths_k=(2048,) * 2, causal=True,
    )  # fmt: skip
    run(case, way.device)


def test_refusals(way: Way) -> None:
    x, wide = torch.ones(1, 8, 2, 64), torch.ones(1, 8, 2, 192)
    for given, words in (
        (
            (x.clone().requires_grad_(), x, x),
            ["q", "float16 or bfloat16 where gradients", "float32"],
        ),
        ((wide, wide, wide), ["q", "head_dim from 16 to 128", "192"]),
        ((x, x.half(), x), ["k", "dtype float32", "float16"]),
    ):
        check_refused("flash_attention", lambda t=given: flash_attention(*t), words)
