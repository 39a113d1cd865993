"""Tensors of rows in any strides, from any place of memory that is all ones' bits elsewhere."""

from __future__ import annotations

import random

import torch
from arena import Arena


class Rows:
    """A tensor in memory that is all ones' bits elsewhere, as the lot says."""

    def __init__(
        self, memory: Arena, lot: random.Random, name: str, shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        offset = lot.choice((0, 0, 0, 1, 2, 3, 4, 8, 16))
        row = shape[-1] + lot.choice((0, 0, 0, 1, 2, 3, 8, 16, 40)) if len(shape) > 1 else 1
        strides: tuple[int, ...] = (1,) * len(shape)
        if len(shape) == 2:
            strides = (row, 1)
        elif len(shape) == 3:
            outer = shape[1] * row + lot.choice((0, 0, 1, 8))
            strides = (outer, row, 1) if lot.random() < 0.7 else (row, shape[0] * row, 1)
        size = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        self.memory = memory.empty(name, (size,), dtype)
        self.offset = offset
        self.tensor = self.memory.as_strided(shape, strides, self.memory.storage_offset() + offset)

    def check_around(self) -> None:
        """All that no element is was not written."""
        bits = self.memory.view(torch.uint8).view(-1, self.memory.element_size())
        rows = torch.arange(len(bits)).as_strided(
            self.tensor.shape, self.tensor.stride(), self.offset
        )  # fmt: skip
        around = torch.ones(len(bits), dtype=torch.bool)
        around[rows.reshape(-1)] = False
        assert bool((bits.cpu()[around] == 0xFF).all())
