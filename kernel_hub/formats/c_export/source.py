"""The header and the source of one exported image: arrays, loading, one typed function a kernel."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from ... import __version__
from ...collection.manifest import FunctionEntry
from ...collection.resolve import parse_target
from ...errors import CubinCorruptError, FunctionNotFoundError
from ...signature.c_types import type_info
from . import tensor_text
from .images import Build
from .text import (
    checked_name,
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
FIRST = (
    *("CUstream stream", "kernel_hub_dim3 grid", "kernel_hub_dim3 block"),
    "unsigned int shared_bytes",
)
_SHAPE = "    shape_t shape;\n    shape.grid = grid;\n    shape.block = block;\n"
SHAPE = f"{_SHAPE}    shape.shared_bytes = shared_bytes;\n"
_TVM_FFI_HEADERS = """
/* pip install apache-tvm-ffi; tvm-ffi-config --cflags --ldflags --libs says where it is. */
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>
"""


def render_plain(
    name: str,
    builds: Sequence[Build],
    *,
    prefix: str = "",
    dlpack: bool = False,
    tvm_ffi: bool = False,
) -> dict[str, str]:
    """The files of functions that are given grid, block and shared memory."""
    table = _functions(name, builds)
    common = common_names(name, prefix, builds)
    spelled = {
        offered: checked_name(c_name(offered) if {*"<:"} & {*offered} else offered, "function")
        for offered in table
    }
    if len(set(spelled.values())) < len(spelled):
        raise FunctionNotFoundError(
            f"{name}: two functions have one name in C: {', '.join(spelled)}"
        )
    functions = [entry._replace(name=spelled[offered]) for offered, entry in table.items()]
    prototypes = [
        prototype(prefix + f.name, [*FIRST, *map(declare, f.params, names_of(f.params))])
        for f in functions
    ]
    on_tensors = tensor_text.declarations(functions, prefix, FIRST) if dlpack else {}
    declarations = [
        limits(offered, builds) + f"{text};\n" + (f"{on_tensors[f.name]};\n" if dlpack else "")
        for offered, f, text in zip(table, functions, prototypes, strict=True)
    ]
    header = fill(
        "export.h.in",
        {
            "EXAMPLE": prefix + functions[0].name,
            "EXTRA": fill("export_dlpack.h.in", {}) if dlpack else "",
            **header_names(name, prefix, dlpack, declarations),
            **common,
        },
    )
    launch = fill(
        "export_launch.c.in",
        {"COOPERATIVE": wrapped(str(int(entry.cooperative)) for entry in functions)},
    )
    definitions = [
        f"{text} {{\n{_body(index, function)}}}\n"
        for index, (function, text) in enumerate(zip(functions, prototypes, strict=True))
    ]
    if dlpack:
        definitions.append(tensor_text.dlpack_source(functions, common, FIRST, SHAPE))
    if tvm_ffi:
        definitions.append(tensor_text.tvm_ffi_source(functions, common, "plain"))
    symbols = [builds_symbol(builds, offered) for offered in table]
    source = source_text(common, builds, list(table), symbols, launch, definitions, dlpack, tvm_ffi)
    return {f"{prefix}{name}.h": header, f"{prefix}{name}.c": source}


def common_names(name: str, prefix: str, builds: Sequence[Build]) -> dict[str, str]:
    """What every template of an image is filled with."""
    checked_name(prefix + name, "cubin")
    archs = ", ".join(sorted(_spelled(build) for build in builds))
    return {"NAME": name, "PREFIX": prefix, "VERSION": __version__, "ARCHS": archs}


def header_names(
    name: str, prefix: str, dlpack: bool, declarations: Sequence[str]
) -> dict[str, str]:
    """What every header is filled with."""
    return {
        "GUARD": f"KERNEL_HUB_{prefix.upper()}{name.upper()}_H",
        "INCLUDES": fill("export_dlpack_types.h.in", {}) if dlpack else "",
        "DECLARATIONS": "\n".join(declarations),
    }


def builds_symbol(builds: Sequence[Build], offered: str) -> str:
    """A function's name in the images, which is one."""
    found = {build.symbol(offered) for build in builds if offered in build.functions}
    if len(found) != 1:
        raise FunctionNotFoundError(
            f"{offered} is called {' and '.join(sorted(found))} in images of different "
            "architectures: export one arch at a time"
        )
    return found.pop()


