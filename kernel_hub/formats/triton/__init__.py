"""Triton's kernels: `load` what its cache holds, `compile` ahead of time, `tune`, launch them all.

`load` and launches need no Triton; `compile` and `tune` import it when they are called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ahead.collection import TritonCollection, collection
    from .ahead.compiling import compile, compile_configs
    from .ahead.dispatcher import Dispatcher
    from .ahead.tune import Problem, tune
    from .ahead.tuned_file import Tuned
    from .cache import load
    from .function import TritonFunction
    from .metadata import Metadata
    from .signature import Argument

__all__ = [
    "Argument",
    "Dispatcher",
    "Metadata",
    "Problem",
    "TritonCollection",
    "TritonFunction",
    "Tuned",
    "collection",
    "compile",
    "compile_configs",
    "load",
    "tune",
]

_MODULES = {
    "Argument": "signature",
    "Dispatcher": "ahead.dispatcher",
    "Metadata": "metadata",
    "Problem": "ahead.tune",
    "TritonCollection": "ahead.collection",
    "TritonFunction": "function",
    "Tuned": "ahead.tuned_file",
    "collection": "ahead.collection",
    "compile": "ahead.compiling",
    "compile_configs": "ahead.compiling",
    "load": "cache",
    "tune": "ahead.tune",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
