"""Shipped kernels written out as C: cubins as arrays, and one typed launch function a kernel.

Writes text only; the C files need the driver's header and library, and no Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from .. import __version__
from ..ctypes_table import type_info
from ..errors import (
    CubinCorruptError,
    CubinNotFoundError,
    FunctionNotFoundError,
    ParamsError,
    nearest,
)
from ..manifest import Collection, CubinEntry, FunctionEntry, find_collection
from ..resolve import names_target, parse_target
from . import _c_folder, _c_tensors
from ._c_text import (
    checked_name,
    checked_prefix,
    declare,
    fill,
    limits,
    local_array,
    names_of,
    prototype,
    values_of,
    wrapped,
)

_WORDS_A_LINE = 4
_TVM_FFI_HEADERS = """
/* pip install apache-tvm-ffi; tvm-ffi-config --cflags --ldflags --libs says where it is. */
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>
"""


def export(
    names: str | Sequence[str],
    to: str | Path,
    *,
    package: str | Path = "kernel_hub",
    archs: str | Sequence[str] | None = None,
    prefix: str = "",
    dlpack: bool = False,
    tvm_ffi: bool = False,
) -> list[Path]:
    """Write `NAME.c` and `NAME.h` for each cubin of `package`, and a CMakeLists.txt.

    names: cubins as `kernel-hub list` shows them.
    to: folder, made where it does not exist. What was exported to it before is replaced where the
        names are the same, else it stays and is in the CMakeLists.txt too.
    package: whose cubins, or a folder with a manifest.json.
    archs: which builds to take ('sm80', 'sm_90'); None takes all.
    prefix: put before the name of each file and function.
    dlpack: also a function FUNCTION_dlpack for each, which takes DLTensors and checks them.
    tvm_ffi: also a TVM-FFI function for each (and dlpack); compiling needs apache-tvm-ffi.

    Returns: the files written. Raises CubinNotFoundError for a name or arch that is not shipped;
    FunctionNotFoundError for a function that C cannot name, or that two of the cubins have;
    CubinCorruptError for an image or a parameter that is not what the manifest says;
    ParamsError for an argument of another kind; KernelHubError when the folder cannot be written,
    or has files of these names that no export wrote. Nothing is written then.

    Each header declares `NAME_load`, `NAME_unload`, `NAME_get` and `CUresult FUNCTION(CUstream
    stream, kernel_hub_dim3 grid, kernel_hub_dim3 block, unsigned int shared_bytes, parameters
    ...)`. A TVM-FFI function is called as `FUNCTION(grid, block, shared_bytes, parameters ...)`.
    """
    names = _listed("names", names, "rms_norm")
    archs = None if archs is None else _listed("archs", archs, "sm90")
    checked_prefix(prefix)
    if not isinstance(to, (str, Path)) or not str(to) or "\0" in str(to):
        raise ParamsError(f"to={to!r:.80}: the folder to write to")
    collection = find_collection(package)
    texts: dict[str, str] = {}
    for name in dict.fromkeys(names):
        texts |= render(
            collection, name, archs, prefix=prefix, dlpack=dlpack or tvm_ffi, tvm_ffi=tvm_ffi
        )
    return _c_folder.write(Path(to), texts)


def _listed(argument: str, value: object, example: str) -> list[str]:
    """What is given as a list of texts, or as one text with commas between."""
    found = value.split(",") if isinstance(value, str) else value
    items = list(found) if isinstance(found, Iterable) else []
    if not items or not all(isinstance(item, str) and item for item in items):
        raise ParamsError(
            f"{argument}={value!r:.80}: a list of texts, or one text with commas between, such as "
            f"{example!r}"
        )
    return items


def render(
    collection: Collection,
    name: str,
    archs: Sequence[str] | None = None,
    *,
    prefix: str = "",
    dlpack: bool = False,
    tvm_ffi: bool = False,
) -> dict[str, str]:
    """The header and the source of one cubin, by file name."""
    entries = _entries(collection, name, archs)
    table = _functions(name, entries)
    functions = list(table.values())
    checked_name(prefix + name, "cubin")
    common = {
        "NAME": name,
        "PREFIX": prefix,
        "VERSION": __version__,
        "ARCHS": ", ".join(sorted(_spelled(entry) for entry in entries)),
    }
    prototypes = {
        function.name: prototype(
            prefix + checked_name(function.name, "function"),
            map(declare, function.params, names_of(function.params)),
        )
        for function in functions
    }
    on_tensors = _c_tensors.declarations(functions, prefix) if dlpack else {}
    declarations = [
        limits(function, entries) + f"{text};\n" + (f"{on_tensors[function]};\n" if dlpack else "")
        for function, text in prototypes.items()
    ]
    header = fill(
        "export.h.in",
        {
            "GUARD": f"KERNEL_HUB_{prefix.upper()}{name.upper()}_H",
            "EXAMPLE": prefix + functions[0].name,
            "INCLUDES": fill("export_dlpack_types.h.in", {}) if dlpack else "",
            "EXTRA": fill("export_dlpack.h.in", {}) if dlpack else "",
            "DECLARATIONS": "\n".join(declarations),
            **common,
        },
    )
    definitions = [
        f"{prototypes[function.name]} {{\n{_body(index, function)}}}\n"
        for index, function in enumerate(functions)
    ]
    if dlpack:
        definitions.append(_c_tensors.dlpack_source(functions, common))
    if tvm_ffi:
        definitions.append(_c_tensors.tvm_ffi_source(functions, common))
    source = fill(
        "export.c.in",
        {
            "STDIO": "#include <stdio.h>\n" if dlpack else "",
            "TVM_FFI": _TVM_FFI_HEADERS if tvm_ffi else "",
            "NUM_IMAGES": str(len(entries)),
            "NUM_FUNCTIONS": str(len(functions)),
            "NAMES": ",\n".join(f'    "{function}"' for function in table),
            "COOPERATIVE": wrapped(str(int(function.cooperative)) for function in functions),
            "ROWS": ",\n".join(_row(entry, table) for entry in entries),
            "DEFINITIONS": "\n".join(definitions),
            **common,
            "IMAGES": "\n".join(_array(_image(e), collection.read(e)) for e in entries),
        },
    )
    return {f"{prefix}{name}.h": header, f"{prefix}{name}.c": source}


def _entries(collection: Collection, name: str, archs: Sequence[str] | None) -> list[CubinEntry]:
    """The builds to write, the one to prefer first."""
    cubins = collection.manifest.cubins
    if name not in cubins:
        shipped = ", ".join(nearest(name, cubins)[:12])
        raise CubinNotFoundError(f"{collection.package} ships no cubin {name!r}; it has: {shipped}")
    built = cubins[name].values()
    if missing := [
        arch for arch in archs or () if not any(names_target(arch, e.target) for e in built)
    ]:
        raise CubinNotFoundError(
            f"{name} is not built for {', '.join(missing)}; it is for {', '.join(cubins[name])}"
        )
    chosen = [
        entry
        for entry in built
        if archs is None or any(names_target(arch, entry.target) for arch in archs)
    ]
    return sorted(chosen, key=lambda entry: parse_target(entry.target), reverse=True)


def _functions(name: str, entries: Sequence[CubinEntry]) -> dict[str, FunctionEntry]:
    """Every function of the builds. The newest one that has it stands for all."""
    functions: dict[str, FunctionEntry] = {}
    for entry in entries:
        for function in entry.functions.values():
            for param in function.params:
                info = type_info(param.type)
                if info is not None and info.size_bytes != param.size_bytes:
                    raise CubinCorruptError(
                        f"{entry.file}: parameter {param.name} of {function.name} is {param.type} "
                        f"({info.size_bytes} bytes) with {param.size_bytes} bytes in the manifest"
                    )
            known = functions.setdefault(function.name, function)
            if [(p.type, p.size_bytes) for p in known.params] != [
                (p.type, p.size_bytes) for p in function.params
            ]:
                raise FunctionNotFoundError(
                    f"{function.name} takes different parameters in the builds of {name}: export "
                    "one arch at a time"
                )
    if not functions:
        raise FunctionNotFoundError(f"{name} has no function to export")
    return functions


def _spelled(entry: CubinEntry) -> str:
    """'sm80', or 'sm90 (sm_90a)' where that says more."""
    return f"{entry.arch} ({entry.target})" if entry.target[-1].isalpha() else entry.arch


def _body(index: int, function: FunctionEntry) -> str:
    values = values_of(function.params)
    argument = "params" if values else "NULL"
    return (
        local_array("void* params", values)
        + f"    return launch({index}, stream, grid, block, shared_bytes, {argument});\n"
    )


def _image(entry: CubinEntry) -> str:
    return checked_name(f"image_{entry.arch}", "the image")


def _array(name: str, data: bytes) -> str:
    words = np.frombuffer(data + b"\0" * (-len(data) % 8), "<u8").tolist()
    lines = [
        "    " + ", ".join(f"0x{word:016x}ull" for word in words[i : i + _WORDS_A_LINE])
        for i in range(0, len(words), _WORDS_A_LINE)
    ]
    return f"static const uint64_t {name}[] = {{\n" + ",\n".join(lines) + "\n};\n"


def _row(entry: CubinEntry, functions: Mapping[str, FunctionEntry]) -> str:
    major, minor, suffix = parse_target(entry.target)
    numbers = f"{major}, {minor}, {int(suffix == 'a')}"
    built = [
        f"{{1, {entry.functions[name].static_shared_bytes}}}"
        if name in entry.functions
        else "{0, 0}"
        for name in functions
    ]
    table = wrapped(built, "      ").strip()
    return f"    {{{_image(entry)}, {numbers}, 0, NULL, {{NULL}}, {{0}},\n     {{{table}}}}}"
