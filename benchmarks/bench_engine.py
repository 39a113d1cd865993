"""Steps of the engine beside their floor: decoding, prompts, and both in one pass.

    python benchmarks/bench_engine.py [--quick] [--model llama-3-8b] [--rounds 30] [--seed 1]

Random weights; real requests, whose contexts are drawn within a third of a case's, sampled
(temperature, top_k, top_p), streamed, with a stop string. From step to step in wall time, and how
long the device is idle between two passes (events); as the engine runs, one pass ahead, and in
step, each pass read before the next is planned. Prompts come one a step and end with a token.
Floor: over all products, attention, norms and sampling the sum of max(bytes / memory rate,
FLOP / matrix rate), at the rates given, of contexts as long as they are in the middle of the steps
that count: who answers first has said more by then. The prompt of 8,192 beside the rate at which
this card multiplies when it has been busy (a product of 8192^3 by torch); decodes with 512 tokens
of a prompt beside a prompt of as many tokens and the decodes' attention, each alone. The engine
takes so many beside decodes where a backlog asks for it (engine/shapes.py): that case has one, and
room in a pass for no more. --case: these alone, in the order of all. Beside each the clock of the
multiprocessors and the power, medians of nvidia-smi's: at the cap of power what ran before counts.
"""

from __future__ import annotations

import argparse
import atexit
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import torch
from harness import OURS, Report, arguments, model_arguments, sustained

from kernel_hub.engine.config import ModelConfig
from kernel_hub.engine.requests import Request, SamplingParams

FLOOR, IN_STEP = "floor", "in step"
PARAMS = SamplingParams(
    temperature=0.7, top_k=50, top_p=0.9, ignore_eos=True, stop=("never said",)
)  # fmt: skip
QUICK = {"rounds": 10, "layers": 4}
WARM = 4  # steps before those that count


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
    *(Pass(0, 0, 777), Pass(0, 0, 2048), Pass(0, 0, 8192)),
    *(Pass(64, 1024, 192), Pass(0, 0, 576), Pass(64, 1024, 512)),
)
CASES = {str(each): each for each in PASSES}
ALONE, MIXED = PASSES[-2:]  # as many tokens, alone and beside decodes
LONG = Pass(0, 0, 8192)
CACHE_TOKENS = 450_000
MOST_TOKENS = 8192  # of a pass
BACKLOG = 40  # prompts of 512 tokens that wait: as much as a sixteenth of fills a pass


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


class Words:
    """Text of random tokens, as a tokenizer's is: some letters each."""

    def __init__(self, vocab_size: int) -> None:
        self._words = [f" {token:x}" for token in range(vocab_size)]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self._words[i] for i in ids)


class Clock:
    """When the device begins and ends the passes of an engine: from the first copy to the last."""

    def __init__(self, engine: Any) -> None:
        self.passes: list[tuple[Any, Any]] = []
        real_run, real_staged = engine.runner.run, engine.runner._staged

        def staged(arrays: Any) -> Any:
            found = real_staged(arrays)
            self._began = _now()
            return found

        def run(batch: Any) -> Any:
            drawn = real_run(batch)
            self.passes.append((self._began, _now()))
            return drawn

        engine.runner._staged, engine.runner.run = staged, run

    def idle_us(self, places: Iterable[int]) -> list[float]:
        """Before the passes at these places, from the end of the one before each."""
        torch.cuda.synchronize()
        pairs = ((self.passes[i - 1][1], self.passes[i][0]) for i in places)
        return [1e3 * end.elapsed_time(begin) for end, begin in pairs]


class Card:
    """Clock (MHz) and power (W) of the device, every 20 ms, as nvidia-smi says them."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, str]] = []
        asked = "--query-gpu=clocks.sm,power.draw.instant"
        uuid = torch.cuda.get_device_properties(0).uuid
        how = "--format=csv,noheader,nounits", "-lms", "20", "-i", f"GPU-{uuid}"
        try:
            self._told = subprocess.Popen(
                ["nvidia-smi", asked, *how], stdout=subprocess.PIPE, text=True
            )
        except FileNotFoundError:
            return
        atexit.register(self._told.kill)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._told.stdout or ():
            self._seen.append((time.perf_counter(), line))

    def since(self, began: float) -> str:
        seen = [line.split(",") for at, line in self._seen if at >= began]
        clock, power = ([float(x[i]) for x in seen if "[" not in x[i]] for i in (0, 1))
        if not clock or not power:
            return "clock and power unknown"
        return f"{statistics.median(clock):.0f} MHz, {statistics.median(power):.0f} W"


def _now() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def request(lot: random.Random, name: str, length: int, vocab_size: int, most: int) -> Request:
    prompt = tuple(lot.randrange(vocab_size) for _ in range(length))
    return Request(name, prompt, replace(PARAMS, max_tokens=most))


def stepped(engine: Any) -> list[Any]:
    """What a step said, no request of it failed."""
    found: list[Any] = engine.step()
    if failed := [delta.error for delta in found if delta.error is not None]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return found


def steps(
    engine: Any, clock: Clock, prompts: Iterator[Request], count: int, is_in_step: bool
) -> tuple[list[float], list[float], list[Any]]:
    """Microseconds from step to step, the device's idle ones between, what the steps said.

    prompts: one a step. is_in_step: each pass is read before the next is planned.
    """
    began, said = [time.perf_counter()], list[Any]()
    for i in range(count + WARM):
        for prompt in islice(prompts, 1):
            engine.submit(prompt)
        if is_in_step and engine._flight is not None:
            engine._flight.is_awaited = True
        found = stepped(engine)
        began.append(time.perf_counter())
        if i >= WARM:
            said.append(found)
    walls, made = [(after - before) * 1e6 for before, after in pairwise(began)], len(clock.passes)
    return walls[WARM:], clock.idle_us(range(made - count, made)), said


def busy_rate(rounds: int) -> float:
    """FLOP a microsecond of products by torch, at the clocks of a card that has been busy."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    times = sustained({"product": lambda: torch.mm(x, x)}, rounds)["product"]
    return 2 * 8192**3 / statistics.median(times) / 1e3


