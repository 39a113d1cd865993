"""batched_matmul against cuBLAS (torch.bmm) on the products of latent attention and attention.

Inputs are rotated past the L2, contenders alternate; products bound by the matrix units run in
bursts of work after idleness, the others as CUDA-graph replays.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from pathlib import Path

import torch
from _ops_common import RESULTS, _gpu_token
from bench_linear import BURST_US, IDLE_SECONDS, Launch, measure

from kernel_hub.measure import results, timing
from kernel_hub.ops import batched_matmul
from kernel_hub.testing.compare import compare

# name -> (batch, m, n, k)
SHAPES = {
    f"{name} {batch} heads m{m}": (batch, m, *sizes)
    for name, sizes in {"MLA q to latent": (512, 128), "MLA latent to v": (128, 512)}.items()
    for batch in (16, 128)
    for m in (1, 16, 128, 1024, 4096)
} | {
    "q k^T 64 x 1k d128": (64, 1024, 1024, 128),
    "p v 64 x 1k d128": (64, 1024, 128, 1024),
    "q k^T 16 x 4k d128": (16, 4096, 4096, 128),
    "q k^T 128 x 512 d64": (128, 512, 512, 64),
    "16 x 2048^3": (16, 2048, 2048, 2048),
}  # fmt: skip
RIDGE = 150  # operations a byte


def sets_of(
    pool: torch.Tensor, batch: int, m: int, n: int, k: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Inputs and outputs cut from random numbers, together past the L2."""
    each = batch * (m * k + n * k)
    wanted = -(-timing.L2_FACTOR * timing.l2_bytes() // (2 * (each + batch * m * n)))
    made = []
    for i in range(max(1, min(24, wanted, pool.numel() // each))):
        a, b = pool[i * each : (i + 1) * each].split([batch * m * k, batch * n * k])
        out = torch.empty(batch, m, n, device="cuda", dtype=pool.dtype)
        made.append((a.view(batch, m, k), b.view(batch, n, k), out))
    return made


def run(options: argparse.Namespace) -> int:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    pool = torch.randn(1 << 29, device="cuda", dtype=dtype)
    rows: list[results.ResultRow] = []
    ratios: list[float] = []
    failures = []
    for name, (batch, m, n, k) in SHAPES.items():
        ss = sets_of(pool, batch, m, n, k)
        a, b, out = (x[-1] for x in ss[0])
        batched_matmul(ss[0][0], ss[0][1], out=ss[0][2])
        a, b = a[:256], b[:256]
        found = compare(out[:256, :256], a.double() @ b.double().T, a @ b.T)
        if not found.ok:
            failures.append(f"{name}: {found.message}")
            continue
        launches: dict[str, list[Launch]] = {
            "kernel_hub": [functools.partial(batched_matmul, a, b, out=o) for a, b, o in ss],
            "cuBLAS": [functools.partial(torch.bmm, a, b.transpose(1, 2), out=o) for a, b, o in ss],
        }
        flops, moved = 2 * batch * m * n * k, 2 * batch * (m * k + n * k + m * n)
        is_bound = flops > RIDGE * moved
        expected = max(flops / 700e6, moved / 4.2e6, 2)
        samples = measure(
            launches,
            max(6, min(96, int(BURST_US / expected))),
            IDLE_SECONDS if is_bound else 0.0,
            options.rounds * (1 if is_bound else 3),
        )
        rows += results.summarise("batched_matmul", name, samples, "us", ratio_to="cuBLAS")
        medians = {label: statistics.median(values) for label, values in samples.items()}
        ours = medians["kernel_hub"]
        ratios.append(medians["cuBLAS"] / ours)
        print(
            f"{name:32} {ours:9.2f} us {flops / ours / 1e6:6.1f} TFLOP/s {moved / ours / 1e6:5.2f} "
            f"TB/s  cuBLAS {medians['cuBLAS']:9.2f}  x {ratios[-1]:.3f}",
            flush=True,
        )
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"geometric mean {mean:.3f} x cuBLAS, least {min(ratios):.3f}")
    about = results.environment()
    where = options.out or RESULTS / f"{_gpu_token(about['gpu'])}_batched_matmul.json"
    results.write(where, rows)
    for failure in failures:
        print(f"WRONG {failure}", file=sys.stderr)
    return 1 if failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    with torch.no_grad():
        return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
