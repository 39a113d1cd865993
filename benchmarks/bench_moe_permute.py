"""moe_permute beside torch and a Triton kernel behind torch's sort, in one run.

Timed as bench_silu_and_mul.py says. Writes benchmarks/results/<gpu>_moe_permute.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import CHECKED_TOKENS, Case, Contender
from moe_peers import MODELS, draw_experts, run_models, triton_permute

from kernel_hub import ops
from kernel_hub.measure import timing


def formula(x: torch.Tensor, experts: torch.Tensor, num_experts: int) -> Any:
    """What torch is given; torch.compile sorts no faster."""
    found, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(found, torch.arange(num_experts, device="cuda"), right=True)
    return x[order // experts.shape[1]], ends, order.argsort()


def permute(dtype: torch.dtype, model: str, tokens: int, hidden: int) -> Case:
    """Rows -> once for each expert, sorted by it."""
    num_experts, k = MODELS[model]
    num_bytes = tokens * (hidden * dtype.itemsize * (k + 1) + 8 * k)
    sets = range(timing.num_sets(num_bytes))
    x = torch.randn(len(sets), tokens, hidden, device="cuda", dtype=dtype)
    experts = [draw_experts(tokens, num_experts, k) for _ in sets]

    def each(function: Callable[..., Any]) -> Contender:
        launches = [partial(function, x[i], experts[i], num_experts) for i in sets]
        return Contender(launches, lambda found: found[:1])

    right = formula(x[0], experts[0], num_experts)[0][:CHECKED_TOKENS]
    return Case(
        f"moe_permute {model} {tokens} x {hidden}", num_bytes, each(ops.moe_permute),
        [right.double()], [right],
        {"torch": lambda: each(formula), "triton": lambda: each(triton_permute)},
    )  # fmt: skip


def main() -> int:
    """Measure, write, print."""
    return run_models("moe_permute", permute, __doc__)


if __name__ == "__main__":
    sys.exit(main())
