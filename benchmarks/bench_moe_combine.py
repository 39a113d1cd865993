"""moe_combine beside torch, torch.compile and a Triton kernel, in one run.

Timed as bench_silu_and_mul.py says. Writes benchmarks/results/<gpu>_moe_combine.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import CHECKED_TOKENS, Case, Contender, compiled
from moe_peers import MODELS, run_models, triton_combine

from kernel_hub import ops
from kernel_hub.measure import timing
from kernel_hub.testing import reference_moe


def formula(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What torch and torch.compile are given."""
    return (rows[places].float() * weights[..., None]).sum(1).to(rows.dtype)


def combine(dtype: torch.dtype, model: str, tokens: int, hidden: int) -> Case:
    """The experts' rows -> a token's, weighted."""
    k = MODELS[model][1]
    num_bytes = tokens * (hidden * dtype.itemsize * (k + 1) + 8 * k)
    sets = range(timing.num_sets(num_bytes))
    rows = torch.randn(len(sets), tokens * k, hidden, device="cuda", dtype=dtype)
    places = [torch.randperm(tokens * k, device="cuda").int().view(tokens, k) for _ in sets]
    weights = torch.rand(len(sets), tokens, k, device="cuda")

    def each(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, rows[i], places[i], weights[i]) for i in sets])

    first = slice(0, CHECKED_TOKENS)
    truth, own = (
        reference_moe.moe_combine(rows[0], places[0][first], weights[0][first], dtype=each)
        for each in (torch.float64, dtype)
    )
    return Case(
        f"moe_combine {model} {tokens} x {hidden}", num_bytes, each(ops.moe_combine), [truth],
        [own],
        {
            "torch": lambda: each(formula),
            "torch.compile": lambda: each(compiled(formula)),
            "triton": lambda: each(triton_combine),
        },
    )  # fmt: skip


def main() -> int:
    """Measure, write, print."""
    return run_models("moe_combine", combine, __doc__)


if __name__ == "__main__":
    sys.exit(main())
