"""mla_decode beside torch's attention and FlashInfer's, where it is there, in one run.

One new token a sequence over a bf16 cache in shuffled pages of 64, full to the end or ragged
(log-uniform from a sixteenth). Kernel time by CUDA-graph replays over caches rotated past the L2;
every output is held against fp64 first. Limits: the bandwidth of a read-only reduction, and for
many heads the tensor cores. Writes benchmarks/results/<gpu>_mla_decode.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench_decode_attention import read_bandwidth
from harness import OURS, Launch, Report, arguments

from kernel_hub import ops
from kernel_hub.measure import timing
from kernel_hub.testing.compare import compare
from kernel_hub.testing.reference_attention import reference_mla_decode

KEY_DIM, LATENT_DIM, PAGE, SCALE = 576, 512, 64, 192**-0.5
MIN_LAUNCHES, BIG_CACHE = 20, 256e6
CASES = [
    (heads, batch, context)
    for heads in (16, 128)
    for batch in (1, 16, 64, 128)
    for context in (1024, 4096, 32768)
    if batch * context <= 1 << 22
]
QUICK = [(16, 64, 4096), (128, 64, 4096), (16, 1, 4096), (128, 1, 32768), (16, 128, 1024)]


@dataclass
class Shape:
    """A cache in pages and queries of one case."""

    num_heads: int
    batch_size: int
    context: int
    is_ragged: bool = False

    def __post_init__(self) -> None:
        lot = random.Random(f"{self.num_heads} {self.batch_size} {self.context}")
        lengths = [self.context] * self.batch_size
        if self.is_ragged:
            lengths = [round(self.context * 16 ** -lot.random()) for _ in lengths]
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.num_bytes = 2 * KEY_DIM * sum(lengths)
        self.flops = 2 * self.num_heads * (KEY_DIM + LATENT_DIM) * sum(lengths)
        self.num_sets = timing.num_sets(self.num_bytes) if self.num_bytes < BIG_CACHE else 1
        columns = -(-self.context // PAGE)
        order = torch.randperm(self.batch_size * columns, device="cuda").int()
        self.table = order.view(self.batch_size, columns)
        like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        pages = (self.num_sets, self.batch_size * columns, PAGE, KEY_DIM)
        self.cache = torch.empty(pages, **like).normal_()
        self.q = torch.randn(self.num_sets, self.batch_size, 1, self.num_heads, KEY_DIM, **like)

    @property
    def name(self) -> str:
        ragged = " ragged" if self.is_ragged else ""
        return f"{self.num_heads} heads B{self.batch_size} L{self.context}{ragged}"

    def launches(self, launch: Callable[[int], Any]) -> list[Launch]:
        """One a set, again and again where launches are short."""
        count = max(self.num_sets, MIN_LAUNCHES if self.num_bytes < BIG_CACHE else 1)
        return [partial(launch, i % self.num_sets) for i in range(count)]


def ours(shape: Shape) -> list[Launch]:
    return shape.launches(
        lambda i: ops.mla_decode(
            shape.q[i], shape.cache[i], cache_seqlens=shape.lengths, block_table=shape.table,
            softmax_scale=SCALE,
        )
    )  # fmt: skip


def by_torch(shape: Shape) -> list[Launch]:
    """Two products and a softmax, of caches that lie in order already; of full ones alone."""
    rows = shape.table.long()
    keys = [each[rows].view(shape.batch_size, -1, KEY_DIM) for each in shape.cache]

    def run(i: int) -> torch.Tensor:
        scores = shape.q[i][:, 0] @ keys[i].transpose(1, 2) * SCALE
        return (torch.softmax(scores, -1) @ keys[i][..., :LATENT_DIM])[:, None]

    return shape.launches(run)


def flashinfer(shape: Shape) -> list[Launch]:
    """Its MLA on pages, planned beforehand."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa3")
    used = -(-shape.lengths // PAGE)
    indptr = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    seen = torch.arange(shape.table.shape[1], device="cuda") < used[:, None]
    starts = torch.arange(shape.batch_size + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        starts, indptr, shape.table[seen], shape.lengths, shape.num_heads, LATENT_DIM,
        KEY_DIM - LATENT_DIM, PAGE, False, SCALE, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip

    def run(i: int) -> torch.Tensor:
        q, cache = shape.q[i][:, 0], shape.cache[i]
        found: torch.Tensor = wrapper.run(
            q[..., :LATENT_DIM], q[..., LATENT_DIM:], cache[..., :LATENT_DIM],
            cache[..., LATENT_DIM:],
        )  # fmt: skip
        return found[:, None]

    return shape.launches(run)


def is_wrong(shape: Shape, name: str, launch: Launch) -> str:
    """'' or what is wrong with the first output: of the first and the last sequence."""
    out = launch()
    torch.cuda.synchronize()
    which = sorted({0, shape.batch_size - 1})
    options = {
        "cache_seqlens": shape.lengths[which], "block_table": shape.table[which],
        "softmax_scale": SCALE,
    }  # fmt: skip
    truth, own = (
        reference_mla_decode(shape.q[0][which], shape.cache[0], **options, dtype=dtype)[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    found = compare(out[which], truth, own, name=f"{shape.name}: {name}")
    # A peer may round in between; it stays in unless it computes something else.
    fine = found.ok or (name != OURS and found.error <= 8 * found.limit)
    return "" if fine else found.message


def run_case(report: Report, timer: timing.GraphTimer, shape: Shape, ceiling: float) -> None:
    """Check and time the contenders of a case."""
    makers = {OURS: ours, "flashinfer": flashinfer}
    if not shape.is_ragged:
        makers["torch"] = by_torch
    contenders: dict[str, Sequence[Launch]] = {}
    for name, make in makers.items():
        try:
            launches = make(shape)
            wrong = is_wrong(shape, name, launches[0])
        except Exception as error:  # noqa: BLE001  one that fails is left out, and said
            wrong = f"{name}: {type(error).__name__}: {str(error)[:160]}"
        if not wrong:
            contenders[name] = launches
            continue
        print(f"left out in {shape.name}: {wrong}", file=sys.stderr)
        if name == OURS:
            report.failures.append(wrong)
    if OURS not in contenders:
        return
    samples = timer.measure(contenders, shape.num_bytes)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    best = min((name for name in medians if name != OURS), key=medians.__getitem__, default=OURS)
    report.case(shape.name, samples, "us", ratio_to=best)
    report.ahead("the best peer of a shape", medians[best] / medians[OURS])
    rate, us = shape.num_bytes / medians[OURS] / 1e6, medians[OURS]
    others = ", ".join(f"{name} {them:.2f}" for name, them in medians.items() if name != OURS)
    print(
        f"{shape.name:28} {us:9.2f} us {rate:5.2f} TB/s {100 * rate / ceiling:4.0f} % "
        f"{shape.flops / us / 1e6:6.1f} TFLOP/s  {others}",
        flush=True,
    )


def cases(options: argparse.Namespace) -> Iterator[Shape]:
    """Full caches, then ragged ones."""
    for case in QUICK if options.quick else CASES:
        yield Shape(*case)
    for heads, batch, context in QUICK[:2] if options.quick else CASES:
        if batch > 1:
            yield Shape(heads, batch, context, True)


def main() -> int:
    """Measure, write, print."""
    options = arguments(__doc__, rounds=30, quick={"rounds": 10})
    report = Report("mla_decode", options)
    timer = timing.GraphTimer(options.rounds, placements=1)
    ceiling = read_bandwidth()
    print(f"read {ceiling:.3f} TB/s")
    for shape in cases(options):
        run_case(report, timer, shape, ceiling)
        del shape
        torch.cuda.empty_cache()
    return report.done()


if __name__ == "__main__":
    sys.exit(main())
