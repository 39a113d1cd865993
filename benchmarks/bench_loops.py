"""Our engine beside transformers' `generate` and loops in the manner of gpt-fast and nano-vllm.

    python benchmarks/bench_loops.py [--layers 8] [--case '1 x 1024'] [--seconds 50] [--rounds 5]

Greedy, on the same random weights of Llama 3 8B's sizes (of its layers, --layers), wall time, by
turns. Steps of sequences behind prompts, the host reading each token (gpt-fast's: at the end); the
loops begin with the engine's own cache. Prompts alone: until the first token is there, transformers
by a dynamic cache, as it is and with its forward compiled; the engine has not seen the prompt.
What others take to compile and to capture does not count; who is not begun within --seconds, or
interrupted meanwhile, is left out. Before that the tokens are held against the engine's.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from bench_engine import FLOOR, Pass, floor_us
from harness import OURS, Report, arguments, model_arguments
from loops import GptFast, NanoVllm, Transformers

HF, HF_COMPILED = "transformers", "transformers, compiled"
LOOPS = {"nano-vllm's manner": NanoVllm, "gpt-fast's manner": GptFast}
CONTENDERS = OURS, *LOOPS, HF, HF_COMPILED
PASSES = Pass(1, 1024), Pass(0, 0, 777), Pass(0, 0, 8192), Pass(64, 1024), Pass(16, 8192)
CASES = {str(each): each for each in PASSES}
QUICK = {"rounds": 2, "layers": 2, "steps": 8}
AGREE = 0.7  # of greedy tokens by other orders of sums; the rest were as good as tied
Measure = Callable[[], tuple[list[int], float]]  # tokens to hold against the engine's; us


class Ours:
    """An engine, and what it is asked for here."""

    def __init__(self, options: argparse.Namespace) -> None:
        from kernel_hub.engine.config import NAMED
        from kernel_hub.engine.engine import Engine

        config = {**NAMED[options.model], "num_hidden_layers": options.layers}
        self.engine = Engine.random(
            config, max_model_len=16384, max_tokens_a_pass=8192, cache_tokens=180_000
        )
        self.model, self.lot = self.engine.runner.model, random.Random(options.seed)

    def prompts(self, x: Pass) -> list[list[int]]:
        lengths = [x.context] * x.decodes or [x.prompt]
        return [[self.lot.randrange(self.engine.vocab_size) for _ in range(n)] for n in lengths]

    def answer(self, prompts: list[list[int]], count: int = 1) -> list[list[int]]:
        """Ask; until each has `count` tokens."""
        from kernel_hub.engine.requests import Request, SamplingParams

        params = SamplingParams(temperature=0.0, ignore_eos=True)
        self.said: dict[str, list[int]] = {f"loop {i}": [] for i in range(len(prompts))}
        for name, prompt in zip(self.said, prompts, strict=True):
            self.engine.submit(Request(name, tuple(prompt), params))
        while min(map(len, self.said.values())) < count:
            self.step()
        return list(self.said.values())

    def step(self) -> None:
        for delta in self.engine.step():
            if delta.error:
                raise RuntimeError(delta.error)
            self.said[delta.request_id] += delta.tokens

    def end(self) -> None:
        for name in self.said:
            self.engine.abort(name)
        while self.engine.has_work:
            self.engine.step()

    def cached(self, name: str, count: int) -> list[tuple[Any, Any]]:
        """Keys and values of the first tokens of a request, layer by layer."""
        pages = list(self.engine._live[name].pages)
        return [
            (k[pages].flatten(0, 1)[:count], v[pages].flatten(0, 1)[:count])
            for k, v in self.engine.runner.cache
        ]

    def steps(self, prompts: list[list[int]], count: int) -> tuple[list[int], float]:
        """Of a step; their prompts are known, and come from the pages that hold them."""
        said = self.answer(prompts, 3)
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        spent = time.perf_counter() - began
        self.end()
        return [tokens[1] for tokens in said], 1e6 * spent / count

    def prompt(self, x: Pass) -> tuple[list[int], float]:
        """Of one that nobody knows."""
        prompts, began = self.prompts(x), time.perf_counter()
        self.answer(prompts)
        spent = time.perf_counter() - began
        self.end()
        return [], 1e6 * spent


def loop(ours: Ours, kind: type[GptFast], prompts: list[list[int]], count: int) -> Measure:
    """Its caches and first tokens are the engine's."""
    context = len(prompts[0])
    made = kind(ours.model, len(prompts), context + count + 1)
    first = [tokens[0] for tokens in ours.answer(prompts)]
    for i, name in enumerate(ours.said):
        made.fill(i, ours.cached(name, context))
    ours.end()

    def measure() -> tuple[list[int], float]:
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = made.generate(first, context, count)
        return found[0], 1e6 * (time.perf_counter() - began) / count

    return measure


