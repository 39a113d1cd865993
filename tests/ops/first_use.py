"""What the first call of an op takes in a process that has torch and a CUDA context. A script.

    PYTHONPATH=. python tests/ops/first_use.py [--against OTHER_TREE] [--rounds 3] [--where]

Each call is made by a process of its own, in which torch has run a product and a backward first;
several get ready at a time, and then run one after the other. Least and median of the rounds, in
ms: the import of kernel_hub's ops, the call, the same call once more. --where: of a round under a
profiler, what the driver's calls take, and functions: ms with and without those that they call,
how often.
"""

from __future__ import annotations

import argparse
import compileall
import cProfile
import importlib
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

Calls = list[tuple[str, Callable[[], Any]]]
OWN = Path(__file__).resolve().parents[2]


def _half(*shape: int, grad: bool = False) -> Any:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16).requires_grad_(grad)


def _attention(ops: Callable[[], Any], grad: bool = False) -> Calls:
    q, k, v, dout = (_half(1, 248, 4, 64, grad=grad) for _ in range(4))
    found: list[Any] = []

    def forward() -> None:
        found[:] = [ops().flash_attention(q, k, v, causal=True)]

    def backward() -> None:
        torch.autograd.grad(found[0], (q, k, v), dout.detach(), retain_graph=True)

    return [("forward", forward), ("backward", backward)][: 1 + grad]


def _decode(ops: Callable[[], Any]) -> Calls:
    q, caches = _half(4, 1, 8, 128), [_half(64, 16, 2, 128) for _ in range(2)]
    lengths = torch.tensor([17, 30, 40, 90], dtype=torch.int32, device="cuda")
    table = torch.arange(64, dtype=torch.int32, device="cuda").view(4, 16)
    options = {"cache_seqlens": lengths, "block_table": table}
    return [("decode", lambda: ops().decode_attention(q, *caches, **options))]


def _linear(ops: Callable[[], Any]) -> Calls:
    a, b = _half(16, 512), _half(256, 512)
    return [("linear", lambda: ops().linear(a, b))]


CASES: dict[str, Callable[[Callable[[], Any]], Calls]] = {
    "attention": _attention,
    "backward": lambda ops: _attention(ops, grad=True),
    "decode": _decode,
    "linear": _linear,
}


def _warm() -> None:
    """What any program that uses torch has done."""
    x, w = _half(64, 64, grad=True), _half(64, 64)
    y = torch.nn.functional.gelu(x @ w)
    torch.autograd.grad(y, x, torch.ones_like(y))  # gradients that are given import sympy
    torch.cuda.synchronize()


def _ms(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def _driver_times() -> dict[str, list[float]]:
    """ms of each call of the driver from here on, by its name; nothing goes to another thread."""
    apart: Any = importlib.import_module("kernel_hub.driver.apart")
    apart.run = lambda function, *args: function(*args)
    found: dict[str, list[float]] = {}

    def timed(name: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return real(*args)
            finally:
                found.setdefault(name, []).append(1e3 * (time.perf_counter() - began))

        return call

    opened: Any = importlib.import_module("kernel_hub.driver").get()
    prototypes: Any = importlib.import_module("kernel_hub.driver.prototypes")
    for name in filter(opened.has, prototypes.FUNCTIONS):
        opened._functions[name] = timed(name, opened._functions[name])
    return found


def _where(calls: Calls, driver: dict[str, list[float]]) -> list[str]:
    lines = []
    for name, call in calls:
        driver.clear()
        profile = cProfile.Profile()
        profile.runcall(call)
        torch.cuda.synchronize()
        took = sorted(driver.items(), key=lambda each: -sum(each[1]))[:7]
        said = ", ".join(f"{one} {len(ms)} x {sum(ms):.2f}" for one, ms in took)
        lines.append(f"  {name}, the driver: {said}")
        found = pstats.Stats(profile).stats  # type: ignore[attr-defined]
        for (file, line, what), row in sorted(found.items(), key=lambda each: -each[1][3]):
            if row[3] > 2e-4:
                where = f"{file.replace(f'{OWN}/', '')}:{line} {what}"
                lines.append(f"    {1e3 * row[3]:7.2f} {1e3 * row[2]:7.2f} {row[0]:4} {where}")
    return lines


def _child(name: str, is_profiled: bool) -> None:
    """A process of one call: ready when it says so, done at a line of its input."""
    _warm()
    kept: list[Any] = []

    def load() -> None:
        kept.append(importlib.import_module("kernel_hub.ops"))

    calls = CASES[name](lambda: kept[0])
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    found = {"import": _ms(load)}
    lines: list[str] = []
    if is_profiled:
        lines = _where(calls, _driver_times())
    else:
        for each, call in calls:
            found[each] = _ms(call)
            torch.cuda.synchronize()
        for each, call in calls:
            found[f"{each} again"] = _ms(call)
    print(json.dumps([found, lines]), flush=True)


class _Process(NamedTuple):
    """A call that is going to be made."""

    tree: Path
    name: str
    is_profiled: bool

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, "--child", self.name, *["--where"] * self.is_profiled]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self.tree}:{os.environ.get('PYTHONPATH', '')}",
        }
        return subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )


def _ask(process: subprocess.Popen[str], line: str = "") -> str:
    assert process.stdin is not None and process.stdout is not None
    if line:
        process.stdin.write(line)
        process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        sys.exit(f"{process.args} failed")
    return answer


def _made(asked: list[_Process], at_once: int) -> Iterator[tuple[_Process, Any, list[str]]]:
    """What each measured."""
    for first in range(0, len(asked), at_once):
        wave = [(each, each.start()) for each in asked[first : first + at_once]]
        for _, process in wave:
            _ask(process)
        for each, process in wave:
            found, lines = json.loads(_ask(process, "go\n"))
            process.communicate()
            yield each, found, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another tree, which comes first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=CASES, help="may be repeated")
    parser.add_argument("--where", action="store_true", help="what the time goes to")
    parser.add_argument("--at-once", type=int, default=4, help="processes that get ready together")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _child(options.child, options.where)
    trees = [*([options.against.resolve()] if options.against else []), OWN]
    for tree in trees:  # as pip does
        compileall.compile_dir(tree / "kernel_hub", quiet=2)
    names = options.only or list(CASES)
    asked = [_Process(t, n, False) for n in names for _ in range(options.rounds) for t in trees]
    times: dict[tuple[str, Path], dict[str, list[float]]] = {}
    for each, found, _ in _made(asked, options.at_once):
        rows = times.setdefault((each.name, each.tree), {})
        for key, ms in found.items():
            rows.setdefault(key, []).append(ms)
        if len(rows["import"]) == options.rounds:
            said = [f"{k} {min(ms):.2f} {statistics.median(ms):.2f}" for k, ms in rows.items()]
            print(f"{each.name}, ms, {each.tree.name}: {', '.join(said)}", flush=True)
    if options.where:
        for each, _, lines in _made([_Process(OWN, n, True) for n in names], options.at_once):
            print("\n".join([each.name, *lines]), flush=True)
    return None


if __name__ == "__main__":
    main()
