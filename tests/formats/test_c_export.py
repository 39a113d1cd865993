"""Kernels as C sources: they compile as C and C++ without a warning, and launch what was asked."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakecuda import FakeCuda

from kernel_hub import driver
from kernel_hub.cli import main
from kernel_hub.errors import CubinNotFoundError, KernelHubError
from kernel_hub.formats import c_export, carray
from kernel_hub.manifest import open_collection

ROOT = Path(__file__).resolve().parents[2]

NAME = "launch_probe"
NO_BINARY = 209
COMPILERS = {"c": ("gcc", "-std=c11"), "c++": ("g++", "-std=c++17", "-xc++")}


def cuda_include() -> Path:
    """The folder of cuda.h, or a skip that says that there is none."""
    nvcc = shutil.which("nvcc")
    roots = [Path(nvcc).resolve().parents[1]] if nvcc else []
    roots += [Path(os.environ["CUDA_HOME"])] if "CUDA_HOME" in os.environ else []
    for root in [*roots, Path("/usr/local/cuda")]:
        for folder in (root / "include", root / "targets/x86_64-linux/include"):
            if (folder / "cuda.h").exists():
                return folder
    pytest.skip("cuda.h is not installed (a CUDA toolkit)")


def compile_to(folder: Path, name: str, language: str, driver: Path) -> Path:
    if not shutil.which(COMPILERS[language][0]):
        pytest.skip(f"{COMPILERS[language][0]} is not installed")
    library = folder / f"lib{name}_{language}.so"
    command = [*COMPILERS[language], "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared"]
    command += [f"-I{cuda_include()}", "-o", str(library), str(folder / f"{name}.c")]
    done = subprocess.run([*command, "-xnone", str(driver)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


class Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


@pytest.fixture
def context(fakecuda: FakeCuda) -> Iterator[FakeCuda]:
    """A stand-in whose first device is current in this thread."""
    runtime = driver.get()
    with runtime.on_device(0):
        yield fakecuda


@pytest.fixture(params=COMPILERS)
def library(request: Any, tmp_path: Path, context: FakeCuda) -> ctypes.CDLL:
    """The exported launch_probe, compiled and bound to the stand-in."""
    c_export.export([NAME], tmp_path)
    return ctypes.CDLL(str(compile_to(tmp_path, NAME, request.param, Path(context.path))))


def launch_5(library: ctypes.CDLL, shared_bytes: int = 0) -> int:
    addresses = [ctypes.c_uint64(address) for address in (0x1000, 0x2000, 0x3000)]
    return int(
        library.launch_probe_5(
            ctypes.c_void_p(0), Dim3(4, 2, 1), Dim3(64, 1, 1), ctypes.c_uint(shared_bytes),
            *addresses, ctypes.c_int(7), ctypes.c_float(2.5),
        )
    )  # fmt: skip


def test_a_launch_is_what_was_asked_for(library: ctypes.CDLL, context: FakeCuda) -> None:
    assert launch_5(library) == 0
    launch = context.launch()
    assert (launch.name, launch.gridDim, launch.blockDim) == (
        "launch_probe_5",
        (4, 2, 1),
        (64, 1, 1),
    )
    assert launch.params == tuple(
        [address.to_bytes(8, "little") for address in (0x1000, 0x2000, 0x3000)]
        + [(7).to_bytes(4, "little"), struct.pack("<f", 2.5)]
    )
    before = context.calls("cuLibraryLoadData")
    assert launch_5(library) == 0
    assert context.calls("cuLibraryLoadData") == before == 1


def test_large_shared_memory_is_opted_in(library: ctypes.CDLL, context: FakeCuda) -> None:
    assert launch_5(library, 100 * 1024) == 0
    assert context.launch().sharedMemBytes == 100 * 1024
    assert launch_5(library, 400 * 1024) != 0


@pytest.mark.parametrize(("capability", "code"), [((7, 5), NO_BINARY), ((10, 0), NO_BINARY)])
def test_a_gpu_without_an_image(
    library: ctypes.CDLL, context: FakeCuda, capability: tuple[int, int], code: int
) -> None:
    context.set_capability(0, *capability)
    assert (launch_5(library), library.launch_probe_load()) == (code, code)
    assert context.launch_count == 0


def test_unload_and_load_again(library: ctypes.CDLL, context: FakeCuda) -> None:
    assert library.launch_probe_load() == 0
    assert context.live("libraries") == 1
    assert library.launch_probe_unload() == 0
    assert context.live("libraries") == 0
    assert launch_5(library) == 0
    assert context.calls("cuLibraryLoadData") == 2


def test_a_failed_load_is_returned_and_tried_again(library: ctypes.CDLL, context: FakeCuda) -> None:
    context.fail("cuLibraryGetKernel", 500)
    assert launch_5(library) == 500
    assert (context.live("libraries"), context.launch_count) == (0, 0)
    assert launch_5(library) == 0


def test_threads_load_once(library: ctypes.CDLL, context: FakeCuda) -> None:
    start = threading.Barrier(8)
    codes: list[int] = []

    def work() -> None:
        with driver.get().on_device(0):
            start.wait()
            codes.extend(launch_5(library) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) == {0}
    assert len(codes) == context.launch_count == 400
    assert context.calls("cuLibraryLoadData") == 1


def test_every_shipped_cubin_compiles_as_c(tmp_path: Path, fakecuda: FakeCuda) -> None:
    """With one arch, and its numbers left out: what varies is names and types."""
    include = cuda_include()
    names = list(open_collection("kernel_hub").manifest.cubins)
    assert len(names) > 10
    for name in names:
        texts = c_export.render(open_collection("kernel_hub"), name, None)
        for path, text in texts.items():
            short = re.sub(r"(\n    0x\w+ull[^\n]*)+", "\n    0", text)
            assert len(short) < len(text) or path.endswith(".h")
            (tmp_path / path).write_text(short)
    sources = [str(tmp_path / f"{name}.c") for name in names]
    for compiler in COMPILERS.values():
        if shutil.which(compiler[0]):
            command = [*compiler, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{include}"]
            done = subprocess.run([*command, *sources], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:2000]


def test_arrays_are_the_shipped_cubins(tmp_path: Path) -> None:
    c_export.export([NAME], tmp_path, archs=["sm80", "sm90"])
    images = carray.load(tmp_path / f"{NAME}.c")
    for arch in ("sm80", "sm90"):
        shipped = (ROOT / f"cubins/{arch}/{NAME}.cubin").read_bytes()
        assert images[f"image_{arch}"][: len(shipped)] == shipped
    assert len(images) == 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", NAME, "silu_and_mul", "--to", str(tmp_path / "out")]) == 0
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {f"{NAME}.c", f"{NAME}.h", "silu_and_mul.c", "silu_and_mul.h", "CMakeLists.txt"}
    assert "launch_probe.c silu_and_mul.c" in (tmp_path / "out/CMakeLists.txt").read_text()
    assert f"{NAME}.h" in capsys.readouterr().out
    assert main(["export", "launch_prob", "--to", str(tmp_path)]) == 2
    assert "ships no cubin 'launch_prob'; it has: launch_probe" in capsys.readouterr().err


def test_refusals_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(CubinNotFoundError, match="launch_probe is not built for sm75; it is for"):
        c_export.export([NAME], tmp_path / "x", archs=["sm75"])
    with pytest.raises(CubinNotFoundError, match="ships no cubin 'nothing'"):
        c_export.export([NAME, "nothing"], tmp_path / "x")
    assert not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelHubError, match="cannot write to"):
        c_export.export([NAME], tmp_path / "file")
