"""Whether what a call writes meets what it reads, or itself, in memory.

Layouts are looked at once, for a plan; a call compares addresses. What cannot be proven to overlap
in reasonable time passes.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...errors import TensorError
from .refusals import refuse, say

# Of NumPy's exact test (a bounded linear equation); rows and columns take a handful.
_MAX_WORK: Any = 100_000
_MAX_APART = 16384
_is_tracing = torch.compiler.is_dynamo_compiling
_Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, bytes of an element


class _Memory:
    """Elements at an address, for NumPy, which does not look at them."""

    def __init__(self, address: int, layout: _Layout) -> None:
        shape, strides, size = layout
        self.__array_interface__ = {
            "data": (address, True), "shape": shape, "strides": tuple(s * size for s in strides),
            "typestr": f"|V{size}", "version": 3,
        }  # fmt: skip


def _meet(a: _Layout, b: _Layout, distance: int) -> bool:
    """Whether some byte belongs to both, b beginning `distance` bytes after a."""
    base = 1 << 60
    try:
        import numpy as np

        first = np.asarray(_Memory(base, a))
        second = np.asarray(_Memory(base + distance, b))
        return bool(np.shares_memory(first, second, max_work=_MAX_WORK))
    except (RuntimeError, ValueError, OverflowError, ImportError):
        # Too hard, more dimensions than NumPy has, or no NumPy.
        return False


def _layout_of(x: torch.Tensor) -> _Layout:
    """Without dimensions of one element, whose strides say nothing."""
    kept = [(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n != 1]
    return tuple(n for n, _ in kept), tuple(s for _, s in kept), x.element_size()


def _reach(layout: _Layout) -> int:
    """Bytes from the first element to the end of the last; 0 where there is none."""
    shape, strides, size = layout
    if 0 in shape:
        return 0
    return size * (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))


def _meets_itself(layout: _Layout) -> bool:
    """Whether two elements share memory."""
    shape, strides, size = layout
    if 0 in shape:
        return False
    dims = sorted(zip(strides, shape, strict=True))
    span = 0
    for stride, n in dims:
        if stride <= span:
            break
        span += (n - 1) * stride
    else:
        return False
    # Of two elements in one place, take the first dimension in which they differ: moved together,
    # one has index 0 there and in those before, the other a later one.
    for axis in range(len(shape)):
        rest = (shape[axis + 1 :], strides[axis + 1 :], size)
        later = ((shape[axis] - 1, *rest[0]), strides[axis:], size)
        if _meet(rest, later, strides[axis] * size):
            return True
    return False


def check_output(op: str, argument: str, out: torch.Tensor) -> None:
    """No two elements of an output may share memory."""
    if all(type(n) is int for n in (*out.shape, *out.stride())) and not _is_tracing():
        overlaps = _meets_itself(_layout_of(out))
    else:  # sizes that a tracer has no numbers for
        overlaps = any(n > 1 and s == 0 for n, s in zip(out.shape, out.stride(), strict=True))
    if overlaps:
        raise refuse(op, argument, "an output whose elements do not overlap", out)


class Spans:
    """How far the tensors of a plan reach, and which of them must not meet."""

    # Addresses that were found apart, with what else a call made of them. The hot question of a
    # call is whether its own are among them.
    apart: dict[tuple[int, ...], Any]

    __slots__ = ("__weakref__", "_names", "_op", "_pairs", "_shown", "apart")

    def __init__(self, writes: Writes, tensors: tuple[torch.Tensor | None, ...]) -> None:
        given = [(n, x) for n, x in zip(writes.names, tensors, strict=True) if x is not None]
        self._op = writes.op
        self._names = [name for name, _ in given]
        self._pairs = []
        self.apart = {}
        _spans.add(self)
        if writes.written.isdisjoint(self._names):  # nothing to meet
            return
        layouts = [_layout_of(x) for _, x in given]
        self._shown = [say(x) for _, x in given]
        for a, b in itertools.permutations(range(len(given)), 2):
            names = self._names[a], self._names[b]
            reaches = _reach(layouts[a]), _reach(layouts[b])
            # Of two that are written, once.
            if names[0] not in writes.written or (names[1] in writes.written and b < a):
                continue
            if all(reaches):
                may_be = frozenset(names) in writes.in_place and layouts[a] == layouts[b]
                self._pairs.append((a, b, *reaches, may_be, layouts[a], layouts[b]))

    def check(self, addresses: tuple[int, ...]) -> None:
        """Raise TensorError where a tensor that is written meets another; else remember.

        addresses: of the tensors that are not None, in their order; 0 of one without memory.
        """
        self.refuse(addresses)
        self.keep(addresses)

    def made(
        self, addresses: tuple[int, ...], may_meet: bool, make: Callable[..., Any], *given: Any
    ) -> Any:
        """What `make(*given)` makes of addresses that are new here, remembered with them.

        may_meet: the caller gave what is written; raises TensorError where it meets another.
        """
        if may_meet:
            self.refuse(addresses)
        made = make(*given)
        self.keep(addresses, made)
        return made

    def keep(self, addresses: tuple[int, ...], made: Any = ()) -> None:
        """Remember addresses that were found apart, and what was made of them."""
        global _num_apart
        _num_apart += 1
        if _num_apart > _MAX_APART:
            for spans in list(_spans):
                spans.apart.clear()
            _num_apart = 1
        self.apart[addresses] = made

    def refuse(self, addresses: tuple[int, ...]) -> None:
        """Raise TensorError where a tensor that is written meets another."""
        for a, b, reach_a, reach_b, may_be, layout_a, layout_b in self._pairs:
            distance = addresses[b] - addresses[a]
            if (
                -reach_b < distance < reach_a
                and addresses[a]
                and not (may_be and distance == 0)
                and _meet(layout_a, layout_b, distance)
            ):
                raise TensorError(
                    f"{self._op}: {self._names[a]}: expected memory of its own, found that of "
                    f"{self._names[b]}, which begins {distance} bytes from it: {self._names[a]} "
                    f"{self._shown[a]}, {self._names[b]} {self._shown[b]}"
                )


_spans: weakref.WeakSet[Spans] = weakref.WeakSet()
_num_apart = 0  # at most: plans that are gone took theirs with them


class Writes:
    """What an op reads and writes.

    names: of tensor arguments, in the order in which they are passed here; written: those it
    writes; in_place: 'out=x', where one may be exactly the other: its address, shape, strides and
    size of elements.
    """

    def __init__(self, op: str, names: str, written: str, in_place: str = "") -> None:
        self.op = op
        self.names = tuple(names.split())
        self.written = frozenset(written.split())
        self.in_place = frozenset(frozenset(pair.split("=")) for pair in in_place.split())

    def spans(self, *tensors: torch.Tensor | None) -> Spans:
        """For a plan; None where a tensor is not given."""
        return Spans(self, tensors)

    def check(self, *tensors: Any) -> None:
        """The whole check of one call."""
        given = [x for x in tensors if x is not None]
        self.spans(*tensors).refuse(tuple([x.data_ptr() for x in given]))
