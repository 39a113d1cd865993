"""What calls of ops are drawn with, and one such call (call_cases.py)."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_hub import ops


@dataclass(repr=False)
class Case:
    """The arguments of one call."""

    op: str
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    outs: tuple[str, ...] = ()  # where results may be told to go; all are among `tensors`
    caches: tuple[str, ...] = ()  # written without being asked
    in_place: frozenset[tuple[str, str]] = frozenset()  # (written, input it may be)
    required: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()

    def __repr__(self) -> str:
        shown = {key: (tuple(x.shape), x.stride(), x.dtype) for key, x in self.tensors.items()}
        return f"{self.op}({shown}, {self.options})"

    @property
    def written(self) -> tuple[str, ...]:
        return self.outs + self.caches

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(name for name in self.tensors if name not in self.outs)

    def call(self, **changes: Any) -> Any:
        return getattr(ops, self.op)(**{**self.tensors, **self.options, **changes})

    def call_fresh(self, **changes: Any) -> Any:
        """The same without `outs`."""
        return self.call(**{**dict.fromkeys(self.outs), **changes})


class Lot:
    """What the cases draw from."""

    def __init__(self, name: str, seed: int, device: str) -> None:
        self.random = random.Random(f"{name} {seed}")
        self.generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))
        self.device = device

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        made = torch.randn(shape, generator=self.generator) / 4
        return made.to(dtype).to(self.device)

    def ints(self, *values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def maybe(self, *made: tuple[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in made if self.random.random() < 0.5}