def attention_us(engine: Any, prompts: list[list[int]], rounds: int) -> float:
    """Of a decode step behind prompts, in all layers."""
    from kernel_hub.measure.steps.decode import decode_step

    kinds = decode_step(engine, prompts, rounds).kinds
    return sum(kind.count * kind.time_us for kind in kinds if kind.op == "decode_attention")


def run(options: argparse.Namespace) -> int:
    from kernel_hub.engine.config import NAMED
    from kernel_hub.engine.engine import Engine

    config = {**NAMED[options.model], "num_hidden_layers": options.layers}
    described, report = ModelConfig.from_dict(config), Report("engine", options)
    engine = Engine.random(
        config, max_model_len=16384, max_tokens_a_pass=MOST_TOKENS, seed=options.seed,
        cache_tokens=CACHE_TOKENS,
    )  # fmt: skip
    engine.text, clock, vocab_size = Words(engine.vocab_size), Clock(engine), engine.vocab_size
    took, card = dict[Pass, float](), Card()
    for x in (each for name, each in CASES.items() if name in (options.case or CASES)):
        lot = random.Random(f"{options.seed} {x}")
        lengths = [lot.randint(x.context * 2 // 3, x.context * 4 // 3) for _ in range(x.decodes)]
        for i, length in enumerate(lengths):
            engine.submit(request(lot, f"decode {i}", length, vocab_size, 10_000))
        while x.decodes and len(stepped(engine)) < x.decodes:  # until all of them answer
            pass
        chunks = [1] * x.decodes + [x.prompt] * (x.prompt > 0)
        engine._scheduler.max_tokens = sum(chunks) if x == MIXED else MOST_TOKENS
        found, states = dict[str, list[float]](), list[str]()
        for name in (OURS, IN_STEP):
            prompts = (
                request(lot, f"{name} {i}", x.prompt, vocab_size, 1)
                for i in range((options.rounds + WARM + BACKLOG) * (x.prompt > 0))
            )
            for prompt in islice(prompts, BACKLOG * (x == MIXED)):
                engine.submit(prompt)
            began = time.perf_counter()
            walls, idle, said = steps(engine, clock, prompts, options.rounds, name == IN_STEP)
            states.append(card.since(began))
            found |= {name: walls, f"{name}, idle": idle}
            if name == OURS:  # in the cache, in the middle
                live = [engine._live[f"decode {i}"] for i in range(x.decodes)]
                lengths = [len(each.tokens) - 1 - options.rounds // 2 for each in live]
            tokens = [token for deltas in said for delta in deltas for token in delta.tokens]
            if any(len(deltas) != len(chunks) for deltas in said) or not all(
                0 <= token < vocab_size for token in tokens
            ):
                report.failures.append(f"{x}, {name}: {[len(d) for d in said]}, {tokens[:8]}")
            for left in [each for each in engine._live if not each.startswith("decode")]:
                engine.abort(left)
        for left in list(engine._live):
            engine.abort(left)
        while engine.has_work:
            stepped(engine)
        before = lengths + [0] * (x.prompt > 0)
        floor = floor_us(described, chunks, before, options.tb_per_s * 1e6, options.tflops * 1e6)
        medians = report.case(str(x), {**found, FLOOR: [floor]}, "us", ratio_to=FLOOR)
        report.ahead("prompts" if x.prompt else "decoding", floor / medians[OURS])
        shown = ", ".join(
            f"{name}: {medians[name]:9.1f} us (idle {medians[f'{name}, idle']:7.1f}), "
            f"{floor / medians[name]:.2f} of the floor"
            for name in (OURS, IN_STEP)
        )
        print(f"{x!s:22} {shown}; {' and '.join(states)}", flush=True)
        took[x] = medians[OURS]
        if x == LONG:
            rate = busy_rate(options.rounds)
            share = floor_us(described, chunks, before, float("inf"), rate) / took[x]
            print(f"{x!s:22} {share:.3f} of {rate / 1e6:.0f} TFLOP/s, the busy card's")
            report.ahead("a long prompt, the busy card's products", share)
        elif x == MIXED and ALONE in took:
            texts = [[lot.randrange(vocab_size) for _ in range(length)] for length in lengths]
            parts = took[ALONE], attention_us(engine, texts, options.rounds)
            print(f"{x!s:22} {took[x] / sum(parts):.3f} x (prompt alone {parts[0]:.1f} us + "
                  f"attention alone {parts[1]:.1f} us)")  # fmt: skip
            report.ahead("decodes beside a prompt", sum(parts) / took[x])
    return report.done()


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        model_arguments(parser)
        parser.add_argument("--case", action="append", choices=CASES, help="may be repeated")
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--tb-per-s", type=float, default=4.69, help="of memory, measured")
        parser.add_argument("--tflops", type=float, default=801.0, help="of products, measured")

    return run(arguments(__doc__, rounds=30, quick=QUICK, more=more))


if __name__ == "__main__":
    sys.exit(main())
