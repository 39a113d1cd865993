"""Attention on cases drawn by lot, each held against fp64. A script, not a test.

    python tests/gpu_attention_grid.py --cases 2000 --seed 7 [--op forward|backward|decode|all]

Case i of a seed is always the same: a failure prints the command that runs it alone. Ends with what
was covered and the worst error in units of what is allowed; the exit status is 1 where one failed.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/ops")]
OPS = ("all", "forward", "backward", "decode")
DECODE_SHARE = 0.3
MAX_SHOWN = 20


def draw(op: str, seed: int, index: int) -> Any:
    """Case `index` of a seed."""
    from attention_random import random_case
    from decode_cases import random_decode_case

    generator = random.Random(f"{seed} {index}")
    if op == "decode" or (op == "all" and generator.random() < DECODE_SHARE):
        return random_decode_case(generator)
    share = {"forward": 0.0, "backward": 1.0, "all": 0.4}[op]
    while True:
        case = random_case(generator, backward_share=share)
        if case.backward or op != "backward":
            return case


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


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every case; what was covered, the worst, and what failed."""
    import torch
    from attention_cases import Case
    from attention_cases import run as run_attention
    from decode_cases import run_decode

    if options.portable:
        from kernel_hub.ops.attention import backward_sm90, forward_sm90

        forward_sm90.is_enabled = backward_sm90.is_enabled = False
    # The fp64 truth needs no help, the budget must be the dtype's own.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    counts: collections.Counter[str] = collections.Counter()
    failed: list[dict[str, Any]] = []
    worst, worst_case = 0.0, ""
    started, progress = time.monotonic(), Progress(options.cases)
    lost = False
    for index in range(options.first, options.first + options.cases):
        case = draw(options.op, options.seed, index)
        try:
            ratio = (run_attention if isinstance(case, Case) else run_decode)(case, options.device)
            if ratio > worst:
                worst, worst_case = ratio, str(case)
        except Exception as error:
            if options.raise_:
                raise
            text = f"{type(error).__name__}: {error}"
            failed.append({"index": index, "error": text[:600], "case": str(case)})
            if options.device == "cuda":
                try:
                    torch.cuda.synchronize()
                except RuntimeError:
                    lost = True
        counts.update(case.features())
        progress.step()
        if lost:
            break
    progress.stop()
    return {
        "seed": options.seed, "op": options.op, "cases": progress.done, "failed": failed,
        "worst": worst, "worst_case": worst_case, "counts": dict(sorted(counts.items())),
        "device_lost": lost, "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def main() -> int:
    """Parse the command line, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=None, help="default: drawn and printed")
    parser.add_argument("--op", choices=OPS, default="all")
    parser.add_argument("--device", default="cuda", help="cpu runs the references of the ops")
    parser.add_argument("--portable", action="store_true", help="not Hopper's own forward kernels")
    parser.add_argument("--raise", action="store_true", dest="raise_", help="with a traceback")
    parser.add_argument("--json", help="write the result here")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {options.seed}, {options.cases} cases, op {options.op}", flush=True)
    result = run(options)
    for failure in result["failed"][:MAX_SHOWN]:
        print(f"\nFAILED {failure['case']}\n  {failure['error']}")
        print(
            f"  again: python tests/gpu_attention_grid.py --seed {options.seed} --op {options.op} "
            f"--first {failure['index']} --cases 1 --device {options.device} --raise"
            + " --portable"
            * options.portable
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


if __name__ == "__main__":
    sys.exit(main())
