"""A Triton kernel in C: a function of its declared arguments alone, what a launch needs settled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...collection.manifest import FunctionEntry, ParamEntry
from ...errors import FunctionNotFoundError
from ...signature.c_types import type_info
from ..triton import Argument, Metadata, TritonFunction
from ..triton.signature import c_type, part_names
from . import tensor_text
from .images import Build
from .source import common_names, header_names, source_text
from .text import (
    checked_name,
    declare,
    fill,
    functions_used,
    is_by_address,
    is_pointer,
    local_array,
    names_of,
    prototype,
    values_of,
)

_PORTABLE_CLUSTER = 8
_SWIZZLES = ("NONE", "32B", "64B", "128B")
# PTX's number of a TMA element type -> the driver's name of it.
_TMA_TYPES = {
    0: "UINT8", 1: "UINT16", 2: "UINT32", 3: "INT32", 4: "UINT64", 5: "INT64", 6: "FLOAT16",
    7: "FLOAT32", 9: "FLOAT64", 10: "BFLOAT16",
}  # fmt: skip
_NO_TMA = "(CUtensorMapDataType)0, (CUtensorMapSwizzle)0"
TENSOR = "kernel_hub_tensor"


def arguments_of(arguments: Sequence[Argument], sizes: Mapping[str, int]) -> tuple[ParamEntry, ...]:
    """The declared arguments as C passes them. sizes: bytes of those of unknown type."""
    found = []
    for argument in arguments:
        kind = TENSOR if argument.is_descriptor else c_type(argument.type)
        info = type_info(kind)
        # Of a tensor the parameters differ by architecture; C passes the one struct.
        unknown = 0 if kind == TENSOR else sizes.get(argument.name, 0)
        size_bytes = info.size_bytes if info else unknown
        found.append(ParamEntry(argument.name, kind, size_bytes, 0))
    return tuple(found)


def first_of(has_grid: bool) -> tuple[str, ...]:
    """What a function takes before the arguments."""
    return ("CUstream stream",) if has_grid else ("CUstream stream", "kernel_hub_dim3 programs")


def render_triton(
    name: str,
    built: Sequence[tuple[Build, TritonFunction]],
    *,
    prefix: str = "",
    dlpack: bool = False,
    tvm_ffi: bool = False,
) -> dict[str, str]:
    """The files of one configuration, `built` for each architecture, the nearest first."""
    builds = [build for build, _ in built]
    functions = [function for _, function in built]
    newest = functions[0]
    params = _params(name, newest)
    if any(_params(name, other) != params for other in functions[1:]):
        raise FunctionNotFoundError(
            f"{name} takes different arguments in its builds: export one arch at a time"
        )
    checked_name(name, "cubin")
    entry = FunctionEntry(name, params, 0, 0, 0, None, None, None, None, False)
    first = first_of(newest.grid is not None)
    common = common_names(name, prefix, builds)
    text = prototype(prefix + name, [*first, *map(declare, params, names_of(params))])
    on_tensors = tensor_text.declarations([entry], prefix, first) if dlpack else {}
    declaration = _comment(newest) + f"{text};\n"
    declaration += f"{on_tensors[name]};\n" if dlpack else ""
    header = fill(
        "export_triton.h.in",
        {
            "EXAMPLE": prefix + name,
            "FIRST": "stream, " if newest.grid else "stream, programs, ",
            "EXTRA": fill("export_dlpack.h.in", {}) if dlpack else "",
            **header_names(name, prefix, dlpack, [declaration]),
            "TENSOR": fill("export_tensor.h.in", {}) if _has_tensors(params) else "",
            **common,
        },
    )
    kept = newest.grid is not None
    programs = "memset(&shape, 0, sizeof shape)" if kept else "shape.programs = programs"
    shape = f"    shape_t shape;\n    {programs};\n"
    values = values_of(params)
    body = local_array("void* given", values)
    body += f"{shape}    return launch(0, stream, &shape, {'given' if values else 'NULL'});\n"
    definitions = [f"{text} {{\n{body}}}\n"]
    if dlpack:
        definitions.append(tensor_text.dlpack_source([entry], common, first, shape))
    if tvm_ffi:
        takes = "nothing" if newest.grid else "programs"
        definitions.append(tensor_text.tvm_ffi_source([entry], common, takes))
    symbols = [newest.spec.symbol or newest.spec.name]
    if {build.symbol(symbols[0]) for build in builds} != {*symbols}:
        raise FunctionNotFoundError(f"{name} has other names in some builds: export one at a time")
    offered = [next(iter(builds[0].functions))]
    launch = _launch(functions, params)
    source = source_text(common, builds, offered, symbols, launch, definitions, dlpack, tvm_ffi)
    return {f"{prefix}{name}.h": header, f"{prefix}{name}.c": source}


def _params(name: str, function: TritonFunction) -> tuple[ParamEntry, ...]:
    sizes = {param.name: param.size_bytes for param in function.spec.params or ()}
    return arguments_of(function.arguments, sizes)


def _has_tensors(params: Sequence[ParamEntry]) -> bool:
    return any(param.type == TENSOR for param in params)


def _comment(function: TritonFunction) -> str:
    """What a header says of the configuration."""
    said = [f"{function.metadata.num_warps} warps a block"]
    constants = [f"{name} = {value}" for name, value in function.constexprs.items()]
    if constants:
        said.append(f"compiled for {', '.join(constants)}")
    by_divisor: dict[int, list[str]] = {}
    for argument in function.arguments:
        if argument.divisors[0] > 1:
            by_divisor.setdefault(argument.divisors[0], []).append(argument.name)
    said += [f"{divisor} must divide {', '.join(n)}" for divisor, n in by_divisor.items()]
    text = "; ".join(said).replace("*/", "* /").replace("\\", "/")
    grid = f"\n   Programs: {function.grid.text}." if function.grid else ""
    return f"/* {text}.{grid} */\n"


def _launch(functions: Sequence[TritonFunction], params: Sequence[ParamEntry]) -> str:
    """The filled export_triton.c.in."""
    newest = functions[0]
    layouts: list[tuple[str, ...]] = []
    rows = []
    for function in functions:
        layout = _layout(function)
        if layout not in layouts:
            layouts.append(layout)
        rows.append(_how(function, layouts.index(layout)))
    checks = _checks(functions, params)
    grid = _grid(newest, params)
    tensors = _has_tensors(params)
    expand = "export_triton_tensors.c.in" if tensors else "export_triton_plain.c.in"
    separator = ",\n        "
    arguments = ",\n".join(f"    {{\n        {separator.join(each)}}}" for each in layouts)
    most = max(_num_params(function) for function in functions)
    helpers = fill("export_integer.c.in", {}) + "\n" if "integer(" in checks + grid else ""
    helpers += functions_used("export_grid.c.in", grid)
    return fill(
        "export_triton.c.in",
        {
            "HOWS": ",\n".join(rows),
            "NUM_ARGUMENTS": str(len(params)),
            "MOST_PARAMS": str(most),
            "MOST_SHARED_BYTES": str(max(f.metadata.shared_bytes for f in functions)),
            "HELPERS": f"{helpers}\n" if helpers else "",
            "CHECKS": checks,
            "GRID": grid,
            "EXPAND": fill(expand, {"NUM_LAYOUTS": str(len(layouts)), "ARGUMENTS": arguments}),
            "EXPANDED": "    expanded_t expanded[NUM_ARGUMENTS];\n" if tensors else "",
            "EXPANDED_AT": "expanded, " if tensors else "",
        },
    )


def _num_params(function: TritonFunction) -> int:
    return sum(max(1, len(argument.parts)) for argument in function.arguments)


def _how(function: TritonFunction, layout: int) -> str:
    metadata: Metadata = function.metadata
    attribute = metadata.cluster or (0, 0, 0)
    if function.spec.cluster is not None and metadata.num_ctas <= _PORTABLE_CLUSTER:
        attribute = (0, 0, 0)
    numbers = [
        *(metadata.block_threads, metadata.shared_bytes),
        _braced(metadata.program_blocks),
        _braced(attribute),
        *(int(metadata.cooperative), int(metadata.programmatic), metadata.num_hidden, layout),
        *(metadata.global_scratch_bytes, metadata.global_scratch_align),
    ]
    return f"    {_braced(numbers)}"


def _braced(items: Any) -> str:
    return "{" + ", ".join(map(str, items)) + "}"


def _layout(function: TritonFunction) -> tuple[str, ...]:
    """The rows of argument_t of a build."""
    maps = iter(function.metadata.maps)
    rows = []
    for argument in function.arguments:
        if not argument.is_descriptor:
            rows.append(f"{{ITSELF, 0, 0, 0, {_NO_TMA}, {{0}}}}")
            continue
        rank = sum(part == "i32" for part in argument.parts)
        if argument.parts[0] != "nvTmaDesc":
            flags = argument.parts.count("i1")
            rows.append(f"{{PARTS, {rank}, {flags}, 0, {_NO_TMA}, {{0}}}}")
            continue
        meta = next(maps)
        rows.append(
            f"{{MAP, {rank}, 0, {meta.elem_bytes}, "
            f"CU_TENSOR_MAP_DATA_TYPE_{_TMA_TYPES[meta.elem_type]}, "
            f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[meta.swizzle]}, {_braced(meta.block)}}}"
        )
    return tuple(rows)


def _checks(functions: Sequence[TritonFunction], params: Sequence[ParamEntry]) -> str:
    """Statements that refuse what a build was not compiled for."""
    lines = []
    for index, param in enumerate(params):
        parts = [function.arguments[index] for function in functions]
        if param.type == TENSOR:
            lines += _tensor_checks(index, parts)
            continue
        divisor = max(argument.divisors[0] for argument in parts)
        if divisor > 1 and not is_by_address(param):
            code = "MISALIGNED_ADDRESS" if is_pointer(param) else "INVALID_VALUE"
            lines.append(_refusal(f"{_integer(index, param)} & {divisor - 1}", code))
    return "".join(lines)


def _tensor_checks(index: int, parts: Sequence[Argument]) -> list[str]:
    """Of a tensor's address, lengths and strides, by the parameters that they become."""
    needs: dict[str, int] = {}
    for argument in parts:
        for name, divisor in zip(part_names(argument), argument.divisors, strict=True):
            field = name.removeprefix(argument.name).removesuffix(" (again)").lstrip(".")
            needs[field] = max(divisor, needs.get(field, 1))
    tensor = f"((const kernel_hub_tensor*)given[{index}])"
    lines = []
    for field, divisor in needs.items():
        if divisor > 1 and field.partition("[")[0] in ("", "shape", "strides"):
            value = f"{tensor}->{field or 'base'}"
            code = "INVALID_VALUE" if field else "MISALIGNED_ADDRESS"
            lines.append(_refusal(f"{value} & {divisor - 1}", code))
    return lines


