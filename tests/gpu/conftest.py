"""Kernels of this folder, compiled by the machine's own nvcc."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kernel_hub import driver
from kernel_hub.compilers.nvcc import find_nvcc
from kernel_hub.errors import KernelHubError

Compile = Callable[..., Path]


@pytest.fixture(scope="session")
def device_arch() -> str:
    """The GPU's own, as nvcc names it: sm_90."""
    major, minor = driver.get().compute_capability(0)
    return f"sm_{major}{minor}"


@pytest.fixture(scope="session")
def compile_cuda(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """`compile_cuda("x.cu", "-cubin", "-arch=sm_90")`: the file made of it, once a session.

    The source is of this folder, or a path; `suffix` is that of the file made. Tests without an
    nvcc skip with the reason.
    """
    made: dict[tuple[str, ...], Path] = {}

    def compile_source(source: str | Path, *flags: str, suffix: str = ".cubin") -> Path:
        path = Path(__file__).parent / source
        key = (str(path), *flags, suffix)
        if key not in made:
            try:
                nvcc = find_nvcc()
            except KernelHubError as missing:
                pytest.skip(f"{path.name} must be compiled: {missing}")
            target = tmp_path_factory.mktemp(path.stem) / f"{path.stem}{suffix}"
            subprocess.run([nvcc.path, *flags, "-std=c++17", "-o", target, path], check=True)
            made[key] = target
        return made[key]

    return compile_source


@pytest.fixture(scope="session")
def cubin(compile_cuda: Compile, device_arch: str) -> Path:
    """The kernels of this folder for the GPU at hand."""
    return compile_cuda("gpu_kernels.cu", "-cubin", f"-arch={device_arch}")