def source_text(
    common: Mapping[str, str],
    builds: Sequence[Build],
    offered: Sequence[str],
    symbols: Sequence[str],
    launch: str,
    definitions: Sequence[str],
    dlpack: bool,
    tvm_ffi: bool,
) -> str:
    """The source around `launch` and `definitions`: images, loading, unloading."""
    return fill(
        "export.c.in",
        {
            "STDIO": "#include <stdio.h>\n" if dlpack else "",
            "TVM_FFI": _TVM_FFI_HEADERS if tvm_ffi else "",
            "NUM_IMAGES": str(len(builds)),
            "NUM_FUNCTIONS": str(len(offered)),
            "NAMES": ",\n".join(f'    "{symbol}"' for symbol in symbols),
            "ROWS": ",\n".join(_row(build, offered) for build in builds),
            "LAUNCH": launch,
            "DEFINITIONS": "\n".join(definitions),
            **common,
            "IMAGES": "\n".join(_array(build) for build in builds),
        },
    )


def c_name(offered: str) -> str:
    """A C++ name as C can have it: scale<float> is scale_float."""
    return re.sub(r"\W+", "_", offered.replace("*", "_ptr"), flags=re.ASCII).strip("_")


def _functions(name: str, builds: Sequence[Build]) -> dict[str, FunctionEntry]:
    """Every function of the builds by offered name. The newest one that has it stands for all."""
    functions: dict[str, FunctionEntry] = {}
    for build in builds:
        for offered, function in build.functions.items():
            for param in function.params:
                info = type_info(param.type)
                if info is not None and info.size_bytes != param.size_bytes:
                    raise CubinCorruptError(
                        f"{build.label}: parameter {param.name} of {offered} is {param.type} "
                        f"({info.size_bytes} bytes) with {param.size_bytes} bytes in the manifest"
                    )
            known = functions.setdefault(offered, function)
            if [(p.type, p.size_bytes) for p in known.params] != [
                (p.type, p.size_bytes) for p in function.params
            ]:
                raise FunctionNotFoundError(
                    f"{offered} takes different parameters in the builds of {name}: export "
                    "one arch at a time"
                )
    if not functions:
        raise FunctionNotFoundError(f"{name} has no function to export")
    return functions


def _spelled(build: Build) -> str:
    """'sm80', or 'sm90 (sm_90a)' where that says more."""
    if build.is_ptx:
        return f"{build.arch} on (PTX)"
    says_more = build.target[-1].isalpha() and not build.arch[-1].isalpha()
    return f"{build.arch} ({build.target})" if says_more else build.arch


def _body(index: int, function: FunctionEntry) -> str:
    values = values_of(function.params)
    argument = "params" if values else "NULL"
    return (
        local_array("void* params", values)
        + f"{SHAPE}    return launch({index}, stream, &shape, {argument});\n"
    )


def _image(build: Build) -> str:
    return checked_name(f"image_{'ptx_' if build.is_ptx else ''}{build.arch}", "the image")


def _array(build: Build) -> str:
    data = build.read() + (b"\0" if build.is_ptx else b"")
    words = np.frombuffer(data + b"\0" * (-len(data) % 8), "<u8").tolist()
    lines = [
        "    " + ", ".join(f"0x{word:016x}ull" for word in words[i : i + _WORDS_A_LINE])
        for i in range(0, len(words), _WORDS_A_LINE)
    ]
    return f"static const uint64_t {_image(build)}[] = {{\n" + ",\n".join(lines) + "\n};\n"


def _row(build: Build, offered: Sequence[str]) -> str:
    major, minor, suffix = parse_target(build.target)
    runs_on = "LATER" if build.is_ptx and not suffix else "EXACT" if suffix == "a" else "SAME_MAJOR"
    numbers = f"{major}, {minor}, {runs_on}"
    built = [
        f"{{1, {build.functions[name].static_shared_bytes}}}"
        if name in build.functions
        else "{0, 0}"
        for name in offered
    ]
    table = wrapped(built, "      ").strip()
    return f"    {{{_image(build)}, {numbers}, 0, NULL, {{NULL}}, {{0}},\n     {{{table}}}}}"
