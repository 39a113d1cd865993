"""How an op says no: the argument, what it expects there and what it found."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...errors import TensorError


def say(tensor: torch.Tensor) -> str:
    """A tensor in an error message: shape, dtype, strides, device."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested:
        return f"a nested tensor, {dtype}, on {tensor.device}"
    shape = tuple(tensor.shape)
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
        return f"a {layout} tensor, shape {shape}, {dtype}, on {tensor.device}"
    return f"shape {shape}, {dtype}, strides {tuple(tensor.stride())}, on {tensor.device}"


def named(dtypes: Iterable[torch.dtype]) -> str:
    """Dtypes in an error message."""
    *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(names)} or {last}" if names else last


def refuse(op: str, argument: str, expected: str, found: object) -> TensorError:
    """The TensorError for `argument` of `op`."""
    shown = found
    if isinstance(found, torch.Tensor):
        shown = say(found)
        if expected == "dtype int32" and found.dtype == torch.int64:
            expected += f" ({argument}.int())"
    return TensorError(f"{op}: {argument}: expected {expected}, found {shown}")
