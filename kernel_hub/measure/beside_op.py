"""What an op is for `kernel-hub bench`: sizes, inputs, itself and its peers. Knows no op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Inputs = dict[str, Any]
Sizes = Mapping[str, int]
Run = Callable[[Inputs], Any]
Peer = Callable[[], Run]


@dataclass(frozen=True)
class Tensors:
    """Makes inputs of one dtype on one device."""

    device: str
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype) * scale

    def weight(self, *shape: int) -> torch.Tensor:
        """Whose product with rows of `normal` is about as large as these."""
        return self.normal(*shape, scale=shape[-1] ** -0.5)

    def fp32(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device)

    def count(self, end: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.arange(end, device=self.device, dtype=dtype)

    def full(self, size: int, value: int) -> torch.Tensor:
        return torch.full((size,), value, device=self.device, dtype=torch.int32)


@dataclass(frozen=True)
class Op:
    """An op beside its peers.

    sizes: name -> the default. torch: the same by torch, in the dtype of what it is given; it may
    write into the inputs that `ours` writes, and returns these too. flops: of its products.
    """

    sizes: Sizes
    make: Callable[[Sizes, Tensors], Inputs]
    ours: Run
    torch: Run
    peers: Mapping[str, Peer] = field(default_factory=dict)
    flops: Callable[[Sizes], int] = lambda _: 0