def _refusal(condition: str, code: str) -> str:
    return f"    if ({condition}) {{\n        return CUDA_ERROR_{code};\n    }}\n"


def _integer(index: int, param: ParamEntry) -> str:
    """A whole number or address among the given ones, as C reads it."""
    info = type_info(param.type)
    signed = int(info is not None and info.kind == "int")
    return f"integer(given[{index}], {param.size_bytes}, {signed})"


def _grid(function: TritonFunction, params: Sequence[ParamEntry]) -> str:
    """The body of count_programs."""
    if function.grid is None:
        return "    (void)given;\n    *programs = shape->programs;\n    return CUDA_SUCCESS;\n"
    places = {param.name: index for index, param in enumerate(params)}

    def spell(name: str) -> str:
        if name in places:
            return _integer(places[name], params[places[name]])
        return f"INT64_C({int(function.constexprs[name])})"

    return grid_body(function.grid, spell)


def grid_body(grid: Any, spell: Callable[[str], str]) -> str:
    """Statements that compute `programs` and return."""
    sizes = grid.as_c(spell)
    lines = [
        f"    const int64_t {axis} = {size};\n" for axis, size in zip("xyz", sizes, strict=True)
    ]
    return (
        "    int bad = 0;\n"
        + "".join(lines)
        + "    (void)given;\n    (void)shape;\n"
        + "    if (bad || x < 0 || y < 0 || z < 0 || x > 0x7fffffff || y > 0x7fffffff || "
        + "z > 0x7fffffff) {\n        return CUDA_ERROR_INVALID_VALUE;\n    }\n"
        + "".join(f"    programs->{axis} = (unsigned int){axis};\n" for axis in "xyz")
        + "    return CUDA_SUCCESS;\n"
    )
