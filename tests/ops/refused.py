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


def check_misaligned(
    call: Callable[[torch.Tensor], Any], a: torch.Tensor, name: str = "a", op: str = ".*"
) -> None:
    """Rows of 16 elements of `a`, whose own have 20, begin where no product takes them; also where
    they are as far apart as kernels want, but all off the place."""
    whole = torch.zeros(a[..., :16].numel() + 1, dtype=a.dtype, device=a.device)[1:]
    for wrong in (a[..., 1:17], a[..., :16], whole.view(*a.shape[:-1], 16)):
        said = f"^{op}: {name}: expected rows that begin at multiples of 16 bytes"
        with pytest.raises(TensorError, match=said) as caught:
            call(wrong)
        assert ("bytes behind one" in str(caught.value)) == bool(wrong.data_ptr() % 16)
