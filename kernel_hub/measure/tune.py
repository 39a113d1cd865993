"""Which variant of an op is the fastest on this GPU: every candidate checked, then timed.

Knows how to measure any op that has a `tuning.Table`; what the ops need for it is in tune_ops.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..errors import KernelHubError
from ..tuning import Choice, Gpu, GpuSection, Row, Table
from .timing import BurstTimer, GraphTimer

Key = Mapping[str, int | str]
Launch = Callable[[], torch.Tensor]
DEFAULT = "default"
# Of one look, those beyond this many times the best are not timed again.
_HOPELESS = 1.15
# What takes less than this much of the default's time is better, what takes more is noise.
_BETTER = 0.99
# A measured row holds for smaller sizes too, down to a quarter of its own.
_REACH = 4
# Operations a byte from which a kernel is bound by the tensor cores, on any GPU.
_MATRIX_BOUND = 100.0
_TERAFLOPS = 600.0


@dataclass(frozen=True)
class Case:
    """One problem on the GPU: launches over input sets that together pass the L2.

    Each launch writes into an output of its own and returns it.
    """

    launches: Sequence[Launch]
    num_bytes: int  # read and written by one launch, at least
    num_operations: int


class Tunable(Protocol):
    """What tuning needs of an op."""

    @property
    def table(self) -> Table:
        """The op's."""

    @property
    def shapes(self) -> Mapping[str, Key]:
        """By name, those measured by default."""

    @property
    def sizes(self) -> Sequence[int]:
        """Of the bucket, measured by default."""

    @property
    def dtypes(self) -> Sequence[str]:
        """Tokens of the dtypes in the functions' names; the first is measured by default."""

    def candidates(self, gpu: Gpu, size: int, key: Key) -> Iterator[Row]:
        """Every launch worth measuring."""

    def plan(self, gpu: Gpu, size: int, key: Key) -> object:
        """What the op would launch, comparable: two rows of equal plans are the same launch."""

    def case(self, size: int, key: Key, dtype: str) -> Case:
        """The problem, on the current GPU."""


class Timer(Protocol):
    """Microseconds a launch, in samples, of contenders that take turns."""

    def __call__(
        self, contenders: Mapping[str, Sequence[Launch]], case: Case, rounds: int
    ) -> dict[str, list[float]]: ...


@dataclass(frozen=True)
class Measured:
    """The outcome of one problem.

    best: the fastest row, that of the op's own choice unless another is clearly better; None where
        the op's own choice is the best and no row says it
    refused: candidate -> why it may not win
    """

    key: str
    size: int
    best: Row | None
    best_us: float
    default_us: float
    medians: Mapping[str, float] = field(repr=False)
    refused: Mapping[str, str] = field(repr=False)


def current_gpu() -> Gpu:
    """The current GPU, as the ops know it."""
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu((found.major, found.minor), found.multi_processor_count, found.name)


def time_on_gpu(
    contenders: Mapping[str, Sequence[Launch]], case: Case, rounds: int
) -> dict[str, list[float]]:
    """Bursts where the tensor cores are the limit, else replays past the L2."""
    if case.num_operations > _MATRIX_BOUND * case.num_bytes:
        expected = case.num_operations / _TERAFLOPS / 1e6
        return BurstTimer(rounds).measure(contenders, expected)
    return GraphTimer(3 * rounds, placements=1).measure(contenders, case.num_bytes)


def measure(
    tunable: Tunable,
    gpu: Gpu,
    size: int,
    key: Key,
    dtype: str,
    *,
    rounds: int = 5,
    timer: Timer = time_on_gpu,
) -> Measured:
    """Check every candidate against the op's own choice, time those that are right.

    What does not fit into the GPU's memory is measured as nothing, with the reason.
    """
    try:
        return _measure(tunable, gpu, size, key, tunable.case(size, key, dtype), rounds, timer)
    except torch.OutOfMemoryError as error:
        reason = {"all": str(error).partition(". GPU")[0]}
        text = tunable.table.layout.text(key)
        return Measured(text, size, None, math.nan, math.nan, {}, reason)


def _measure(
    tunable: Tunable, gpu: Gpu, size: int, key: Key, case: Case, rounds: int, timer: Timer
) -> Measured:
    table = tunable.table
    expected = case.launches[0]().clone()
    contenders: dict[str, Sequence[Launch]] = {DEFAULT: case.launches}
    rows: dict[str, Row] = {}
    refused: dict[str, str] = {}
    plans: list[object] = [tunable.plan(gpu, size, key)]
    for row in tunable.candidates(gpu, size, key):
        with table.forcing(row):
            plan = tunable.plan(gpu, size, key)
        if plan == plans[0]:
            rows[DEFAULT] = row
        if plan in plans:
            continue
        plans.append(plan)
        launches = [_forced(table, row, launch) for launch in case.launches]
        wrong = problem(launches[0], expected)
        if wrong:
            refused[str(row)] = wrong
        else:
            contenders[str(row)], rows[str(row)] = launches, row
    medians, finalists = race(contenders, case, rounds, timer, keep=DEFAULT)
    best = min(finalists, key=medians.__getitem__)
    if medians[best] > _BETTER * medians[DEFAULT]:
        best = DEFAULT
    return Measured(
        table.layout.text(key), size, rows.get(best), medians[best], medians[DEFAULT], medians,
        refused,
    )  # fmt: skip


def race(
    contenders: Mapping[str, Sequence[Launch]],
    case: Case,
    rounds: int,
    timer: Timer,
    *,
    keep: str | None = None,
) -> tuple[dict[str, float], list[str]]:
    """(median microseconds by name, those timed in earnest): one look sends the hopeless home.

    keep: one that stays in whatever it takes.
    """
    medians = _medians(timer(contenders, case, 1))
    least = min(medians.values())
    close = {
        name: launches
        for name, launches in contenders.items()
        if name == keep or medians[name] <= _HOPELESS * least
    }
    medians |= _medians(timer(close, case, rounds))
    return medians, list(close)


def _forced(table: Table, row: Row, launch: Launch) -> Launch:
    def run() -> torch.Tensor:
        with table.forcing(row):
            return launch()

    return run


def _medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in samples.items()}


def problem(launch: Launch, expected: torch.Tensor) -> str:
    """'' or what is wrong with the result of `launch`, over an output that was poisoned."""
    try:
        launch().fill_(math.nan)
        found = launch()
    except KernelHubError as error:
        return str(error).splitlines()[0]
    # Both are the same fp32 sum, rounded, but for the order of its terms.
    eps = torch.finfo(expected.dtype).eps
    limit = 4 * eps * float(expected.abs().max())
    distance = float((found.float() - expected.float()).abs().max())  # nan where a place is left
    return "" if distance <= limit else f"differs by {distance:.3g}, {limit:.3g} allowed"


def section(table: Table, gpu: Gpu, outcomes: Sequence[Measured]) -> GpuSection:
    """The outcomes as a section of a file. A row reaches down to the size measured before it."""
    choices: dict[str, tuple[Choice, ...]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.size):
        if outcome.best is None:
            continue
        rows = choices.get(outcome.key, ())
        before = rows[-1].most if rows else 0
        above = max(before, (outcome.size - 1) // _REACH)
        choices[outcome.key] = (*rows, Choice(above, outcome.size, outcome.best))
    return GpuSection(gpu.arch, gpu.name, gpu.num_sms, table.hashes(gpu), choices)
