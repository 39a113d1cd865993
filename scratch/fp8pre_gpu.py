# ruff: noqa
"""flash_attention over e4m3 caches on a GPU: cases by lot against fp64, then times.

    python scratch/fp8pre_gpu.py [--cases 500] [--seed 1] [--skip-times]

Times, in us (medians of 7 bursts): the 16-bit cache, the e4m3 cache, the widening alone, and what
docs/notes/flash_attention_e4m3_caches.md predicts of an H200.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/ops"),
                str(ROOT / "tests/ops/attention")]  # fmt: skip

import torch
from test_flash_attention_e4m3_caches import MODULE, drawn, run

from kernel_hub import ops
from kernel_hub.ops.attention.problem import Options

E4M3 = torch.float8_e4m3fn
# batch, queries, keys, heads, kv heads, head_dim, window, predicted us
CASES = (
    (1, 1024, 32768, 32, 8, 128, -1, 769), (8, 1024, 8192, 32, 8, 128, -1, 1500),
    (1, 512, 8192, 32, 8, 128, -1, 111), (4, 256, 16384, 32, 8, 128, -1, 472),
    (1, 128, 32768, 28, 4, 128, -1, 121), (1, 64, 65536, 8, 1, 128, -1, 49),
    (16, 17, 2048, 28, 4, 128, -1, 56), (1, 17, 131072, 64, 8, 128, -1, 396),
    (2, 512, 65536, 64, 8, 64, 127, None), (1, 512, 16384, 16, 8, 256, -1, None),
)  # fmt: skip


def burst_us(call: Any, launches: int = 20) -> float:
    """A median of 7, the first left out."""
    found = []
    for _ in range(8):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(launches):
            call()
        end.record()
        torch.cuda.synchronize()
        found.append(1000 * begin.elapsed_time(end) / launches)
    return statistics.median(found[1:])


def times(page_size: int) -> None:
    print(f"\npages of {page_size}" if page_size else "\ncontiguous")
    print("case | 16 bits | e4m3 | widening | widening TB/s | predicted e4m3")
    for batch, seqlen_q, seqlen_k, heads, kv_heads, dim, left, predicted in CASES:
        q = torch.randn(batch, seqlen_q, heads, dim, device="cuda", dtype=torch.bfloat16)
        shape: tuple[int, ...] = (batch, seqlen_k, kv_heads, dim)
        lengths = torch.full((batch,), seqlen_k, device="cuda", dtype=torch.int32)
        table = None
        if page_size:
            count = seqlen_k // page_size
            shape = (batch * count, page_size, kv_heads, dim)
            table = torch.randperm(batch * count, device="cuda").int().view(batch, count)
        k, v = (torch.randn(shape, device="cuda").to(E4M3) for _ in range(2))
        scale = torch.rand(kv_heads, device="cuda") + 0.5
        options = {
            "causal": True, "window_size": (left, -1), "block_table": table,
            "cache_seqlens": lengths,
        }  # fmt: skip
        k16, v16 = k.bfloat16(), v.bfloat16()
        wide = burst_us(lambda: ops.flash_attention(q, k16, v16, **options))
        narrow = burst_us(
            lambda: ops.flash_attention(q, k, v, k_scale=scale, v_scale=scale, **options)
        )
        given = Options(
            causal=True, window_size=(left, -1), block_table=table, cache_seqlens=lengths
        )
        scales = MODULE.CacheScales(scale, scale)
        plan = MODULE._plan(q, k, v, scales, None, given)
        alone = burst_us(
            lambda: [MODULE._widened(share, q, k, v, scales, given) for share in plan.shares]
        )
        seen = seqlen_k if left < 0 else min(seqlen_k, seqlen_q + left + 256)
        moved = 6 * batch * seen * kv_heads * dim
        print(
            f"{batch} x {seqlen_q} over {seqlen_k} h{heads}/{kv_heads} d{dim} left {left} | "
            f"{wide:.1f} | {narrow:.1f} | {alone:.1f} | {moved / alone / 1e6:.2f} | {predicted}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip-times", action="store_true")
    given = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
    failed = 0
    for index in range(given.cases):
        seed = given.seed * 100_000 + index
        case, kind, most = drawn(seed, (16, 64, 96, 128, 192, 256))
        MODULE.most_bytes = most
        try:
            run(case, kind, "cuda")
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {case} {kind} {most}: {str(error)[:300]}")
    MODULE.most_bytes = 1 << 29
    print(f"{given.cases - failed} of {given.cases} cases right")
    if not given.skip_times:
        for page_size in (0, 1, 16, 64):
            times(page_size)
        for units in (1024, 4096):
            MODULE._UNITS_PER_BLOCK = units
            MODULE._plans.clear()
            print(f"\n_UNITS_PER_BLOCK {units}")
            times(64)
        MODULE._UNITS_PER_BLOCK = 2048
        MODULE.most_bytes = 32 << 20
        MODULE._plans.clear()
        print("\nmost_bytes 32 MiB")
        times(64)
    return failed > 0


if __name__ == "__main__":
    raise SystemExit(main())
