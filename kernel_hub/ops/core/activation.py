"""The activations of matrix products: names, what kernels call them, formulas."""

from __future__ import annotations

from collections.abc import Callable

import torch

CODES = {None: 0, "gelu": 1, "silu": 2, "relu": 3}
_FORMULAS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x, torch.nn.functional.gelu, torch.nn.functional.silu, torch.relu,
)  # fmt: skip


def activate(values: torch.Tensor, code: int) -> torch.Tensor:
    """The activation, on the CPU."""
    return _FORMULAS[code](values)
