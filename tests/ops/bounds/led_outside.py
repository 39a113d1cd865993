"""What launches said of their tables, held against what the tables are."""

from __future__ import annotations

from collections.abc import Collection

import torch

from kernel_hub.ops.core import bounds


def forget(like: torch.Tensor) -> None:
    """What earlier launches said is no business of this test."""
    bounds.take(like)


def check_said(
    op: str, like: torch.Tensor, certain: Collection[str], possible: Collection[str] = ()
) -> None:
    """The flag of `op` names all tables in `certain`, and none that is in neither."""
    said = bounds.take(like)
    assert said.keys() <= {op}, f"{op} set flags of {said.keys()}"
    found = set(said.get(op, ()))
    assert found >= set(certain), f"{op} said {found}, led outside by {certain}"
    assert found <= {*certain, *possible}, f"{op} said {found}, led outside by {certain}"
