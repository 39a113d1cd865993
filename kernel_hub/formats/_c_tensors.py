"""The exported functions that take tensors: DLPack entries in C, and TVM-FFI functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .._dtypes import DTYPES
from ..ctypes_table import type_info
from ..manifest import FunctionEntry, ParamEntry
from ._c_text import (
    declare,
    fill,
    is_by_address,
    is_pointer,
    local_array,
    names_of,
    prototype,
    values_of,
)

_KINDS = {"int": "SIGNED", "uint": "UNSIGNED", "bool": "UNSIGNED", "float": "FLOATING"}


def declarations(functions: Sequence[FunctionEntry], prefix: str) -> dict[str, str]:
    """The prototype of each function's DLPack entry, by the function's name."""
    return {
        function.name: prototype(
            f"{prefix}{function.name}_dlpack",
            (
                declare(param, name, pointer="const DLTensor*")
                for param, name in zip(function.params, names_of(function.params), strict=True)
            ),
        )
        for function in functions
    }


def dlpack_source(functions: Sequence[FunctionEntry], common: Mapping[str, str]) -> str:
    """The DLPack entries and the tables that they check by."""
    # Most functions of a cubin take the same parameters: a table for each list of them.
    tables: dict[tuple[str, ...], str] = {}
    for function in functions:
        tables.setdefault(_rows(function.params), f"params_{len(tables)}")
    most = max(len(rows) for rows in tables) or 1
    texts = [f"enum {{ MAX_PARAMS = {most} }};\n"]
    for rows, name in tables.items():
        if rows:
            listed = ",\n    ".join(rows)
            texts.append(f"static const param_t {name}[] = {{\n    {listed}\n}};\n")
    signatures = []
    for function in functions:
        rows = _rows(function.params)
        signatures.append(f"    {{{len(rows)}, {tables[rows] if rows else 'NULL'}}}")
    given = declarations(functions, common["PREFIX"])
    entries = [
        f"\n{given[function.name]} {{\n{_body(index, function)}}}\n"
        for index, function in enumerate(functions)
    ]
    return fill(
        "export_dlpack.c.in",
        {
            **common,
            "TABLES": "\n".join(texts),
            "SIGNATURES": ",\n".join(signatures),
            "ENTRIES": "".join(entries),
        },
    )


def tvm_ffi_source(functions: Sequence[FunctionEntry], common: Mapping[str, str]) -> str:
    """The TVM-FFI functions, which use what `dlpack_source` gives."""
    prefix = common["PREFIX"]
    exports = (f"EXPORTED({i}, {prefix}{f.name})" for i, f in enumerate(functions))
    return fill("export_tvm_ffi.c.in", {**common, "EXPORTS": "\n".join(exports)})


def _rows(params: Sequence[ParamEntry]) -> tuple[str, ...]:
    strides = [param.name for param in params if param.name.endswith("_stride")]
    return tuple(
        f'{{"{name}", {_kind(param)}, {int(_has_strides(param.name, strides))}}}'
        for param, name in zip(params, names_of(params), strict=True)
    )


def _kind(param: ParamEntry) -> str:
    """What is given for a parameter, and DLPack's code and bits for it."""
    info = type_info(param.type)
    if is_by_address(param) or info is None:
        return "BY_ADDRESS, 0, 0"
    dtype = DTYPES.get(info.dtype or "")
    if is_pointer(param):
        known = f"{dtype.dlpack_code}, {8 * dtype.size_bytes}" if dtype else "0, 0"
        return f"TENSOR, {known}"
    # 16-bit and smaller floats have no C type: C passes their bits, and so it is here.
    is_number = info.kind != "float" or info.size_bytes >= 4
    kind = _KINDS[info.kind] if is_number else "UNSIGNED"
    return f"{kind}, {dtype.dlpack_code if dtype else 0}, {8 * info.size_bytes}"


def _has_strides(name: str, strides: Sequence[str]) -> bool:
    """By the house's names: `q_token_stride` is of `q`, `k_page_stride` of `k_cache`."""
    first = name.split("_")[0]
    return any(stride.split("_")[0] == first for stride in strides)


def _body(index: int, function: FunctionEntry) -> str:
    names, values = names_of(function.params), values_of(function.params)
    tensors = [name for p, name in zip(function.params, names, strict=True) if is_pointer(p)]
    for number, name in enumerate(tensors):
        values[names.index(name)] = f"&addresses[{number}]"
    addresses = f"    CUdeviceptr addresses[{len(tensors)}];\n" if tensors else ""
    given = f"{'tensors, addresses' if tensors else 'NULL, NULL'}, {'params' if values else 'NULL'}"
    return (
        local_array("const DLTensor* const tensors", tensors)
        + addresses
        + local_array("void* params", values)
        + f"    return launch_tensors({index}, stream, grid, block, shared_bytes, {given});\n"
    )
