"""The period of decode steps under the server: clients that stream, with stop strings, from an
8B-shaped model with random weights; beside the engine's own loop, and beside threads that change
every 5 ms, as Python's do.

From the start of a step to the start of the next; the clients are another process.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

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


@contextlib.contextmanager
def periods(engine: Any, num_clients: int) -> Iterator[list[float]]:
    """Microseconds from start to start of steps of which all clients have a part."""
    found: list[float] = []
    real, began = engine.step, [0.0]

    def step() -> Any:
        now = time.perf_counter()
        if began[0]:
            found.append((now - began[0]) * 1e6)
        deltas = real()
        began[0] = now if len(deltas) == num_clients else 0.0
        return deltas

    engine.step = step
    try:
        yield found
    finally:
        engine.step = real


def alone(engine: Any, num_clients: int, num_tokens: int) -> list[float]:
    """Of the engine's own loop, asked for the same."""
    from kernel_hub.engine.requests import SamplingParams

    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, stop=("never said",))
    with periods(engine, num_clients) as found:
        engine.generate([[1 + number] * 128 for number in range(num_clients)], params)
    return found


def served(engine: Any, interval_s: float | None, num_clients: int, num_tokens: int) -> list[float]:
    """Of one run of the clients; threads change every `interval_s`, None: as the server says."""
    from kernel_hub.engine.server import serve
    from kernel_hub.engine.server.serve import ServerLimits

    listener = serve.bound("127.0.0.1", 0, ServerLimits())
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"
    made: list[Any] = []
    here = threading.Thread(
        target=serve.serve, args=(engine, listener, ServerLimits()), kwargs={"ready": made.append}
    )
    with periods(engine, num_clients) as found:
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
    report = Report("serve", options)
    for num_clients in (1, 64):
        samples: dict[str, list[float]] = {ALONE: [], PYTHONS: [], OURS: []}
        for _ in range(options.rounds):
            samples[ALONE] += alone(engine, num_clients, options.tokens)
            for name, interval_s in ((PYTHONS, 5e-3), (OURS, None)):
                samples[name] += served(engine, interval_s, num_clients, options.tokens)
        case = f"step b{num_clients}"
        medians = report.case(case, samples, "us", ratio_to=ALONE)
        print(case, {name: round(value, 1) for name, value in medians.items()}, flush=True)
    return report.done()


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--layers", type=int, default=32)
        parser.add_argument("--tokens", type=int, default=256, help="of an answer")

    return run(arguments(__doc__, rounds=5, quick=QUICK, more=more))


if __name__ == "__main__":
    sys.exit(main())
