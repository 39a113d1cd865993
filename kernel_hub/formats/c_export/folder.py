"""The folder of exported kernels: what an earlier export left in it, and its CMakeLists.txt."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ... import __version__
from ...collection import manifest_write
from ...errors import FunctionNotFoundError, KernelHubError
from .text import fill

_CMAKE = "CMakeLists.txt"
_MARK = "written by kernel_hub"  # in the first line of every exported file
_DEFINED = re.compile(r"^(?:CUresult|const char\*|int) (\w+)\(", re.MULTILINE)


def write(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write `texts`, by file name, and a CMakeLists.txt of them and of the sources there already.

    Each file is replaced whole. Raises FunctionNotFoundError for a function that two sources
    define, KernelHubError for a file in the way that no export wrote; nothing is written then.
    """
    try:
        for name in (*texts, _CMAKE):
            if os.path.lexists(folder / name) and not _is_ours(folder / name):
                raise KernelHubError(
                    f"{folder / name} is in the way: it is no file that kernel-hub export wrote. "
                    "Move it, or export to another folder"
                )
        sources = {path.name: _text(path) for path in folder.glob("*.c") if _is_ours(path)}
        sources |= {name: text for name, text in texts.items() if name.endswith(".c")}
        _check_symbols(sources)
        written = {**texts, _CMAKE: _cmake(sources)}
        for name, text in written.items():
            manifest_write.write(folder / name, text.encode())
    except OSError as error:
        raise KernelHubError(f"cannot write to {str(folder)!r}: {error}") from error
    return [folder / name for name in written]


def _is_ours(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return _MARK in file.readline(1000)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _check_symbols(sources: Mapping[str, str]) -> None:
    owners: dict[str, str] = {}
    for name, text in sources.items():
        for symbol in _DEFINED.findall(text):
            if symbol in owners:
                raise FunctionNotFoundError(
                    f"{owners[symbol]} and {name} both have a function {symbol}: export one of "
                    "them to a folder of its own, with a prefix"
                )
            owners[symbol] = name


def _cmake(sources: Mapping[str, str]) -> str:
    # TVM-FFI's own CMake file speaks of C++ features.
    tvm_ffi = any("<tvm/ffi/c_api.h>" in text for text in sources.values())
    return fill(
        "export.cmake.in",
        {
            "VERSION": __version__,
            "SOURCES": " ".join(sorted(sources)),
            "LANGUAGES": "C CXX" if tvm_ffi else "C",
            "KIND": "SHARED " if tvm_ffi else "",
            "TVM_FFI": fill("export_tvm_ffi.cmake.in", {}) if tvm_ffi else "",
            "LIBRARIES": " tvm_ffi::shared" if tvm_ffi else "",
        },
    )
