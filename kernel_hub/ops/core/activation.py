"""What ends matrix products: the activations' names, what kernels call them, formulas."""

from __future__ import annotations

from collections.abc import Callable

import torch

CODES = {None: 0, "gelu": 1, "silu": 2, "relu": 3}
_FORMULAS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x, torch.nn.functional.gelu, torch.nn.functional.silu, torch.relu,
)  # fmt: skip


def finish(
    values: torch.Tensor,
    bias: torch.Tensor | None,
    code: int,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(values + bias) + residual, in fp32 on the CPU."""
    if bias is not None:
        values = values + bias.float()
    values = _FORMULAS[code](values)
    return values if residual is None else values + residual.float()
