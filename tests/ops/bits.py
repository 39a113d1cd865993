"""Equality bit by bit."""

from __future__ import annotations

import torch


def same_bits(a: torch.Tensor, b: torch.Tensor, *, name: str = "out") -> None:
    """Raise AssertionError unless the two are equal bit by bit (so nan may equal nan)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise AssertionError(f"{name}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}")
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differs = a.contiguous().view(kind) != b.contiguous().view(kind)
    if bool(differs.any()):
        where = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(differs.sum())} of {a.numel()} elements differ in their bits, first at "
            f"{where}: {a[where].item()!r} and {b[where].item()!r}"
        )
