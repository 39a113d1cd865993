"""What the tests of fmha_v2 calls share: the stand-in kernels, arrays, and the struct that came."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any

import numpy as np
from fakecuda import FakeCuda

from kernel_hub import KernelFunction
from kernel_hub.arrays.device_array import DeviceArray
from kernel_hub.cubin import read_cubin
from kernel_hub.formats import fmha_v2
from kernel_hub.formats.fmha_v2 import Params

DATA = Path(__file__).parent / "data"
CUBIN = DATA / "fmha_stand_in.cubin"
HEADS, TOTAL = 4, 48
# The stand-ins' files, each built with one of the structs.
FILES = {
    "stand_in": "Params",
    "without_sinks": "ParamsWithoutSinks",
    "640": "Params640",
    "576": "Params576",
    "long_512": "LongParams512",
    "512": "Params512",
}


def kernel(**fields: Any) -> KernelFunction:
    return fmha_v2.find(fmha_v2.load(CUBIN), **fields)


def load(file: str, **fields: Any) -> KernelFunction:
    return fmha_v2.find(fmha_v2.load(DATA / f"fmha_{file}.cubin"), **fields)


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


def changed(image: bytes, symbol: str, size: int, old: int, new: int) -> bytes:
    """`image` whose kernel reads byte `new` of its struct where it read byte `old`."""
    sections = {section.name: section for section in read_cubin(image).sections}
    text = sections[f".text.{symbol}"]
    start = sections[f".nv.constant0.{symbol}"].size_bytes - size
    made = bytearray(image)
    for at in range(text.offset, text.offset + text.size_bytes, 16):
        word = int.from_bytes(made[at : at + 8], "little")
        if word >> 9 & 7 in (3, 5) and word >> 38 & 0xFFFF == start + old:
            word += (new - old) << 38
            made[at : at + 8] = word.to_bytes(8, "little")
    assert made != image
    return bytes(made)


def half2(value: float) -> int:
    return int.from_bytes(struct.pack("<e", value) * 2, "little")


def float_bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little")


def paged(page_size: int = 32, dtype: str = "bf16") -> tuple[DeviceArray, ...]:
    """q, pool, block_table."""
    pool = array(12, 2, page_size, 128, dtype=dtype)
    return array(TOTAL, HEADS, 128, dtype=dtype), pool, array(2, 2, 3, dtype="int32")
