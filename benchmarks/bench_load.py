"""An engine under load: random requests all at once, then as they come, at a share of that rate.

    python benchmarks/bench_load.py [--quick] [--requests 1000] [--passes 2048] [--load 0.7]

Random weights; lengths of prompts and answers log-uniform by lot, sampled, streamed, with a stop
string. All at once: the time beside the sum of prompt tokens at the rate of a pass of prompts alone
and of as many steps as decoded anything, each as long as the median of those that did nothing else.
At a share of that rate, Poisson: the time between two tokens of a request beside that median.
For each limit on the tokens of a pass. Of passes by the rows of their graphs: how many, how long,
what the host took to launch one, by how much they are longer than that sum has them, and how many
of the tokens behind another waited for one, and how long.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from typing import Any, NamedTuple

import torch
from bench_engine import WARM, Words, request, stepped
from harness import OURS, Report, arguments, model_arguments

from kernel_hub.engine.batch import shape_of

FLOOR, STEP = "prompts alone + decode steps", "a decode step"
QUICK = {"rounds": 5, "layers": 4, "requests": 100}
PROMPT, ANSWER = (32, 2048), (16, 256)


class Timed(NamedTuple):
    """A pass."""

    decodes: int
    prompt: int  # tokens of prompts
    rows: int  # of its graph; 0: it has none
    host_us: float  # to launch it
    wall_us: float  # from the end of the pass before, or from its step's beginning

    @property
    def kind(self) -> tuple[int, str]:
        """In the order of kinds, and how it is called."""
        if not self.prompt:
            return 0, "decodes only"
        return (self.rows, f"{self.rows} rows") if self.rows else (1 << 30, "no graph")


class Ran(NamedTuple):
    """What a run of requests was like, in microseconds."""

    total: float
    passes: list[Timed]
    first: list[float]  # from a request's arrival to its first token
    decodes: list[float]  # steps that did nothing but decode
    num_decoding: int  # steps that decoded anything
    gaps: list[tuple[float, Timed]]  # between tokens of a request, and the pass that ended them
    num_tokens: int


class Watch:
    """What an engine's passes consist of, in the order in which they are launched."""

    def __init__(self, engine: Any) -> None:
        self.launched: list[Timed] = []
        self.real, engine.runner.run = engine.runner.run, self._run

    def _run(self, batch: Any) -> Any:
        began = time.perf_counter()
        drawn = self.real(batch)
        host, decodes = (time.perf_counter() - began) * 1e6, batch.num_decodes
        prompt = len(batch.inputs["ids"]) - decodes * batch.width
        shape = shape_of(batch)
        rows = 0 if shape is None else shape.decodes * shape.width + shape.prompt
        self.launched.append(Timed(decodes, prompt, rows, host, 0.0))
        return drawn


def between(gaps: list[float]) -> tuple[float, float]:
    """Median and 95th of a hundred."""
    each = statistics.quantiles(gaps, n=20) if len(gaps) > 1 else gaps * 19 or [0.0] * 19
    return each[9], each[18]


def shown(found: Ran, each: float, step: float) -> None:
    """A line for each kind of passes; each, step: us of a token of prompts and of a decode step."""
    for kind in sorted({x.kind for x in found.passes}):
        some = [x for x in found.passes if x.kind == kind]
        decodes, prompt, _, host, wall = (statistics.mean(x) for x in zip(*some, strict=True))
        parts = statistics.mean(each * x.prompt + step * (x.decodes > 0) for x in some)
        gaps = [us for us, x in found.gaps if x.kind == kind]
        p50, p95 = between(gaps)
        print(
            f"  {kind[1]:12} {len(some):5} x {wall / 1e3:6.2f} ms (parts {parts / 1e3:6.2f}, in "
            f"all {len(some) * (wall - parts) / 1e6:+.2f} s), host {host / 1e3:5.2f} ms, "
            f"{decodes:.0f} decodes + {prompt:.0f}; {len(gaps) / len(found.gaps):4.0%} of tokens "
            f"waited for one, p50 {p50 / 1e3:.2f}, p95 {p95 / 1e3:.2f} ms",
            flush=True,
        )


def log_uniform(lot: random.Random, span: tuple[int, int]) -> int:
    return round(math.exp(lot.uniform(*map(math.log, span))))


def requests_of(lot: random.Random, options: argparse.Namespace, vocab_size: int) -> list[Any]:
    return [
        request(lot, f"load {i}", log_uniform(lot, PROMPT), vocab_size, log_uniform(lot, ANSWER))
        for i in range(options.requests)
    ]


