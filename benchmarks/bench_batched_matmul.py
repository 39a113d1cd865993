"""batched_matmul against cuBLAS (torch.bmm) on the products of latent attention and attention.

Inputs are rotated past the L2, contenders alternate; products bound by the matrix units run in
bursts of work after idleness, the others as CUDA-graph replays.
"""

from __future__ import annotations

import argparse
import functools
import sys

import torch
from harness import BURST_US, IDLE_SECONDS, OURS, Launch, Report, arguments, replays

from kernel_hub.measure import timing
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
    pool = torch.randn(1 << 29, device="cuda", dtype=options.torch_dtype)
    report = Report("batched_matmul", options)
    for name, (batch, m, n, k) in list(SHAPES.items())[:: 3 if options.quick else 1]:
        ss = sets_of(pool, batch, m, n, k)
        a, b, out = (x[-1] for x in ss[0])
        batched_matmul(ss[0][0], ss[0][1], out=ss[0][2])
        a, b = a[:256], b[:256]
        found = compare(out[:256, :256], a.double() @ b.double().T, a @ b.T)
        if not found.ok:
            report.failures.append(f"{name}: {found.message}")
            continue
        launches: dict[str, list[Launch]] = {
            OURS: [functools.partial(batched_matmul, a, b, out=o) for a, b, o in ss],
            "cuBLAS": [functools.partial(torch.bmm, a, b.transpose(1, 2), out=o) for a, b, o in ss],
        }
        flops, moved = 2 * batch * m * n * k, 2 * batch * (m * k + n * k + m * n)
        is_bound = flops > RIDGE * moved
        expected = max(flops / 700e6, moved / 4.2e6, 2)
        samples = replays(
            launches,
            max(6, min(96, int(BURST_US / expected))),
            IDLE_SECONDS if is_bound else 0.0,
            options.rounds * (1 if is_bound else 3),
        )
        medians = report.case(name, samples, "us", ratio_to="cuBLAS")
        ours = medians[OURS]
        ratio = medians["cuBLAS"] / ours
        report.ahead("cuBLAS", ratio)
        print(
            f"{name:32} {ours:9.2f} us {flops / ours / 1e6:6.1f} TFLOP/s {moved / ours / 1e6:5.2f} "
            f"TB/s  cuBLAS {medians['cuBLAS']:9.2f}  x {ratio:.3f}",
            flush=True,
        )
    return report.done()


def main() -> int:
    """Measure, write, print."""
    options = arguments(__doc__, rounds=5, quick={"rounds": 2}, dtypes=("bf16", "fp16"))
    with torch.no_grad():
        return run(options)


if __name__ == "__main__":
    sys.exit(main())
