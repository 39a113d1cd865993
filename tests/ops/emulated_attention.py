"""Hopper's attention forward in the emulator: with the fixture `hopper_way`, on so many SMs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from kernel_hub.ops.core.device import PlannedGpu, pretend

SM90: Any = importlib.import_module("kernel_hub.ops.attention.forward_sm90")


@contextlib.contextmanager
def hopper_attention(patch: pytest.MonkeyPatch, num_sms: int) -> Iterator[None]:
    """CPU tensors go where `forward_sm90.applies` sends those of a GPU."""
    patch.setattr(SM90, "applies", SM90.fits)
    with pretend(PlannedGpu((9, 0), num_sms)):
        yield
