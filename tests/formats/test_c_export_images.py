"""Any image goes out as C: one's own files, arrays, bytes, Kernels, C++ compiled at run time."""

from __future__ import annotations

import ctypes
import importlib.util
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exported import COMPILERS, Dim3, shared_library
from fakecuda import FakeCuda
from tiny_images import MIXED, PTX, SM80, SM90

from kernel_hub import DeviceArray, Kernel, driver
from kernel_hub.errors import (
    CubinCorruptError,
    CubinNotFoundError,
    FunctionNotFoundError,
    KernelHubError,
    ParamsError,
)
from kernel_hub.formats import c_export

NO_BINARY = 209
ADD = {"add": "float* out, float* a, float* b, int n"}
HAS_NVRTC = all(map(importlib.util.find_spec, ("cuda", "cuda.core")))
SOURCE = """
template <typename T>
__global__ void scale(T* out, const T* x, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * T(factor);
}
namespace ns { __global__ void plain(int* out, short a, double b) { *out = a + int(b); } }
"""


def given(*addresses: int, n: int) -> list[Any]:
    return [*map(ctypes.c_uint64, addresses), ctypes.c_int(n)]


def launched(fake: FakeCuda, folder: Path, name: str, function: str, *values: Any) -> int:
    library = ctypes.CDLL(str(shared_library(folder, name, "c", fake.path)))
    shape = (Dim3(2, 1, 1), Dim3(64, 1, 1), ctypes.c_uint(0))
    with driver.get().on_device(0):
        return int(library[function](ctypes.c_void_p(0), *shape, *values))


@pytest.mark.parametrize("language", COMPILERS)
def test_one_s_own_cubin(fakecuda: FakeCuda, tmp_path: Path, language: str) -> None:
    own = tmp_path / "my-add.cubin"
    own.write_bytes(SM90)
    out = tmp_path / "out"
    written = c_export.export(own, out, signatures=ADD | {"other": "int"})
    assert [path.name for path in written] == ["my_add.h", "my_add.c", "CMakeLists.txt"]
    library = ctypes.CDLL(str(shared_library(out, "my_add", language, fakecuda.path)))
    shape = (Dim3(4, 2, 1), Dim3(32, 1, 1), ctypes.c_uint(1024))
    with driver.get().on_device(0):
        assert library.add(ctypes.c_void_p(0), *shape, *given(16, 32, 48, n=7)) == 0
    launch = fakecuda.launch()
    assert (launch.name, launch.gridDim, launch.sharedMemBytes) == ("add", (4, 2, 1), 1024)
    assert launch.params == (*(struct.pack("<Q", n) for n in (16, 32, 48)), struct.pack("<i", 7))
    header = (out / "my_add.h").read_text()
    assert "CUdeviceptr out /* float* */" in header


def test_without_types_parameters_go_by_address(fakecuda: FakeCuda, tmp_path: Path) -> None:
    for source in (SM90, bytearray(SM90), Kernel(SM90)):
        c_export.export({"tiny": source}, tmp_path)
        assert "const void* arg3 /* unknown, 4 bytes */" in (tmp_path / "tiny.h").read_text()
    values = [ctypes.byref(value) for value in given(16, 32, 48, n=7)]
    assert launched(fakecuda, tmp_path, "tiny", "add", *values) == 0
    assert fakecuda.launch().params[3] == struct.pack("<i", 7)  # type: ignore[index]


@pytest.mark.parametrize(
    ("capability", "loaded"),
    [
        ((7, 5), None),
        ((8, 0), SM80),
        ((8, 9), SM80),
        ((9, 0), SM90),
        ((10, 0), PTX),
        ((12, 0), PTX),
    ],
)
def test_a_fatbin_s_code_and_ptx(
    make_fakecuda: Callable[..., FakeCuda],
    tmp_path: Path,
    capability: tuple[int, int],
    loaded: bytes | str | None,
) -> None:
    """Each GPU loads what Kernel would, PTX where no machine code is for it."""
    (tmp_path / "mixed.fatbin").write_bytes(MIXED)
    c_export.export(tmp_path / "mixed.fatbin", tmp_path, signatures=ADD)
    assert "for sm80, sm90, sm90 on (PTX);" in (tmp_path / "mixed.h").read_text()
    fake = make_fakecuda(capability=capability)
    code = launched(fake, tmp_path, "mixed", "add", *given(16, 32, 48, n=7))
    assert code == (NO_BINARY if loaded is None else 0)
    source = (tmp_path / "mixed.c").read_text()
    assert "image_ptx_sm90, 9, 0, LATER" in source and "image_sm80, 8, 0, SAME_MAJOR" in source
    if loaded is None:
        return
    x = DeviceArray.zeros(64, "fp32")
    first = fake.launch()
    Kernel(MIXED, signatures=ADD).add(2, 64, 0, 0, [x, x, x, 7])
    assert (first.name, first.gridDim) == (fake.launch().name, fake.launch().gridDim)
    c_export.export(tmp_path / "mixed.fatbin", tmp_path / "one", archs=["sm80"], signatures=ADD)
    assert "for sm80;" in (tmp_path / "one/mixed.h").read_text()


