"""Values to parameters: what goes in, what is refused, and that messages say both sides."""

from __future__ import annotations

import ctypes
import itertools
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_hub.errors import ParamsError
from kernel_hub.signature.params import Param, bfloat16_bits, layout, ordered, wrong_count

SIZES = {"int": 4, "float": 4, "double": 8, "int64_t": 8, "uint8_t": 1, "bool": 1, "__half": 2,
         "__nv_bfloat16": 2, "float*": 8, "void*": 8, "int16_t": 2, "uint32_t": 4, "int8_t": 1,
         "uint64_t": 8}  # fmt: skip


def param(type_text: str | None, size: int | None = None) -> Param:
    return Param.make(3, "count", type_text, size or SIZES[str(type_text)], 0)


class OnGpu:
    """Anything with the CUDA array interface."""

    def __init__(self, address: int = 0x7F00, typestr: str = "<f4", device: int | None = None):
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "typestr": typestr,
            "shape": (4,),
            "version": 3,
        }
        self.device = device


@pytest.mark.parametrize(
    ("type_text", "value", "packed"),
    [
        ("int", 7, 7),
        ("int", True, 1),
        ("int", -(2**31), -(2**31)),
        ("uint32_t", 2**32 - 1, 2**32 - 1),
        ("int", np.int32(5), 5),
        ("int", np.uint32(5), 5),
        ("int", ctypes.c_int(-4), -4),
        ("float", 1, 1.0),
        ("float", 0.5, 0.5),
        ("float", float("inf"), float("inf")),
        ("float", np.float32(2.5), 2.5),
        ("float", ctypes.c_float(2.5), 2.5),
        ("__half", 1.5, 1.5),
        ("__nv_bfloat16", 1.0, 0x3F80),
        ("bool", True, True),
        ("float*", None, 0),
        ("float*", ctypes.c_void_p(0x1234), 0x1234),
        ("float*", ctypes.c_void_p(), 0),
        ("float*", np.uint64(0x1234), 0x1234),
        ("void*", OnGpu(0x99), 0x99),
        ("float*", OnGpu(0x99), 0x99),
        ("int", struct.pack("<i", -9), -9),
        (None, ctypes.c_int(3), 3),
        (None, np.float32(1.0), 0x3F800000),
    ],
)
def test_accepted(type_text: str | None, value: Any, packed: Any) -> None:
    made = param(type_text, 4 if type_text is None else None).convert(value)
    assert made == packed
    struct.pack(f"<{param(type_text, 4 if type_text is None else None).code}", made)


@pytest.mark.parametrize(
    ("type_text", "value", "says"),
    [
        ("int", 2**31, "range"),
        ("int", -(2**31) - 1, "range"),
        ("uint32_t", -1, "range"),
        ("uint8_t", 256, "range"),
        ("int", 1.0, "float"),
        ("int", np.int64(1), "8 bytes"),
        ("int", np.float32(1), "float32"),
        ("int", ctypes.c_float(1), "c_float"),
        ("int", ctypes.c_int64(1), "8 bytes"),
        ("int", b"abc", "3 bytes"),
        ("int", "7", "str"),
        ("int", None, "null"),
        ("int", OnGpu(), "number"),
        ("float", 1e300, "overflows"),
        ("float", np.float64(1), "float64"),
        ("__half", 1e6, "overflows"),
        ("bool", 2, "bool"),
        ("float*", 0x7F00, "c_void_p"),
        ("float*", 1.5, "c_void_p"),
        ("float*", OnGpu(typestr="<f2"), "fp16"),
        ("float*", OnGpu(device=1), "device 1"),
        ("float*", np.zeros(4, np.float32), "CPU"),
        ("float*", [1, 2], "list"),
        ("float*", ctypes.c_float(1), "4 bytes"),
        (None, 3, "signatures"),
        (None, 0.5, "ctypes or NumPy"),
        (None, True, "signatures"),
        (None, ctypes.c_int64(3), "8 bytes"),
    ],
)
def test_refused(type_text: str | None, value: Any, says: str) -> None:
    with pytest.raises(ParamsError) as caught:
        param(type_text, 4 if type_text is None else None).convert(value, device=0)
    text = str(caught.value)
    assert says in text
    assert "params[3] (count)" in text


def test_integers_of_one_width_pass_for_each_other_and_no_others() -> None:
    pointer = Param.make(0, "n", "uint32_t*", 8, 0)
    assert pointer.convert(OnGpu(typestr="<i4")) == 0x7F00
    with pytest.raises(ParamsError, match="int64"):
        pointer.convert(OnGpu(typestr="<i8"))
    assert Param.make(0, "m", "bool*", 8, 0).convert(OnGpu(typestr="|u1")) == 0x7F00


def test_a_structure_goes_in_by_its_bytes() -> None:
    class Pair(ctypes.Structure):
        _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]

    by_value = Param.make(0, "pair", None, 16, 0)
    pair = Pair(1, 2.0)
    assert by_value.convert(pair) == bytes(pair)
    with pytest.raises(ParamsError, match="16 bytes"):
        Param.make(0, "pair", None, 24, 0).convert(pair)


def test_a_declared_type_of_another_size_is_refused() -> None:
    with pytest.raises(ParamsError, match="8 bytes"):
        Param.make(0, "n", "int64_t", 4, 0)


def test_params_by_name() -> None:
    expected = [Param.make(0, "out", "float*", 8, 0), Param.make(1, "n", "int", 4, 8)]
    assert ordered({"n": 3, "out": None}, expected) == [None, 3]
    with pytest.raises(ParamsError, match="missing out; unknown x"):
        ordered({"n": 3, "x": 1}, expected)
    for wrong in ("text", b"bytes", 7, np.zeros(2)):
        with pytest.raises(ParamsError, match="not a list"):
            ordered(wrong, expected)
    assert "too few params: got 1, the kernel takes 2: float\\* out, int n".replace(
        "\\", ""
    ) in str(wrong_count([1], expected))


@given(st.lists(st.sampled_from(sorted(SIZES)), max_size=20))
def test_layout_aligns_every_value(types: list[str]) -> None:
    params = [Param.make(i, None, t, SIZES[t], 0) for i, t in enumerate(types)]
    text, offsets, end = layout(params, 64)
    assert struct.calcsize(f"<{text}") == end - 64
    for made, offset in zip(params, offsets, strict=True):
        assert offset % made.size_bytes == 0
    spans = sorted((o, o + p.size_bytes) for o, p in zip(offsets, params, strict=True))
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@given(st.floats(width=32))
def test_bfloat16_rounds_to_nearest_even(value: float) -> None:
    bits = bfloat16_bits(value)
    back = np.array([bits << 16], np.uint32).view(np.float32)[0]
    if value != value:
        assert back != back
        return
    exact = np.float32(value)
    if np.isinf(back):  # rounded past the largest bfloat16
        assert abs(float(exact)) > 3.3895e38
        return
    below = np.array([(int(exact.view(np.uint32)) >> 16) << 16], np.uint32).view(np.float32)[0]
    assert back == below or abs(float(back) - float(exact)) <= abs(float(below) - float(exact))
