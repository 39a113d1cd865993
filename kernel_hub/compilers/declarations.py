"""Kernel prototypes in CUDA C++: parameter names and C types, checked against the PTX and the cubin
of the same compilation. Reads text, runs nothing.

A cubin cannot tell a float from an int, nor a pointer from an int64; the source can. This is not
a C++ parser: it reads the flat `extern "C"` signatures the house style asks for, refuses the
rest by name, and trusts nothing that the PTX and the cubin do not confirm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from ..collection.manifest import ParamEntry
from ..cubin import ParamInfo, PtxParam
from ..errors import KernelHubError
from ..signature.c_types import SCALARS, canonical, type_info

_GLOBAL = re.compile(r"__attribute__\s*\(\(\s*(?:__)?global(?:__)?\s*\)\)|\b__global__\b")
_HEAD_TOKEN = re.compile(r'\s*([A-Za-z_]\w*|"C")\s*')
_TEMPLATE = re.compile(r"\btemplate\s*<([^<>]*)>[^;{}<>]*$")
_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_ATTRIBUTES = ("__attribute__", "__launch_bounds__", "__cluster_dims__", "__maxnreg__", "alignas")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*$")
_TYPE_WORDS = {"unsigned", "signed", "short", "long", "int", "char", "float", "double", "bool"}

Declared = list[tuple[str, str]]  # (parameter name, canonical type) in order


def read_prototypes(preprocessed: str, names: Iterable[str], where: str) -> dict[str, Declared]:
    """The parameters of each kernel of `names` as declared in `preprocessed` (`nvcc -E` output)."""
    text = re.sub(r"^#.*$", "", preprocessed, flags=re.MULTILINE)
    wanted = set(names)
    found: dict[str, Declared] = {}
    resolve = _alias_resolver(text, where)
    for match in _GLOBAL.finditer(text):
        name, start = _declared_name(text, match.end())
        if name in wanted:
            inside = text[start : _closing(text, start - 1)]
            found[name] = [
                _param(part, i, resolve, f"{where}: {name}")
                for i, part in enumerate(_split_params(inside))
            ]
    missing = sorted(wanted - found.keys())
    if missing:
        raise KernelHubError(
            f'{where}: no extern "C" __global__ prototype found for {", ".join(missing)}; '
            'export kernels as `extern "C" __global__ void name(...)`'
        )
    return found


def read_instance(source: str, expression: str, where: str) -> Declared:
    """The parameters of `expression` (`f`, `ns::f<float, 4>`) as declared in `source` as written.

    Macros are not expanded and both sides of an #if are read: two different declarations of the
    name are an error, as is none.
    """
    text = _COMMENT_OR_STRING.sub(lambda m: m[0] if m[0][0] == '"' else " ", source)
    text = re.sub(r"^[ \t]*#(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE)
    name, bracket, arguments = expression.partition("<")
    name = name.strip().rpartition("::")[2]
    resolve = _alias_resolver(text, where)
    found: list[Declared] = []
    for match in _GLOBAL.finditer(text):
        declared, start = _declared_name(text, match.end())
        if declared != name:
            continue
        inside = text[start : _closing(text, start - 1)]
        template = _TEMPLATE.search(text, 0, match.start())
        if bracket or template:
            given = _split_params(arguments.rpartition(">")[0])
            for word, value in _template_arguments(template, given, f"{where}: {name}").items():
                inside = re.sub(rf"\b{word}\b", value.replace("\\", r"\\"), inside)
        params = [_param(p, i, resolve, f"{where}: {name}") for i, p in _numbered(inside)]
        if [kind for _, kind in params] not in [[kind for _, kind in one] for one in found]:
            found.append(params)
    if len(found) != 1:
        raise KernelHubError(f"{where}: {len(found)} different declarations of {name!r} found")
    return found[0]


def _template_arguments(
    template: re.Match[str] | None, given: list[str], where: str
) -> dict[str, str]:
    """{'T': 'float', 'N': '4'}: the template's parameters by name, defaults where none is given."""
    values = {}
    for i, text in _numbered(template[1] if template else ""):
        left, _, default = text.partition("=")
        word = _IDENTIFIER.search(left.strip())
        value = given[i] if i < len(given) else default.strip()
        if word is None or not value or "..." in left:
            raise KernelHubError(f"{where}: template parameter {i} `{text}` is not understood")
        values[word[0]] = value
    if len(given) > len(values):
        raise KernelHubError(f"{where}: {len(given)} template arguments, {len(values)} parameters")
    return values


def _numbered(inside: str) -> Iterable[tuple[int, str]]:
    return enumerate(_split_params(inside))


