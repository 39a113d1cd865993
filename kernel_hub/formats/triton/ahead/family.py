"""The configurations of one kernel, sorted: what a caller passes, and which of them takes it.

Knows what a manifest says of each; loads and launches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import ParamsError
from ..configuration import entry, is_tuple
from ..grid import Grid
from ..signature import Argument


@dataclass(frozen=True)
class Described:
    """One configuration as a collection holds it.

    function: the kernel's name. declared: its signature, arguments equal to one included (`i32:1`).
    order: all arguments of the kernel, where the collection says them.
    """

    name: str
    function: str
    arguments: tuple[Argument, ...]
    declared: Mapping[str, str]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    order: tuple[str, ...] = ()
    grid: Grid | None = None

    def runtime(self) -> dict[str, str | None]:
        """Type of each argument that a launch passes, or that is compiled to be one."""
        found = {argument.name: argument.type for argument in self.arguments}
        for name, text in self.declared.items():
            if not is_tuple(text) and entry(name, text)[0] == "":
                found[name] = text.partition(":")[0]
        return found


@dataclass(frozen=True)
class FamilyVariant:
    """A configuration, and which values it takes.

    divisors: argument -> what must divide it; equals: argument -> the value compiled in; present:
    what must not be None, because None is compiled into another configuration. passed: the
    arguments that it is launched with. All by position in the family's arguments.
    """

    name: str
    divisors: Mapping[int, int]
    equals: Mapping[int, Any]
    present: frozenset[int]
    passed: tuple[int, ...]


@dataclass(frozen=True)
class Algo:
    """Configurations of the same constants and options: they differ in what they assume alone."""

    name: str
    variants: tuple[FamilyVariant, ...]  # those that assume the most first


@dataclass(frozen=True)
class Family:
    """All configurations of one kernel for one list of arguments (name, type)."""

    name: str
    arguments: tuple[Argument, ...]
    algos: tuple[Algo, ...]

    @property
    def names(self) -> list[str]:
        """Of the arguments, in the kernel's order."""
        return [argument.name for argument in self.arguments]

    def algo_of(self, configuration: str) -> int:
        """The number of the algo that has this configuration."""
        for number, algo in enumerate(self.algos):
            if any(variant.name == configuration for variant in algo.variants):
                return number
        raise KeyError(configuration)


def family(kernel: str, found: Iterable[Described]) -> Family:
    """The family of the configurations `found` of `kernel`.

    Raises ParamsError where they do not take the same arguments.
    """
    members = sorted(found, key=lambda each: each.name)
    types: dict[str, tuple[str | None, str]] = {}
    arguments: dict[str, Argument] = {}
    for each in members:
        for name, kind in each.runtime().items():
            known, first = types.setdefault(name, (kind, each.name))
            if known != kind:
                raise ParamsError(
                    f"{kernel} is built for arguments of different types: {name} is {known} in "
                    f"{first} and {kind} in {each.name}; take each by its own name"
                )
        for argument in each.arguments:
            arguments.setdefault(argument.name, argument)
    for name, (kind, _) in types.items():
        arguments.setdefault(name, Argument(name, kind))
    order = _ordered(arguments, members)
    places = {name: place for place, name in enumerate(order)}
    optional = frozenset(
        places[name]
        for each in members
        for name, value in each.constexprs.items()
        if value is None and name in places
    )
    groups: dict[str, list[Described]] = {}
    for each in members:
        constants = {n: v for n, v in each.constexprs.items() if n not in places}
        groups.setdefault(_key(constants, each.options), []).append(each)
    algos = []
    for group in groups.values():
        variants = [_variant(each, places, optional) for each in group]
        variants.sort(key=lambda v: (-len(v.divisors) - len(v.equals), v.name))
        algos.append(Algo(_algo_name(group[0], places), tuple(variants)))
    return Family(kernel, tuple(arguments[name] for name in order), _distinct(algos))


def _key(constants: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return json.dumps([dict(constants), dict(options)], sort_keys=True, default=str)


def _ordered(names: Iterable[str], members: Sequence[Described]) -> list[str]:
    """As the kernel declares them; where no member knows, as the member with the most has them."""
    order = next((each.order for each in members if each.order), ())
    if not order:
        widest = sorted(members, key=lambda each: -len(each.runtime()))
        order = tuple(dict.fromkeys(n.partition(".")[0] for each in widest for n in each.runtime()))

    def place(name: str) -> tuple[int, ...]:
        top, *path = name.split(".")
        return (order.index(top) if top in order else len(order), *map(int, path))

    return sorted(names, key=place)


def _variant(each: Described, places: Mapping[str, int], optional: frozenset[int]) -> FamilyVariant:
    divisors = {
        places[a.name]: a.divisors[0]
        for a in each.arguments
        if a.divisors[0] > 1 and not a.is_descriptor
    }
    passed = tuple(places[argument.name] for argument in each.arguments)
    equals = {
        place: each.constexprs[name]
        for name, place in places.items()
        if place not in passed and name in each.constexprs
    }
    return FamilyVariant(each.name, divisors, equals, optional.intersection(passed), passed)


def _algo_name(each: Described, places: Mapping[str, int]) -> str:
    constants = [f"{name}{value}" for name, value in each.constexprs.items() if name not in places]
    options = [f"w{each.options.get('num_warps')}", f"s{each.options.get('num_stages')}"]
    return "_".join([*constants, *options])


def _distinct(algos: Sequence[Algo]) -> tuple[Algo, ...]:
    """Algos that differ in options which their names leave out get a number."""
    names = [algo.name for algo in algos]
    return tuple(
        Algo(f"{algo.name}_{i}", algo.variants) if names.count(algo.name) > 1 else algo
        for i, algo in enumerate(algos)
    )
