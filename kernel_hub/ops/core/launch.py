"""A launch but for its pointers, and the memory of planned calls. Plans nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

MAX_PLANS = 4096

Dims = tuple[int, int, int]
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_Plan = TypeVar("_Plan")
# Of a call, which brings it, among the parameters of its launch.
GIVEN: Any = object()
_empty_like = torch.empty_like
# What torch's own compiled code makes tensors by, on the current device: half of `empty_like`.
_dynamo: Any = getattr(torch._C, "_dynamo", None)
_empty_cuda = getattr(getattr(_dynamo, "guards", None), "_empty_strided_cuda", None)


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


def emptied(x: torch.Tensor) -> torch.Tensor:
    """x, which nobody else has, without its memory, for a plan to keep: `torch.empty_like` of it
    takes half of what `torch.empty`, which parses sizes, does."""
    x.untyped_storage().resize_(0)
    return x


def call_first(
    plans: Plans[Any], key: tuple[Any, ...], launch: Launch, new: torch.Tensor,
    params: tuple[Any, ...], *given: Any,
) -> torch.Tensor:  # fmt: skip
    """The first call of its kind; `plans` has what makes the next ones, of `given` like these.

    new: nobody else's, like what a call returns, which is the first parameter; params: the others,
    GIVEN where a call brings one.
    """
    function, grid, block, shared_bytes, _, _, options = launch
    like, template = emptied(new), [None, *params]
    places = [place for place, value in enumerate(template) if value is GIVEN]

    def call(*given: Any) -> torch.Tensor:
        made, values = _empty_like(like), template.copy()
        values[0] = made
        for place, value in zip(places, given, strict=True):
            values[place] = value
        function(grid, block, shared_bytes, None, tuple(values), **options)
        return made

    found = call(*given)
    quick = None
    if like.is_cuda and hasattr(function, "planned"):  # else nothing that the driver launches
        make: Any = (_empty_like, (like,))
        if _empty_cuda is not None and torch.cuda.device_count() == 1:  # of that which is current
            make = (_empty_cuda, (tuple(like.shape), like.stride(), like.dtype))
        arguments = (grid, block, shared_bytes, None, tuple(template))
        quick = function.planned(like.get_device(), arguments, options, places, make, call)
    plans.keep(key, quick or call)
    return found
