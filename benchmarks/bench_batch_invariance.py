"""What deterministic="batch" costs: products, norms and attention of an 8B model, with and without.

    python benchmarks/bench_batch_invariance.py [--quick] [--seconds 60] [--out out.json]

Columns, us: free (the fastest plan) and batch, and their quotient. Rows of "attention" are steps
over paged caches: decode_attention where a sequence has up to 16 queries, else flash_attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import case_rows
import torch

from kernel_hub import ops
from kernel_hub.measure.timing import l2_bytes, replays

ROUNDS, IDLE_SECONDS, REPLAY_US, MOST_SETS, PAGE = 5, 0.005, 1500.0, 4, 64
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
COUNTS, FEW_COUNTS = (1, 7, 64, 129, 777, 4096), (1, 64, 129, 777)


@dataclass(frozen=True)
class Case:
    """op of m rows; of attention batch sequences of m queries each over `keys`."""

    op: str
    m: int
    keys: int = 0
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.op} {self.m}" + (f" x {self.batch} over {self.keys}" if self.keys else "")


PRODUCTS = ("qkv_linear", "o", "gate_up", "down", "rms_norm")
STEPS = [
    Case("attention", 1, 1024), Case("attention", 1, 8192), Case("attention", 1, 1024, 64),
    Case("attention", 1, 8192, 16), Case("attention", 1, 4096, 64), Case("attention", 5, 4096, 16),
    Case("attention", 777, 777), Case("attention", 2048, 2048), Case("attention", 512, 8192),
    Case("attention", 4096, 4096), Case("attention", 2048, 16_384), Case("attention", 1, 131_072),
]  # fmt: skip
CASES = [*STEPS, *(Case(op, m) for op in PRODUCTS for m in COUNTS)]
QUICK = [*STEPS[:10], *(Case(op, m) for op in ("qkv_linear", "o", "down") for m in FEW_COUNTS)]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def call_of(case: Case) -> tuple[Callable[[Any], object], int]:
    """(what is timed, given `deterministic`; the bytes it reads)."""
    if case.op == "attention":
        pages = -(-case.keys // PAGE)
        k, v = (randn(case.batch * pages, PAGE, KV_HEADS, HEAD_DIM) for _ in range(2))
        new: dict[str, Any] = {"device": "cuda", "dtype": torch.int32}
        table = torch.arange(case.batch * pages, **new).view(case.batch, pages)
        lengths = torch.full((case.batch,), case.keys, **new)
        q = randn(case.batch, case.m, HEADS, HEAD_DIM)
        given = {"cache_seqlens": lengths, "block_table": table}
        num_bytes = 2 * k.numel() * 2
        if case.m <= 16:
            return lambda d: ops.decode_attention(q, k, v, **given, deterministic=d), num_bytes
        how = {"causal": True, **given}
        return lambda d: ops.flash_attention(q, k, v, **how, deterministic=d), num_bytes
    x = randn(case.m, INTERMEDIATE if case.op == "down" else HIDDEN)
    if case.op == "rms_norm":
        weight = randn(HIDDEN)
        return lambda d: ops.rms_norm(x, weight, deterministic=d), 4 * x.numel()
    if case.op == "qkv_linear":
        w = randn((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        angles = torch.randn(case.m, HEAD_DIM // 2, device="cuda")
        heads: dict[str, Any] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS}
        rotation: dict[str, Any] = {"cos": angles.cos(), "sin": angles.sin()}
        one = x[None]  # a sequence
        return lambda d: ops.qkv_linear(one, w, **heads, **rotation, deterministic=d), 2 * w.numel()
    if case.op == "gate_up":
        w = randn(2 * INTERMEDIATE, HIDDEN)
        return lambda d: ops.swiglu_linear(x, w, deterministic=d), 2 * w.numel()
    w, residual = randn(HIDDEN, x.shape[1]), randn(case.m, HIDDEN)
    return lambda d: ops.linear(x, w, residual=residual, deterministic=d), 2 * w.numel()


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One row."""
    calls = [call_of(case)]
    num_sets = max(1, min(MOST_SETS, -int(-3 * l2_bytes() // calls[0][1])))
    calls += [call_of(case) for _ in range(num_sets - 1)]
    contenders = {
        name: [partial(call, how) for call, _ in calls]
        for name, how in (("free", False), ("batch", "batch"))
    }
    samples = replays(contenders, 4, IDLE_SECONDS, 1)
    longest = max(statistics.median(each) for each in samples.values())
    count = max(4, min(200, int(REPLAY_US / max(longest, 1.0))))
    samples = replays(contenders, count, IDLE_SECONDS, rounds)
    row: dict[str, Any] = {"case": str(case)}
    row |= {name: round(statistics.median(each), 1) for name, each in samples.items()}
    row["quotient"] = round(row["batch"] / row["free"], 3)
    return row


def main() -> None:
    """Parse the command line, measure, print."""
    case_rows.main(__doc__, QUICK, CASES, measure, ROUNDS)


if __name__ == "__main__":
    main()
