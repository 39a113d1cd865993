"""Host tensor descriptors given to Triton kernels on the stand-in: what they become."""

from __future__ import annotations

import ctypes
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fakecuda import FakeCuda
from triton_data import DATA, NEWEST, TLX, TensorDescriptor, hidden, numbers, words

from kernel_hub import DeviceArray, TensorMap
from kernel_hub.errors import LaunchConfigError, ParamsError
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
    f[1](made, x, np.int32(48), np.int32(256), np.float32(0.5))
    params = fakecuda.launch().params
    assert params is not None
    assert (params[0], params[1], params[8]) == (made.raw, struct.pack("<i", 48), b"\0\0\0?")


@pytest.mark.parametrize("suffix", [".ptx", None])
def test_without_the_intermediate_form_the_metadata_tells_the_descriptors(
    fakecuda: FakeCuda, tmp_path: Path, suffix: str | None
) -> None:
    """`tensordesc_meta` says which parameters are a descriptor's, where only sizes are known."""
    path = TLX / "tlx_copy.cubin"
    for kept in (".cubin", ".json", suffix):
        if kept:
            shutil.copy(path.with_suffix(kept), tmp_path)
    f = triton.load(tmp_path)
    assert [(a.name, len(a.divisors)) for a in f.arguments] == [
        ("arg0", 5),
        ("arg1", 5),
        ("arg2", 1),
    ]
    assert f.arguments[0].element == "fp16"
    x, out = (DeviceArray.zeros((64, 128), "fp16") for _ in range(2))
    given = [TensorDescriptor(each, (64, 128), (64, 64)) for each in (x, out)]
    f[(1, 2)](*given, ctypes.c_int(7))
    loaded = fakecuda.launch().params
    triton.load(TLX, "tlx_copy")[(1, 2)](*given, 7)
    assert fakecuda.launch().params == loaded
    f[1](TensorMap.tiled(x, (64, 64), swizzle="128B"), given[1], ctypes.c_int(0))
    with pytest.raises(ParamsError, match=r"DeviceArray of fp32 .*; convert it to fp16"):
        wide = DeviceArray.zeros((64, 128), "fp32")
        f[1](TensorDescriptor(wide, (64, 128), (64, 64)), given[1], ctypes.c_int(7))


def test_descriptors_without_a_tensor_map_are_null_in_the_metadata(
    make_fakecuda: Callable[..., FakeCuda], tmp_path: Path
) -> None:
    """fbtriton keeps one entry a descriptor: null where it became a pointer and numbers."""
    for kept in (".cubin", ".json", ".ttir"):
        shutil.copy((NEWEST / "sm80/desc_kernel").with_suffix(kept), tmp_path)
    file = tmp_path / "desc_kernel.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "tensordesc_meta": [None]}))
    fake = make_fakecuda(capability=(8, 0))
    x, out = (DeviceArray.zeros((48, 256), "fp16") for _ in range(2))
    declared = {
        "x_desc": "tensordesc<fp16[16,128]>", "out": "*fp16", "M": "i32", "N": "i32",
        "scale": "fp32",
    }  # fmt: skip
    for signature in (None, declared):
        f = triton.load(tmp_path, signature=signature)
        f[(3, 2)](TensorDescriptor(x, (48, 256), (16, 128)), out, 48, 256, 0.5)
        assert fake.launch().params[:2] == words(x.ptr, 48)  # type: ignore[index]


def test_clusters_that_group_the_blocks_of_a_grid(fakecuda: FakeCuda) -> None:
    """TLX's ctas_per_cga: the grid counts blocks, where num_ctas makes a program a cluster."""
    f = triton.load(TLX, "add_kernel")
    assert f.metadata.cluster == f.spec.cluster == (2, 1, 1)
    x = DeviceArray.zeros(1024, "fp32")
    f[(4,)](x, x, x, 1000)
    launch = fakecuda.launch()
    assert (launch.gridDim, launch.attributes) == ((4, 1, 1), {})
    with pytest.raises(LaunchConfigError, match="not a multiple of cluster"):
        f[(3,)](x, x, x, 1000)
