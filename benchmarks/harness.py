"""What every benchmark shares: command line, correctness before time, timing, rows, summary.

Three ways to time, for what limits a kernel: `run_cases` replays graphs past the L2 (memory, rows
at a time), `replays` does so with idle seconds between (products), `burst` and `sustained` launch
for some milliseconds from an idle or a busy card (attention).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from kernel_hub import KernelHubError
from kernel_hub.measure import results, timing
from kernel_hub.measure.timing import replays as replays
from kernel_hub.testing.compare import compare

OURS = "kernel_hub"
RESULTS = Path(__file__).resolve().parent / "results"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CHECKED_TOKENS = 256
Launch = Callable[[], Any]


# -- the command line


def arguments(
    description: str | None, *, rounds: int, quick: Mapping[str, Any], dtypes: Sequence[str] = (),
    more: Callable[[argparse.ArgumentParser], object] = lambda parser: None, **lists: Any,
) -> argparse.Namespace:  # fmt: skip
    """The command line of a benchmark; it ends here where there is no GPU.

    lists: options of words with commas between, with their defaults; `tokens` become numbers.
    quick: the defaults under --quick. dtypes: the tokens that --dtype takes; bf16 is the default,
    and `torch_dtype` is torch's. more: adds further options.
    """
    parser = argparse.ArgumentParser(description=description)
    if dtypes:
        parser.add_argument("--dtype", default="bf16", choices=dtypes)
    for name, default in lists.items():
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<gpu>_<family>.json")
    more(parser)
    if parser.parse_args().quick:
        parser.set_defaults(**quick)
    options = parser.parse_args()
    for name in lists:
        setattr(options, name, options.__dict__[name].split(","))
    if "tokens" in lists:
        options.tokens = [int(count) for count in options.tokens]
    if dtypes:
        options.torch_dtype = DTYPES[options.dtype]
    try:
        options.about = results.environment()
    except KernelHubError as error:
        sys.exit(f"needs an NVIDIA GPU: {error}")
    return options


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model an engine runs, of random weights."""
    parser.add_argument("--model", default="llama-3-8b", help="a name that the engine knows")
    parser.add_argument("--layers", type=int, default=32)


# -- what was found


class Report:
    """The rows of a family, how far ahead of its peers each group of cases is, what was wrong."""

    def __init__(self, family: str, options: argparse.Namespace) -> None:
        self.family = family
        self.rows: list[results.ResultRow] = []
        self.failures: list[str] = []
        self._ratios: dict[str, list[float]] = {}
        self._began = time.monotonic()
        self._out = options.out or RESULTS / f"{gpu_token(options.about['gpu'])}_{family}.json"

    def case(
        self, name: str, samples: Mapping[str, Sequence[float]], unit: str, *, ratio_to: str
    ) -> dict[str, float]:
        """Keep the rows of a case; their medians by contender."""
        self.rows += results.summarise(self.family, name, samples, unit, ratio_to=ratio_to)
        return {name: statistics.median(values) for name, values in samples.items()}

    def ahead(self, group: str, ratio: float) -> None:
        """Count a case to `group`; `ratio`: how many times as fast as the peer ours is."""
        self._ratios.setdefault(group, []).append(ratio)

    def product(
        self, case: str, samples: Mapping[str, Sequence[float]], ratio_to: str, m: int, flops: int
    ) -> None:
        """Keep and print a fused product of m rows beside its peers, of which one is `ratio_to`."""
        medians = self.case(case, samples, "us", ratio_to=ratio_to)
        ours = medians.pop(OURS)
        self.ahead(f"{ratio_to}, {rows_group(m)}", medians[ratio_to] / ours)
        others = "".join(f"  {one} {us:.2f} us x {us / ours:.3f}" for one, us in medians.items())
        print(f"{case:28} {ours:9.2f} us  {flops / ours / 1e6:6.1f} TFLOP/s{others}", flush=True)

    def write(self, others: Iterable[results.ResultRow] = ()) -> None:
        """The rows so far to the file, after `others`."""
        results.write(self._out, [*others, *self.rows])

    def kept(self) -> list[results.ResultRow]:
        """The rows of other cases that the file has."""
        if not self._out.is_file():
            return []
        names = [each.name for each in fields(results.ResultRow)]
        measured = {row.case for row in self.rows}
        return [
            results.ResultRow(**{name: row[name] for name in names if name in row})
            for row in results.read(self._out)
            if row["case"] not in measured
        ]

    def finish(self) -> int:
        """Print the summary; 1 where an output of ours was wrong. The rows are to be written."""
        for group, ratios in self._ratios.items():
            print(
                f"{self.family}, {group}: geometric mean {statistics.geometric_mean(ratios):.3f} "
                f"x as fast, worst {min(ratios):.3f}, {len(ratios)} cases"
            )
        seconds = time.monotonic() - self._began
        print(f"{self.family}: {len(self.rows)} rows, {seconds:.0f} s; {self._out}")
        for failure in self.failures:
            print(f"WRONG {failure}", file=sys.stderr)
        return 1 if self.failures else 0

    def done(self) -> int:
        """Write the rows, print the summary; 1 where an output of ours was wrong."""
        self.write()
        return self.finish()