def transformers(ours: Ours, prompts: list[list[int]], count: int, is_compiled: bool) -> Measure:
    """Steps where count is more than 1."""
    made, ids = Transformers(ours.model), torch.tensor(prompts, device=ours.model.device)
    if is_compiled:
        made.model.forward = torch.compile(made.model.forward)

    def measure() -> tuple[list[int], float]:
        said, spent = made.generate(ids, count)
        return [each[0] for each in said], spent

    return measure


def contenders(x: Pass, ours: Ours, steps: int) -> dict[str, tuple[Callable[[], Measure], Any]]:
    """What makes them ready, and the tokens that each is to say."""
    prompts = ours.prompts(x)
    for _ in range(2):  # from the second time on by the pages of the first, as all that follow
        said = ours.answer(prompts, 2)
        ours.end()
    first, second = ([tokens[i] for tokens in said] for i in range(2))
    hf = partial(transformers, ours, prompts)
    if x.prompt:
        return {
            OURS: (lambda: partial(ours.prompt, x), []),
            HF: (partial(hf, 1, False), first),
            HF_COMPILED: (partial(hf, 1, True), first),
        }
    return {
        OURS: (lambda: partial(ours.steps, prompts, steps), second),
        **{name: (partial(loop, ours, kind, prompts, steps), second)
           for name, kind in LOOPS.items()},
        HF: (partial(hf, steps, False), first),
    }  # fmt: skip


def run(options: argparse.Namespace) -> int:
    report, began = Report("loops", options), time.monotonic()
    torch._dynamo.config.automatic_dynamic_shapes = False
    options.contender = options.contender or CONTENDERS
    ours, kept = Ours(options), report.kept()
    config, rates = ours.model.config, (options.tb_per_s * 1e6, options.tflops * 1e6)
    for x in (CASES[case] for case in options.case or CASES):
        torch.compiler.reset()
        ready: dict[str, Measure] = {}
        for name, (make, expected) in contenders(x, ours, options.steps).items():
            since = time.monotonic()
            if since - began > options.seconds or name not in options.contender:
                continue
            try:
                measure = make()
                found, _ = (measure()[0] for _ in range(2))
            except KeyboardInterrupt:
                options.seconds = 0.0
                continue
            except Exception as error:  # noqa: BLE001 - others', which the rest does without
                print(f"{x!s:14} {name}: {type(error).__name__}: {error!s:.600}", flush=True)
                continue
            same = sum(a == b for a, b in zip(found, expected, strict=True))
            print(f"{x!s:14} {name}: {same} of {len(expected)} tokens are ours, "
                  f"ready in {time.monotonic() - since:.1f} s", flush=True)  # fmt: skip
            if same < AGREE * len(expected):
                report.failures.append(f"{x}, {name}: {found[:8]}, not {expected[:8]}")
            ready[name] = measure
        if OURS not in ready:
            continue
        samples: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(options.rounds):
            for name in ours.lot.sample(list(ready), len(ready)):
                samples[name].append(ready[name]()[1])
        chunks, before = [x.prompt or 1] * (x.decodes or 1), [x.context] * (x.decodes or 1)
        samples[FLOOR] = [floor_us(config, chunks, before, *rates)]
        medians = report.case(f"{x}, {options.layers} layers", samples, "us", ratio_to=OURS)
        for name in set(ready) - {OURS}:
            report.ahead(
                f"{name}, {'prompts' if x.prompt else 'steps'}", medians[name] / medians[OURS]
            )
        print(f"{x!s:14} " + ", ".join(
            f"{name} {us:.1f} us x {us / medians[OURS]:.3f}" for name, us in medians.items()
        ), flush=True)  # fmt: skip
        report.write(kept)
    return report.finish()


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        model_arguments(parser)
        parser.set_defaults(layers=8)
        parser.add_argument("--case", action="append", choices=CASES, help="may be repeated")
        parser.add_argument("--contender", action="append", choices=CONTENDERS, help="the same")
        parser.add_argument("--steps", type=int, default=32, help="of a round")
        parser.add_argument("--seconds", type=float, default=3600.0)
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--tb-per-s", type=float, default=4.69, help="of memory, measured")
        parser.add_argument("--tflops", type=float, default=801.0, help="of products, measured")

    return run(arguments(__doc__, rounds=5, quick=QUICK, more=more))


if __name__ == "__main__":
    sys.exit(main())
