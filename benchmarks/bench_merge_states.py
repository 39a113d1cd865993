"""merge_states beside torch, torch.compile and FlashInfer's merge_state, in one run.

Kernel time by CUDA-graph replays over inputs rotated past the L2; each contender's output is held
against fp64 first; everybody allocates his own outputs. FlashInfer gets logarithms as it takes
them: (tokens, heads), base 2. Writes benchmarks/results/<gpu>_merge_states.json.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import CHECKED_TOKENS, Case, Contender, cases_of, compiled, row_arguments, run_cases

from kernel_hub import ops
from kernel_hub.measure import timing
from kernel_hub.testing import reference

HEAD_DIM = 128


def torch_merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
    """What torch and torch.compile are given."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((x - lse).exp().transpose(0, 1)[..., None] for x in (lse_a, lse_b))
    return (weight_a * out_a.float() + weight_b * out_b.float()).to(out_a.dtype), lse


def merge(dtype: torch.dtype, tokens: int, num_heads: int) -> Case:
    """Two states of (tokens, num_heads, head_dim) -> one."""
    num_bytes = 3 * tokens * num_heads * (HEAD_DIM * dtype.itemsize + 4)
    sets = range(timing.num_sets(num_bytes))
    shape = (2, len(sets), tokens, num_heads, HEAD_DIM)
    out_a, out_b = torch.randn(shape, device="cuda", dtype=dtype)
    lse_a, lse_b = 3 * torch.randn(2, len(sets), num_heads, tokens, device="cuda")

    def contender(function: Callable[..., Any]) -> Contender:
        launches = [partial(function, out_a[i], lse_a[i], out_b[i], lse_b[i]) for i in sets]
        return Contender(
            launches, lambda found: (found[0].clone(), found[1].transpose(0, 1).contiguous())
        )

    def flashinfer() -> Contender:
        from flashinfer.cascade import merge_state

        a, b = (x.transpose(1, 2).contiguous() / math.log(2) for x in (lse_a, lse_b))
        launches = [partial(merge_state, out_a[i], a[i], out_b[i], b[i]) for i in sets]
        return Contender(launches, lambda found: (found[0].clone(), found[1] * math.log(2)))

    first = slice(0, CHECKED_TOKENS)
    given = (out_a[0][first], lse_a[0][:, first], out_b[0][first], lse_b[0][:, first])

    def expected(wide: torch.dtype) -> list[torch.Tensor]:
        out, lse = reference.merge_states(*given, dtype=wide)
        return [out, lse.transpose(0, 1)]

    return Case(
        f"merge_states {tokens} x {num_heads}",
        num_bytes,
        contender(ops.merge_states),
        expected(torch.float64),
        expected(dtype),
        {
            "torch": lambda: contender(torch_merge),
            "torch.compile": lambda: contender(compiled(torch_merge)),
            "flashinfer": flashinfer,
        },
    )


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, heads="32,64")

    with torch.no_grad():
        return run_cases("merge_states", cases_of((merge,), options.heads, options), options)


if __name__ == "__main__":
    sys.exit(main())
