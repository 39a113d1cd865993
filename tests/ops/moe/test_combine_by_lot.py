"""moe_combine by lot: any hidden size, strides and offsets, rows that are not there, in place."""

from __future__ import annotations

import random

import pytest
import torch
from arena import Arena
from rows_in_memory import Rows
from ways import DTYPES, Way

from kernel_hub.ops import moe_combine
from kernel_hub.testing.compare import check

LOTS = 60
_HIDDEN = (1, 2, 3, 7, 8, 9, 16, 31, 64, 65, 127, 128, 129, 200, 256, 264, 1000, 1024, 2056)


@pytest.mark.parametrize("lot", range(LOTS))
def test_combine(way: Way, lot: int) -> None:
    draw = random.Random(f"combine {lot}")
    dtype, hidden = draw.choice(DTYPES), draw.choice(_HIDDEN)
    tokens, k = draw.choice((1, 2, 5, 33, 130)), draw.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17))
    num_rows = draw.choice((0, 1, 7, tokens * max(k, 1)))
    with Arena(way.device, draw) as memory:

        def given(name: str, shape: tuple[int, ...], seed: int) -> Rows:
            made = Rows(memory, draw, name, shape, dtype)
            made.tensor.copy_(way.randn(*shape, seed=seed).to(dtype))
            return made

        rows = given("rows", (num_rows, hidden), lot) if num_rows else Rows(
            memory, draw, "rows", (1, hidden), dtype
        )  # fmt: skip
        there = rows.tensor[:num_rows]
        places = torch.tensor(
            [[draw.choice((-1, draw.randrange(max(num_rows, 1)), draw.randrange(max(num_rows, 1))))
              if num_rows else -1 for _ in range(k)] for _ in range(tokens)], dtype=torch.int32,
        ).view(tokens, k)  # fmt: skip
        ids = memory.empty("row_id_map", (tokens, k), torch.int32)
        ids.copy_(places)
        weights = memory.empty("weights", (tokens, k), torch.float32)
        weights.copy_(way.randn(tokens, k, seed=lot + 1))
        residual = given("residual", (tokens, hidden), lot + 2) if draw.random() < 0.5 else None
        truth = torch.zeros(tokens, hidden, dtype=torch.float64, device=way.device)
        for j in range(k):
            is_there = (ids[:, j] >= 0).nonzero()[:, 0]
            found = there[ids[is_there, j].long()].double()
            truth[is_there] += weights[is_there, j, None].double() * found
        if residual is not None:
            truth += residual.tensor.double()
        out = residual
        if out is None or draw.random() < 0.5:
            out = Rows(memory, draw, "out", (tokens, hidden), dtype)
        # What no slot has may be anything.
        weights[ids < 0] = draw.choice((float("nan"), float("inf"), 1.0))
        moe_combine(
            there, ids, weights, out=out.tensor,
            residual=None if residual is None else residual.tensor,
        )  # fmt: skip
        slack = 1e-6 * (k + 1) * max(1.0, float(truth.abs().max()))
        check(out.tensor, truth, truth.to(dtype), atol=slack)
        out.check_around()
