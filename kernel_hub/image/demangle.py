"""C++ names of kernels: what a mangled symbol is called in its source, and symbols by that name.

The C++ library that is on the machine reads the names; where there is none they stay as they are.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from ..errors import FunctionNotFoundError, listed

_LIBRARIES = {"linux": ["libstdc++.so.6"], "darwin": ["/usr/lib/libc++abi.dylib"]}
_PREFIX = "_Z"
_RESULT = "void "  # of every kernel; written for templates alone
# Longer than any that templates give; what reads names recurses, and files are nobody's friends.
_MAX_LENGTH = 1 << 16
_SPACE = re.compile(r"(?<!\w) | (?!\w)")
# How compilers differ in writing a template's number: 512, 512u, (int)512; true, (bool)1.
_CAST = re.compile(r"\((?:bool|char|(?:un)?signed[\w ]*|short|int|long(?: long)?)\)(?=-?\d)")
_SUFFIX = re.compile(r"(?<=[<,])(-?\d+)u?l{0,2}(?=[,>])")
_TRUTH = {"true": "1", "false": "0"}


@lru_cache(maxsize=1)
def _reader() -> Any:
    """(__cxa_demangle, free) of the C++ library, or None."""
    for name in _LIBRARIES.get(sys.platform, []):
        try:
            library = ctypes.CDLL(name)
            read, free = library.__cxa_demangle, library.free
        except (OSError, AttributeError):
            continue
        read.restype, free.restype = ctypes.c_void_p, None
        read.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 2, ctypes.POINTER(ctypes.c_int)]
        free.argtypes = [ctypes.c_void_p]
        return read, free
    return None


@lru_cache(maxsize=1 << 14)
def demangled(symbol: str) -> str:
    """The declaration behind a mangled name, 'void scale<float>(float*, int)'; else `symbol`."""
    if not symbol.startswith(_PREFIX) or not symbol.isascii() or len(symbol) > _MAX_LENGTH:
        return symbol
    if (reader := _reader()) is None:
        return symbol
    status = ctypes.c_int()
    address = reader[0](symbol.encode(), None, None, ctypes.byref(status))
    if not address:
        return symbol
    text = ctypes.string_at(address).decode(errors="replace")
    reader[1](address)
    return text


def cxx_names(symbols: Iterable[str]) -> dict[str, str]:
    """What each kernel is called in C++: its `cxx_name`, with parameters where several share it."""
    found = {symbol: cxx_name(symbol) for symbol in symbols}
    times = Counter(found.values())
    whole = {s: demangled(s).removeprefix(_RESULT) for s, name in found.items() if times[name] > 1}
    return found | whole


@lru_cache(maxsize=1 << 14)
def cxx_name(symbol: str) -> str:
    """A kernel's name with its template arguments: 'ns::scale<float, 4>'; else `symbol`."""
    return _without_parameters(demangled(symbol)).removeprefix(_RESULT)


def symbol_of(name: str, symbols: Iterable[str]) -> str | None:
    """The symbol of the kernel that C++ calls `name`; None for none.

    name: with its template arguments, if it has some; with its parameters where several kernels
    have the name. Spaces, casts and suffixes of numbers do not matter.

    Raises FunctionNotFoundError where several symbols are meant.
    """
    return Symbols(symbols).called(name)


class Symbols(dict[str, None]):
    """The symbols of an image in their order, to be found by what C++ calls them too.

    Each look-up takes the same time however many there are; the first by a C++ name reads them all.
    """

    def __init__(self, symbols: Iterable[str]) -> None:
        super().__init__(dict.fromkeys(symbols))
        self._by_form: dict[str, list[str]] | None = None

    def called(self, name: str) -> str | None:
        """See `symbol_of`."""
        if self._by_form is None:
            by_form: dict[str, list[str]] = {}
            for symbol in self:
                for form in _forms(symbol):
                    by_form.setdefault(form, []).append(symbol)
            self._by_form = by_form
        found = self._by_form.get(_plain(name), [])
        if len(found) > 1:
            whole = listed(map(demangled, found), 8, "; ")
            raise FunctionNotFoundError(f"{len(found)} kernels are called {name!r}: {whole}")
        return found[0] if found else None

    def find(self, name: Any) -> Any:
        """The symbol that is `name`, or is called so in C++; else `name`."""
        if not isinstance(name, str) or name in self:
            return name
        return self.called(name) or name


@lru_cache(maxsize=1 << 14)
def _forms(symbol: str) -> frozenset[str]:
    """The ways in which a C++ kernel may be asked for, each as `_plain` writes it."""
    text = demangled(symbol)
    if text == symbol:
        return frozenset()
    return frozenset(map(_plain, (text, text.removeprefix(_RESULT), cxx_name(symbol))))


def _plain(text: str) -> str:
    """`text` written in one way: no needless space, numbers without type."""
    text = _SPACE.sub("", " ".join(text.split()))
    text = _SUFFIX.sub(r"\1", _CAST.sub("", text))
    return re.sub(r"\b(?:true|false)\b", lambda word: _TRUTH[word[0]], text)


def _without_parameters(text: str) -> str:
    """'void f<int>' of 'void f<int>(float*, void (*)(int))'."""
    if not text.endswith(")"):
        return text
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += (text[at] == ")") - (text[at] == "(")
        if not depth:
            return text[:at]
    return text
