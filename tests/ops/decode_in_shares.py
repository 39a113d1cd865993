"""Steps of decode_attention by attention's kernels of equal shares, wherever they can."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from attention_devices import taken
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.kv_cache import decode_sm90

SPLIT: Any = importlib.import_module("kernel_hub.ops.attention.forward_split_sm90")


@contextlib.contextmanager
def in_shares(patch: pytest.MonkeyPatch, hopper_way: Way) -> Iterator[list[str]]:
    """The functions of the launches that they took."""
    found = taken(patch, SPLIT, lambda planned, *_: str(planned.function.name))
    patch.setattr(decode_sm90, "choice", True)
    patch.setattr(SPLIT, "choice", True)
    few = contextlib.nullcontext() if hopper_way.is_gpu else hopper_attention(patch, 7)
    with few:
        forget_all()
        yield found
