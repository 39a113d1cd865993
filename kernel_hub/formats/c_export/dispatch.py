"""The configurations of a Triton kernel as one function in C, chosen as in Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ... import __version__
from ...collection.manifest import ParamEntry
from ...collection.resolve import parse_target
from ...errors import ParamsError
from ..triton import TritonCollection
from ..triton.ahead import tuned_file
from ..triton.ahead.family import Algo, Family, FamilyVariant
from .images import Build
from .text import checked_name, declare, fill, is_by_address, is_pointer, names_of, prototype
from .triton_source import TENSOR, arguments_of, first_of

_LOCALS = ("result", "found", "fits", "best", "i", "launch_algo", "best_algo")


def render_dispatcher(
    collection: TritonCollection,
    family: Family,
    builds: Mapping[str, Sequence[Build]],
    *,
    has_grid: bool,
    prefix: str = "",
) -> dict[str, str]:
    """The files of `family`, whose configurations' own files are beside them.

    builds: of each configuration. has_grid: whether all of them were built with a grid.
    """
    name = checked_name(family.name, "kernel")
    params = arguments_of(family.arguments, {})
    # What the functions call, and their own variables.
    spelled = names_of(params, (*(prefix + each for each in builds), *_LOCALS))
    first = first_of(has_grid)
    declared = list(map(declare, params, spelled))
    given = [text.split()[-1] for text in first] + spelled
    whole = [*first, *declared]
    table = _table(collection, family, builds)
    common = {"NAME": name, "PREFIX": prefix, "VERSION": __version__}
    values = {
        **common,
        "GUARD": f"KERNEL_HUB_{prefix.upper()}{name.upper()}_KERNEL_H",
        "INCLUDES": "".join(f'#include "{prefix}{each}.h"\n' for each in builds),
        "ALGOS": "".join(
            f"\n     {number}  {algo.name}: {_shown(algo)}"
            for number, algo in enumerate(family.algos)
        ),
        "TUNED": _said(collection, family, table),
        "CHOSEN": prototype(f"{prefix}{name}", [*whole, "int algo"]),
        "DEFAULT": prototype(f"{prefix}{name}_default", whole),
    }
    header = fill("export_dispatch.h.in", values)
    keys = table.keys if table else ()
    sizes = [f"(int64_t){spelled[family.names.index(key)]}" for key in keys]
    cases = "".join(_case(i, a, params, spelled, first, prefix) for i, a in enumerate(family.algos))
    source = fill(
        "export_dispatch.c.in",
        {
            **values,
            "NUM_ALGOS": str(len(family.algos)),
            "ALGO_NAMES": ",\n".join(f'    "{algo.name}"' for algo in family.algos),
            "TABLE": _table_text(family, table, builds) if table else "",
            "WHOLE": ",\n    ".join(whole),
            "CASES": cases,
            "GIVEN": ", ".join(given),
            "BEST": f"best_algo({', '.join(sizes)})" if table else "-1",
            "LOADS": "".join(_each("load", prefix, each) for each in builds),
            "UNLOADS": "".join(_each("unload", prefix, each) for each in builds),
        },
    )
    return {f"{prefix}{name}.h": header, f"{prefix}{name}.c": source}


def _shown(algo: Algo) -> str:
    return ", ".join(variant.name for variant in algo.variants)


def _each(what: str, prefix: str, name: str) -> str:
    return f"    result = {what}ed({prefix}{name}_{what}(), result);\n"


def _case(
    number: int,
    algo: Algo,
    params: Sequence[ParamEntry],
    spelled: Sequence[str],
    first: Sequence[str],
    prefix: str,
) -> str:
    """The configurations of an algo, those that assume the most first."""
    lines = [f"    case {number}:\n"]
    leading = [text.split()[-1] for text in first]
    for variant in algo.variants:
        conditions = _conditions(variant, params, spelled)
        call = ", ".join([*leading, *(spelled[i] for i in variant.passed)])
        body = f"{prefix}{variant.name}({call})"
        lines += [
            f"        if ({' && '.join(conditions) or '1'}) {{\n",
            f"            result = {body};\n",
            "            if (result != CUDA_ERROR_NO_BINARY_FOR_GPU) {\n",
            "                *fits = 1;\n                return result;\n            }\n",
            "        }\n",
        ]
    return "".join([*lines, "        break;\n"])


def _conditions(
    variant: FamilyVariant, params: Sequence[ParamEntry], spelled: Sequence[str]
) -> list[str]:
    found = []
    for place, constant in variant.equals.items():
        found.append(_equals(params[place], spelled[place], constant, variant.name))
    found += [f"!({_equals(params[i], spelled[i], None, variant.name)})" for i in variant.present]
    for place, divisor in variant.divisors.items():
        if not is_by_address(params[place]):
            found.append(f"({spelled[place]} & {divisor - 1}) == 0")
    return found


def _equals(param: ParamEntry, name: str, constant: Any, configuration: str) -> str:
    """Whether an argument is what is compiled in, in C."""
    if constant is None and (is_pointer(param) or param.type == TENSOR):
        return f"{name} == {'NULL' if param.type == TENSOR else '0'}"
    if isinstance(constant, (bool, int)) and not is_pointer(param) and not is_by_address(param):
        return f"{name} == {int(constant)}"
    is_float = isinstance(constant, float) and math.isfinite(constant)
    if is_float and param.type in ("float", "double"):
        return f"{name} == {constant!r}{'f' if param.type == 'float' else ''}"
    raise ParamsError(
        f"{configuration}: {param.name} is compiled to be {constant!r}, which C cannot tell from "
        f"other values of {param.type}: export the configurations by their own names"
    )


# -- the tuned table


def _table(
    collection: TritonCollection, family: Family, builds: Mapping[str, Sequence[Build]]
) -> tuned_file.TunedTable | None:
    """What was measured of the kernel, where its keys are arguments that are whole numbers."""
    table = tuned_file.read(collection).get(family.name)
    if table is None:
        return None
    numbers = {a.name for a in family.arguments if (a.type or "").lstrip("iu").isdigit()}
    if not {*table.keys} <= numbers:
        return None
    for section in table.sections:
        for choice in section.choices.values():
            tuned_file.check_image(collection, choice, f"{tuned_file.FILE}: {family.name}")
    return table


def _said(collection: TritonCollection, family: Family, table: Any) -> str:
    if table:
        gpus = ", ".join(section.gpu.name for section in table.sections)
        return (
            f"that which was the fastest for such {', '.join(table.keys)} (measured on {gpus}; on "
            "other GPUs of an architecture, and of others, what comes nearest)"
        )
    if family.name in tuned_file.read(collection):
        return "the first (the tuned table goes by sizes that are no arguments)"
    return "the first"


def _table_text(
    family: Family, table: tuned_file.TunedTable, builds: Mapping[str, Sequence[Build]]
) -> str:
    sections, rows, targets = [], [], []
    for number, section in enumerate(table.sections):
        choices = [
            (bucket, choice)
            for bucket, choice in sorted(section.choices.items())
            if choice.function in builds
        ]
        if not choices:
            continue
        listed = []
        for bucket, choice in choices:
            built = [_runs_on(build) for build in builds[choice.function]]
            row = f"{{{', '.join(built)}}}"
            if row not in targets:
                targets.append(row)
            bits = ", ".join(map(str, bucket))
            algo = family.algo_of(choice.function)
            listed.append(f"    {{{{{bits}}}, {algo}, targets_{targets.index(row)}, {len(built)}}}")
        rows.append(
            f"static const choice_t choices_{number}[] = {{\n" + ",\n".join(listed) + "\n};\n"
        )
        gpu = section.gpu.name.replace("\\", "\\\\").replace('"', '\\"')
        major, minor = section.gpu.compute_capability
        sections.append(
            f'    {{{major}, {minor}, {section.gpu.num_sms}, "{gpu}", choices_{number}, '
            f"{len(choices)}}}"
        )
    lists = [f"static const target_t targets_{i}[] = {row};\n" for i, row in enumerate(targets)]
    keys = len(table.keys)
    return fill(
        "export_tuned.c.in",
        {
            "NUM_KEYS": str(keys),
            "TARGETS": "".join(lists),
            "CHOICES": "\n".join(rows),
            "NUM_SECTIONS": str(len(sections)),
            "SECTIONS": ",\n".join(sections),
            "SIZES": ", ".join(f"int64_t size_{i}" for i in range(keys)),
            "BITS": "\n".join(f"    bits[{i}] = bits_of(size_{i});" for i in range(keys)),
        },
    )


def _runs_on(build: Build) -> str:
    major, minor, suffix = parse_target(build.target)
    return f"{{{major}, {minor}, {int(suffix == 'a')}}}"
