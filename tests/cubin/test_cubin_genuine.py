"""150 programs drawn by lot and compiled here: each cubin is sound, and read as its text says.

KERNEL_HUB_SEED draws others; `genuine_build.py` takes more, and compilers of CUDA 12.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from genuine import draw
from genuine_build import DidNotCompileError, faults, nvcc_cubin, nvrtc_cubin

from kernel_hub.cubin import read_cubin

SEED = int(os.environ.get("KERNEL_HUB_SEED", "20261122"))
CHUNK = 20
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
# NVRTC takes a tenth of nvcc's time, but links nothing.
BY_NVCC, BY_NVRTC = range(10), range(0, 140, CHUNK)
LONG = {"barrier", "groups", "std"}
BLACKWELL = ("100", "100a", "120", "120a")


def nvrtc() -> Path | None:
    """The NVRTC that the extra `jit` installs."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations or () if spec else ()
    found = [p for folder in folders for p in Path(folder).glob("cu*/lib/libnvrtc.so.*")]
    return found[0] if found else None


@functools.cache
def for_nvrtc() -> list[int]:
    """Numbers of 140 programs, one in twenty with long headers: a second each to read."""
    chosen, num_long = list[int](), 0
    for number in itertools.count(10):
        is_long = not LONG.isdisjoint(draw(SEED, number, linked=False).headers)
        if not is_long or num_long <= len(chosen) // CHUNK:
            chosen.append(number)
            num_long += is_long
        if len(chosen) == 140:
            return chosen
    raise AssertionError


@functools.cache
def headers() -> list[str]:
    """CUDA's and CCCL's headers: of the toolkit that nvcc belongs to, or beside NVRTC."""
    roots = []
    if NVCC:
        command = [NVCC, "--dryrun", "-E", "-x", "cu", os.devnull]
        told = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        roots += re.findall(r'INCLUDES="-I(.*?)"', told)
    library = nvrtc()
    if library:
        roots.append(str(library.parent.parent / "include"))
    paths = [path for root in roots for path in (Path(root), Path(root, "cccl"))]
    return [os.path.normpath(path) for path in paths if path.is_dir()]


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no nvcc: it draws and compiles programs")
def test_by_nvcc() -> None:
    for number in BY_NVCC:
        program = draw(SEED, number)
        assert not faults(program, nvcc_cubin(program, str(NVCC))), (SEED, number)


@pytest.mark.slow
@pytest.mark.skipif(nvrtc() is None, reason="no NVRTC: pip install 'kernel_hub[jit]'")
@pytest.mark.parametrize("first", BY_NVRTC)
def test_by_nvrtc(first: int) -> None:
    library = nvrtc()
    assert library is not None
    compiled = 0
    for number in for_nvrtc()[first : first + CHUNK]:
        program = draw(SEED, number, linked=False)
        try:
            image = nvrtc_cubin(program, library, headers())
        except DidNotCompileError as error:
            assert "cannot open source file" in str(error), (SEED, number)
            continue  # a header that is not on this machine
        compiled += 1
        assert not faults(program, image), (SEED, number)
    assert compiled >= CHUNK // 3


@pytest.mark.slow
@pytest.mark.skipif(NVCC is None, reason="no nvcc: it draws and compiles programs")
def test_later_gpus_are_read_but_never_called_sound() -> None:
    """From sm_100 on only bounds are checked, so a driver is asked in a child process first."""
    for number in range(4):
        program = draw(SEED, number, archs=BLACKWELL)
        found = faults(program, nvcc_cubin(program, str(NVCC)))
        bounds = f"code for sm_{program.arch.rstrip('a')}, of which only the bounds are checked"
        assert found[0] == f"unknown: {bounds}", (SEED, number)
        assert all(text.startswith("unknown: ") for text in found), (SEED, number)


@pytest.mark.skipif(NVCC is None, reason="no nvcc: it draws and compiles programs")
def test_pointers_whose_alignment_ptx_tells(tmp_path: Path) -> None:
    """As LLVM writes them for XLA and TensorFlow; nvcc's own PTX says nothing of the kind."""
    text = """.version 8.0
.target sm_80
.address_size 64
.visible .entry pointed(.param .u64 .ptr .global .align 16 a, .param .u64 .ptr .align 1 b,
                        .param .u32 n) { ret; }
"""
    (tmp_path / "a.ptx").write_text(text)
    command = [str(NVCC), "-cubin", "-arch=sm_80", "a.ptx", "-o", "out.cubin"]
    subprocess.run(command, cwd=tmp_path, check=True)
    info = read_cubin((tmp_path / "out.cubin").read_bytes())
    assert info.unknown == ()
    assert [p.size_bytes for p in info.functions["pointed"].params] == [8, 8, 4]


@pytest.mark.skipif(NVCC is None, reason="no nvcc: it draws and compiles programs")
@pytest.mark.parametrize("arch", ["80", "90"])
def test_debug_data_that_points_at_code_which_is_gone(tmp_path: Path, arch: str) -> None:
    """Before sm_90 a conversion to fp8 leaves a label, $L__tmp100, that nothing defines."""
    (tmp_path / "a.cu").write_text(
        "#include <cuda_fp8.h>\n"
        "__global__ void cast(float* out) { *out = (float)__nv_fp8_e4m3(*out); }"
    )
    command = [str(NVCC), "-G", "-cubin", f"-arch=sm_{arch}", "a.cu", "-o", "out.cubin"]
    subprocess.run(command, cwd=tmp_path, check=True)
    info = read_cubin((tmp_path / "out.cubin").read_bytes())
    assert info.unknown == () and len(info.functions) == 1


def test_the_judge_can_say_no() -> None:
    """Facts of one program are not those of another, and a damaged cubin is not sound."""
    data = Path(__file__).parent / "data"
    image = (data / "features_sm90.cubin").read_bytes()
    number = next(n for n in range(99) if draw(SEED, n, archs=("90",)).variables)
    program = draw(SEED, number, archs=("90",))
    found = faults(program, image)
    assert any("kernels, not" in text for text in found)
    assert any(text.startswith("variable") for text in found)
    assert faults(program, image[:-8])[0].startswith("refused")
    assert faults(draw(SEED, number, archs=("80",)), image)[0].startswith("target")
