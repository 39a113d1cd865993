"""What is exported as text: complete, compiling, honest about what it refuses."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import drawn
import pytest
from exported import COMPILERS, changed_probe, cuda_include, run_compiler
from fakecuda import FakeCuda

from kernel_hub import driver
from kernel_hub.cli import main
from kernel_hub.collection.manifest import Collection, ParamEntry, open_collection
from kernel_hub.errors import (
    CubinCorruptError,
    CubinNotFoundError,
    FunctionNotFoundError,
    KernelHubError,
    ParamsError,
)
from kernel_hub.formats import c_export, carray

ROOT = Path(__file__).resolve().parents[2]
NAME = "launch_probe"


@pytest.mark.slow
def test_every_shipped_cubin_compiles_as_c(tmp_path: Path, fakecuda: FakeCuda) -> None:
    """With one arch, and its numbers left out: what varies is names and types."""
    every = list(open_collection("kernel_hub").manifest.cubins)
    names = drawn.some(every, 12, "as C")
    assert len(every) > len(names) > 10 or names == every
    for name in names:
        texts = c_export.render(open_collection("kernel_hub"), name, dlpack=True)
        for path, text in texts.items():
            short = re.sub(r"(\n    0x\w+ull[^\n]*)+", "\n    0", text)
            assert len(short) < len(text) or path.endswith(".h")
            (tmp_path / path).write_text(short)
    sources = [str(tmp_path / f"{name}.c") for name in names]
    for language, command in COMPILERS.items():
        if shutil.which(command[0]):
            run_compiler(language, "-fsyntax-only", *sources)


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
    flags = ["--tvm-ffi", "--prefix", "my_", "--arch", "sm90"]
    assert main(["export", NAME, "--to", str(tmp_path / "out"), *flags]) == 0
    source = (tmp_path / f"out/my_{NAME}.c").read_text()
    assert "my_launch_probe_5_dlpack(" in source
    assert "EXPORTED(1, my_launch_probe_5)" in source
    assert "image_sm80" not in source
    assert main(["export", "launch_prob", "--to", str(tmp_path)]) == 2
    assert "ships no cubin 'launch_prob'; it has: launch_probe" in capsys.readouterr().err


def test_odd_names_and_types_still_compile(tmp_path: Path) -> None:
    params = [
        ParamEntry(name, kind, size, 0)
        for name, kind, size in (
            ("while", "float*", 8), ("", "int", 4), ("a b", "T</*x*/>*", 8),
            ("n", "Odd / type", 24),
            ("n", "__half", 2), ("params", "bool", 1), ("h", "__nv_fp8_e4m3", 1),
            ("map", "CUtensorMap", 128), ("p", "int**", 8), ("x", "double", 8), ("c", "char", 1),
        )
    ]  # fmt: skip

    def one(name: str, given: Sequence[ParamEntry]) -> Collection:
        return changed_probe(
            lambda _, functions: {
                name: functions["launch_probe_5"]._replace(name=name, params=tuple(given))
            }
        )

    for given in (params, []):
        for path, text in c_export.render(one("odd", given), NAME, dlpack=True).items():
            (tmp_path / path).write_text(text)
        for language in COMPILERS:
            run_compiler(language, "-fsyntax-only", tmp_path / f"{NAME}.c")
    for bad in ("two words", "x;", "while", ""):
        with pytest.raises(FunctionNotFoundError, match="cannot be exported"):
            c_export.render(one(bad, []), NAME)
    with pytest.raises(FunctionNotFoundError, match="different parameters in the builds"):
        c_export.render(
            changed_probe(
                lambda arch, functions: {
                    "f": functions["launch_probe_5"]._replace(
                        params=tuple(params[: arch == "sm80"])
                    )
                }
            ),
            NAME,
        )
    with pytest.raises(CubinCorruptError, match=r"parameter n of f is int \(4 bytes\) with 8 by"):
        c_export.render(one("f", [ParamEntry("n", "int", 8, 0)]), NAME)
    with pytest.raises(FunctionNotFoundError, match="has no function to export"):
        c_export.render(changed_probe(lambda *_: {}), NAME)


@pytest.mark.parametrize("tvm_ffi", [False, True], ids=["plain", "tvm_ffi"])
def test_cmake_builds_one_library(tmp_path: Path, fakecuda: FakeCuda, tvm_ffi: bool) -> None:
    cuda_include()
    if not shutil.which("cmake"):
        pytest.skip("cmake is not installed")
    if tvm_ffi:
        pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    c_export.export([NAME, "silu_and_mul"], tmp_path, tvm_ffi=tvm_ffi)
    build = tmp_path / "build"
    options = {
        "BUILD_SHARED_LIBS": "ON",
        "CUDA_cuda_driver_LIBRARY": fakecuda.path,
        "Python_EXECUTABLE": sys.executable,
    }
    given = [f"-D{name}={value}" for name, value in options.items()]
    for command in (["-S", tmp_path, "-B", build, *given], ["--build", build]):
        done = subprocess.run(["cmake", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    library = ctypes.CDLL(str(build / "libkernel_hub_kernels.so"))
    with driver.get().on_device(0):
        assert (library.launch_probe_load(), library.silu_and_mul_load()) == (0, 0)


def test_refusals_write_nothing(tmp_path: Path) -> None:
    with pytest.raises(CubinNotFoundError, match="launch_probe is not built for sm75; it is for"):
        c_export.export([NAME], tmp_path / "x", archs=["sm75"])
    with pytest.raises(CubinNotFoundError, match="ships no cubin 'nothing'"):
        c_export.export([NAME, "nothing"], tmp_path / "x")
    assert not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelHubError, match="cannot write to"):
        c_export.export([NAME], tmp_path / "file")


@pytest.mark.parametrize(
    "wrong",
    [
        {"names": None}, {"names": [[]]}, {"names": []}, {"names": ""}, {"names": [""]},
        {"to": None}, {"to": 5}, {"to": ""}, {"to": "a\0b"},
        {"archs": 5}, {"archs": [5]}, {"archs": [[]]}, {"archs": []}, {"archs": ""},
        {"prefix": None}, {"prefix": 5}, {"prefix": "9"}, {"prefix": "a b"},
        {"package": None}, {"package": 5},
    ],
    ids=str,
)  # fmt: skip
def test_arguments_of_the_wrong_kind(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParamsError, match=f"^{next(iter(wrong))}="):
        c_export.export(**{"names": [NAME], "to": "x", **wrong})
    assert not list(tmp_path.iterdir())


def test_texts_stand_for_lists(tmp_path: Path) -> None:
    c_export.export(f"{NAME},silu_and_mul", tmp_path, archs="sm80,sm_90")
    assert carray.load(tmp_path / f"{NAME}.c").keys() == {"image_sm80", "image_sm90"}
    options = ["--arch", "sm_90", "--arch", "sm80,sm90"]
    assert main(["export", "silu_and_mul", "--to", str(tmp_path), *options]) == 0
    assert len(carray.load(tmp_path / "silu_and_mul.c")) == 2
    c_export.export("linear_sm90", tmp_path, archs="sm_90a")


def test_a_second_export_keeps_the_first(tmp_path: Path) -> None:
    c_export.export(NAME, tmp_path, archs="sm90", tvm_ffi=True)
    (tmp_path / "own.c").write_text("int own;\n")
    c_export.export("silu_and_mul", tmp_path, archs="sm90")
    cmake = (tmp_path / "CMakeLists.txt").read_text()
    assert "SHARED launch_probe.c silu_and_mul.c)" in cmake and "tvm_ffi::shared" in cmake
    c_export.export("batched_matmul", tmp_path, archs="sm90")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        FunctionNotFoundError, match=r"batched_matmul\.c and batched_matmul_sm90\.c"
    ):
        c_export.export("batched_matmul_sm90", tmp_path)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["CMakeLists.txt", f"{NAME}.c", f"{NAME}.h"])
@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling"])
def test_what_others_wrote_stays(tmp_path: Path, name: str, kind: str) -> None:
    folder, victim = tmp_path / "k", tmp_path / "victim"
    folder.mkdir()
    if kind == "folder":
        (folder / name).mkdir()
    elif kind == "file":
        (folder / name).write_text("mine")
    else:
        (folder / name).symlink_to(victim)
    if kind == "link":
        victim.write_text("mine")
    with pytest.raises(KernelHubError, match=rf"{name} is in the way: .*another folder"):
        c_export.export(NAME, folder)
    assert [path.name for path in folder.iterdir()] == [name]
    if kind in ("file", "link"):
        assert (folder / name).read_text() == "mine"
    else:
        assert not victim.exists()


def test_a_link_to_an_export_is_replaced_itself(tmp_path: Path) -> None:
    c_export.export(NAME, tmp_path / "first", archs="sm80")
    kept = (tmp_path / f"first/{NAME}.c").read_text()
    (tmp_path / "second").mkdir()
    (tmp_path / f"second/{NAME}.c").symlink_to(tmp_path / f"first/{NAME}.c")
    c_export.export(NAME, tmp_path / "second", archs="sm90")
    assert (tmp_path / f"first/{NAME}.c").read_text() == kept
    assert not (tmp_path / f"second/{NAME}.c").is_symlink()
