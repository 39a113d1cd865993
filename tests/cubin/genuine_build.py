"""Compiles drawn programs and holds what is read of them against their text. Also a script:

    python tests/cubin/genuine_build.py --programs 2000 --seed 7 \
        --nvrtc .../libnvrtc.so.12 --ptxas .../bin/ptxas --include .../include

With nvcc alone it takes that; each NVRTC library (its headers first) and ptxas named is used in
turn. Reports every program whose cubin is refused, has something unknown, or reads wrongly.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from genuine import ARCHS, Program, draw  # noqa: E402
from make_data import nvrtc_compile  # noqa: E402

from kernel_hub.cubin import CubinInfo, read_cubin  # noqa: E402
from kernel_hub.errors import CubinCorruptError  # noqa: E402

_NVRTC_FLAGS = ("-w", "--device-int128")


class DidNotCompileError(Exception):
    """A compiler does not take a program: its fault or the generator's, never the reader's."""


def nvcc_cubin(program: Program, nvcc: str = "nvcc") -> bytes:
    """One file to a cubin, or two by way of nvlink."""
    with tempfile.TemporaryDirectory() as folder:
        target = f"-gencode=arch=compute_{program.arch},code=sm_{program.arch}"
        base = [nvcc, "-std=c++17", target, "-w", *program.flags]
        Path(folder, "a.cu").write_text("#include <cstdio>\n" + program.source)
        if not program.other:
            _run([*base, "-cubin", "a.cu", "-o", "out.cubin"], folder)
        else:
            Path(folder, "b.cu").write_text(program.other)
            _run([*base, "-rdc=true", "-dc", "a.cu", "b.cu"], folder)
            _run([nvcc, target, "-dlink", "-cubin", "a.o", "b.o", "-o", "out.cubin"], folder)
        return Path(folder, "out.cubin").read_bytes()


def nvrtc_cubin(program: Program, library: Path, includes: Sequence[str]) -> bytes:
    """One file by an NVRTC, which includes what a kernel needs of stdio and textures by itself."""
    flags = [*program.flags, *_NVRTC_FLAGS, *(f"-I{path}" for path in includes)]
    try:
        return nvrtc_compile(program.source, f"sm_{program.arch}", flags, library)
    except SystemExit as error:
        raise DidNotCompileError(str(error)) from None


def ptxas_cubin(program: Program, library: Path, includes: Sequence[str], ptxas: str) -> bytes:
    """One file by an NVRTC to PTX and a ptxas of its version or a later one."""
    flags = [*program.flags, *_NVRTC_FLAGS, *(f"-I{path}" for path in includes)]
    try:
        text = nvrtc_compile(program.source, f"compute_{program.arch}", flags, library, "PTX")
    except SystemExit as error:
        raise DidNotCompileError(str(error)) from None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.ptx").write_bytes(text.rstrip(b"\0"))
        known = [flag for flag in program.flags if flag in ("-lineinfo", "-G")]
        options = [f"-arch=sm_{program.arch}", *known]
        _run([ptxas, *options, "a.ptx", "-o", "out.cubin"], folder)
        return Path(folder, "out.cubin").read_bytes()


def _run(command: Sequence[str], folder: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DidNotCompileError((done.stdout + done.stderr)[-2000:])


def faults(program: Program, image: bytes) -> list[str]:
    """What is read of `image` otherwise than its text says; [] for a sound reader."""
    try:
        info = read_cubin(image)
    except CubinCorruptError as error:
        return [f"refused: {error}"]
    found = [f"unknown: {text}" for text in info.unknown]
    if info.target != f"sm_{program.arch}":
        found.append(f"target {info.target}, not sm_{program.arch}")
    return found + _kernel_faults(program, info) + _variable_faults(program, info)


def _kernel_faults(program: Program, info: CubinInfo) -> list[str]:
    found = []
    number = len(program.kernels) + bool(program.other)
    if len(info.functions) != number:
        found.append(f"{len(info.functions)} kernels, not {number}: {list(info.functions)}")
    for index, kernel in enumerate(program.kernels):
        names = [n for n in info.functions if n == kernel.name or f"kernel_{index}I" in n]
        if len(names) != 1:
            found.append(f"kernel_{index} is not among {list(info.functions)}")
            continue
        read = info.functions[names[0]]
        places = [(param.offset_bytes, param.size_bytes) for param in read.params]
        facts = (places, read.max_threads, read.cluster)
        if facts != (kernel.params, kernel.max_threads, kernel.cluster):
            found.append(f"{names[0]}: read {facts}, its text says {kernel}")
        if not kernel.least_shared <= read.static_shared_bytes <= 4 * kernel.least_shared + 4096:
            found.append(
                f"{names[0]}: {read.static_shared_bytes} bytes shared, at least "
                f"{kernel.least_shared} are declared"
            )
    return found


def _variable_faults(program: Program, info: CubinInfo) -> list[str]:
    read = {name: variable.size_bytes for name, variable in info.globals.items()}
    return [
        f"variable {name}: {read.get(name)} bytes, its text says {size}"
        for name, size in program.variables.items()
        if read.get(name) != size
    ]


def main() -> None:
    """Draw, compile and read, two programs at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--archs", default=",".join(ARCHS))
    parser.add_argument("--nvrtc", type=Path, action="append", default=[])
    parser.add_argument(
        "--ptxas", type=_tool, action="append", default=[], help="fed by the first NVRTC"
    )
    parser.add_argument("--include", action="append", default=[], help="headers for the NVRTCs")
    parser.add_argument("--save", type=Path, help="keep what is refused or read wrongly here")
    options = parser.parse_args()
    started = time.monotonic()
    counts: collections.Counter[str] = collections.Counter()
    features: collections.Counter[str] = collections.Counter()
    numbers = range(options.first, options.first + options.programs)
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        for result in pool.map(_one, numbers, [options] * len(numbers), chunksize=4):
            how, used, found, note = result
            counts[how] += 1
            features.update(used)
            if found:
                counts["faults"] += 1
                print(f"program {note}: {how}: {found[:3]}", flush=True)
    print(dict(counts), f"in {time.monotonic() - started:.0f} s; seed {options.seed}")
    print("features:", dict(features))


def _tool(name: str) -> str:
    """The program's whole path: it is run in other folders."""
    return os.path.abspath(shutil.which(name) or name)


def _one(number: int, options: argparse.Namespace) -> tuple[str, list[str], list[str], str]:
    """(compiler, features, faults, number) of one program; each compiler in its turn."""
    ways: list[tuple[str, object]] = [("nvcc", None)] if shutil.which("nvcc") else []
    ways += [("nvrtc", path) for path in options.nvrtc] + [
        ("ptxas", path) for path in options.ptxas
    ]
    way, tool = ways[number % len(ways)]
    archs = tuple(options.archs.split(","))
    program = draw(options.seed, number, archs, linked=way == "nvcc")
    try:
        if way == "nvcc":
            image = nvcc_cubin(program)
        elif way == "nvrtc":
            image = nvrtc_cubin(program, Path(str(tool)), options.include)
        else:
            image = ptxas_cubin(program, options.nvrtc[0], options.include, str(tool))
    except DidNotCompileError as error:
        return f"{way}: did not compile", [], [], f"{number} {error}"[:300]
    found = faults(program, image)
    name = f"{way} {Path(str(tool)).parts[-5:-4]}" if tool else way
    if found and options.save:
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / f"{options.seed}_{number}.cubin").write_bytes(image)
        (options.save / f"{options.seed}_{number}.cu").write_text(program.source)
    return name, program.features, found, str(number)


if __name__ == "__main__":
    main()
