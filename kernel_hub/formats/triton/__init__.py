"""Triton's kernels: `load` what its cache holds, `compile` ahead of time, `tune`, launch them all.

`load` and launches need no Triton; `compile` and `tune` import it when they are called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._cache import load
    from ._function import TritonFunction
    from ._metadata import Metadata
    from ._signature import Argument
    from .ahead._collection import TritonCollection, collection
    from .ahead._compile import compile, compile_configs
    from .ahead._dispatch import Dispatcher
    from .ahead._tune import Problem, tune
    from .ahead._tuned import Tuned

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
    "Argument": "_signature",
    "Dispatcher": "ahead._dispatch",
    "Metadata": "_metadata",
    "Problem": "ahead._tune",
    "TritonCollection": "ahead._collection",
    "TritonFunction": "_function",
    "Tuned": "ahead._tuned",
    "collection": "ahead._collection",
    "compile": "ahead._compile",
    "compile_configs": "ahead._compile",
    "load": "_cache",
    "tune": "ahead._tune",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
