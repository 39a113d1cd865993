"""Host tensor descriptors given to Triton kernels on the stand-in: what they become."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fakecuda import FakeCuda
from triton_data import DATA, NEWEST, TensorDescriptor, hidden, numbers, words

from kernel_hub import DeviceArray, TensorMap
from kernel_hub.errors import ParamsError
from kernel_hub.formats import triton


@pytest.mark.parametrize("version", ["3.4.0", "3.5.0", "3.6.0", "3.7.0", "3.9.0"])
def test_a_host_descriptor_becomes_a_tensor_map(fakecuda: FakeCuda, version: str) -> None:
    f = triton.load(DATA / version, "desc_kernel")
    x, out = (DeviceArray.zeros((48, 256), "fp16") for _ in range(2))
    same = TensorMap.tiled(x, (16, 64), swizzle="128B")
    for value in (TensorDescriptor(x, (48, 256), (16, 128)), same):
        f[(3, 2)](value, out, 48, 256, 0.5)
        params = fakecuda.launch().params
        assert params is not None
        assert params[0] == same.raw
        assert params[1:5] == (*(struct.pack("<i", n) for n in (48, 256)), *words(256, 1))
        assert params[5:9] == (
            struct.pack("<Q", out.ptr), struct.pack("<i", 48), struct.pack("<i", 256),
            struct.pack("<f", 0.5),
        )  # fmt: skip
        assert params[9:] == words(0, 0)[: hidden(version)]
    assert "tensordesc<fp16[16,128]>" in f.signature
    f.bind((3, 2), params=[same, out, 48, 256, 0.5])()
    assert fakecuda.launch().params[0] == same.raw  # type: ignore[index]


@pytest.mark.parametrize("version", ["3.4.0", "3.5.0", "3.6.0", "3.7.0", "3.9.0"])
def test_without_tma_a_descriptor_becomes_pointer_and_numbers(
    make_fakecuda: Callable[..., FakeCuda], version: str
) -> None:
    fake = make_fakecuda(capability=(8, 0))
    x, out = (DeviceArray.zeros((48, 256), "fp16") for _ in range(2))
    declared = {
        "x_desc": "tensordesc<fp16[16,128]>", "out": "*fp16", "M": "i32", "N": "i32",
        "scale": "fp32", "BM": "constexpr", "BN": "constexpr",
    }  # fmt: skip
    named = numbers(version) >= (3, 5)  # before, only the caller can say what belongs together
    path = DATA / version / "sm80/desc_kernel.cubin"
    f = triton.load(path, signature=None if named else declared)
    num_flags = 0 if not named else 1 if numbers(version) < (3, 7) else 2
    f[(3, 2)](TensorDescriptor(x, (48, 256), (16, 128)), out, 48, 256, 0.5)
    params = fake.launch().params
    assert params is not None
    sizes = words(48, 256, 256, 1)
    assert params[:5] == (*words(x.ptr), *sizes)
    assert params[5 : 5 + num_flags] == (b"\0",) * num_flags
    rest = params[5 + num_flags :]
    assert rest[:4] == (struct.pack("<i", 48), struct.pack("<i", 256), *words(256, 1))
    nan = TensorDescriptor(x, (48, 256), (16, 128), "nan")
    if num_flags:
        f[(3, 2)](nan, out, 48, 256, 0.5)
        assert fake.launch().params[5] == b"\1"  # type: ignore[index]
    else:
        with pytest.raises(ParamsError, match="padding is not known"):
            f[(3, 2)](nan, out, 48, 256, 0.5)
    with pytest.raises(ParamsError, match=r"params\[0\] \(x_desc\).*compiled without TMA"):
        f[1](fake_map(), out, 48, 256, 0.5)


def fake_map() -> TensorMap:
    return object.__new__(TensorMap)


def test_descriptors_that_do_not_fit(fakecuda: FakeCuda) -> None:
    f = triton.load(NEWEST, "desc_kernel")
    x, out = (DeviceArray.zeros((48, 256), "fp16") for _ in range(2))
    wide = DeviceArray.zeros((48, 256), "fp32")
    odd = TensorDescriptor(x, (48, 250), (16, 128))
    ragged = TensorDescriptor(x, (48, 256), (16, 128))
    ragged.shape = [48]
    for value, found in (
        (x, r"params\[0\] \(x_desc\): got DeviceArray; pass Triton's TensorDescriptor"),
        (TensorDescriptor(x, (48, 256), (16, 64)), r"block_shape is \[16, 64\]; compiled for"),
        (TensorDescriptor(wide, (48, 256), (16, 128)), "__half"),
        (TensorDescriptor(x, (48, 256), (16, 128), "inf"), "padding is 'inf'"),
        (ragged, "its shape is"),
        (None, "got NoneType"),
        (TensorMap.tiled(x, (16, 32), swizzle="128B"), r"box \(16, 32\); compiled for \(16, 64\)"),
        (
            TensorMap.tiled(wide, (16, 32), swizzle="128B"),
            "TensorMap is of fp32; compiled for fp16",
        ),
    ):
        with pytest.raises(ParamsError, match=found):
            f[1](value, out, 48, 256, 0.5)
    with pytest.raises(ValueError, match="x_desc: stride 0 is 250 elements"):
        f[1](odd, out, 48, 256, 0.5)
    assert fakecuda.launch_count == 0


def test_a_descriptor_where_only_sizes_are_known(fakecuda: FakeCuda, tmp_path: Path) -> None:
    for suffix in (".cubin", ".json"):
        shutil.copy((NEWEST / "desc_kernel").with_suffix(suffix), tmp_path)
    x = DeviceArray.zeros((48, 256), "fp16")
    made = TensorMap.tiled(x, (16, 64), swizzle="128B")
    f = triton.load(tmp_path)
    numbers = [np.int32(48), np.int32(256), np.int64(256), np.int64(1)]
    f[1](made, *numbers, x, *numbers[:2], np.float32(0.5))
    params = fakecuda.launch().params
    assert params is not None
    assert (params[0], params[1], params[8]) == (made.raw, struct.pack("<i", 48), b"\0\0\0?")
