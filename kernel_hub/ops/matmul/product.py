"""The way of a call of a product whose out may have several dtypes: check, plan, launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import common
from ..core.launch import Plans

_empty_like = torch.empty_like
_Into = Callable[..., torch.Tensor]


class Planned(NamedTuple):
    """What is known of calls of the same layouts."""

    launch: Any  # a LinearLaunch or a GroupedLaunch
    spans: common.Spans  # for each set of addresses that was met, its tensor maps
    out: torch.Tensor | None  # what one is made like where none is given


def launch(
    found: Planned, at: tuple[int, ...], tensors: tuple[Any, ...], out: Any, is_given: bool,
    residual: Any,
) -> Any:  # fmt: skip
    """Run it; tensors: a, b and the other pointers; at: where those that are given lie.
    is_given: the caller gave out, which may overlap the rest."""
    plan, spans, like = found
    if out is None:
        out = _empty_like(like)
    addresses = (out.data_ptr(), *at)
    maps = spans.apart.get(addresses)
    if maps is None:
        a, b = tensors[:2]
        maps = spans.made(addresses, is_given, plan.maps, a, b, out, residual)
    if plan.function is not None:
        plan.run(maps, out, *tensors)
    return out


class ProductOp:
    """One op. `inputs` are the arguments of its schema, a and b the first of them.

    required, optional: names of its tensors, but for out; tensors: those that a launch takes, in
    its order. check: (*inputs, out, out_dtype), new: (*inputs, out_dtype) -> an out, plan:
    (*inputs, out) -> a launch.
    """

    registered: common.Pair

    def __init__(
        self, op: str, required: str, optional: str, tensors: str, *, check: Callable[..., Any],
        new: Callable[..., Any], plan: Callable[..., Any], in_place: str = "",
    ) -> None:  # fmt: skip
        self._op, self._check, self._new, self._plan = op, check, new, plan
        self._operands = common.Operands(op, required, f"{optional} out")
        self._writes = common.Writes(op, f"out {tensors}", "out", in_place=in_place)
        self.plans: Plans[Planned] = Plans()

    def register(self, name: str, inputs: str, cuda: _Into, cpu: _Into) -> None:
        """With torch; inputs: of the schema."""
        count = inputs.count(",") + 2

        def check(*given: Any) -> None:
            self._check(*given, given[-1].dtype)

        def named(*given: Any) -> None:
            try:
                cuda(*given)
            except KernelHubError:
                check(*given[:count])  # names the devices that differ
                raise

        self.registered = common.define_pair(
            name, inputs, more="ScalarType out_dtype", new=self._new, cuda=named, cpu=cpu,
            check=check,
        )  # fmt: skip

    def call(
        self, cuda: _Into, cpu: _Into, inputs: tuple[Any, ...], required: Sequence[Any],
        optional: Sequence[Any], out: Any, out_dtype: Any,
    ) -> torch.Tensor:  # fmt: skip
        """The product. cuda, cpu: (*inputs, out or None, is_given, out_dtype) -> out; optional: the
        tensors that may be None, out the last."""
        if not self._operands.are_plain(required, optional):
            self._check(*inputs, out, out_dtype)
            made: torch.Tensor = self.registered.run(inputs, out, out_dtype)
            return made
        try:
            into = cuda if required[0].is_cuda else cpu
            if out is None:
                return into(*inputs, None, False, out_dtype)
            if out.dtype is not out_dtype:
                raise common.refuse(self._op, "out", f"dtype {out_dtype}, as out_dtype says", out)
            into(*inputs, out, True, out_dtype)
        except common.FOREIGN:
            self._operands.check_tensors(required, optional)  # names what has no memory
            self._check(*inputs, out, out_dtype)
            raise
        common.written((out,))
        return out

    def plan(
        self, key: tuple[Any, ...], inputs: tuple[Any, ...], tensors: tuple[Any, ...], out: Any,
        out_dtype: Any,
    ) -> Planned:  # fmt: skip
        """Check and plan a call that is new."""
        dtype = out_dtype if out is None else out.dtype
        self._check(*inputs, out, dtype)
        made = self._new(*inputs, dtype) if out is None else out
        spans, plan = self._writes.spans(made, *tensors), self._plan(*inputs, made)
        like = common.emptied(made) if out is None else None
        return self.plans.keep(key, Planned(plan, spans, like))

    def on_cpu(
        self, inputs: tuple[Any, ...], tensors: tuple[Any, ...], out: Any, is_given: bool,
        out_dtype: Any,
    ) -> torch.Tensor:  # fmt: skip
        """The checks of a call that torch computes; what it is to write."""
        made: torch.Tensor = self._new(*inputs, out_dtype) if out is None else out
        self._check(*inputs, made, made.dtype)
        if is_given:
            self._writes.check(made, *tensors)
        return made