def test_ptx_and_arrays_in_c(fakecuda: FakeCuda, tmp_path: Path) -> None:
    (tmp_path / "tiny.ptx").write_text(PTX)
    c_export.export(str(tmp_path / "tiny.ptx"), tmp_path / "ptx", signatures=ADD)
    assert launched(fakecuda, tmp_path / "ptx", "tiny", "add", *given(16, 32, 48, n=7)) == 0
    arrays = "".join(
        f"unsigned char {name}[] = {{{', '.join(map(str, data))}}};\n"
        for name, data in (("first", SM80), ("second", SM90))
    )
    (tmp_path / "two.cubin.cpp").write_text(arrays)
    with pytest.raises(FunctionNotFoundError, match="both have a function add"):
        c_export.export(tmp_path / "two.cubin.cpp", tmp_path / "two", signatures=ADD)
    (tmp_path / "one.c").write_text(arrays.partition("unsigned char second")[0])
    c_export.export([tmp_path / "one.c"], tmp_path / "one", signatures=ADD)
    assert (tmp_path / "one/first.c").is_file()
    c_export.export({"mine": str(tmp_path / "one.c")}, tmp_path / "mine", signatures=ADD)
    assert (tmp_path / "mine/mine.c").is_file()


def test_what_an_export_wrote_goes_out_again(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """The arrays of an exported source are images like any other."""
    c_export.export({"tiny": Kernel(SM90, signatures=ADD)}, tmp_path / "one")
    c_export.export(tmp_path / "one/tiny.c", tmp_path / "two", signatures=ADD)
    assert launched(fakecuda, tmp_path / "two", "image_sm90", "add", *given(1, 2, 3, n=4)) == 0


@pytest.mark.skipif(not HAS_NVRTC, reason="cuda-core is not installed")
def test_cpp_compiled_at_run_time(fakecuda: FakeCuda, tmp_path: Path) -> None:
    names = ["scale<float>", "scale<int>", "ns::plain"]
    kernel = Kernel.from_source(SOURCE, names, arch="sm_90a")
    c_export.export({"mine": kernel}, tmp_path)
    header = (tmp_path / "mine.h").read_text()
    assert "CUresult scale_float(" in header and "CUresult ns_plain(" in header
    values = [ctypes.c_uint64(16), ctypes.c_uint64(32), ctypes.c_float(2.5), ctypes.c_int(9)]
    assert launched(fakecuda, tmp_path, "mine", "scale_float", *values) == 0
    assert fakecuda.launch().params[2:] == (struct.pack("<f", 2.5), struct.pack("<i", 9))  # type: ignore[index]
    values = [ctypes.c_uint64(16), ctypes.c_int16(-3), ctypes.c_double(0.5)]
    assert launched(fakecuda, tmp_path, "mine", "ns_plain", *values) == 0
    assert fakecuda.launch().params[1] == struct.pack("<h", -3)  # type: ignore[index]
    with pytest.raises(CubinNotFoundError, match="mine is not built for sm80; it is for sm90a"):
        c_export.export({"mine": kernel}, tmp_path, archs=["sm80"])


@pytest.mark.skipif(not HAS_NVRTC, reason="cuda-core is not installed")
def test_cpp_for_several_gpus(make_fakecuda: Callable[..., FakeCuda], tmp_path: Path) -> None:
    """Compiled for the GPU at hand it goes out for that, or for those that are named."""
    fake = make_fakecuda(capability=(8, 9))
    kernel = Kernel.from_source(SOURCE, ["scale<float>"])
    c_export.export({"one": kernel}, tmp_path)
    assert "for sm89;" in (tmp_path / "one.h").read_text()
    c_export.export({"two": kernel}, tmp_path, archs=["sm80", "sm90"], prefix="p_")
    assert "for sm80, sm90a;" in (tmp_path / "p_two.h").read_text()
    values = [ctypes.c_uint64(16), ctypes.c_uint64(32), ctypes.c_float(2.5), ctypes.c_int(9)]
    assert launched(fake, tmp_path, "p_two", "p_scale_float", *values) == 0
    (tmp_path / "plain.cu").write_text(SOURCE)
    c_export.export(tmp_path / "plain.cu", tmp_path, archs="sm80,sm90", prefix="q_")
    assert "for sm80, sm90;" in (tmp_path / "q_plain.h").read_text()


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (Kernel(SM90), ParamsError, "names is a Kernel: give it a name"),
        (SM90, ParamsError, "names is a bytes: give it a name"),
        ({"x": b"nothing"}, CubinCorruptError, "neither cubin, fatbin nor PTX"),
        ({"x": "no.cubin"}, CubinNotFoundError, "no file 'no.cubin'"),
        ({"": SM90}, ParamsError, "names has the key ''"),
        ("no/such/folder", CubinNotFoundError, "cannot read"),
        (".", CubinNotFoundError, "no collection in '.'"),
        ({"x": SM90, "y": SM90}, FunctionNotFoundError, "both have a function add"),
    ],
)
def test_what_is_no_image(
    tmp_path: Path, names: Any, error: type[KernelHubError], words: str
) -> None:
    with pytest.raises(error, match=words):
        c_export.export(names, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path: Path, fakecuda: FakeCuda) -> None:
    (tmp_path / "tiny.cubin").write_bytes(SM90)
    command = [sys.executable, "-m", "kernel_hub", "export", str(tmp_path / "tiny.cubin"), "--to"]
    typed = ["--signature", "add=float* out, float* a, float* b, int n"]
    done = subprocess.run([*command, str(tmp_path), *typed], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert launched(fakecuda, tmp_path, "tiny", "add", *given(16, 32, 48, n=7)) == 0
    done = subprocess.run(
        [*command, str(tmp_path), "--signature", "add"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "--signature add: FUNCTION=TYPES" in done.stderr
