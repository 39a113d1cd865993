"""Passes of the engine beside their floor: decode steps, prompts, and both in one pass.

    python benchmarks/bench_engine.py [--quick] [--model llama-3-8b] [--rounds 20] [--seed 1]

Random weights; lengths of a case are drawn within a third of its context. A pass is what
`Engine.step` runs: arrays to the device, the model (a CUDA graph where all rows decode), sampling
(temperature, top_k, top_p), ids on the host. Floor: over all products, attention, norms and
sampling the sum of max(bytes / memory rate, FLOP / matrix rate), at the rates given.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

from harness import OURS, Report, arguments

from kernel_hub.engine.config import ModelConfig
from kernel_hub.engine.requests import Request, SamplingParams
from kernel_hub.engine.scheduler import Sequence

FLOOR = "floor"
PARAMS = SamplingParams(temperature=0.7, top_k=50, top_p=0.9)
QUICK = {"rounds": 5, "layers": 4}


@dataclass(frozen=True)
class Pass:
    """Sequences that decode after `context` tokens, and a prompt of `prompt` tokens."""

    decodes: int
    context: int
    prompt: int = 0

    def __str__(self) -> str:
        decodes = f"{self.decodes} x {self.context}" if self.decodes else ""
        prompt = f"prompt {self.prompt}" if self.prompt else ""
        return " + ".join(filter(None, (decodes, prompt)))


PASSES = (
    *(Pass(1, 1024), Pass(1, 8192), Pass(16, 1024), Pass(16, 8192), Pass(33, 3072)),
    *(Pass(64, 1024), Pass(64, 4096), Pass(200, 1024)),
    *(Pass(0, 0, 777), Pass(0, 0, 2048), Pass(0, 0, 8192), Pass(64, 1024, 512)),
)


def floor_us(
    c: ModelConfig, chunks: list[int], before: list[int], bytes_per_us: float, flops_per_us: float
) -> float:
    """Of one pass; 2 bytes an element. Windows and experts are not reckoned with."""
    m, rows, q = sum(chunks), len(chunks), c.num_heads * c.head_dim
    kv = 2 * c.num_kv_heads * c.head_dim

    def kernel(num_bytes: float, flops: float = 0.0) -> float:
        return max(num_bytes / bytes_per_us, flops / flops_per_us)

    def product(m: int, n: int, k: int, out_bytes: int = 2) -> float:
        return kernel(2 * (n * k + m * k) + out_bytes * m * n, 2.0 * m * n * k)

    ends = [old + new for old, new in zip(before, chunks, strict=True)]
    # A token sees those before it and half of its own chunk.
    seen = sum(new * (old + (new + 1) / 2) for old, new in zip(before, chunks, strict=True))
    layer = (
        product(m, q + kv, c.hidden_size)
        + kernel(2 * kv * sum(ends) + 4 * m * q, 4.0 * q * seen)
        + product(m, c.hidden_size, q)
        + product(m, 2 * c.intermediate_size, c.hidden_size)
        + product(m, c.hidden_size, c.intermediate_size)
        + 2 * kernel(4 * m * c.hidden_size)
    )
    head = product(rows, c.vocab_size, c.hidden_size, 4) + kernel(4 * rows * c.vocab_size)
    return len(c.layers) * layer + head


def planned(x: Pass, lot: random.Random, engine: Any) -> list[Sequence]:
    """The pass as the scheduler plans it, on pages of which nobody else knows."""
    page_size, vocab = engine.runner.cache[0][0].shape[1], engine.vocab_size
    lengths = [lot.randint(x.context * 2 // 3, x.context * 4 // 3) for _ in range(x.decodes)]
    found, next_page = list[Sequence](), 0
    for i, (before, chunk) in enumerate(
        [(n, 1) for n in lengths] + [(0, x.prompt)] * (x.prompt > 0)
    ):
        tokens = [lot.randrange(vocab) for _ in range(before + chunk)]
        request, seed = Request(str(i), tuple(tokens), PARAMS), lot.getrandbits(62)
        sequence = Sequence(request, tokens, seed, len(tokens) + 1)
        num_pages = -(-len(tokens) // page_size)
        sequence.pages.extend(range(next_page, next_page + num_pages))
        next_page += num_pages
        sequence.computed, sequence.chunk = before, chunk
        found.append(sequence)
    return found


def run(options: argparse.Namespace) -> int:
    from kernel_hub.engine.config import NAMED
    from kernel_hub.engine.engine import Engine
    from kernel_hub.engine.runner import batch_of

    config = {**NAMED[options.model], "num_hidden_layers": options.layers}
    described, report = ModelConfig.from_dict(config), Report("engine", options)
    engine = Engine.random(config, max_model_len=16384, seed=options.seed)
    for x in PASSES:
        lot = random.Random(f"{options.seed} {x}")
        sequences = planned(x, lot, engine)
        chunks, before = [s.chunk for s in sequences], [s.computed for s in sequences]
        floor = floor_us(described, chunks, before, options.tb_per_s * 1e6, options.tflops * 1e6)
        samples = []
        for i in range(options.rounds + 3):
            start = time.perf_counter()
            tokens, _ = engine.runner.run(batch_of(sequences, engine.vocab_size)).read()
            if i >= 3:
                samples.append((time.perf_counter() - start) * 1e6)
            if len(tokens) != len(sequences) or not all(0 <= t < engine.vocab_size for t in tokens):
                report.failures.append(f"{x}: tokens {tokens[:8]}")
        medians = report.case(str(x), {OURS: samples, FLOOR: [floor]}, "us", ratio_to=FLOOR)
        ratio = floor / medians[OURS]
        report.ahead("prompts" if x.prompt else "decoding", ratio)
        print(f"{x!s:22} {medians[OURS]:10.1f} us, {ratio:.2f} of its floor", flush=True)
    report.write()
    return report.finish()


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", default="llama-3-8b", help="a name that the engine knows")
        parser.add_argument("--layers", type=int, default=32)
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--tb-per-s", type=float, default=4.69, help="of memory, measured")
        parser.add_argument("--tflops", type=float, default=801.0, help="of products, measured")

    return run(arguments(__doc__, rounds=20, quick=QUICK, more=more))


if __name__ == "__main__":
    sys.exit(main())
