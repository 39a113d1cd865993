"""Calls that an op must refuse, and what it must say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernel_hub.errors import TensorError


def check_refused(op: str, call: Callable[[], object], words: list[str]) -> None:
    """`call` raises a TensorError that begins with the op's name and has all of `words` in it."""
    with pytest.raises(TensorError) as raised:
        call()
    message = str(raised.value)
    missing = [word for word in words if word not in message]
    assert message.startswith(f"{op}: ") and not missing, f"{missing} is not in: {message}"


def check_misaligned(call: Callable[[torch.Tensor], Any], a: torch.Tensor) -> None:
    """Rows of 16 elements of `a`, whose own have 20, begin where no product takes them."""
    for wrong in (a[..., 1:17], a[..., :16]):
        with pytest.raises(TensorError, match="multiples of 16 bytes"):
            call(wrong)
