"""Images of every toolkit and kind on a real GPU: they load, compute, and PTX is compiled once."""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from ctypes import byref, c_void_p
from pathlib import Path

import numpy as np
import pytest

from kernel_hub import DeviceArray, Kernel, cache_folder, driver
from kernel_hub.cubin import read_cubin
from kernel_hub.errors import CubinNotFoundError, CudaDriverError, DriverNotFoundError

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/cubin/data"
Compile = Callable[..., Path]
ADD = {"add": "float* out, float* a, float* b, int n"}
FEATURES = {
    "scale": "float* out, float* in, int n, float s", "staged": "float* out, float* in, int n",
    "by_value": "struct Big big, char c, short s, double d, float* out",
    "calls": "int* out, int n", "clustered": "int* out",
}  # fmt: skip
POINTERS = {"pointers": "int* out, int i", "methods": "float* out, int i"}


def sound(words: str) -> list[Path]:
    """The test data for the GPU generation these were made for."""
    paths = sorted(DATA.glob(f"*{words}_sm90*.cubin"))
    return [path for path in paths if read_cubin(path.read_bytes()).compute_capability == (9, 0)]


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    if driver.get().compute_capability(0) != (9, 0):
        pytest.skip("the test data is for compute capability 9.0")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own; the driver's is off, so that what is timed is a compilation."""
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    return tmp_path / "cache" / "ptx"


def check_add(kernel: Kernel) -> None:
    x, y = np.arange(1000, dtype=np.float32), np.ones(1000, dtype=np.float32)
    out, a, b = DeviceArray.zeros(1000, "fp32"), *map(DeviceArray.from_numpy, (x, y))
    kernel.add(4, 256, params=[out, a, b, 1000])
    np.testing.assert_array_equal(out.to_numpy(), x + 1)


@pytest.mark.parametrize("path", sound("tiny"), ids=lambda path: path.stem)
def test_add(path: Path) -> None:
    check_add(Kernel(path, signatures=ADD))


@pytest.mark.parametrize("path", sound("features"), ids=lambda path: path.stem)
def test_features(path: Path) -> None:
    kernel = Kernel(path, signatures=FEATURES)
    x = np.arange(256, dtype=np.float32)
    out, given = DeviceArray.zeros(256, "fp32"), DeviceArray.from_numpy(x)
    table = DeviceArray.from_numpy(np.full(64, 2, dtype=np.float32))
    view = kernel.get_global("table", "fp32")
    view.copy_from(table)
    kernel.scale(1, 256, params=[out, given, 256, 3.0])
    np.testing.assert_array_equal(out.to_numpy(), 6 * x)
    kernel.staged(1, 128, 512, params=[out, given, 0])
    np.testing.assert_array_equal(out.to_numpy()[:128], x[127::-1])
    big = struct.pack("<16idc7x", *range(16), 0.5, b"\x01")
    values = [big, 1, 2, 0.25, out]
    kernel.by_value(1, 1, params=values)
    assert out.to_numpy()[0] == 3 + 0.5 + 1 + 1 + 2 + 0.25 + 3
    counts = DeviceArray.zeros(256, "int32")
    kernel.calls(1, 1, params=[counts, 4])
    assert counts.to_numpy()[0] == 24
    kernel.clustered(2, 64, params=[counts])
    assert counts.to_numpy()[0] == 1


@pytest.mark.parametrize("path", sound("pointers"), ids=lambda path: path.stem)
def test_calls_through_pointers(path: Path) -> None:
    kernel = Kernel(path, signatures=POINTERS)
    out = DeviceArray.from_numpy(np.full(2, 3, dtype=np.int32))
    for index, expected in ((0, 0), (1, 8)):
        kernel.pointers(1, 1, params=[out, index])
        assert out.to_numpy()[0] == expected
    areas = DeviceArray.from_numpy(np.full(2, 2, dtype=np.float32))
    for index in range(2):
        kernel.methods(1, 1, params=[areas, index])
    np.testing.assert_allclose(areas.to_numpy(), [2 * 3.14, 4], rtol=1e-6)


@pytest.mark.parametrize("name", ["plain", "compressed", "speed", "size"])
def test_fatbins(name: str) -> None:
    check_add(Kernel(DATA / f"{name}.fatbin", ["add"], signatures=ADD))


@pytest.mark.parametrize("mode", ["none", "speed", "size"])
def test_fatbins_with_ptx_alone(mode: str, compile_cuda: Compile, cache: Path) -> None:
    flags = ["-fatbin", "-gencode=arch=compute_80,code=[sm_80,compute_80]", "-compress-mode", mode]
    kernel = Kernel(
        compile_cuda(DATA / "tiny.cu", *flags, suffix=".fatbin"), ["add"], signatures=ADD
    )
    check_add(kernel)
    assert "PTX" in repr(kernel._loader._held[0].chosen.label)
    assert len(list(cache.iterdir())) == 1