def match_params(
    declared: Declared, in_cubin: Sequence[ParamInfo], in_ptx: Sequence[PtxParam], where: str
) -> tuple[ParamEntry, ...]:
    """The manifest's parameters, once source, PTX and cubin agree on count, size, offset, kind."""
    if not len(declared) == len(in_cubin) == len(in_ptx):
        raise KernelHubError(
            f"{where}: {len(declared)} parameters in the source, {len(in_ptx)} in the PTX, "
            f"{len(in_cubin)} in the cubin"
        )
    entries = []
    end = 0
    for (name, c_type), cubin, ptx in zip(declared, in_cubin, in_ptx, strict=True):
        this = f"{where}: parameter {cubin.ordinal} ({c_type} {name})"
        # NOTE: ptxas aligns in the constant bank, whose parameters start at a multiple of 16 that
        # differs by arch: a 128-byte aligned CUtensorMap may stand at offset 112 or 160.
        offset = cubin.offset_bytes
        fits = end <= offset < end + ptx.align and offset % min(ptx.align, 16) == 0
        if not fits or cubin.size_bytes != ptx.size_bytes:
            raise KernelHubError(
                f"{this} is {ptx.size_bytes} bytes aligned to {ptx.align} from {end} in the PTX, "
                f"{cubin.size_bytes} bytes at {offset} in the cubin"
            )
        known = type_info(c_type)
        if known and known.size_bytes != cubin.size_bytes:
            raise KernelHubError(
                f"{this} is {known.size_bytes} bytes by its type, {cubin.size_bytes} in the cubin"
            )
        is_float = ptx.type in (".f32", ".f64")
        if known and is_float != (known.dtype in ("fp32", "fp64") and known.kind == "float"):
            raise KernelHubError(f"{this} is {ptx.type} in the PTX")
        end = offset + ptx.size_bytes
        entries.append(ParamEntry(name, c_type, cubin.size_bytes, cubin.offset_bytes))
    return tuple(entries)


def _closing(text: str, opening: int) -> int:
    """Index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    return len(text)


def _declared_name(text: str, position: int) -> tuple[str | None, int]:
    """The function declared after a `__global__`, and where its parameter list starts."""
    while token := _HEAD_TOKEN.match(text, position):
        position = token.end()
        if text[position : position + 1] != "(":
            continue
        if token[1] not in _ATTRIBUTES:
            return token[1], position + 1
        position = _closing(text, position) + 1
    return None, position


def _split_params(inside: str) -> list[str]:
    parts = [""]
    depth = 0
    for char in inside:
        depth += (char in "([{<") - (char in ")]}>")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    parts = [" ".join(part.split()) for part in parts]
    return [] if parts in ([""], ["void"]) else parts


def _param(text: str, index: int, resolve: Callable[[str], str], where: str) -> tuple[str, str]:
    """`const __nv_bfloat16* __restrict__ x` -> ("x", "__nv_bfloat16*")."""
    text = _without_attributes(text)
    refused = next((sign for sign in ("<", "&", "(", "=") if sign in text), None)
    if refused:
        raise KernelHubError(
            f"{where}: parameter {index} `{text}` has a {refused!r}; exported signatures take "
            "plain types: scalars, pointers and named structs"
        )
    text, bracket, _ = text.partition("[")  # an array parameter is a pointer
    text = text.strip()
    name = f"arg{index}"
    last = _IDENTIFIER.search(text)
    if last:
        before = canonical(text[: last.start()])
        if before and last[0] not in _TYPE_WORDS and not last[0].startswith("__restrict"):
            name, text = last[0], text[: last.start()]
    return name, resolve(canonical(text) + ("*" if bracket else ""))


def _without_attributes(text: str) -> str:
    while (start := text.find("__attribute__")) >= 0:
        text = text[:start] + text[_closing(text, text.index("(", start)) + 1 :]
    return text.replace("__grid_constant__", "").strip()


def _alias_resolver(text: str, where: str) -> Callable[[str], str]:
    """Follows `using X = Y;` and `typedef Y X;` in `text` until the type is one of the table."""
    known: dict[str, str] = {}

    def target(name: str) -> str:
        word = re.escape(name.rpartition("::")[2])
        found = re.findall(rf"\busing\s+{word}\s*=([^;]+);", text)
        found += re.findall(rf"\btypedef\s([^;{{}}]+?[\s*]){word}\s*;", text)
        targets = {canonical(_without_attributes(t)) for t in found if "<" not in t}
        if len(targets) > 1:
            raise KernelHubError(
                f"{where}: type {name!r} is an alias of {' and of '.join(sorted(targets))}; "
                "spell the type out in the exported signature"
            )
        return targets.pop() if targets else name

    def resolve(type_text: str) -> str:
        stars = ""
        for _ in range(16):  # an alias of an alias; the bound ends a circle
            base = type_text.rstrip("*")
            stars += type_text[len(base) :]
            if base in SCALARS or base == "void":
                break
            if base not in known:
                known[base] = target(base)
            type_text = known[base]
            if type_text == base:
                break
        return type_text.rstrip("*") + stars

    return resolve
