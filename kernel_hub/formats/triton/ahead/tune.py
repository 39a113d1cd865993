"""Which configuration of a kernel is the fastest for which sizes: checked, timed, written down.

Needs a GPU and torch, both only when `tune` is called; what is written is read by `tuned_file`.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....arrays import interop
from ....errors import KernelHubError, MissingPackageError, ParamsError, TableError
from ....progress import progress
from ..function import TritonFunction
from .collection import TritonCollection, collection
from .tuned_file import (
    FILE,
    Bucket,
    TunedChoice,
    TunedSection,
    bucket_of,
    check_sizes,
    current_gpu,
    is_name,
    merged,
    read,
    save,
)

if TYPE_CHECKING:
    from ....measure.tune import Timer

__all__ = ["MeasuredShape", "Problem", "tune"]

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

    def __post_init__(self) -> None:
        if not callable(self.launch):
            raise ParamsError(f"launch={self.launch!r:.80}: expected a function of a kernel")
        for name in ("num_bytes", "num_operations"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ParamsError(f"{name}={value!r:.80}: a whole number from 0 up")


@dataclass(frozen=True)
class MeasuredShape:
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
) -> list[MeasuredShape]:
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
        from ....measure import tune as engine
    except ImportError as error:
        raise MissingPackageError(
            f'tuning needs torch with CUDA ({error}): pip install "kernel_hub[torch]"'
        ) from error
    todo = _shapes(shapes)
    keys = tuple(todo[0])
    if not callable(case):
        raise ParamsError(f"case={case!r:.80}: a function of the sizes {', '.join(keys)}")
    if type(rounds) is not int or rounds < 1:
        raise ParamsError(f"rounds={rounds!r:.80}: a whole number from 1 up")
    kernel, functions = _functions(found, names, table)
    tables = read(found)
    file, gpu = found.root / FILE, current_gpu()
    _check_writable(found.root)  # fails before the work
    outcomes: list[MeasuredShape] = []
    timer = timer or engine.time_on_gpu
    with progress(len(todo), f"tuning {kernel}") as advance:
        for sizes in todo:
            advance(" ".join(f"{key}={size}" for key, size in sizes.items()))
            outcomes.append(_measure(functions, case, sizes, rounds, timer))
            new = TunedSection(gpu, _choices(found, keys, outcomes, functions))
            tables[kernel] = merged(tables.get(kernel), keys, new)
            save(file, tables)
    return outcomes


def _shapes(shapes: Any) -> list[dict[str, int]]:
    """`shapes`, checked: at least one, and all of the same sizes."""
    expected = "shapes: at least one, a dict of the same sizes each: [{'M': 512}, …]"
    if not isinstance(shapes, Iterable) or isinstance(shapes, (str, bytes, Mapping)):
        raise ParamsError(f"{expected}; got {shapes!r:.80}")
    todo = []
    for shape in shapes:
        if not isinstance(shape, Mapping) or not shape or not all(map(is_name, shape)):
            raise ParamsError(f"{expected}; one is {shape!r:.80}")
        check_sizes(shape, "shapes")
        todo.append(dict(shape))
    if not todo or any(shape.keys() != todo[0].keys() for shape in todo):
        raise ParamsError(f"{expected}; got {todo!r:.80}")
    return todo


def _check_writable(folder: Path) -> None:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise TableError(f"{folder / FILE} cannot be written: {error}") from error


def _functions(
    found: TritonCollection, names: Sequence[str] | None, table: str | None
) -> tuple[str, dict[str, TritonFunction]]:
    """(the table's name, the configurations to measure)."""
    if table is not None and not (isinstance(table, str) and table):
        raise ParamsError(f"table={table!r:.80}: a name to write under, or None")
    if names is not None and not isinstance(names, (list, tuple)):
        raise ParamsError(f"names={names!r:.80}: a list of names of {found!r}, or None")
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
) -> MeasuredShape:
    from ....measure.timing import num_sets
    from ....measure.tune import Case, problem, race

    def make() -> Problem:
        made = case(**sizes)
        if not isinstance(made, Problem) and not callable(made):
            raise ParamsError(
                f"case of {dict(sizes)} returned {made!r:.80}: a Problem, or the function that "
                "launches one"
            )
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
            out = launches[0]()
        except KernelHubError as error:
            refused[name] = str(error).splitlines()[0]
            continue
        expected = _expected(out, expected, sizes)
        if wrong := problem(launches[0], expected):
            refused[name] = wrong
        else:
            contenders[name] = launches
    if not contenders:
        reasons = "".join(f"\n  {name}: {why}" for name, why in refused.items())
        raise KernelHubError(f"no configuration solves {dict(sizes)}:{reasons}")
    measured = Case(next(iter(contenders.values())), max(1, first.num_bytes), first.num_operations)
    medians, finalists = race(contenders, measured, rounds, timer)
    best = min(finalists, key=medians.__getitem__)
    return MeasuredShape(dict(sizes), best, medians[best], medians, refused)


def _expected(out: Any, expected: Any, sizes: Mapping[str, int]) -> Any:
    """What the problem's output is to be, `out` being the first; ParamsError if they cannot be."""
    torch = interop.loaded_torch()
    for name, value in (("launch of", out), ("expected of", out if expected is None else expected)):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise ParamsError(
                f"{name} {dict(sizes)} is {getattr(value, 'dtype', repr(value))!s:.80}: expected "
                "the output, a torch tensor of floats"
            )
    if expected is None:
        return out.clone()
    if out.shape != expected.shape:
        raise ParamsError(
            f"launch of {dict(sizes)} gives the shape {tuple(out.shape)}, expected has "
            f"{tuple(expected.shape)}"
        )
    return expected


def _choices(
    found: TritonCollection,
    keys: tuple[str, ...],
    outcomes: Sequence[MeasuredShape],
    functions: Mapping[str, TritonFunction],
) -> dict[Bucket, TunedChoice]:
    """The best of each bucket: that which loses the least over its shapes."""
    groups: dict[Bucket, list[MeasuredShape]] = {}
    for outcome in outcomes:
        groups.setdefault(bucket_of(keys, outcome.sizes), []).append(outcome)
    choices = {}
    for bucket, group in groups.items():

        def loss(name: str, group: list[MeasuredShape] = group) -> float:
            return sum(o.medians.get(name, math.inf) / o.best_us for o in group)

        best = min((o.best for o in group), key=loss)
        us = max(o.medians.get(best, o.best_us) for o in group)
        choices[bucket] = TunedChoice(best, round(us, 3), found.image_of(best))
    return choices
