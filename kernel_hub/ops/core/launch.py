"""A launch but for its pointers, and the memory of planned calls. Plans nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

MAX_PLANS = 4096

Dims = tuple[int, int, int]
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_Plan = TypeVar("_Plan")


def nothing(*arguments: Any, **options: Any) -> None:
    """Takes the place of a kernel."""


class Launch(NamedTuple):
    """A launch but for its pointers; `Launch()` where there is nothing to compute.

    A tuple, so that a hot path may unpack it.
    """

    function: Any = nothing  # a KernelFunction, called with all but the maps
    grid: Dims = (0, 0, 0)
    block: Dims = (0, 0, 0)
    shared_bytes: int = 0
    numbers: tuple[int | float, ...] = ()
    maps: tuple[Any, ...] = ()  # what tensor maps are made of; () where pointers are passed
    options: Mapping[str, Any] = _NO_OPTIONS  # keywords of the launch


class Memory(dict[tuple[Any, ...], _Plan]):
    """What was made of calls seen before, by all that it depends on; at most so much of it."""

    most = 512

    def keep(self, key: tuple[Any, ...], plan: _Plan) -> _Plan:
        """Remember and return `plan`; where there are `most` already, forget those first."""
        if len(self) >= self.most:
            self.clear()
        self[key] = plan
        return plan


class Plans(Memory[_Plan]):
    """Plans of calls seen before. One of each op or kernel family."""

    most = MAX_PLANS

    def __init__(self) -> None:
        super().__init__()
        _all.append(self)


# Those of the ops' modules, which stay as long as the process.
_all: list[Plans[Any]] = []


def forget_all() -> None:
    """Forget every plan: what plans depend on besides their keys has changed."""
    for plans in _all:
        plans.clear()
