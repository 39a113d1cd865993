"""silu_and_mul beside torch, torch.compile, Liger and FlashInfer, in one run.

Kernel time by CUDA-graph replays over inputs rotated past the L2; each contender's output is held
against fp64 first. All contenders read the same inputs and allocate their outputs themselves, in
the capture, from one memory pool, so that all write the same addresses; three pools are averaged
over, and the order is drawn anew each round (kernel_hub/measure/timing.py). Writes
benchmarks/results/<gpu>_silu_and_mul.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gated_contenders import gated as gated_case
from harness import CHECKED_TOKENS, Case, Contender, cases_of, compiled, row_arguments, run_cases

from kernel_hub import ops
from kernel_hub.measure import timing
from kernel_hub.testing import reference


def formula(x: torch.Tensor) -> torch.Tensor:
    """What torch.compile is given."""
    gate, up = x.chunk(2, -1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)


def eager(x: torch.Tensor) -> torch.Tensor:
    """What a model in eager torch runs."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def gated(dtype: torch.dtype, tokens: int, size: int) -> Case:
    """x -> silu(x[:, :size]) * x[:, size:]."""
    num_bytes = 3 * tokens * size * dtype.itemsize
    x = torch.randn(timing.num_sets(num_bytes), tokens, 2 * size, device="cuda", dtype=dtype)
    sets = range(len(x))

    def each(function: Callable[..., Any]) -> Contender:
        return Contender([partial(function, x[i]) for i in sets])

    def liger() -> Contender:
        from liger_kernel.ops.swiglu import swiglu_forward

        # It takes gate and up as tensors of their own.
        gate, up = (part.contiguous() for part in x.chunk(2, -1))
        launches = [partial(swiglu_forward, gate[i], up[i]) for i in sets]
        return Contender(launches, lambda found: found[-1:])

    def flashinfer() -> Contender:
        from flashinfer.activation import silu_and_mul

        return Contender([partial(silu_and_mul, x[i]) for i in sets])

    checked = x[0][:CHECKED_TOKENS]
    return Case(
        f"silu_and_mul {tokens} x {size}",
        num_bytes,
        Contender([partial(ops.silu_and_mul, x[i]) for i in sets]),
        [reference.silu_and_mul(checked)],
        [reference.silu_and_mul(checked, dtype=dtype)],
        {
            "torch": lambda: each(eager),
            "torch.compile": lambda: each(compiled(formula)),
            "liger": liger,
            "flashinfer": flashinfer,
        },
    )


def into_e4m3(dtype: torch.dtype, tokens: int, size: int) -> Case:
    """The same with a scale a row."""
    wide: Callable[..., Any] = reference.silu_and_mul
    return gated_case(ops.silu_and_mul, formula, wide, None, dtype, tokens, size, is_e4m3=True)


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(__doc__, {"sizes": "14336,28672"}, sizes="11008,14336,28672")

    with torch.no_grad():
        kinds = (gated, into_e4m3)
        return run_cases("silu_and_mul", cases_of(kinds, options.sizes, options), options)


if __name__ == "__main__":
    sys.exit(main())