def ran(engine: Any, watch: Watch, requests: list[Any], arrivals: list[float]) -> Ran:
    """All of them, each submitted once its second has come."""
    decodes, gaps, last = list[float](), list[tuple[float, Timed]](), dict[str, float]()
    passes, first = list[Timed](), list[float]()
    watch.launched.clear()
    num_decoding = num_tokens = place = 0
    began = before = time.perf_counter()
    was_alone = False  # the pass that a step reads is that of the step before
    while place < len(requests) or engine.has_work:
        while place < len(requests) and time.perf_counter() - began >= arrivals[place]:
            engine.submit(requests[place])
            place += 1
        if not engine.has_work:
            time.sleep(2e-4)
            before, was_alone = time.perf_counter(), False
            continue
        found = [delta for delta in stepped(engine) if delta.tokens]
        now = time.perf_counter()
        has_old = any(delta.request_id in last for delta in found)
        num_decoding += has_old
        flight = engine._flight
        read = len(watch.launched) - (flight is not None)  # passes
        if read > len(passes):
            passes.append(watch.launched[read - 1]._replace(wall_us=(now - before) * 1e6))
        is_alone = flight is not None and all(count for _, _, count, _ in flight.rows)
        if was_alone and has_old and is_alone and all(d.request_id in last for d in found):
            decodes.append((now - before) * 1e6)
        for delta in found:
            if delta.request_id in last:
                gaps.append(((now - last[delta.request_id]) * 1e6, passes[-1]))
            else:
                came = arrivals[int(delta.request_id.split()[1])]
                first.append((now - began - came) * 1e6)
            last[delta.request_id] = now
            num_tokens += len(delta.tokens)
        before, was_alone = now, is_alone
    return Ran((now - began) * 1e6, passes, first, decodes, num_decoding, gaps, num_tokens)


def prompt_us(engine: Any, tokens: int, rounds: int, lot: random.Random) -> float:
    """Of a token of prompts that fill a pass."""
    walls = []
    for i in range(rounds + WARM):
        engine.submit(request(lot, f"prompt {i}", tokens, engine.vocab_size, 1))
        began = time.perf_counter()
        while engine.has_work:
            stepped(engine)
        walls.append((time.perf_counter() - began) * 1e6)
    return statistics.median(walls[WARM:]) / tokens


def run(options: argparse.Namespace) -> int:
    from kernel_hub.engine.config import NAMED
    from kernel_hub.engine.engine import Engine

    config = {**NAMED[options.model], "num_hidden_layers": options.layers}
    report, budgets = Report("load", options), [*map(int, options.passes)]
    engine = Engine.random(
        config, max_model_len=4096, max_batch=options.batch, max_tokens_a_pass=max(budgets),
        seed=options.seed,
    )  # fmt: skip
    engine.text, graphs = Words(engine.vocab_size), engine.runner._graphs
    engine.runner.warm_up()  # as the server does
    watch = Watch(engine)
    for tokens in budgets:
        engine._scheduler.max_tokens, lot = tokens, random.Random(f"{options.seed} {tokens}")
        each = prompt_us(engine, tokens, options.rounds, lot)
        requests = requests_of(lot, options, engine.vocab_size)
        # Plans of passes without a graph: as many as run at once, then as they come.
        warm = requests_of(lot, options, engine.vocab_size)[: 2 * options.batch]
        ran(engine, watch, warm, [max(0, i - options.batch) / 30 for i in range(len(warm))])
        made = len(graphs)
        full = ran(engine, watch, requests, [0.0] * len(requests))
        step, num_prompt = statistics.median(full.decodes), sum(len(r.prompt) for r in requests)
        floor = num_prompt * each + full.num_decoding * step
        case = f"all at once, {tokens} a pass"
        report.case(case, {OURS: [full.total], FLOOR: [floor]}, "us", ratio_to=FLOOR)
        report.ahead("all at once", floor / full.total)
        print(
            f"{case}: {full.total / 1e6:.2f} s, {floor / full.total:.3f} of the sum (asked 0.85): "
            f"{num_prompt} prompt tokens at {each:.1f} us, {full.num_decoding} steps at {step:.0f} "
            f"us; {full.num_tokens * 1e6 / full.total:.0f} tokens/s",
            flush=True,
        )
        shown(full, each, step)
        at, arrivals = 0.0, []
        for _ in requests:
            at += lot.expovariate(options.load * len(requests) / (full.total / 1e6))
            arrivals.append(at)
        some = ran(engine, watch, requests_of(lot, options, engine.vocab_size), arrivals)
        step = statistics.median(some.decodes or full.decodes)
        gaps = [us for us, _ in some.gaps]
        p50, p95 = between(gaps)
        case = f"load {options.load:g}, {tokens} a pass"
        report.case(case, {OURS: gaps, STEP: [step]}, "us", ratio_to=STEP)
        report.ahead(f"load {options.load:g}, p95 of twice a step", 2 * step / p95)
        print(
            f"{case}: between tokens p50 {p50:.0f} us, p95 {p95:.0f} us, {p95 / step:.2f} x a step "
            f"of {step:.0f} us (asked 2); first token p50 {statistics.median(some.first) / 1e3:.0f}"
            f" ms; {len(graphs)} graphs, {len(graphs) - made} of them made meanwhile",
            flush=True,
        )
        shown(some, each, step)
    torch.cuda.synchronize()
    return report.done()


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        model_arguments(parser)
        parser.add_argument("--batch", type=int, default=64, help="requests that run at once")
        parser.add_argument("--requests", type=int, default=1000)
        parser.add_argument("--load", type=float, default=0.7, help="of the rate of all at once")
        parser.add_argument("--seed", type=int, default=1)

    return run(arguments(__doc__, rounds=20, quick=QUICK, more=more, passes="2048"))


if __name__ == "__main__":
    sys.exit(main())
