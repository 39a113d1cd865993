"""Launches of exported Triton kernels: arguments for C, and the comparison with Python's launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exported import shared_library
from fakecuda import FakeCuda, Launch
from triton_data import TensorDescriptor

from kernel_hub import DeviceArray
from kernel_hub.formats import c_export

INVALID, NO_BINARY, MISALIGNED = 1, 209, 716
COOPERATIVE, PROGRAMMATIC = 2, 6  # launch attributes


class Tensor(ctypes.Structure):
    """kernel_hub_tensor."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("shape", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 5),
        ("nan_outside", ctypes.c_int),
    )

    @classmethod
    def of(cls, given: TensorDescriptor) -> Tensor:
        made = cls(given.base.ptr, nan_outside=given.padding == "nan")
        made.shape[: len(given.shape)] = given.shape
        made.strides[: len(given.shape)] = given.strides
        return made


def in_c(values: Sequence[Any]) -> list[Any]:
    """Arguments of a Python launch as a C function takes them."""
    made: list[Any] = []
    for value in values:
        if isinstance(value, TensorDescriptor):
            made.append(ctypes.byref(Tensor.of(value)))
        elif isinstance(value, DeviceArray):
            made.append(ctypes.c_uint64(value.ptr))
        else:
            made.append(ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value))
    return made


def compiled(
    folder: Path, fake: FakeCuda, name: str, source: Any, language: str = "c", **options: Any
) -> ctypes.CDLL:
    c_export.export({name: source}, folder, **options)
    return ctypes.CDLL(str(shared_library(folder, name, language, fake.path)))


def same(first: Launch, second: Launch) -> None:
    for field in (
        "name",
        "gridDim",
        "blockDim",
        "sharedMemBytes",
        "attributes",
        "params",
        "stream",
    ):
        assert getattr(first, field) == getattr(second, field), field
