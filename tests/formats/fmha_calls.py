"""What the tests of fmha_v2 calls share: the stand-in kernels, arrays, and the struct that came."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import numpy as np
from fakecuda import FakeCuda

from kernel_hub import KernelFunction
from kernel_hub.formats import fmha_v2
from kernel_hub.formats.fmha_v2 import Params
from kernel_hub.memory import DeviceArray

DATA = Path(__file__).parent / "data"
CUBIN = DATA / "fmha_stand_in.cubin"
HEADS, TOTAL = 4, 48


def kernel(**fields: Any) -> KernelFunction:
    return fmha_v2.find(fmha_v2.load(CUBIN), **fields)


def array(*shape: int, dtype: str = "fp16") -> DeviceArray:
    return DeviceArray.zeros(shape, dtype)


def starts(*ends: int) -> DeviceArray:
    return DeviceArray.from_numpy(np.array([0, *ends], np.int32))


def arrived(fake: FakeCuda, struct: type[Any] = Params) -> Any:
    """The struct of the last launch, its parameter's bytes."""
    params = fake.launch().params
    assert params is not None
    (raw,) = params
    assert len(raw) == ctypes.sizeof(struct)
    return struct.from_buffer_copy(raw)


def half2(value: float) -> int:
    return int.from_bytes(struct.pack("<e", value) * 2, "little")


def float_bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def paged(page_size: int = 32, dtype: str = "bf16") -> tuple[DeviceArray, ...]:
    """q, pool, block_table."""
    pool = array(12, 2, page_size, 128, dtype=dtype)
    return array(TOTAL, HEADS, 128, dtype=dtype), pool, array(2, 2, 3, dtype="int32")
