"""What tests of exported kernels share: gcc and g++ with every warning on, a cubin to change."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from kernel_hub.collection.manifest import Collection, FunctionEntry, Manifest, open_collection
from kernel_hub.compilers.nvcc import find_nvcc
from kernel_hub.errors import KernelHubError

COMPILERS = {"c": ("gcc", "-std=c11"), "c++": ("g++", "-std=c++17", "-xc++")}
WARNINGS = ("-Wall", "-Wextra", "-Werror")


class Dim3(ctypes.Structure):
    """kernel_hub_dim3."""

    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


def cuda_include() -> Path:
    """The folder of cuda.h, or a skip that says that there is none."""
    roots = [Path("/usr/local/cuda")]
    try:
        roots.insert(0, Path(find_nvcc().path).resolve().parents[1])
    except KernelHubError:
        pass
    folders = [root / sub for root in roots for sub in ("include", "targets/x86_64-linux/include")]
    folders += [Path(path) / "triton/backends/nvidia/include" for path in sys.path]
    for folder in folders:
        if (folder / "cuda.h").exists():
            return folder
    pytest.skip("cuda.h is not installed (a CUDA toolkit)")


def run_compiler(language: str, *arguments: str | Path) -> None:
    """gcc or g++ on sources of `language`; a warning fails the test."""
    command = COMPILERS[language]
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed")
    given = [*command, *WARNINGS, f"-I{cuda_include()}", *map(str, arguments)]
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


def shared_library(
    folder: Path, name: str, language: str, driver: str | Path, flags: Sequence[str] = ()
) -> Path:
    """`folder`/`name`.c as a library on that libcuda."""
    library = folder / f"lib{name}_{language.replace('+', 'p')}.so"
    made = ("-O1", "-fPIC", "-shared", "-o", library, folder / f"{name}.c", "-xnone", driver)
    run_compiler(language, *made, *flags)
    return library


def changed_probe(
    change: Callable[[str, Mapping[str, FunctionEntry]], Mapping[str, FunctionEntry]],
) -> Collection:
    """launch_probe with the functions of each build as `change(arch, functions)` gives them."""
    own = open_collection("kernel_hub")
    archs = {
        arch: entry._replace(functions=change(arch, entry.functions))
        for arch, entry in own.manifest.cubins["launch_probe"].items()
    }
    return own._replace(manifest=Manifest({"launch_probe": archs}))
