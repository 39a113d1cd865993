"""Shipped kernels written out as C: cubins as arrays, and one typed launch function a kernel.

Writes text only; the C files need the driver's header and library, and no Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from .. import __version__
from ..ctypes_table import canonical, type_info
from ..errors import CubinNotFoundError, FunctionNotFoundError, KernelHubError, nearest
from ..manifest import Collection, CubinEntry, FunctionEntry, ParamEntry, open_collection
from ..resolve import parse_target

_WORDS_A_LINE = 4
# Scalars without a C type of their own pass as their bits.
_BITS = {"__half": "uint16_t", "__nv_bfloat16": "uint16_t"} | dict.fromkeys(
    ("__nv_fp8_e4m3", "__nv_fp8_e5m2", "bool"), "uint8_t"
)
_KEYWORDS = """\
    stream grid block shared_bytes params auto break case char const continue default do double
    else enum extern float for goto if inline int long register restrict return short signed sizeof
    static struct switch typedef union unsigned void volatile while alignas alignof bool catch class
    delete explicit export false friend mutable namespace new operator private protected public
    template this throw true try typename using virtual and or not xor"""
_TAKEN = set(_KEYWORDS.split())


def export(
    names: Sequence[str],
    to: str | Path,
    *,
    package: str = "kernel_hub",
    archs: Sequence[str] | None = None,
) -> list[Path]:
    """Write `NAME.c` and `NAME.h` for each cubin of `package`, and a CMakeLists.txt.

    names: cubins as `kernel-hub list` shows them.
    to: folder, made where it does not exist; files of these names in it are replaced.
    archs: which builds to take ('sm80', 'sm90'); None takes all.

    Returns: the files written. Raises CubinNotFoundError for a name or arch that is not shipped;
    KernelHubError when the folder cannot be written.

    Each header declares `NAME_load`, `NAME_unload` and `CUresult FUNCTION(CUstream stream,
    kernel_hub_dim3 grid, kernel_hub_dim3 block, unsigned int shared_bytes, parameters ...)`.
    """
    collection = open_collection(package)
    texts: dict[str, str] = {}
    for name in dict.fromkeys(names):
        texts |= render(collection, name, archs)
    sources = " ".join(path for path in texts if path.endswith(".c"))
    texts["CMakeLists.txt"] = _fill("export.cmake.in", VERSION=__version__, SOURCES=sources)
    folder = Path(to)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise KernelHubError(f"cannot write to {str(folder)!r}: {error}") from error
    return [folder / path for path in texts]


def render(collection: Collection, name: str, archs: Sequence[str] | None = None) -> dict[str, str]:
    """The header and the source of one cubin, by file name."""
    entries = _entries(collection, name, archs)
    # The newest build stands for all; one that lacks a function says so at run time.
    functions: dict[str, FunctionEntry] = {}
    for entry in entries:
        for function in entry.functions.values():
            known = functions.setdefault(function.name, function)
            if known.params != function.params:
                raise FunctionNotFoundError(
                    f"{function.name} takes different parameters in the builds of {name}: export "
                    "one arch at a time"
                )
    common = {"NAME": name, "VERSION": __version__}
    prototypes = [_prototype(function) for function in functions.values()]
    header = _fill(
        "export.h.in",
        GUARD=f"KERNEL_HUB_{name.upper()}_H",
        ARCHS=", ".join(sorted(entry.arch for entry in entries)),
        DECLARATIONS="".join(f"{prototype};\n\n" for prototype in prototypes),
        **common,
    )
    definitions = (
        f"{prototype} {{\n{_body(index, function)}}}\n"
        for index, (prototype, function) in enumerate(
            zip(prototypes, functions.values(), strict=True)
        )
    )
    source = _fill(
        "export.c.in",
        NUM_IMAGES=str(len(entries)),
        NUM_FUNCTIONS=str(len(functions)),
        NAMES=",\n".join(f'    "{function}"' for function in functions),
        IMAGES="\n".join(_array(f"image_{e.arch}", collection.read(e)) for e in entries),
        ROWS=",\n".join(_row(entry, functions) for entry in entries),
        DEFINITIONS="\n".join(definitions),
        **common,
    )
    return {f"{name}.h": header, f"{name}.c": source}


def _entries(collection: Collection, name: str, archs: Sequence[str] | None) -> list[CubinEntry]:
    """The builds to write, the one to prefer first."""
    cubins = collection.manifest.cubins
    if name not in cubins:
        shipped = ", ".join(nearest(name, cubins)[:12])
        raise CubinNotFoundError(f"{collection.package} ships no cubin {name!r}; it has: {shipped}")
    if missing := [arch for arch in archs or () if arch not in cubins[name]]:
        raise CubinNotFoundError(
            f"{name} is not built for {', '.join(missing)}; it is for {', '.join(cubins[name])}"
        )
    chosen = [entry for arch, entry in cubins[name].items() if archs is None or arch in archs]
    return sorted(chosen, key=lambda entry: parse_target(entry.target), reverse=True)


def _prototype(function: FunctionEntry) -> str:
    first = [
        "CUstream stream",
        "kernel_hub_dim3 grid",
        "kernel_hub_dim3 block",
        "unsigned int shared_bytes",
    ]
    params = first + [_declare(param) for param in function.params]
    return f"CUresult {function.name}(" + ",\n    ".join(["\n    " + params[0], *params[1:]]) + ")"


def _declare(param: ParamEntry) -> str:
    kind, name = canonical(param.type), _name(param)
    if kind.endswith("*"):
        return f"CUdeviceptr {name} /* {kind} */"
    if kind == "CUtensorMap":
        return f"const CUtensorMap* {name}"
    if type_info(kind) is None:
        return f"const void* {name} /* {kind}, {param.size_bytes} bytes */"
    bits = _BITS.get(kind)
    return f"{bits} {name} /* bits of {kind} */" if bits else f"{kind} {name}"


def _body(index: int, function: FunctionEntry) -> str:
    """Parameters that the caller passes by address are copied from there by the driver."""
    values = []
    for param in function.params:
        by_address = canonical(param.type) == "CUtensorMap" or type_info(param.type) is None
        values.append(f"(void*){_name(param)}" if by_address else f"&{_name(param)}")
    params, argument = "", "NULL"
    if values:
        params = f"    void* params[] = {{{', '.join(values)}}};\n"
        argument = "params"
    return f"{params}    return launch({index}, stream, grid, block, shared_bytes, {argument});\n"


def _name(param: ParamEntry) -> str:
    return f"{param.name}_" if param.name in _TAKEN else param.name


def _array(name: str, data: bytes) -> str:
    words = np.frombuffer(data + b"\0" * (-len(data) % 8), "<u8").tolist()
    lines = [
        "    " + ", ".join(f"0x{word:016x}ull" for word in words[i : i + _WORDS_A_LINE])
        for i in range(0, len(words), _WORDS_A_LINE)
    ]
    return f"static const uint64_t {name}[] = {{\n" + ",\n".join(lines) + "\n};\n"


def _row(entry: CubinEntry, functions: Mapping[str, FunctionEntry]) -> str:
    major, minor, suffix = parse_target(entry.target)
    has = ", ".join("1" if name in entry.functions else "0" for name in functions)
    return (
        f"    {{image_{entry.arch}, {major}, {minor}, {int(bool(suffix))}, {{{has}}}, 0, NULL, "
        "{NULL}}"
    )


def _fill(template: str, **values: str) -> str:
    folder = resources.files(f"{__package__.rpartition('.')[0]}.templates")
    text = folder.joinpath(template).read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text
