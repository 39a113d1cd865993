"""Queries over caches of bytes, which are multiplied as fp16: of any size, beside others that are
far from it or not finite, against fp64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from decode_step import E4M3, Step
from ways import Way

from kernel_hub.testing.compare import attention_parts_atol, check

HEADS = ((4, 2), (8, 1), (40, 2), (2, 2))


@pytest.mark.parametrize("number", range(16))
def test_queries_of_any_size(way: Way, number: int) -> None:
    lot = random.Random(f"queries of any size {number}")
    lengths = [lot.choice((1, 17, 64, 130, lot.randrange(1, 300))) for _ in range(2)]
    step = Step(
        way, lengths, torch.bfloat16, E4M3, heads=lot.choice(HEADS), seqlen_q=1,
        head_dim=lot.choice((64, 80, 128, 256)), page_size=lot.choice((0, 16, 7)), seed=number,
    )  # fmt: skip
    size = lot.choice((-100, -40, 0, 40, 100))
    smaller = torch.tensor([[lot.choice((0, -3, -20)) for _ in range(step.heads[0])] for _ in "ab"])
    smaller[lot.randrange(2), lot.randrange(step.heads[0])] = 0
    factors = (smaller + size).double().exp2().to(way.device)
    step.q = (step.q.double() * factors[:, None, :, None]).bfloat16()
    options = {"softmax_scale": 2.0**-size / math.sqrt(step.head_dim)}
    others = torch.ones(2, step.heads[0], dtype=torch.bool, device=way.device)
    if number % 2:
        strange = lot.randrange(2), lot.randrange(step.heads[0])
        step.q[strange[0], 0, strange[1], lot.randrange(step.head_dim)] = lot.choice(
            (math.inf, -math.inf, math.nan)
        )
        others[strange] = False
    out, lse = step.run(**options)
    (truth, truth_lse), (own, own_lse) = (
        step.truth(kind, **options) for kind in (torch.float64, torch.bfloat16)
    )
    truth, own = truth[:, 0][others], own[:, 0][others]
    atol = attention_parts_atol(truth, step.dtype, 0.0)
    check(out[:, 0][others], truth, own, atol=atol, name="out")
    check(lse[..., 0][others], truth_lse[..., 0][others], own_lse[..., 0][others], atol=1e-4,
          name="lse")  # fmt: skip