def gpu_token(name: str) -> str:
    """'NVIDIA H200' -> 'h200'."""
    words = re.findall(r"[a-z0-9]+", name.lower().removeprefix("nvidia"))
    return "_".join(words) or "gpu"


# -- ops of rows: checked, then timed by replays past the L2


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


def product_arguments(
    description: str | None, quick: Mapping[str, Any], shapes: Iterable[str],
    dtypes: tuple[str, ...] = ("bf16", "fp16"), **more: Any,
) -> argparse.Namespace:  # fmt: skip
    """`arguments` of the benchmarks of products, of the `shapes` of that name."""
    return arguments(
        description,
        rounds=5,
        quick=quick,
        dtypes=dtypes,
        shapes=",".join(shapes),
        tokens="1,8,16,32,64,128,256,512,1024,2048,4096,8192",
        **more,
    )


def row_arguments(
    description: str | None, quick: Mapping[str, str] | None = None, **lists: Any
) -> argparse.Namespace:
    """`arguments` of the benchmarks that `run_cases`; quick: what --quick sets besides."""
    return arguments(
        description,
        rounds=30,
        quick={"tokens": "1,64,1024,8192,32768", "rounds": 15, **(quick or {})},
        dtypes=tuple(DTYPES),
        tokens="1,16,64,128,1024,8192,32768",
        peers="torch,torch.compile,liger,flashinfer",
        **lists,
    )


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for one shape, as if nothing had been compiled before."""
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


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
            wrong = repr(error)
        if wrong:
            _leave_out(case, name, wrong)
        else:
            contenders[name] = contender.launches
    # Of two that torch compiles the second has undone the first, which is compiled again.
    for name in [name for name in contenders if name != OURS]:
        try:
            contenders[name][0]()
            timing.capture(contenders[name][:1])
        except Exception as error:  # noqa: BLE001
            _leave_out(case, name, repr(error))
            del contenders[name]
    return timer.measure(contenders, case.num_bytes)


def _leave_out(case: Case, name: str, why: str) -> None:
    print(f"left out in {case.name}: {name}: {why[:300]}", file=sys.stderr, flush=True)


def cases_of(
    kinds: Sequence[Callable[[torch.dtype, int, int], Case]],
    sizes: Iterable[str],
    options: argparse.Namespace,
) -> Iterator[Callable[[], Case]]:
    """A case of each kind, size and number of tokens, each made when its turn comes."""
    for kind, size, tokens in itertools.product(kinds, sizes, options.tokens):
        yield functools.partial(kind, options.torch_dtype, tokens, int(size))


_LINE = "{:44} {:>9} {:>6} {:>7} {:>12}  {:28} {}"


def run_cases(family: str, cases: Iterable[Callable[[], Case]], options: argparse.Namespace) -> int:
    """Run the cases, print and write each as it ends. 1 if any of our outputs was wrong."""
    report = Report(family, options)
    copy = timing.copy_bandwidth()
    timer = timing.GraphTimer(options.rounds)
    report.rows.append(results.ResultRow(family, "copy", "torch copy_", copy, copy, copy, "TB/s"))
    behind: list[str] = []
    header = ("case", "us", "TB/s", "of copy", "/ best peer", "best peer us", "others us")
    print(_LINE.format(*header))
    for make in cases:
        case = make()
        try:
            samples = run_case(case, timer, options.peers)
        except AssertionError as error:
            report.failures.append(str(error))
            continue
        medians = {name: statistics.median(values) for name, values in samples.items()}
        order = sorted(medians.keys() - {OURS}, key=medians.__getitem__) or [OURS]
        best = order[0]
        report.case(case.name, samples, "us", ratio_to=best)
        report.write()
        us, ratio = medians[OURS], f"{medians[OURS] / medians[best]:.3f}"
        rate = case.num_bytes / us / 1e6
        cells = f"{us:.2f}", f"{rate:.2f}", f"{100 * rate / copy:.0f} %", ratio
        named = [f"{name} {medians[name]:.2f}" for name in order]
        print(_LINE.format(case.name, *cells, named[0], ", ".join(named[1:])).rstrip(), flush=True)
        behind += [f"{case.name} {ratio}"] if float(ratio) > 1.0 else []
        del case
        torch.cuda.empty_cache()
    count = len({row.case for row in report.rows}) - 1
    print(
        f"{family}: copy {copy:.3f} TB/s; {count} cases, behind the best peer in "
        f"{len(behind)} ({', '.join(behind) or 'none'})"
    )
    return report.done()


# -- products: replays of graphs, from an idle card where the matrix units are the limit

BURST_US, IDLE_SECONDS = 6000.0, 0.035
FEW_ROWS = 128


class Inputs:
    """Sets of (a, b, out) cut from one pool of random numbers, together past the L2."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._pool = torch.randn(1 << 30, device="cuda", dtype=dtype)

    def sets(self, m: int, n: int, k: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        each = m * k + n * k
        wanted = -(-timing.L2_FACTOR * timing.l2_bytes() // (2 * (each + m * n)))
        step = -(-each // 1024) * 1024
        count = max(1, min(24, wanted, self._pool.numel() // step))
        made = []
        for i in range(count):
            a, b = self._pool[i * step : i * step + each].split([m * k, n * k])
            out = torch.empty(m, n, device="cuda", dtype=a.dtype)
            made.append((a.view(m, k), b.view(n, k), out))
        return made


def plan_of(m: int, n: int, k: int, rounds: int) -> tuple[int, float, int]:
    """Launches a replay, idle seconds before it, rounds."""
    if m <= FEW_ROWS:
        return 24, 0.0, 5 * rounds
    expected = 2 * m * n * k / 700e6
    return max(4, min(250, int(BURST_US / max(expected, 8)))), IDLE_SECONDS, rounds


def rows_group(m: int) -> str:
    """The group of a product of m rows in a summary."""
    return f"up to {FEW_ROWS} rows" if m <= FEW_ROWS else "more rows"


# -- attention: launches in a row, from an idle card and from a busy one

BUSY_MS, IDLE_S, WARM_S = 6.0, 0.035, 0.5


def milliseconds(launch: Launch, count: int) -> float:
    """Of one launch, `count` of them in a row."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        launch()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) / count


def quickest(launch: Launch) -> float:
    """Milliseconds a launch takes once its plan is made and its code is loaded."""
    return min(milliseconds(launch, 2) for _ in range(3))


def burst(launches: Mapping[str, Launch], rounds: int) -> dict[str, list[float]]:
    """Samples in ms a launch, at the clocks of a card that was idle."""
    counts = {name: max(1, round(BUSY_MS / quickest(launch))) for name, launch in launches.items()}
    samples: dict[str, list[float]] = {name: [] for name in launches}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(launches), len(launches)):
            time.sleep(IDLE_S)
            samples[name].append(milliseconds(launches[name], counts[name]))
    return samples


def sustained(launches: Mapping[str, Launch], rounds: int) -> dict[str, list[float]]:
    """The same at the clocks of a card that has been busy."""
    samples: dict[str, list[float]] = {}
    for name, launch in launches.items():
        each = quickest(launch)
        milliseconds(launch, round(1e3 * WARM_S / each))
        count = max(1, round(2 * BUSY_MS / each))
        samples[name] = [milliseconds(launch, count) for _ in range(rounds)]
    return samples
