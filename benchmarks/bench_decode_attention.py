"""decode_attention beside cuDNN, torch's flash, FlashAttention-3 and FlashInfer, in one run.

One new token a sequence over bf16 caches of d 128, full to the end: contiguous for everybody, then
paged, ragged and fused (rotation and append) for those that can. Kernel time by CUDA-graph replays
over caches rotated past the L2; every output is held against fp64 first. The limit is the bandwidth
of a read-only reduction, measured first and last. Writes benchmarks/results/<gpu>_decode.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from harness import OURS, Launch, Report, arguments
from lot import attention_peers as peers

from kernel_hub import ops
from kernel_hub.measure import results, timing
from kernel_hub.testing.compare import compare
from kernel_hub.testing.reference_attention import reference_attention

HEAD_DIM = 128
HEADS = [(32, 8), (64, 8), (8, 1), (32, 32)]
BATCHES = [1, 4, 16, 32, 64, 128, 256]
CONTEXTS = [1024, 4096, 8192, 32768, 131072]
QUICK = [
    (1, 1024), (1, 8192), (1, 131072), (4, 4096), (16, 1024), (16, 8192), (32, 4096), (64, 1024),
    (64, 8192), (128, 1024), (256, 1024),
]  # fmt: skip
MIN_LAUNCHES = 20
BIG_CACHE = 256e6


@dataclass
class Shape:
    """Caches and queries of one case; `given` None: all full."""

    num_heads: int
    num_kv_heads: int
    batch_size: int
    context: int
    given: torch.Tensor | None = None

    def __post_init__(self) -> None:
        full = torch.full((self.batch_size,), self.context, dtype=torch.int32)
        self.lengths = (full if self.given is None else self.given).cuda()
        tokens = int(self.lengths.sum())
        self.num_bytes = 4 * tokens * self.num_kv_heads * HEAD_DIM
        self.num_sets = timing.num_sets(self.num_bytes) if self.num_bytes < BIG_CACHE else 1
        batch, heads, kv_heads = self.batch_size, self.num_heads, self.num_kv_heads
        like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self.q = torch.randn(self.num_sets, batch, 1, heads, HEAD_DIM, **like)
        caches = (self.num_sets, batch, self.context, kv_heads, HEAD_DIM)
        self.k, self.v = (torch.empty(caches, **like).normal_() for _ in "kv")
        self.tables: dict[int, torch.Tensor] = {}
        self.known: dict[int, tuple[list[int], torch.Tensor, torch.Tensor]] = {}

    @property
    def name(self) -> str:
        """As the protocol writes it."""
        return f"{self.num_heads}/{self.num_kv_heads} B{self.batch_size} L{self.context}"

    def launches(self, launch: Callable[[int], Any]) -> list[Launch]:
        """One a set, again and again where launches are short."""
        count = max(self.num_sets, MIN_LAUNCHES if self.num_bytes < BIG_CACHE else 1)
        return [partial(launch, i % self.num_sets) for i in range(count)]

    def checked(self, page_size: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Some sequences, their truth and their error budget; page_size 0: contiguous."""
        if page_size not in self.known:
            which = sorted({0, self.batch_size - 1})
            k, v = self.k[0], self.v[0]
            if page_size:
                pages = (len(which), -1, self.num_kv_heads, HEAD_DIM)
                rows = self.tables[page_size][which].long()
                k, v = (x.view(-1, page_size, *x.shape[2:])[rows].view(pages) for x in (k, v))
            else:
                k, v = k[which], v[which]
            lengths = self.lengths[which]
            truth, own = (
                reference_attention(self.q[0][which], k, v, cache_seqlens=lengths, dtype=dtype)[0]
                for dtype in (torch.float64, torch.bfloat16)
            )
            self.known[page_size] = which, truth, own
        return self.known[page_size]

    def pages(self, page_size: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """(block_table, k pages, v pages): the same memory in a shuffled order."""
        if page_size not in self.tables:
            per_sequence = self.context // page_size
            order = torch.randperm(self.batch_size * per_sequence, device="cuda").int()
            self.tables[page_size] = order.view(self.batch_size, per_sequence)
        k, v = (
            [x.view(-1, page_size, self.num_kv_heads, HEAD_DIM) for x in cache]
            for cache in (self.k, self.v)
        )
        return self.tables[page_size], k, v


Maker = Callable[[Shape], Sequence[Launch]]


def ours(shape: Shape, **options: Any) -> list[Launch]:
    """The op on contiguous caches."""
    return shape.launches(
        lambda i: ops.decode_attention(
            shape.q[i], shape.k[i], shape.v[i], cache_seqlens=shape.lengths, **options
        )
    )


def ours_paged(shape: Shape, page_size: int) -> list[Launch]:
    """The op on shuffled pages."""
    table, k, v = shape.pages(page_size)
    return shape.launches(
        lambda i: ops.decode_attention(
            shape.q[i], k[i], v[i], cache_seqlens=shape.lengths, block_table=table
        )
    )


def ours_fused(shape: Shape) -> list[Launch]:
    """Rotation of q and k, append, attention: over the same number of tokens."""
    new = torch.randn(shape.batch_size, 1, shape.num_kv_heads, HEAD_DIM, device="cuda")
    new = new.bfloat16()
    angles = torch.arange(shape.context, device="cuda")[:, None] * 500_000.0 ** -torch.linspace(
        0, 1, HEAD_DIM // 2, device="cuda"
    )
    before = shape.lengths - 1
    cos, sin = angles.cos(), angles.sin()
    return shape.launches(
        lambda i: ops.decode_attention(
            shape.q[i], shape.k[i], shape.v[i], cache_seqlens=before, k=new, v=new, cos=cos, sin=sin
        )
    )


def by_torch(shape: Shape, name: str) -> list[Launch]:
    """torch's scaled_dot_product_attention on views."""
    calls = [peers.sdpa(*each, False, name) for each in zip(shape.q, shape.k, shape.v, strict=True)]
    return shape.launches(lambda i: calls[i]())


def flash_attention_3(shape: Shape) -> list[Launch]:
    """fa3_fwd with its own choice of splits."""
    op = peers.fa3()
    return shape.launches(
        lambda i: op(
            shape.q[i], shape.k[i], shape.v[i], softmax_scale=HEAD_DIM**-0.5, is_causal=False,
            num_splits=0,
        )[0]
    )  # fmt: skip


def flashinfer(shape: Shape, page_size: int) -> list[Launch]:
    """Its paged decode on tensor cores, planned beforehand."""
    table, k, v = shape.pages(page_size)
    heads = (shape.num_heads, shape.num_kv_heads, HEAD_DIM)
    run = peers.flashinfer_paged(
        table, [1] * shape.batch_size, shape.lengths.tolist(), heads, page_size, torch.bfloat16
    )
    return shape.launches(lambda i: run(shape.q[i, :, 0], (k[i], v[i]))[:, None])


def uniform_contenders() -> dict[str, Maker]:
    """On contiguous caches (FlashInfer: pages of 64 in order of its table)."""
    return {
        OURS: ours,
        "cudnn": partial(by_torch, name=peers.CUDNN),
        "torch flash": partial(by_torch, name=peers.FA2),
        "flash-attention-3": flash_attention_3,
        "flashinfer p64": partial(flashinfer, page_size=64),
    }


def is_wrong(shape: Shape, name: str, launch: Launch, page_size: int) -> str:
    """'' or what is wrong with the first output."""
    out = launch()
    torch.cuda.synchronize()
    if name.endswith("fused"):  # its truth is the tests'
        return "" if bool(out.isfinite().all()) else f"{name}: not finite"
    which, truth, own = shape.checked(page_size)
    result = compare(out[which], truth, own, name=f"{shape.name}: {name}")
    # A peer may round in between; it stays in unless it computes something else.
    fine = result.ok or (name != OURS and result.error <= 8 * result.limit)
    return "" if fine else result.message


class Bench:
    """Runs cases and keeps their rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.report = Report("decode", options)
        self.timer = timing.GraphTimer(options.rounds, placements=1)
        self.ceiling = read_bandwidth()
        self.big: list[tuple[float, str]] = []

    def case(self, shape: Shape, suffix: str, makers: dict[str, Maker], page_size: int = 0) -> None:
        """Check and time the contenders of a case."""
        contenders: dict[str, Sequence[Launch]] = {}
        for name, make in makers.items():
            try:
                launches = make(shape)
                paged = page_size if name == OURS else 0
                if name.startswith("flashinfer p"):
                    paged = int(name.removeprefix("flashinfer p"))
                wrong = is_wrong(shape, name, launches[0], paged)
            except Exception as error:  # noqa: BLE001  one that fails is left out, and said
                wrong = f"{name}: {type(error).__name__}: {str(error)[:160]}"
            if wrong:
                print(f"left out in {shape.name}{suffix}: {wrong}", file=sys.stderr)
                if name.startswith(OURS):
                    self.report.failures.append(wrong)
            else:
                contenders[name] = launches
        samples = self.timer.measure(contenders, shape.num_bytes)
        medians = {name: statistics.median(values) for name, values in samples.items()}
        others = [name for name in medians if not name.startswith(OURS)]
        best = min(others, key=medians.__getitem__, default=OURS)
        self.report.case(shape.name + suffix, samples, "us", ratio_to=best)
        if OURS not in medians:
            return
        rate = shape.num_bytes / medians[OURS] / 1e6
        if not suffix:
            self.report.ahead("the best peer of a shape", medians[best] / medians[OURS])
            if shape.num_bytes >= BIG_CACHE:
                self.big.append((rate / self.ceiling, shape.name))
        rest = ", ".join(f"{n} {us:.2f}" for n, us in medians.items() if n not in (OURS, best))
        print(
            f"{shape.name + suffix:26s} {medians[OURS]:9.2f} us {rate:5.2f} TB/s "
            f"{100 * rate / self.ceiling:4.0f} %  {medians[best] / medians[OURS]:.3f} x {best} "
            f"{medians[best]:.2f}  {rest}",
            flush=True,
        )

    def finish(self) -> int:
        """The summary, and the rows to their file."""
        last = read_bandwidth()
        for rate in (self.ceiling, last):
            row = results.ResultRow("decode", "read", "torch sum", rate, rate, rate, "TB/s")
            self.report.rows.append(row)
        self.report.write()
        least, name = min(self.big)
        print(
            f"decode: read {self.ceiling:.3f} and {last:.3f} TB/s; caches >= 256 MB at least "
            f"{100 * least:.1f} % ({name})"
        )
        return self.report.finish()


def read_bandwidth(gigabytes: float = 2.0, repeats: int = 12) -> float:
    """TB/s of the fastest read-only reduction that torch has."""
    buffer = torch.ones(int(gigabytes * 2**30) // 4, device="cuda").view(-1, 8192)
    best = 0.0
    for reduce in (torch.sum, partial(torch.sum, dim=1), partial(torch.amax, dim=1)):
        times = []
        for _ in range(repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            reduce(buffer)
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        best = max(best, buffer.nbytes / statistics.median(times) / 1e9)
    return best


def shapes(options: argparse.Namespace) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Heads, batch and context of the uniform cases that fit."""
    for heads in HEADS:
        sizes = QUICK if options.quick else [(b, n) for b in BATCHES for n in CONTEXTS]
        for batch, context in sizes:
            if 4 * batch * context * heads[1] * HEAD_DIM <= options.max_gigabytes * 1e9:
                yield heads, batch, context


def ragged(batch: int, longest: int) -> torch.Tensor:
    """Lengths log-uniform from 64 to `longest`, one of them the longest."""
    generator = torch.Generator().manual_seed(0)
    lengths = 64 * (longest / 64) ** torch.rand(batch, generator=generator)
    lengths[batch // 2] = longest
    return lengths.int()


def main() -> int:
    """Measure, write, print."""
    options = arguments(
        __doc__,
        rounds=30,
        quick={"rounds": 9, "max_gigabytes": 5.0},
        more=lambda parser: parser.add_argument(
            "--max-gigabytes", type=float, default=40.0, help="of one cache set"
        ),
    )
    bench = Bench(options)
    for heads, batch, context in shapes(options):
        bench.case(Shape(*heads, batch, context), "", uniform_contenders())
        torch.cuda.empty_cache()
    for batch, context in ((1, 8192), (16, 8192), (64, 4096)):
        shape = Shape(32, 8, batch, context)
        for page_size in (1, 16, 64, 256):
            makers: dict[str, Maker] = {
                OURS: partial(ours_paged, page_size=page_size),
                f"{OURS} contiguous": ours,
                f"flashinfer p{page_size}": partial(flashinfer, page_size=page_size),
            }
            bench.case(shape, f" page {page_size}", makers, page_size)
        bench.case(shape, " fused", {OURS: ours, f"{OURS} fused": ours_fused})
        del shape
        torch.cuda.empty_cache()
    for batch, longest in ((16, 32768), (64, 32768), (256, 8192)):
        shape = Shape(32, 8, batch, longest, ragged(batch, longest))
        makers = {OURS: ours, f"{OURS} num_splits=1": partial(ours, num_splits=1),
                  "flashinfer p64": partial(flashinfer, page_size=64)}  # fmt: skip
        bench.case(shape, " ragged", makers)
        del shape
        torch.cuda.empty_cache()
    return bench.finish()


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
