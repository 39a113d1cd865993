"""What attention sinks cost: the same calls with and without them, in turn in one run.

    python benchmarks/bench_attention_sinks.py [--quick] [--rounds 20] [--out out.json]

gpt-oss' heads (64 on 8, head_dim 64, full and with its window of 128) and larger ones; prompts,
chunks over a cache, decoding. Columns, us: none, fp32 and bf16 sinks, and each over none. Before
it is timed, the result with sinks is held against the one without, whose rows they shrink by
exp(lse) / (exp(lse) + exp(sink)).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import case_rows
import harness
import torch

from kernel_hub.measure.timing import l2_bytes, replays
from kernel_hub.ops import decode_attention, flash_attention

ROUNDS, IDLE_SECONDS, REPLAY_US, MOST_LAUNCHES, MOST_SETS = 20, 0.008, 4000.0, 100, 6
FLOPS_A_US, BYTES_A_US, LEAST_US = 500e6, 4.0e6, 6.0  # about an H200's, for how many launches
TOLERANCE = 2e-2
KINDS = {"none": None, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """seqlen_q queries over seqlen_k keys, causal; window: keys before a query's own, -1: all."""

    batch_size: int
    seqlen_q: int
    seqlen_k: int
    heads: tuple[int, int] = (64, 8)
    head_dim: int = 64
    window: int = -1

    def __str__(self) -> str:
        window = f" window {self.window}" * (self.window >= 0)
        return (
            f"{self.batch_size} x {self.seqlen_q} over {self.seqlen_k} h{self.heads[0]}/"
            f"{self.heads[1]} d{self.head_dim}{window}"
        )

    @property
    def is_decoding(self) -> bool:
        return self.seqlen_q <= 16 and self.seqlen_k > self.seqlen_q

    @property
    def seen(self) -> int:
        """Keys of a row, about."""
        mean = self.seqlen_k - self.seqlen_q // 2
        return mean if self.window < 0 else min(mean, self.window + 1)

    @property
    def least_us(self) -> float:
        rows = self.batch_size * self.seqlen_q * self.heads[0]
        flops = 4.0 * rows * self.seen * self.head_dim
        keys = min(self.seqlen_k, self.seen + self.seqlen_q)
        num_bytes = 4.0 * self.batch_size * keys * self.heads[1] * self.head_dim
        return max(LEAST_US, flops / FLOPS_A_US, num_bytes / BYTES_A_US)


QUICK = [
    Case(4, 4096, 4096), Case(4, 4096, 4096, window=127), Case(64, 1, 4096),
    Case(64, 1, 4096, window=127), Case(4, 4096, 4096, (32, 8), 128),
]  # fmt: skip
CASES = [
    *QUICK,
    Case(32, 512, 512), Case(16, 1024, 1024), Case(16, 1024, 1024, window=127),
    Case(1, 16_384, 16_384), Case(1, 16_384, 16_384, window=127), Case(1, 256, 32_768),
    Case(8, 64, 8192), Case(1, 1, 1024), Case(1, 1, 65_536), Case(16, 1, 16_384),
    Case(128, 1, 1024), Case(32, 4, 8192), Case(16, 1024, 1024, (32, 8), 128),
    Case(1, 16_384, 16_384, (32, 8), 128), Case(64, 1, 8192, (32, 8), 128),
    Case(2, 4096, 4096, (16, 8), 256), Case(2, 4096, 4096, (16, 16), 96),
]  # fmt: skip


def call(case: Case, given: tuple[torch.Tensor, ...], sinks: Any, **more: Any) -> Any:
    """The op that a model would call."""
    q, k, v, lengths = given
    options = {"window_size": (case.window, 0 if case.window >= 0 else -1), "sinks": sinks, **more}
    if case.is_decoding:
        return decode_attention(q, k, v, cache_seqlens=lengths, **options)
    return flash_attention(q, k, v, causal=True, **options)


def inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """q, k, v and the lengths."""
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    shapes = [(case.seqlen_q, case.heads[0]), *[(case.seqlen_k, case.heads[1])] * 2]
    tensors = [torch.randn(case.batch_size, *shape, case.head_dim, **like) for shape in shapes]
    lengths = torch.full((case.batch_size,), case.seqlen_k, device="cuda", dtype=torch.int32)
    return (*tensors, lengths)


def check(case: Case, given: tuple[torch.Tensor, ...], sinks: torch.Tensor) -> None:
    """Raises AssertionError where sinks do not shrink rows as they should."""
    out, lse = call(case, given, None, return_lse=True)
    found, found_lse = call(case, given, sinks, return_lse=True)
    column = sinks.float()[:, None]
    share = torch.sigmoid(lse - column).transpose(1, 2)[..., None]
    torch.testing.assert_close(found.float(), out * share, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found_lse, torch.logaddexp(lse, column), rtol=1e-5, atol=1e-4)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One row."""
    cache_bytes = 4.0 * case.batch_size * case.seqlen_k * case.heads[1] * case.head_dim
    sets = [
        inputs(case) for _ in range(max(1, min(MOST_SETS, -int(-3 * l2_bytes() // cache_bytes))))
    ]
    drawn = 3 * torch.randn(case.heads[0], device="cuda")
    contenders: dict[str, list[Callable[[], object]]] = {}
    for name, dtype in KINDS.items():
        sinks = None if dtype is None else drawn.to(dtype)
        if sinks is not None:
            check(case, sets[0], sinks)
        contenders[name] = [partial(call, case, given, sinks) for given in sets]
    count = max(4, min(MOST_LAUNCHES, int(REPLAY_US / case.least_us)))
    samples = replays(contenders, count, IDLE_SECONDS, rounds)
    times = {name: statistics.median(each) for name, each in samples.items()}
    row: dict[str, Any] = {"case": str(case), **{k: round(us, 2) for k, us in times.items()}}
    for name in ("fp32", "bf16"):
        pairs = zip(samples[name], samples["none"], strict=True)
        row[f"{name} / none"] = round(times[name] / times["none"], 4)
        row[f"{name} / none, least and most"] = [
            round(each, 4) for each in _ends([a / b for a, b in pairs])
        ]
    return row


def _ends(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)


def main() -> None:
    """Parse the command line, measure, print."""
    options = harness.arguments(__doc__.splitlines()[0], rounds=ROUNDS, quick={"rounds": 5})
    with torch.no_grad():
        rows = case_rows.measured(QUICK if options.quick else CASES, measure, options.rounds)
    for name in ("fp32", "bf16"):
        ratios = [row[f"{name} / none"] for row in rows if f"{name} / none" in row]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(f"{name} sinks: {mean:.4f} of none (geometric mean), at most {max(ratios):.4f}")
    case_rows.write(options, rows)


if __name__ == "__main__":
    main()
