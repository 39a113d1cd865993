"""Which tiles e4m3 prompts have on Hopper, by what they cost, and how many heads share them."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from kernel_hub.ops.attention.packed_tile import TileCost
from kernel_hub.ops.attention.problem import Problem
from kernel_hub.ops.core.device import PlannedGpu, pretend

FP8: Any = importlib.import_module("kernel_hub.ops.attention.forward_fp8")


def test_how_many_heads_share_tiles() -> None:
    """Of those that share keys and q's scale; us: heads apart, as it is."""

    def found(batch_size: int, seqlen: int, heads: int, kv_heads: int, head_dim: int) -> int:
        q, k = (
            torch.empty(batch_size, seqlen, n, head_dim, device="meta").to(torch.float8_e4m3fn)
            for n in (heads, kv_heads)
        )
        problem = Problem(q, k, k, batch_size, seqlen, seqlen, 0.1, window_right=0)
        with pretend(PlannedGpu((9, 0), 132)):
            own = FP8.choose(head_dim, True, False, seqlen, q[..., 0].numel(), 132, seqlen)
            return int(FP8._cheapest(problem, own, heads // kv_heads)[1])

    assert found(64, 137, 64, 4, 64) == 16  # 142, 76
    assert found(128, 279, 8, 1, 128) == 8  # 93, 64
    assert found(79, 561, 14, 2, 128) == 7  # 217, 191
    assert found(7, 768, 12, 1, 128) < 12  # 25.7, 27.5 with all
    assert found(2, 96, 32, 32, 128) == 1
    # 71 heads, in 8 packs of 9: 684, 378. Of wider bodies that one whose tiles heads can share.
    assert found(128, 269, 71, 1, 64) == 9 and FP8._packs(71, 1) == [(1, 71)]
    assert FP8._packs(71, 64)[-1] == (36, 2) and FP8._packs(6, 64) == [
        (1, 6),
        (2, 3),
        (3, 2),
        (6, 1),
    ]
    assert found(64, 200, 16, 4, 224) == 4 and found(64, 1500, 16, 4, 192) == 1

    def alike(scale: torch.Tensor | None) -> int:
        q, k = (torch.empty(2, 300, n, 64, device="meta") for n in (12, 2))
        return int(FP8._alike(Problem(q, k, k, 2, 300, 300, 0.1), FP8.Scales(scale, None, None)))

    assert alike(None) == alike(torch.ones(())) == alike(torch.ones(2, 2)) == 6
    assert alike(torch.ones(4)) == 3 and alike(torch.ones(2, 12)) == 1
    assert alike(torch.ones(2, 2, 3)) == 1


def test_how_few_causal_tiles_are_dealt() -> None:
    """In few rounds some heads go through theirs before the others, if all fit into the L2."""
    tile = TileCost(192, 96, 1.16, 2.4)

    def last(heads: int, seqlen: int) -> int:
        return int(FP8._begin_last(seqlen, seqlen, heads, tile, 132))

    assert (
        last(4, 19_282) == 3
        and last(6, 11_588) == 4
        and last(1, 19_282) == 1
        and last(24, 3869) == 24
    )

    def are_few(heads: int, seqlen: int, right: int = 0) -> bool:
        q = torch.empty(1, seqlen, heads, 128, device="meta").to(torch.float8_e4m3fn)
        problem = Problem(q, q, q, 1, seqlen, seqlen, 0.1, window_right=right)
        with pretend(PlannedGpu((9, 0), 132)):
            return bool(FP8._are_few(problem, heads, tile))

    assert are_few(4, 19_282) and not are_few(4, 19_282, -1)
    assert not are_few(1, 4096) and not are_few(24, 19_282)
