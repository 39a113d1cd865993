"""Weights of several linear layers as one matrix, of which theirs are rows."""

from __future__ import annotations

from typing import Any

import torch


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

    def is_current(self) -> bool:
        """Whether the layers' parameters still lie here; not after `model.to(...)`, say.

        While tracing only device and dtype are looked at, which torch.compile guards.
        """
        parts = [(self.weight, [linear.weight for linear in self.linears])]
        if self.bias is not None:
            parts.append((self.bias, [linear.bias for linear in self.linears]))
        for whole, rows in parts:
            if any(each.device != whole.device or each.dtype is not whole.dtype for each in rows):
                return False
            if not torch.compiler.is_compiling():
                address, step = whole.data_ptr(), whole[0].numel() * whole.element_size()
                for each in rows:
                    if each.data_ptr() != address:
                        return False
                    address += each.shape[0] * step
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
