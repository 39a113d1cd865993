"""What `cpm_kernels.library.base` offers: finding CUDA's libraries, and functions bound to them.

No library is opened here. Clients replace `windows_find_lib` by their own.
"""

from __future__ import annotations

import ctypes.util
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Lib", "lookup_dll", "unix_find_lib", "windows_find_lib"]

Call = TypeVar("Call", bound=Callable[..., Any])


def lookup_dll(prefix: str) -> str | None:
    """The first DLL on PATH whose name begins with `prefix`."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        found = sorted(Path(folder).glob(f"{prefix}*.dll")) if folder else []
        if found:
            return str(found[0])
    return None


def windows_find_lib(name: str) -> str | None:
    """CUDA's DLL `name` on PATH: cudart64_12.dll for 'cudart'."""
    return lookup_dll(f"{name}64_")


def unix_find_lib(name: str) -> str | None:
    """CUDA's shared library `name`: of $CUDA_PATH, /usr/local/cuda, or the system's."""
    for root in filter(None, (os.environ.get("CUDA_PATH"), "/usr/local/cuda")):
        path = Path(root, "lib64", f"lib{name}.so")
        if path.exists():
            return str(path)
    return ctypes.util.find_library(name)


class Lib:
    """A library by name, which is not opened here, or one that the client opened."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._library: Any = None

    @staticmethod
    def from_lib(name: str, lib: Any) -> Lib:
        """One that is open."""
        made = Lib(name)
        made._library = lib
        return made

    def bind(self, name: str, arg_types: Sequence[Any], ret_type: Any) -> Callable[[Call], Call]:
        """A decorator: before the function runs, the library's `name` is an attribute of this."""

        def decorate(function: Call) -> Call:
            @functools.wraps(function)
            def bound(*args: Any, **options: Any) -> Any:
                if name not in self.__dict__:
                    self.__dict__[name] = found = getattr(self._opened(), name)
                    found.argtypes, found.restype = arg_types, ret_type
                return function(*args, **options)

            return bound  # type: ignore[return-value]

        return decorate

    def _opened(self) -> Any:
        if self._library is None:
            raise RuntimeError(
                f"Library {self._name} is not initialized: kernel_hub's cpm_kernels opens no "
                "library but the driver; cpm_kernels.library.cuda and .cudart go through that, and "
                "the package's own open theirs: pip install --no-deps cpm_kernels"
            )
        return self._library
