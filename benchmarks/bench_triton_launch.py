"""What launching a Triton kernel costs: through kernel_hub.formats.triton, and by Triton itself.

The same kernels, arguments and process; Triton compiles each once into a cache of this run, from
which kernel_hub loads it. "Triton" is kernel[grid](...), "kernel_hub" is f[grid](...). Writes
benchmarks/results/<gpu>_triton_launch.json and prints the table.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from typing import Any

from harness import OURS, Report, arguments

from kernel_hub.measure import launch, results

TARGET = 1 / 3
PEER = "Triton"


def contenders(case: str) -> dict[str, launch.Contender]:
    """Name -> contender of one case, results compared once."""
    import torch
    import triton_launched as kernels

    from kernel_hub.formats import triton

    if case == "add: 3 tensors + int":
        n = 1024
        x, y = (torch.randn(n, device="cuda") for _ in range(2))
        out = torch.empty_like(x)
        grid: tuple[int, ...] = (n // 256,)
        jit = kernels.add
        arguments: tuple[Any, ...] = (x, y, out, n)
        constexprs: dict[str, int] = {"BLOCK": 256}
    else:
        n = 128
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.float16) for _ in range(2))
        out = torch.empty_like(a)
        jit, grid = kernels.matmul, (n // 64, n // 64)
        strides = (n, n, n)
        arguments = (a, b, out, n, n, n, *strides, 1.0)
        constexprs = {"BM": 64, "BN": 64, "BK": 64}
    programs = jit[grid]
    programs(*arguments, **constexprs)
    wanted = out.clone()
    function = triton.load(jit.fn.__name__)
    out.zero_()
    function[grid](*arguments)
    if not torch.equal(out, wanted):
        raise RuntimeError(f"{case}: kernel_hub and Triton differ")
    params, blocks = list(arguments), (*grid, 1, 1)[:3]
    return {
        PEER: launch.timed(lambda: jit[grid](*arguments, **constexprs)),
        "Triton, kernel[grid] kept": launch.timed(partial(programs, *arguments, **constexprs)),
        "kernel_hub": launch.timed(lambda: function[grid](*arguments)),
        "kernel_hub, f[grid] kept": launch.timed(partial(function[grid], *arguments)),
        "kernel_hub, f(gridDim, params=...)": launch.timed(
            partial(function, blocks, params=params)
        ),
        "kernel_hub bound": launch.timed(function.bind(blocks, params=params)),
    }


def main() -> int:
    """Measure, write, print; 1 where the target is missed."""
    options = arguments(__doc__, rounds=200, quick={"rounds": 40})  # of 300 launches each
    report = Report("triton_launch", options)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for case in ("add: 3 tensors + int", "matmul: 3 tensors + 6 ints + float"):
            samples = launch.interleave(contenders(case), options.rounds)
            report.case(case, samples, "ns", ratio_to=PEER)
    report.write()
    print(results.table(report.rows))
    ours = [row for row in report.rows if row.contender.startswith(OURS)]
    missed = [row for row in ours if row.ratio is not None and row.ratio > TARGET]
    for row in missed:
        print(f"misses the target of {TARGET:.2f}: {row.case}, {row.contender}")
    return report.finish() or (1 if missed else 0)


if __name__ == "__main__":
    sys.exit(main())
