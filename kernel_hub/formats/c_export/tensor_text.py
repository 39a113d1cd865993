"""The exported functions that take tensors: DLPack entries in C, and TVM-FFI functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...arrays.dtypes import DTYPES
from ...collection.manifest import FunctionEntry, ParamEntry
from ...signature.c_types import type_info
from .text import (
    declare,
    fill,
    is_by_address,
    is_pointer,
    local_array,
    names_of,
    prototype,
    values_of,
)

# What a TVM-FFI function takes before the parameters, and how that is read: not 0 where it fails.
_FIRST = {
    "plain": (
        ("grid", "block", "shared_bytes"),
        """    static const param_t shared_bytes = {"shared_bytes", UNSIGNED, 1, 32, 0};
    value_t shared = {0};
    void* unused;
    int failed = read_dim3(function, "grid", &args[0], &shape->grid) ||
                 read_dim3(function, "block", &args[1], &shape->block) ||
                 read_value(function, &shared_bytes, &args[2], device, &shared, &unused);
    shape->shared_bytes = (unsigned int)shared.integer;
    return failed;
""",
    ),
    "programs": (
        ("programs",),
        """    (void)device;
    return read_dim3(function, "programs", &args[0], &shape->programs);
""",
    ),
    "nothing": (
        (),
        """    (void)function;
    (void)args;
    (void)device;
    memset(shape, 0, sizeof *shape);
    return 0;
""",
    ),
}
_INVALID = {
    "plain": "grid, block or shared_bytes are beyond a limit of the function or the device",
    "triton": "the grid is beyond a limit, or 16 does not divide an argument as the kernel assumes",
}
_KINDS = {"int": "SIGNED", "uint": "UNSIGNED", "bool": "UNSIGNED", "float": "FLOATING"}


def declarations(
    functions: Sequence[FunctionEntry], prefix: str, first: Sequence[str]
) -> dict[str, str]:
    """The prototype of each function's DLPack entry, by the function's name.

    first: what it takes before its parameters.
    """
    return {
        function.name: prototype(
            f"{prefix}{function.name}_dlpack",
            [
                *first,
                *(
                    declare(param, name, pointer="const DLTensor*")
                    for param, name in zip(function.params, names_of(function.params), strict=True)
                ),
            ],
        )
        for function in functions
    }


def dlpack_source(
    functions: Sequence[FunctionEntry], common: Mapping[str, str], first: Sequence[str], shape: str
) -> str:
    """The DLPack entries and the tables that they check by. shape: makes a shape_t of `first`."""
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
    given = declarations(functions, common["PREFIX"], first)
    entries = [
        f"\n{given[function.name]} {{\n{_body(index, function, shape)}}}\n"
        for index, function in enumerate(functions)
    ]
    return fill(
        "export_dlpack.c.in",
        {
            **common,
            "TABLES": "\n".join(texts),
            "SIGNATURES": ",\n".join(signatures),
            "ENTRIES": "".join(entries),
            "INVALID": _INVALID["plain" if "grid" in shape else "triton"],
        },
    )


def tvm_ffi_source(
    functions: Sequence[FunctionEntry], common: Mapping[str, str], takes: str
) -> str:
    """The TVM-FFI functions, which use what `dlpack_source` gives.

    takes: before the parameters 'plain' grid, block and shared memory, 'programs', or 'nothing'.
    """
    prefix = common["PREFIX"]
    exports = (f"EXPORTED({i}, {prefix}{f.name})" for i, f in enumerate(functions))
    first, read = _FIRST[takes]
    values = {
        "EXPORTS": "\n".join(exports),
        "FIRST": "".join(f"{name}, " for name in first),
        "READ_DIM3": fill("export_tvm_ffi_dim3.c.in", {}) if first else "",
        "READ_SHAPE": fill("export_tvm_ffi_shape.c.in", {"READ": read, "FIRST": str(len(first))}),
    }
    return fill("export_tvm_ffi.c.in", {**common, **values})


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


def _body(index: int, function: FunctionEntry, shape: str) -> str:
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
        + f"{shape}    return launch_tensors({index}, stream, &shape, {given});\n"
    )
