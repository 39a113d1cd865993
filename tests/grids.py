"""What scripts share that hold ops on cases drawn by lot: command line, progress, summary."""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_SHOWN = 20


class Progress:
    """A bar where rich is installed, else a line now and then."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.bar = total, 0, None
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
        except ImportError:
            return
        if sys.stdout.isatty():
            self.bar = Bar(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar.start()
            self.task = self.bar.add_task("cases", total=total)

    def step(self) -> None:
        """One case more."""
        self.done += 1
        if self.bar is not None:
            self.bar.advance(self.task)
        elif self.done % max(1, self.total // 20) == 0:
            print(f"{self.done} / {self.total}", flush=True)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self.bar is not None:
            self.bar.stop()


def parser(doc: str | None, ops: tuple[str, ...]) -> argparse.ArgumentParser:
    """The arguments that all grids have; a grid adds its own."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--cases", type=int, default=2000)
    made.add_argument("--first", type=int, default=0, help="number of the first one")
    made.add_argument("--seed", type=int, default=None, help="default: drawn and printed")
    made.add_argument("--op", choices=ops, default="all")
    made.add_argument("--device", default="cuda", help="cpu runs the references of the ops")
    made.add_argument("--raise", action="store_true", dest="raise_", help="with a traceback")
    made.add_argument("--json", help="write the result here")
    return made


def _exact() -> None:
    """The fp64 truth needs no help, the budget must be the dtype's own."""
    import torch

    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _is_lost(device: str) -> bool:
    import torch

    try:
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _every(
    options: argparse.Namespace, draw: Callable[[int], Any], run: Callable[[int, Any], float]
) -> dict[str, Any]:
    """Every case; what was covered, the worst, and what failed."""
    _exact()
    counts: collections.Counter[str] = collections.Counter()
    failed: list[dict[str, Any]] = []
    worst, worst_case, is_lost = 0.0, "", False
    started, progress = time.monotonic(), Progress(options.cases)
    for index in range(options.first, options.first + options.cases):
        case = draw(index)
        try:
            ratio = run(index, case)
            if ratio > worst:
                worst, worst_case = ratio, str(case)
        except Exception as error:
            if options.raise_:
                raise
            text = f"{type(error).__name__}: {error}"
            failed.append({"index": index, "error": text[:600], "case": str(case)})
            is_lost = _is_lost(options.device)
        counts.update(case.features())
        progress.step()
        if is_lost:
            break
    progress.stop()
    return {
        "seed": options.seed, "op": options.op, "cases": progress.done, "failed": failed,
        "worst": worst, "worst_case": worst_case, "counts": dict(sorted(counts.items())),
        "device_lost": is_lost, "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def main(
    script: str,
    options: argparse.Namespace,
    draw: Callable[[int], Any],
    run: Callable[[int, Any], float],
    again: str = "",
) -> int:
    """Run all cases and print what came of them; the exit status, 1 where one failed.

    draw: (number) -> a case; it has features() and says what it is. run: (number, case) -> its
    largest error in units of what is allowed, raising beyond that. again: a grid's own switches.
    """
    print(f"seed {options.seed}, {options.cases} cases, op {options.op}", flush=True)
    result = _every(options, draw, run)
    for failure in result["failed"][:MAX_SHOWN]:
        print(f"\nFAILED {failure['case']}\n  {failure['error']}")
        print(
            f"  again: python {script} --seed {options.seed} --op {options.op} "
            f"--first {failure['index']} --cases 1 --device {options.device} --raise{again}"
        )
    covered = ", ".join(f"{name} {count}" for name, count in result["counts"].items())
    print(f"\ncovered: {covered}")
    if result["device_lost"]:
        print("the last case left the device in error: the rest did not run")
    print(f"worst: {result['worst']:.2f} of what is allowed, {result['worst_case']}")
    print(
        f"{result['cases']} cases, {len(result['failed'])} failed, seed {options.seed}, "
        f"{result['seconds']} s"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))
    return 1 if result["failed"] else 0


def parsed(made: argparse.ArgumentParser, arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, with a seed."""
    options = made.parse_args(arguments)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 30)
    return options
