"""Parameters of launches that reach no driver, held against what the kernels take."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from kernel_hub.collection.manifest import open_collection
from kernel_hub.signature.params import Param, wrong_count


@functools.cache
def _taken(cubin: str, function: str) -> list[Param] | None:
    """None of what was not built yet."""
    for entry in open_collection().manifest.cubins.get(cubin, {}).values():
        if function in entry.functions:
            params = enumerate(entry.functions[function].params)
            return [Param.make(i, p.name, p.type, p.size_bytes, p.offset_bytes) for i, p in params]
    return None


def check_params(cubin: str, function: str, params: Sequence[Any]) -> None:
    """Raise ParamsError as a launch on a GPU does; tensor maps are of the emulator's kind here."""
    expected = _taken(cubin, function)
    if expected is None:
        return
    if len(params) != len(expected):
        raise wrong_count(params, expected)
    for param, value in zip(expected, params, strict=True):
        if isinstance(value, torch.Tensor):  # of the CPU, which a launch refuses
            param.convert(ctypes.c_void_p(value.data_ptr()))
        elif not isinstance(value, bytes):
            param.convert(value)
