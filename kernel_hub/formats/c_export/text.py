"""How exported kernels are spelled in C: names, parameters, prototypes, tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING

from ...collection.manifest import FunctionEntry, ParamEntry
from ...errors import FunctionNotFoundError, ParamsError
from ...signature.c_types import canonical, type_info

if TYPE_CHECKING:
    from .images import Build

# Scalars without a C type of their own pass as their bits.
_BITS = {"__half": "uint16_t", "__nv_bfloat16": "uint16_t"} | dict.fromkeys(
    ("__nv_fp8_e4m3", "__nv_fp8_e5m2", "bool"), "uint8_t"
)
# Words of C and C++, and what the bodies of the exported functions use themselves.
_WORDS = """\
    stream grid block shared_bytes programs shape algo params tensors addresses given launch NULL
    launch_tensors
    auto break case char const continue default do double
    else enum extern float for goto if inline int long register restrict return short signed sizeof
    static struct switch typedef union unsigned void volatile while alignas alignof bool catch class
    delete explicit export false friend mutable namespace new operator private protected public
    template this throw true try typename using virtual and or not xor"""
_TAKEN = set(_WORDS.split())
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def checked_name(name: str, what: str) -> str:
    """`name`, if C can have a function or variable of that name."""
    if not _IDENTIFIER.fullmatch(name) or name in _TAKEN:
        raise FunctionNotFoundError(f"{what} {name!r} cannot be exported: it is no C identifier")
    return name


def checked_prefix(prefix: str) -> str:
    """`prefix`, if names in C can begin so."""
    if not isinstance(prefix, str) or (prefix and not _IDENTIFIER.fullmatch(prefix)):
        raise ParamsError(
            f"prefix={prefix!r:.80} is put before names in C: letters, digits and _, no digit first"
        )
    return prefix


def names_of(params: Sequence[ParamEntry], taken: Iterable[str] = ()) -> list[str]:
    """C names for parameters: their own where C can have them, and none of `taken`."""
    taken = {*_TAKEN, *taken}
    names: list[str] = []
    for index, param in enumerate(params):
        plain = param.name.replace(".", "_")  # an element of a tuple
        name = f"{plain}_" if plain in taken else plain
        names.append(
            name if _IDENTIFIER.fullmatch(name) and name not in names else f"param_{index}"
        )
    return names


def is_by_address(param: ParamEntry) -> bool:
    """Whether C passes the parameter by address: the driver copies the value from there."""
    return canonical(param.type) == "CUtensorMap" or type_info(param.type) is None


def is_pointer(param: ParamEntry) -> bool:
    """Whether the kernel takes an address on the device."""
    return canonical(param.type).endswith("*")


def declare(param: ParamEntry, name: str, *, pointer: str = "CUdeviceptr") -> str:
    """The parameter as C declares it; device addresses are of type `pointer`."""
    kind = canonical(param.type)
    said = re.sub(r"[^\w *<>,:]", "?", kind)
    if is_pointer(param):
        return f"{pointer} {name} /* {said} */"
    if kind in ("CUtensorMap", "kernel_hub_tensor"):
        return f"const {kind}* {name}"
    if is_by_address(param):
        return f"const void* {name} /* {said}, {param.size_bytes} bytes */"
    bits = _BITS.get(kind)
    return f"{bits} {name} /* bits of {kind} */" if bits else f"{kind} {name}"


def prototype(name: str, params: Iterable[str]) -> str:
    """`CUresult name(params)`, without an end."""
    given = ",\n    ".join(params)
    return f"CUresult {name}(\n    {given})"


def values_of(params: Sequence[ParamEntry]) -> list[str]:
    """Where the driver reads each parameter, as C expressions over the declared names."""
    return [
        f"(void*){name}" if is_by_address(param) else f"&{name}"
        for param, name in zip(params, names_of(params), strict=True)
    ]


def local_array(declared: str, items: Sequence[str]) -> str:
    """An array inside a function; nothing where it would be empty, which C does not know."""
    listed = wrapped(items, "        ")
    return f"    {declared}[] = {{\n{listed}}};\n" if items else ""


def limits(name: str, entries: Iterable[Build]) -> str:
    """A comment of what holds for a function's launches, a line an answer that archs differ in."""
    said: dict[str, list[str]] = {}
    for entry in entries:
        function = entry.functions.get(name)
        text = "not built" if function is None else _limits(function)
        said.setdefault(text, []).append(entry.arch)
    if len(said) == 1:
        return f"/* {next(iter(said))}. */\n"
    lines = "\n   ".join(f"{', '.join(archs)}: {text}." for text, archs in said.items())
    return f"/* {lines} */\n"


def _limits(function: FunctionEntry) -> str:
    parts = [f"at most {function.max_threads or 1024} threads a block"]
    if function.required_block:
        parts = [f"exactly {_times(function.required_block)} threads a block"]
    if function.cluster:
        parts.append(f"clusters of {_times(function.cluster)} blocks: the grid is a multiple")
    elif function.max_cluster_rank:
        parts.append(
            f"clusters of up to {function.max_cluster_rank} blocks, given as a launch attribute"
        )
    if function.cooperative:
        parts.append("a cooperative launch: no more blocks than the GPU holds at once")
    if function.static_shared_bytes:
        parts.append(f"{function.static_shared_bytes} bytes of static shared memory")
    text = "; ".join(parts)
    return text[0].upper() + text[1:]


def _times(sizes: tuple[int, int, int]) -> str:
    return " x ".join(map(str, sizes))


def wrapped(items: Iterable[str], indent: str = "    ") -> str:
    """The items with commas between, in lines of 100 columns."""
    text = ", ".join(items)
    return textwrap.fill(
        text, 100, initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def fill(template: str, values: Mapping[str, str]) -> str:
    """A template's text with @KEY@ replaced by each value."""
    folder = resources.files(f"{__package__.partition('.')[0]}.templates")
    text = folder.joinpath(template).read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def functions_used(template: str, text: str) -> str:
    """Those functions of a template that `text` calls, and those that they call."""
    found: list[str] = []
    for block in reversed(fill(template, {}).strip().split("\n\n")):
        name = block.partition("(")[0].split()[-1]
        if re.search(rf"\b{name}\(", text):
            found.insert(0, block)
            text += block
    return "\n\n".join(found) + "\n" if found else ""
