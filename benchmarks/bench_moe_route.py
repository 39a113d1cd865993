"""moe_route beside torch, torch.compile and a Triton kernel, in one run, as models route.

Timed as bench_silu_and_mul.py says. Writes benchmarks/results/<gpu>_moe_route.json.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import CHECKED_TOKENS, Case, Contender, compiled, row_arguments, run_cases
from moe_peers import MODELS, triton_route

from kernel_hub import ops
from kernel_hub.measure import timing
from kernel_hub.testing import reference_moe


def formula(logits: torch.Tensor, k: int) -> Any:
    """What torch and torch.compile are given."""
    best, experts = logits.topk(k, -1)
    return best.float().softmax(-1), experts.int()


def route(dtype: torch.dtype, model: str, tokens: int) -> Case:
    """logits -> the chosen experts, and a softmax over them."""
    num_experts, k = MODELS[model]
    num_bytes = tokens * (num_experts * dtype.itemsize + 8 * k)
    sets = range(timing.num_sets(num_bytes))
    logits = torch.randn(len(sets), tokens, num_experts, device="cuda", dtype=dtype)

    def each(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, logits[i], k) for i in sets], lambda found: found[:1])

    checked = logits[0][:CHECKED_TOKENS]
    truth, own = (
        reference_moe.moe_route(checked, k, renormalise=True, dtype=each)[0]
        for each in (torch.float64, torch.float32)
    )
    return Case(
        f"moe_route {model} {tokens} x {num_experts}", num_bytes,
        each(partial(ops.moe_route, renormalise=True)), [truth], [own],
        {
            "torch": lambda: each(formula),
            "torch.compile": lambda: each(compiled(formula)),
            "triton": lambda: each(triton_route),
        },
    )  # fmt: skip


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, models=",".join(MODELS))
    options.peers.append("triton")
    cases = [
        partial(route, options.torch_dtype, model, tokens)
        for model, tokens in itertools.product(options.models, options.tokens)
    ]
    with torch.no_grad():
        return run_cases("moe_route", cases, options)


if __name__ == "__main__":
    sys.exit(main())
