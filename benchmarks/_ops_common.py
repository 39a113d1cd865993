"""What the op benchmarks share: cases, correctness before time, peers, rows and the table."""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernel_hub.measure import results, timing
from kernel_hub.testing.compare import compare

OURS = "kernel_hub"
RESULTS = Path(__file__).resolve().parent / "results"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
Launch = Callable[[], Any]


@dataclass
class Contender:
    """One implementation: a launch for each input set, and its outputs of the last one run.

    outputs: what the launch returned -> the tensors to hold against the reference.
    """

    launches: Sequence[Launch]
    outputs: Callable[[Any], Sequence[torch.Tensor]] = lambda found: (found,)


@dataclass
class Case:
    """One op on one shape. `num_bytes` is what a launch reads and writes at least.

    truth, own: the reference in fp64 and in the tensors' dtype, of the first `CHECKED_TOKENS`.
    peers: name -> how to make it; one that cannot be made is left out and said.
    """

    name: str
    num_bytes: int
    ours: Contender
    truth: Sequence[torch.Tensor]
    own: Sequence[torch.Tensor]
    peers: Mapping[str, Callable[[], Contender]] = field(default_factory=dict)


CHECKED_TOKENS = 256


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for one shape, as if nothing had been compiled before."""
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def arguments(description: str | None, **lists: str) -> argparse.Namespace:
    """The command line all op benchmarks take; `lists` are further options of comma lists."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--tokens", default="1,16,64,128,1024,8192,32768")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--peers", default="torch,torch.compile,liger,flashinfer")
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>_<family>.json")
    for name, default in lists.items():
        parser.add_argument(f"--{name}", default=default)
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = "1,64,1024,8192,32768", 15
    for name in ("tokens", "peers", *lists):
        setattr(options, name, options.__dict__[name].split(","))
    options.tokens = [int(count) for count in options.tokens]
    options.torch_dtype = DTYPES[options.dtype]
    return options


def check(case: Case, name: str, contender: Contender) -> str:
    """'' or what is wrong with the contender's first output."""
    outputs = contender.outputs(contender.launches[0]())
    torch.cuda.synchronize()
    for out, truth, own in zip(outputs, case.truth, case.own, strict=True):
        out = out.reshape(-1, *truth.shape[1:])[: len(truth)]
        result = compare(out, truth, own, name=f"{case.name}: {name}")
        # A peer may round in between; it stays in unless it computes something else.
        if not (result.ok or (name != OURS and result.error <= 8 * result.limit)):
            return result.message
    return ""


def run_case(case: Case, timer: timing.GraphTimer, wanted: Sequence[str]) -> dict[str, list[float]]:
    """Check, then time, the case's contenders; raises where ours is wrong."""
    if wrong := check(case, OURS, case.ours):
        raise AssertionError(wrong)
    contenders = {OURS: case.ours.launches}
    for name, make in case.peers.items():
        if name.partition(" ")[0] not in wanted:
            continue
        try:
            contender = make()
            wrong = check(case, name, contender)
        except Exception as error:  # noqa: BLE001  a peer that fails is left out, and said
            wrong = f"{type(error).__name__}: {str(error)[:200]}"
        if wrong:
            print(f"left out in {case.name}: {name}: {wrong}", file=sys.stderr)
        else:
            contenders[name] = contender.launches
    return timer.measure(contenders, case.num_bytes)


def run(family: str, cases: Iterable[Callable[[], Case]], options: argparse.Namespace) -> int:
    """Run the cases, print the table, write the rows. 1 if any of our outputs was wrong."""
    began = time.monotonic()
    copy = timing.copy_bandwidth()
    timer = timing.GraphTimer(options.rounds)
    rows = [results.ResultRow(family, "copy", "torch copy_", copy, copy, copy, "TB/s")]
    table: list[tuple[str, ...]] = []
    failures = []
    for make in cases:
        case = make()
        try:
            samples = run_case(case, timer, options.peers)
        except AssertionError as error:
            failures.append(str(error))
            continue
        medians = {name: statistics.median(values) for name, values in samples.items()}
        peers = {name: us for name, us in medians.items() if name != OURS}
        best = min(peers, key=peers.__getitem__, default=OURS)
        rows += results.summarise(family, case.name, samples, "us", ratio_to=best)
        rate = case.num_bytes / medians[OURS] / 1e6
        table.append(
            (
                case.name,
                f"{medians[OURS]:.2f}",
                f"{rate:.2f}",
                f"{100 * rate / copy:.0f} %",
                f"{medians[OURS] / medians[best]:.3f}",
                f"{best} {medians[best]:.2f}",
                ", ".join(f"{name} {us:.2f}" for name, us in peers.items() if name != best),
            )
        )
        del case
        torch.cuda.empty_cache()
    about = results.environment()
    out = options.out or RESULTS / f"{_gpu_token(about['gpu'])}_{family}.json"
    results.write(out, rows)
    _print_table(table)
    slower = [row for row in table if float(row[4]) > 1.0]
    print(
        f"{family}: copy {copy:.3f} TB/s; {len(table)} cases, behind the best peer in "
        f"{len(slower)} ({', '.join(f'{row[0]} {row[4]}' for row in slower) or 'none'}); "
        f"{time.monotonic() - began:.0f} s; {out}"
    )
    for failure in failures:
        print(f"WRONG {failure}", file=sys.stderr)
    return 1 if failures else 0


def _print_table(table: Sequence[tuple[str, ...]]) -> None:
    header = ("case", "us", "TB/s", "of copy", "/ best peer", "best peer us", "others us")
    lines = [header, *table]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    for line in lines:
        print("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip())


def _gpu_token(name: str) -> str:
    words = re.findall(r"[a-z0-9]+", name.lower().removeprefix("nvidia"))
    return "_".join(words) or "gpu"
