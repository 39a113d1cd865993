"""Kernels of csrc/ on the CPU: builds them with emulator/ and calls them as KernelFunctions are."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import arena
import torch
from launch_params import check_params
from private import private_folder

from kernel_hub.compilers.nvcc import find_nvcc, find_sources
from kernel_hub.errors import KernelHubError

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = Path(__file__).parent / "emulator"
CSRC = ROOT / "csrc"
SOURCES = find_sources(CSRC)  # of a cubin, by name
FIRST = ('"emulator.h"', "<cuda_fp8.h>")
INCLUDE = ("-I", str(CSRC / "include"), "-I", str(CSRC))
ERRORS = {
    1: "a 16-byte access is misaligned",
    2: "the threads of a warp or a block do not meet at one barrier or warp collective",
    3: "dynamic shared memory was used past sharedMemBytes",
    4: "memory that is no tensor's was read or written",
    5: "threads wait for what nothing brings about",
    6: "a copy or a product was not what the others of its group began, or nobody waited for it",
}
OUTSIDE = 4
# (cubin, function) of each launch that went to its end.
RAN: set[tuple[str, str]] = set()


class CannotEmulateError(RuntimeError):
    """What is missing on this machine; tests skip with it."""


@functools.cache
def _cuda_headers() -> Path:
    try:
        nvcc = find_nvcc().path
    except KernelHubError as missing:
        raise CannotEmulateError(f"the emulator needs CUDA's headers: {missing}") from missing
    done = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False
    )
    for word in done.stderr.replace('"', " ").split():
        folder = Path(word.removeprefix("-I"))
        if word.startswith("-I") and (folder / "cuda_bf16.h").is_file():
            return folder
    raise CannotEmulateError(f"cuda_bf16.h was not found in the folders {nvcc} includes")


@functools.cache
def build(cubin: str) -> ctypes.CDLL:
    """The source of a cubin compiled for this CPU (once for each text of source and headers)."""
    if platform.machine() not in ("x86_64", "aarch64"):
        raise CannotEmulateError("the emulator passes arguments as x86-64 and AArch64 do only")
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise CannotEmulateError("no C++ compiler (g++)")
    source = SOURCES[cubin]
    digest = _digest(Path(__file__), source, *sorted(CSRC.rglob("*.cuh")), *_emulator())
    library = private_folder("emulated") / f"{cubin}_{digest}.so"
    with _lock(cubin):
        if not library.exists():
            _compile(compiler, ["-shared", *_first_header(compiler), "-x", "c++"], source, library)
    return ctypes.CDLL(str(library))


def _emulator() -> list[Path]:
    return sorted(path for path in EMULATOR.rglob("*") if path.is_file())


def _digest(*parts: Path | str) -> str:
    """Of what is in the files, and of texts."""
    read = (part.encode() if isinstance(part, str) else part.read_bytes() for part in parts)
    return hashlib.sha256(b"".join(read)).hexdigest()[:16]


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    """One process compiles, the others wait."""
    with open(private_folder("emulated") / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def _first_header(compiler: str) -> list[str]:
    """What includes emulator.h before all else; compiled once, which is half the time of a small
    library. Where another checkout has taken that away, g++ reads the header itself."""
    digest = _digest(Path(__file__), *_emulator(), compiler, str(_cuda_headers()))
    header = private_folder("emulated") / f"first_{digest}.h"
    with _lock("first"):
        if not header.exists():
            for other in header.parent.glob("first_*.gch"):  # of 40 MB
                other.unlink()
            made = header.with_suffix(".tmp")
            made.write_text("#pragma once\n" + "".join(f"#include {name}\n" for name in FIRST))
            _compile(compiler, ["-x", "c++-header"], made, header.with_suffix(".h.gch"))
            made.replace(header)
    return ["-include", str(header)]


def _compile(compiler: str, options: list[str], source: Path, out: Path) -> None:
    made = out.with_suffix(f".{os.getpid()}.tmp")
    command = [
        compiler, "-std=c++20", "-Og", "-U_FORTIFY_SOURCE", "-fno-strict-aliasing", "-fPIC", "-w",
        "-fno-gnu-unique",  # its threads are its own
        "-I", str(EMULATOR), *INCLUDE, "-isystem", str(_cuda_headers()),
        *options, str(source), "-o", str(made),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{source} does not compile for the CPU:\n{done.stderr[:4000]}")
    made.replace(out)


# What a launch ahead of the next ones writes: a tensor, what was there, what it leaves.
_before: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


@contextlib.contextmanager
def written_just_ahead(tensor: torch.Tensor, old: torch.Tensor) -> Iterator[None]:
    """Within, `tensor` is written by a launch just ahead of every other: a thread that has not
    waited for it finds `old` there."""
    global _before
    assert tensor.is_contiguous() and old.is_contiguous() and old.nbytes == tensor.nbytes
    _before = tensor, old, tensor.clone()
    try:
        yield
    finally:
        tensor.copy_(_before[2])
        _before = None


class EmulatedFunction:
    """One kernel; called like a KernelFunction with CPU tensors."""

    def __init__(self, cubin: str, name: str) -> None:
        self.cubin, self.name = cubin, name
        self._cluster = 1
        self._library = build(cubin)
        self._library.emulator_fault_address.restype = ctypes.c_uint64
        self._address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)

    def __call__(
        self,
        gridDim: Sequence[int],
        blockDim: Sequence[int],
        sharedMemBytes: int,
        stream: None,
        params: Sequence[Any],
        *,
        cluster: Sequence[int] = (),
        programmatic: bool = False,  # one launch runs after another
    ) -> None:
        check_params(self.cubin, self.name, params)
        self.run(gridDim, blockDim, sharedMemBytes, params=params, cluster=cluster)

    def run(
        self,
        gridDim: Sequence[int],
        blockDim: Sequence[int],
        sharedMemBytes: int,
        *,
        params: Sequence[Any],
        cluster: Sequence[int],
    ) -> None:
        """Launch with what it takes, unchecked."""
        integers = [0 if p is None else p for p in params if not isinstance(p, float)]
        integers = [p.data_ptr() if isinstance(p, torch.Tensor) else p for p in integers]
        floats = [p for p in params if isinstance(p, float)]
        before = [] if _before is None else [*_before]
        self._library.emulator_launch_before(
            *(ctypes.c_void_p(x.data_ptr()) for x in before or [torch.empty(0)] * 3),
            ctypes.c_uint64(before[0].nbytes if before else 0),
        )
        error = self._library.emulator_launch(
            self._address,
            (ctypes.c_uint * 3)(*gridDim),
            (ctypes.c_uint * 3)(*blockDim),
            math.prod(cluster) if cluster else self._cluster,
            sharedMemBytes,
            (ctypes.c_int64 * len(integers))(*integers),
            len(integers),
            (ctypes.c_float * len(floats))(*floats),
            len(floats),
        )
        if error:
            where = f"gridDim {gridDim}, {blockDim}"
            if error == OUTSIDE:
                where += f", {arena.whereabouts(self._library.emulator_fault_address())}"
            raise AssertionError(f"{self.name}: {ERRORS[error]} ({where})")
        RAN.add((self.cubin, self.name))
