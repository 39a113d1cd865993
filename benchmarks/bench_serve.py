"""The period of decode steps under the server: clients that stream, with stop strings, from an
8B-shaped model with random weights; beside the engine's own loop, and beside threads that change
every 5 ms, as Python's do.

    python benchmarks/bench_serve.py [--quick] [--rounds 5] [--clients 1,64] [--answer 256]

From the start of a step to the start of the next; how long the device is idle between their passes;
and what this process's processors work in a step, the clients being another process.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench_engine import Clock, Words
from harness import OURS, Report, arguments

QUICK = {"rounds": 1, "layers": 4}
ALONE, PYTHONS = "engine alone", "switch interval 5 ms"
CLIENTS = """
import json, sys, threading, urllib.request
url, num_clients, num_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def ask(number):
    body = {"model": "served", "prompt": [1 + number] * 128, "max_tokens": num_tokens,
            "ignore_eos": True, "stop": ["never said"], "stream": True}
    head = {"Content-Type": "application/json"}
    asked = urllib.request.Request(url, json.dumps(body).encode(), head)
    for line in urllib.request.urlopen(asked):
        pass
threads = [threading.Thread(target=ask, args=(number,)) for number in range(num_clients)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@dataclass
class Steps:
    """Those of which all clients have a part, in microseconds of each."""

    period: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)  # of the device, before a pass
    busy: list[float] = field(default_factory=list)  # of this process's processors


@contextlib.contextmanager
def watched(engine: Any, clock: Clock, num_clients: int) -> Iterator[Steps]:
    """A step counts from its start to the start of the next."""
    found, places, real = Steps(), list[int](), engine.step
    began: tuple[float, float] | None = None

    def step() -> Any:
        nonlocal began
        now = time.perf_counter(), time.process_time()
        if began is not None:
            found.period.append((now[0] - began[0]) * 1e6)
            found.busy.append((now[1] - began[1]) * 1e6)
        was_full, before = began is not None, len(clock.passes)
        deltas = real()
        began = now if len(deltas) == num_clients else None
        if was_full and began is not None and len(clock.passes) == before + 1:
            places.append(before)
        return deltas

    engine.step = step
    try:
        yield found
    finally:
        engine.step = real
        found.idle += clock.idle_us(places)
        clock.passes.clear()


def alone(engine: Any, clock: Clock, num_clients: int, num_tokens: int) -> Steps:
    """Of the engine's own loop, asked for the same."""
    from kernel_hub.engine.requests import SamplingParams

    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, stop=("never said",))
    with watched(engine, clock, num_clients) as found:
        engine.generate([[1 + number] * 128 for number in range(num_clients)], params)
    return found


def served(
    engine: Any, clock: Clock, num_clients: int, num_tokens: int, interval_s: float | None
) -> Steps:
    """Of one run of the clients; threads change every `interval_s`, None: as the server says."""
    from kernel_hub.engine.server import serve
    from kernel_hub.engine.server.serve import ServerLimits

    listener = serve.bound("127.0.0.1", 0, ServerLimits())
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
    made: list[Any] = []
    here = threading.Thread(
        target=serve.serve, args=(engine, listener, ServerLimits()), kwargs={"ready": made.append}
    )
    with watched(engine, clock, num_clients) as found:
        here.start()
        while not made:
            time.sleep(0.01)
        if interval_s:
            sys.setswitchinterval(interval_s)
        command = [sys.executable, "-c", CLIENTS, url, str(num_clients), str(num_tokens)]
        subprocess.run(command, check=True)
        made[0].drain()
        here.join()
    return found


def run(options: argparse.Namespace) -> int:
    from kernel_hub.engine.config import NAMED
    from kernel_hub.engine.engine import Engine

    config = {**NAMED["llama-3-8b"], "num_hidden_layers": options.layers}
    engine = Engine.random(config, name="served")
    engine.text, clock, report = Words(engine.vocab_size), Clock(engine), Report("serve", options)
    ways: dict[str, Callable[..., Steps]] = {
        ALONE: alone, PYTHONS: partial(served, interval_s=5e-3),
        OURS: partial(served, interval_s=None),
    }  # fmt: skip
    for num_clients in map(int, options.clients):
        samples: dict[str, list[float]] = {}
        for way in ways.values():  # makes graphs
            way(engine, clock, num_clients, 4)
        for _ in range(options.rounds):
            for name, way in ways.items():
                steps = way(engine, clock, num_clients, options.answer)
                for kind, each in zip(
                    ("", ", idle", ", processors"), vars(steps).values(), strict=True
                ):
                    samples.setdefault(name + kind, []).extend(each)
        medians = report.case(f"step b{num_clients}", samples, "us", ratio_to=ALONE)
        for name in ways:
            idle = statistics.quantiles(samples[f"{name}, idle"], n=20)
            print(
                f"step b{num_clients} {name:20} {medians[name]:8.1f} us, the device idle "
                f"{medians[f'{name}, idle']:.1f} (asked 100; 95 of 100 below {idle[-1]:.1f}, mean "
                f"{statistics.mean(samples[f'{name}, idle']):.1f}), processors "
                f"{medians[f'{name}, processors']:.1f}",
                flush=True,
            )
    return report.done()


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--layers", type=int, default=32)
        parser.add_argument("--answer", type=int, default=256, help="tokens of each")

    return run(arguments(__doc__, rounds=5, quick=QUICK, more=more, clients="1,64"))


if __name__ == "__main__":
    sys.exit(main())
