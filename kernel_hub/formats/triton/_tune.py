"""Which configuration of a kernel is the fastest for which sizes: checked, timed, written down.

Needs a GPU and torch, both only when `tune` is called; what is written is read by `_tuned`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._progress import progress
from ...errors import KernelHubError, MissingPackageError, ParamsError
from ._collection import TritonCollection, collection
from ._function import TritonFunction
from ._tuned import FILE, Bucket, Choice, Section, bucket_of, current_gpu, merged, read, save

if TYPE_CHECKING:
    from ...testing.tune import Timer

__all__ = ["Measured", "Problem", "tune"]

_MAX_SETS = 16


@dataclass(frozen=True)
class Problem:
    """One problem on the GPU, to be solved by any configuration.

    launch: takes the function, computes its grid (`function.constexprs` has the block sizes),
        launches it and returns the output tensor.
    num_bytes: what a launch reads and writes at least; with it inputs are rotated past the L2.
    num_operations: of a launch; many a byte are timed in short bursts, as clocks fall under load.
    expected: the right output, as far as it can be known; None takes the first configuration's.
    """

    launch: Callable[[TritonFunction], Any]
    num_bytes: int = 0
    num_operations: int = 0
    expected: Any = None


@dataclass(frozen=True)
class Measured:
    """The outcome for one shape: median microseconds by name, and who may not win, and why."""

    sizes: Mapping[str, int]
    best: str
    best_us: float
    medians: Mapping[str, float] = field(repr=False)
    refused: Mapping[str, str] = field(repr=False)


def tune(
    where: str | Path | TritonCollection,
    case: Callable[..., Problem | Callable[[TritonFunction], Any]],
    shapes: Iterable[Mapping[str, int]],
    *,
    names: Sequence[str] | None = None,
    table: str | None = None,
    rounds: int = 5,
    timer: Timer | None = None,
) -> list[Measured]:
    """Measure configurations x shapes and write the best into the collection's `tuned.json`.

    case: `case(M=512, N=512, K=512)` makes one Problem, with inputs of its own, or just its launch.
    shapes: {'M': 512, 'N': 512, 'K': 512} each; `collection(where).tuned().select(M=…, …)` then
        finds the function. Shapes up to the same powers of two share a choice.
    names: the configurations; None takes all that the collection has of the kernel `table`.
    table: the name to write under; None is the kernel's own.
    timer: how to measure; None takes CUDA graphs of launches after idleness or past the L2.

    Every configuration's result is checked before it may win. The file is replaced after each
    shape, so an interrupted run keeps what it has. Raises KernelHubError where none runs,
    TableError where the file is damaged or cannot be written.
    """
    found = where if isinstance(where, TritonCollection) else collection(where)
    if not isinstance(found.root, Path):
        raise ParamsError(f"{found!r} is inside an archive: tune a folder")
    try:
        from ...testing import tune as engine
    except ImportError as error:
        raise MissingPackageError(
            f'tuning needs torch with CUDA ({error}): pip install "kernel_hub[torch]"'
        ) from error
    todo = [dict(shape) for shape in shapes]
    keys = tuple(todo[0]) if todo else ()
    if not keys or any(shape.keys() != set(keys) for shape in todo):
        raise ParamsError("shapes: at least one, a dict of the same sizes each: [{'M': 512}, …]")
    kernel, functions = _functions(found, names, table)
    tables = read(found)
    file, gpu = found.root / FILE, current_gpu()
    save(file, tables)  # fails before the work
    outcomes: list[Measured] = []
    timer = timer or engine.time_on_gpu
    with progress(len(todo), f"tuning {kernel}") as advance:
        for sizes in todo:
            advance(" ".join(f"{key}={size}" for key, size in sizes.items()))
            outcomes.append(_measure(functions, case, sizes, rounds, timer))
            new = Section(gpu, _choices(found, keys, outcomes, functions))
            tables[kernel] = merged(tables.get(kernel), keys, new)
            save(file, tables)
    return outcomes


def _functions(
    found: TritonCollection, names: Sequence[str] | None, table: str | None
) -> tuple[str, dict[str, TritonFunction]]:
    """(the table's name, the configurations to measure)."""
    functions = {name: found[name] for name in (found if names is None else names)}
    kernels = {function.name for function in functions.values()}
    if names is None and table in kernels:
        functions = {name: f for name, f in functions.items() if f.name == table}
    elif len(kernels) != 1:
        shown = ", ".join(sorted(kernels)) or "none"
        raise ParamsError(f"{found!r} has the kernels {shown}: name one in table or names")
    return table or kernels.pop(), functions


def _measure(
    functions: Mapping[str, TritonFunction],
    case: Callable[..., Any],
    sizes: Mapping[str, int],
    rounds: int,
    timer: Timer,
) -> Measured:
    from ...testing.timing import num_sets
    from ...testing.tune import Case, problem, race

    def make() -> Problem:
        made = case(**sizes)
        return made if isinstance(made, Problem) else Problem(made)

    first = make()
    count = min(_MAX_SETS, num_sets(first.num_bytes)) if first.num_bytes else 1
    problems = [first, *(make() for _ in range(count - 1))]
    expected = first.expected
    contenders: dict[str, Sequence[Callable[[], Any]]] = {}
    refused: dict[str, str] = {}
    for name, function in functions.items():
        launches = [functools.partial(each.launch, function) for each in problems]
        try:
            if expected is None:
                expected = launches[0]().clone()
            wrong = problem(launches[0], expected)
        except KernelHubError as error:
            wrong = str(error).splitlines()[0]
        if wrong:
            refused[name] = wrong
        else:
            contenders[name] = launches
    if not contenders:
        reasons = "".join(f"\n  {name}: {why}" for name, why in refused.items())
        raise KernelHubError(f"no configuration solves {dict(sizes)}:{reasons}")
    measured = Case(next(iter(contenders.values())), max(1, first.num_bytes), first.num_operations)
    medians, finalists = race(contenders, measured, rounds, timer)
    best = min(finalists, key=medians.__getitem__)
    return Measured(dict(sizes), best, medians[best], medians, refused)


def _choices(
    found: TritonCollection,
    keys: tuple[str, ...],
    outcomes: Sequence[Measured],
    functions: Mapping[str, TritonFunction],
) -> dict[Bucket, Choice]:
    """The best of each bucket: that which loses the least over its shapes."""
    groups: dict[Bucket, list[Measured]] = {}
    for outcome in outcomes:
        groups.setdefault(bucket_of(keys, outcome.sizes), []).append(outcome)
    choices = {}
    for bucket, group in groups.items():

        def loss(name: str, group: list[Measured] = group) -> float:
            return sum(o.medians.get(name, math.inf) / o.best_us for o in group)

        best = min((o.best for o in group), key=loss)
        us = max(o.medians.get(best, o.best_us) for o in group)
        choices[bucket] = Choice(best, round(us, 3), found.image_of(best))
    return choices
