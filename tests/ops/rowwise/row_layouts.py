"""Rows of 64 that lie in memory in every way, and rows that are said to be many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ways import Way


def rows_of_64(way: Way) -> list[torch.Tensor]:
    """fp32, of any number of leading dimensions, strides and addresses."""
    return [
        way.randn(64),
        way.randn(2, 3, 4, 64),
        way.randn(4, 3, 64).transpose(0, 1),
        way.randn(2, 3, 96)[..., :64],
        way.randn(3, 64).expand(2, 3, 64),
        way.randn(3, 65)[:, 1:],
    ]


def say_rows(monkeypatch: pytest.MonkeyPatch, module: Any, rows: int) -> None:
    """What is chosen for the rows of a call is what is chosen for so many."""
    choose = module.choose_of_rows
    monkeypatch.setattr(module, "choose_of_rows", lambda vecs, _, *how: choose(vecs, rows, *how))
