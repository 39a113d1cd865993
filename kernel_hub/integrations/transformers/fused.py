"""Weights of several linear layers as one matrix, of which theirs are rows."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

_is_compiling = torch.compiler.is_compiling


class Fused:
    """One weight, and one bias or none, of linear layers that read the same input.

    The layers' own parameters become views of it, so that their names and values in state_dict
    stay, and what is written to them in place is seen here too.
    """

    def __init__(self, *linears: Any) -> None:
        """Join them. What fails leaves every layer as it was."""
        weight = torch.cat([linear.weight.data for linear in linears])
        has_bias = linears[0].bias is not None
        bias = torch.cat([linear.bias.data for linear in linears]) if has_bias else None
        self.linears = linears
        self.weight = weight
        self.bias = bias
        self.sizes = [linear.out_features for linear in linears]
        _point(linears, "weight", weight.split(self.sizes))
        if bias is not None:
            _point(linears, "bias", bias.split(self.sizes))
        # Where each layer's own lies, which every forward looks at.
        self._parts = [
            (name, whole, linear._parameters, row * whole[0].numel() * whole.element_size())
            for name, whole in (("weight", weight), ("bias", bias))
            if whole is not None
            for linear, row in zip(linears, accumulate(self.sizes, initial=0), strict=False)
        ]

    def is_current(self) -> bool:
        """Whether the layers' parameters still lie here; not after `model.to(...)`, say.

        While tracing only device and dtype are looked at, which torch.compile guards.
        """
        if _is_compiling():
            wholes = [(self.weight, "weight")]
            wholes += [] if self.bias is None else [(self.bias, "bias")]
            return all(
                getattr(linear, name).device == whole.device
                and getattr(linear, name).dtype is whole.dtype
                for whole, name in wholes
                for linear in self.linears
            )
        for name, whole, parameters, start in self._parts:
            own = parameters.get(name)
            if own is None or own.data_ptr() != whole.data_ptr() + start:
                return False
        return True

    def release(self) -> None:
        """Give each layer memory of its own again, with the same bits."""
        names = ("weight",) if self.bias is None else ("weight", "bias")
        for name in names:
            own = [getattr(linear, name).data.clone() for linear in self.linears]
            _point(self.linears, name, own)


def _point(linears: tuple[Any, ...], name: str, values: Any) -> None:
    for linear, value in zip(linears, values, strict=True):
        getattr(linear, name).data = value
