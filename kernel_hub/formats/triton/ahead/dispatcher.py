"""Dispatcher: the configurations of one kernel as one function, chosen by what a call passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ....arrays.interop import current_device
from ....errors import CubinNotFoundError, ParamsError
from ....signature.c_types import type_info
from ....signature.params import Param, wrong_count
from ..function import TritonFunction
from ..launcher import by_name, value_of
from ..signature import Argument, c_type
from ..tuples import Tuples
from . import tuned_file
from .family import Algo, Family, FamilyVariant

if TYPE_CHECKING:
    from .collection import TritonCollection


class Dispatcher:
    """A kernel in several configurations. Call it to launch one, on the grid kept with it:

    d(*params, stream=None, algo=None, **named) -> None
    d[grid](*params, stream=None, algo=None, **named) -> None

    params: all of the kernel's run-time arguments, those too that some configurations fold away
    (equal to 1, None). algo: the number or name of one of `algos`; None takes that which
    `triton.tune` found best for these sizes where there is a table of this kernel whose keys are
    arguments, else the first. Of the configurations of an algo the one that assumes the most runs,
    of those whose assumptions hold. A function of them is `d.select(*params)`.

    Raises ParamsError where none fits, CubinNotFoundError where none is for the GPU, TableError for
    a damaged tuned.json.
    """

    def __init__(self, collection: TritonCollection, family: Family) -> None:
        self.name = family.name
        self.algos = [algo.name for algo in family.algos]
        self.arguments = family.arguments
        self._collection, self._family = collection, family
        self._tuples = Tuples(family.names)
        self._expected = [_shown(i, argument) for i, argument in enumerate(family.arguments)]
        # By GPU: the functions for it by name, and what was measured there.
        self._found: dict[int, tuple[dict[str, TritonFunction], tuned_file.Tuned | None]] = {}

    def __repr__(self) -> str:
        names = ", ".join(self._family.names)
        return f"<Dispatcher {self.name}({names}): {', '.join(self.algos)}>"

    def __call__(self, *params: Any, stream: Any = None, algo: Any = None, **named: Any) -> None:
        function, values = self._choose(params, named, algo)
        function.run(*values, stream=stream)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """A launcher of `grid` programs, whichever configuration runs."""
        return partial(self._launch, grid)

    def _launch(
        self, grid: Any, *params: Any, stream: Any = None, algo: Any = None, **named: Any
    ) -> None:
        function, values = self._choose(params, named, algo)
        function[grid](*values, stream=stream)

    def select(self, *params: Any, algo: Any = None, **named: Any) -> TritonFunction:
        """The function that a call with these arguments launches."""
        return self._choose(params, named, algo)[0]

    def _choose(
        self, params: Sequence[Any], named: Mapping[str, Any], algo: Any
    ) -> tuple[TritonFunction, list[Any]]:
        """(the function, what it is passed)."""
        values = by_name(self._tuples, self._expected, params, named)
        if len(values) != len(self._expected):
            raise wrong_count(values, self._expected)
        functions, tuned = self._for_this_gpu()
        refused = []
        for each in self._ranked(values, algo, tuned):
            for variant in each.variants:
                if variant.name not in functions:
                    continue
                wrong = self._misfit(variant, values)
                if not wrong:
                    return functions[variant.name], [values[i] for i in variant.passed]
                refused.append(f"\n  {variant.name}: {wrong}")
        raise ParamsError(
            f"{self.name}: no configuration takes these arguments"
            + (f" with algo={algo!r}" if algo is not None else "")
            + ("".join(refused) or ": none of it is for this GPU")
        )

    def _ranked(
        self, values: Sequence[Any], algo: Any, tuned: tuned_file.Tuned | None
    ) -> Sequence[Algo]:
        algos = self._family.algos
        if algo is not None:
            chosen = self.algos.index(algo) if algo in self.algos else algo
            if type(chosen) is not int or not 0 <= chosen < len(algos):
                raise ParamsError(
                    f"algo={algo!r:.80} of {self.name}: 0 to {len(algos) - 1}, or one of "
                    + ", ".join(self.algos)
                )
            return [algos[chosen]]
        if tuned is None:
            return algos
        places = {name: i for i, name in enumerate(self._family.names)}
        sizes = {key: value_of(values[places[key]]) or 0 for key in tuned.keys}
        best = self._family.algo_of(tuned.name(**sizes))
        return [algos[best], *(each for i, each in enumerate(algos) if i != best)]

    def _misfit(self, variant: FamilyVariant, values: Sequence[Any]) -> str:
        """What a configuration assumes that is not so, '' where all is."""
        names = self._family.names
        for place, constant in variant.equals.items():
            if not _is(values[place], constant):
                return f"{names[place]} is compiled to be {constant}"
        for place in variant.present:
            if _is_null(values[place]):
                return f"{names[place]} is None, and it reads it"
        for place, divisor in variant.divisors.items():
            found = value_of(values[place])
            if found is not None and found % divisor:
                return f"{names[place]} is {found:#x}, not divisible by {divisor}"
        return ""

    def _for_this_gpu(self) -> tuple[dict[str, TritonFunction], tuned_file.Tuned | None]:
        device = current_device()
        if device not in self._found:
            found: dict[str, TritonFunction] = {}
            refusal: CubinNotFoundError | None = None
            for algo in self._family.algos:
                for variant in algo.variants:
                    try:
                        found[variant.name] = self._collection.function(variant.name)
                    except CubinNotFoundError as error:
                        refusal = error
            if refusal is not None and not found:
                raise refusal
            table = tuned_file.read(self._collection).get(self.name)
            tuned: tuned_file.Tuned | None = None
            if table is not None and {*table.keys} <= {*self._family.names}:
                with contextlib.suppress(CubinNotFoundError):  # no choice is for this GPU
                    tuned = self._collection.tuned(self.name)
            self._found[device] = found, tuned
        return self._found[device]


def _shown(place: int, argument: Argument) -> Param:
    """An argument as messages show it."""
    info = type_info(c_type(argument.type))
    if info is None or argument.is_descriptor:
        return Param(place, argument.name, argument.type, 8, 0)
    return Param.make(place, argument.name, c_type(argument.type), info.size_bytes, 0)


def _is_null(value: Any) -> bool:
    # The value of a c_void_p that is null is None.
    return value is None or getattr(value, "value", 0) is None or value_of(value) == 0


def _is(value: Any, constant: Any) -> bool:
    if constant is None or value is None:
        return value is constant
    found = value_of(value)
    if found is None:
        found = getattr(value, "value", value)
    return isinstance(found, (bool, int, float)) and found == constant
