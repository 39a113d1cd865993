"""Parameter types a caller declares for an image that carries only sizes (`signatures=`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import FunctionNotFoundError, ParamsError, nearest
from ..signature.c_types import ALIASES, SCALARS, canonical
from ..signature.params import Param
from .shipped import Chosen, FunctionSpec, Image

_OWN_TYPE = {"struct", "class", "enum", "union"}
# Types of CUDA's headers that no value here is checked against.
_CUDA_TYPE = re.compile(
    r"u?(char|short|int|long|longlong)[1-4]|(float|double)[1-4](_\w+)?|dim3|(__)?half2|"
    r"(__)?nv_bfloat162|__half_raw|__half2_raw|__nv_fp\w+|cu(da)?[A-Z]\w*|CU\w+"
)


class DeclaredImage:
    """An image whose parameter types the caller declares (`Kernel(..., signatures=…)`)."""

    def __init__(self, image: Image, signatures: Any) -> None:
        self.label = image.label
        self._image = image
        if not isinstance(signatures, Mapping):
            found = type(signatures).__name__
            raise ParamsError(f"signatures is a {found}, not a dict by function name")
        self._signatures = {
            name: _parse_signature(name, given) for name, given in signatures.items()
        }
        names = image.names()
        for name in self._signatures:
            if names is not None and name not in names:
                raise FunctionNotFoundError.among(name, names, self.label)
            self.spec(name)  # a wrong declaration is refused now, not at the first launch

    def names(self) -> Sequence[str] | None:
        return self._image.names()

    def spec(self, name: str) -> FunctionSpec:
        return self._declare(self._image.spec(name))

    def choose(self, compute_capability: tuple[int, int]) -> Chosen:
        chosen = self._image.choose(compute_capability)
        declared = {name: self._declare(chosen.functions[name]) for name in chosen.functions}
        return chosen._replace(functions=declared, declare=self._declare)

    def _declare(self, spec: FunctionSpec) -> FunctionSpec:
        signature = self._signatures.get(spec.name)
        if signature is None or spec.params is None:
            return spec
        if len(signature) != len(spec.params):
            raise ParamsError(
                f"signatures[{spec.name!r}] declares {len(signature)} parameters, the function "
                f"takes {len(spec.params)}"
            )
        params = tuple(
            Param.make(old.position, name, text, old.size_bytes, old.offset_bytes)
            for old, (text, name) in zip(spec.params, signature, strict=True)
        )
        return spec._replace(params=params)


def _parse_signature(function: str, given: Any) -> list[tuple[str, str | None]]:
    """A prototype text, a list of types, or a dict name -> type, as (type, name) pairs."""
    if isinstance(given, Mapping):
        return [_known(function, str(text), str(name)) for name, text in given.items()]
    if isinstance(given, str):
        if given.rstrip(" ;").endswith(")"):  # a whole prototype: 'void f(float* out, int n)'
            given = given[given.find("(") + 1 : given.rindex(")")]
        given = [part for part in given.split(",") if part.strip()]
    if not isinstance(given, Sequence) or not all(isinstance(part, str) for part in given):
        raise ParamsError(
            f"signatures[{function!r}] must be a list of C types, a dict name -> type or a text "
            f"like 'float* out, int n', not {given!r}"
        )
    return [_known(function, *_split_declaration(part)) for part in given]


def _known(function: str, text: str, name: str | None) -> tuple[str, str | None]:
    if wrong := _wrong_type(text):
        raise ParamsError(f"signatures[{function!r}]: {wrong}")
    return text, name


def _split_declaration(text: str) -> tuple[str, str | None]:
    """'const float* x' -> ('const float*', 'x'); a type alone has no name."""
    words = text.replace("*", "* ").split()
    if len(words) > 1 and words[-1].isidentifier() and not _wrong_type(" ".join(words[:-1])):
        return " ".join(words[:-1]), words[-1]
    return text.strip(), None


def _wrong_type(text: str) -> str:
    """What is wrong with a type as written, or ''.

    Types of the caller's own say so (`struct Params`, `ns::Params`): any other unknown name is
    taken for a misspelt one, whose values would go unchecked.
    """
    words = text.replace("*", " ").split()
    base = canonical(text).rstrip("*")
    if base in SCALARS or (base == "void" and "*" in text) or _CUDA_TYPE.fullmatch(base):
        return ""
    if "::" in text or "<" in text or (_OWN_TYPE & set(words) and base.isidentifier()):
        return ""
    known = ", ".join(nearest(base, {*SCALARS, *ALIASES})[:4])
    return f"no such type {text.strip()!r}; nearest: {known}; one of your own is `struct …`"
