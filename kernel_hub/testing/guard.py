"""Outputs that tell on a kernel: poisoned before it runs, and watched around and between rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

GUARD_BYTES = 1024
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Guarded:
    """A tensor inside a larger buffer whose every byte is 0xff (nan, in every float dtype).

    shape, dtype, device: of `.tensor`.
    row_stride: elements from one row (last dimension) to the next; None is contiguous.
    shift: elements by which the start is moved off the 16-byte alignment.

    What the kernel leaves unwritten in `.tensor` stays nan; `check` finds what it wrote elsewhere.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, *,
        row_stride: int | None = None, shift: int = 0,
    ) -> None:  # fmt: skip
        word = _WORDS[dtype.itemsize]
        guard = GUARD_BYTES // dtype.itemsize
        width = shape[-1] if row_stride is None else row_stride
        if width < shape[-1]:
            raise ValueError(f"row_stride {width} is less than a row of {shape[-1]}")
        strides = [1]
        for size in reversed([*shape[1:-1], width] if len(shape) > 1 else []):
            strides.insert(0, strides[0] * size)
        span = math.prod(shape[:-1]) * width
        self._words = torch.full((2 * guard + shift + span,), -1, dtype=word, device=device)
        at = guard + shift
        self.tensor = self._words.view(dtype).as_strided(tuple(shape), strides, at)
        self._outside = torch.ones_like(self._words, dtype=torch.bool)
        self._outside.as_strided(tuple(shape), strides, at).fill_(False)

    def fill(self, values: torch.Tensor) -> torch.Tensor:
        """Write `values` into the tensor (for in-place runs) and return it."""
        return self.tensor.copy_(values)

    def poison(self) -> None:
        """Make every byte of the tensor 0xff, as it was at first."""
        self.tensor.view(self._words.dtype).fill_(-1)

    def check(self, name: str = "out") -> None:
        """Raise AssertionError if anything outside the tensor was written."""
        changed = (self._words != -1) & self._outside
        if bool(changed.any()):
            first = int(changed.nonzero()[0].item())
            raise AssertionError(
                f"{name}: {int(changed.sum())} elements outside the tensor were written, first "
                f"{first - int(self.tensor.storage_offset())} elements from its start"
            )