def test_a_compressed_fatbin_that_nothing_here_unpacks(
    compile_cuda: Compile, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """Machine code: the driver unpacks. PTX: its compiler takes the fatbin whole."""
    from kernel_hub.cubin import unpack

    monkeypatch.setattr(unpack, "_zstd", lambda: None)
    check_add(Kernel(DATA / "size.fatbin", ["add"], signatures=ADD))
    assert not cache.exists()
    code = "-gencode=arch=compute_86,code=[sm_86,compute_86]"  # in no other test
    made = compile_cuda(DATA / "tiny.cu", "-fatbin", "-compress-mode=size", code, suffix=".fatbin")
    check_add(Kernel(made, ["add"], signatures=ADD))
    assert len(list(cache.iterdir())) == 1


def test_several_entries_of_one_architecture(tmp_path: Path) -> None:
    """The driver takes the first, and so does kernel_hub."""
    if not (fatbinary := shutil.which("fatbinary")):
        pytest.skip("no fatbinary (of the CUDA toolkit)")
    path = tmp_path / "two.fatbin"
    parts = [DATA / "tiny_sm90.cubin", DATA / "huge_sm90.cubin"]
    images = [f"--image3=kind=elf,sm=90,file={part}" for part in parts]
    subprocess.run([fatbinary, "-64", f"--create={path}", *images], check=True)
    image = path.read_bytes()
    kernel = Kernel(path, signatures=ADD)
    assert kernel.function_names == ["add"]
    check_add(kernel)
    cuda, library, found = driver.get(), c_void_p(), c_void_p()
    cuda.call("cuLibraryLoadData", byref(library), image, None, None, 0, None, None, 0)
    assert cuda.try_call("cuLibraryGetKernel", byref(found), library, b"add") == 0
    assert cuda.try_call("cuLibraryGetKernel", byref(found), library, b"huge") == 500
    cuda.call("cuLibraryUnload", library)


def test_ptx_is_compiled_once(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = DATA / "cuda118_pointers_sm90.ptx"
    times = []
    for _ in range(3):
        kernel = Kernel(path, signatures=POINTERS)
        start = time.perf_counter()
        kernel.load()
        times.append(time.perf_counter() - start)
        out = DeviceArray.from_numpy(np.full(2, 3, dtype=np.int32))
        kernel.pointers(1, 1, params=[out, 1])
        assert out.to_numpy()[0] == 8
        log = kernel.jit_log()
        kernel.unload()
        assert len(list(cache.iterdir())) == 1
    assert "registers" in log and "pointers" in log
    with capsys.disabled():
        print("PTX, first and later loads in ms:", [round(t * 1e3, 2) for t in times])
        print(log)
    assert times[1] < times[0]


def test_a_damaged_entry_is_made_again(cache: Path) -> None:
    kernel = Kernel(DATA / "tiny_sm90.ptx", signatures=ADD)
    kernel.load()
    kernel.unload()
    (entry,) = cache.iterdir()
    whole = entry.read_bytes()
    for damaged in (whole[:100], whole[:-1] + b"?", b"", bytes(len(whole))):
        entry.write_bytes(damaged)
        with pytest.warns(RuntimeWarning, match="damaged"):
            check_add(kernel)
        kernel.unload()
        assert b"\x7fELF" in entry.read_bytes() and cache_folder.load("ptx", entry.name)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    for value in (str(blocked), "0"):
        monkeypatch.setenv(cache_folder.VARIABLE, value)
        check_add(Kernel(DATA / "tiny_sm90.ptx", signatures=ADD))


def test_wrong_ptx_has_lines() -> None:
    text = (DATA / "tiny_sm90.ptx").read_text()
    line = next(i for i, each in enumerate(text.splitlines(), 1) if "ret;" in each)
    broken = text.replace("ret;", "no_such_instruction;").encode()
    with pytest.raises(CudaDriverError, match=f"line {line}") as caught:
        Kernel(broken).add.load()
    print(caught.value)


def test_what_does_not_fit_is_refused_before_the_driver(compile_cuda: Compile) -> None:
    text = (DATA / "tiny_sm90.ptx").read_text()
    for target, words in (("sm_100", "10.0 or later"), ("sm_100a", "exactly 10.0")):
        with pytest.raises(CubinNotFoundError, match=words):
            Kernel(text.replace("sm_90", target).encode()).add.load()
    version = driver.get().version
    newer = f".version {version // 1000 - 4}.{version % 1000 // 10 + 1}"
    with pytest.raises(DriverNotFoundError, match="needs a driver of CUDA"):
        Kernel(text.replace(".version 9.0", newer).encode()).add.load()
    flags = [
        "-fatbin",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_86,code=sm_86",
    ]
    with pytest.raises(CubinNotFoundError) as caught:
        Kernel(compile_cuda(DATA / "tiny.cu", *flags, suffix=".fatbin")).add.load()
    assert set(caught.value.rejected) == {"sm_80", "sm_86"}
