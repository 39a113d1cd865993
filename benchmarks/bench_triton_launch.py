"""What launching a Triton kernel costs: through kernel_hub.formats.triton, and by Triton itself.

The same kernels, arguments and process; Triton compiles each once into a cache of this run, from
which kernel_hub loads it. "Triton" is kernel[grid](...), "kernel_hub" is f[grid](...). Writes
benchmarks/results/<gpu>_triton_launch.json and prints the table.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from bench_launch import RESULTS, gpu_token

from kernel_hub import KernelHubError
from kernel_hub.measure import launch, results

TARGET = 1 / 3
PEER = "Triton"


def contenders(case: str) -> dict[str, launch.Contender]:
    """Name -> contender of one case, results compared once."""
    import _triton_kernels as kernels
    import torch

    from kernel_hub.formats import triton

    if case == "add: 3 tensors + int":
        n = 1024
        x, y = (torch.randn(n, device="cuda") for _ in range(2))
        out = torch.empty_like(x)
        jit, grid = kernels.add, (n // 256,)
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=200, help="of 300 launches each (default 200)"
    )
    parser.add_argument("--out", type=Path, help="default: results/<gpu>_triton_launch.json")
    args = parser.parse_args()
    try:
        about = results.environment()
    except KernelHubError as error:
        print(f"needs an NVIDIA GPU: {error}", file=sys.stderr)
        return 1
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for case in ("add: 3 tensors + int", "matmul: 3 tensors + 6 ints + float"):
            samples = launch.interleave(contenders(case), args.rounds)
            rows += results.summarise("triton_launch", case, samples, "ns", ratio_to=PEER)
    out = args.out or RESULTS / f"{gpu_token(about['gpu'])}_triton_launch.json"
    results.write(out, rows)
    print(results.table(rows))
    print(f"{about['gpu']}, driver {about['driver']}; wrote {out}")
    ours = [row for row in rows if row.contender.startswith("kernel_hub")]
    missed = [row for row in ours if row.ratio is not None and row.ratio > TARGET]
    for row in missed:
        print(f"misses the target of {TARGET:.2f}: {row.case}, {row.contender}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
