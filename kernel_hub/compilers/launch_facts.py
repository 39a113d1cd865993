"""What sources state of their kernels' launches, out of a cubin of constants.

`csrc/include/kernel_hub/launch_facts.cuh` makes it: of each kernel its numbers and the rule of its
grid, and once the numbers' names in their order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from ..collection.manifest import LaunchFacts
from ..cubin import read_cubin
from ..errors import KernelHubError

_FIELDS, _FACTS, _GRID = "kernel_hub_launch_fields", "_launch_facts", "_launch_grid"
_NOT_STATED = -1


def read_launch_facts(
    image: bytes | None, functions: Iterable[str], where: str
) -> dict[str, LaunchFacts]:
    """{function: its facts}; empty for an image None, that of a source which states nothing.

    Raises KernelHubError for a kernel that is left out, where others are described.
    """
    if image is None:
        return {}
    variables = _variables(image)
    if _FIELDS not in variables:
        return {}
    names = _text(variables[_FIELDS]).split()
    found = {}
    for function in functions:
        if function + _FACTS not in variables:
            raise KernelHubError(f"{where}: {function} is exported without a DESCRIBED around it")
        numbers = struct.unpack(f"<{len(names)}i", variables[function + _FACTS])
        stated = {n: v for n, v in zip(names, numbers, strict=True) if v != _NOT_STATED}
        if negative := {name: value for name, value in stated.items() if value < 0}:
            raise KernelHubError(f"{where}: {function} states {negative}: nothing below 0")
        found[function] = _facts(stated, _text(variables[function + _GRID]))
    return found


def _facts(stated: dict[str, int], grid: str) -> LaunchFacts:
    x, y, z = (stated.pop(name, 0) for name in ("threads", "threads_y", "threads_z"))
    block = (x, y or 1, z or 1) if x else None
    return LaunchFacts(grid, block, stated.pop("shared_bytes", None), stated)


def _variables(image: bytes) -> dict[str, bytes]:
    info = read_cubin(image)
    starts = {section.name: section.offset for section in info.sections}
    found = {}
    for name, variable in info.globals.items():
        start = starts[variable.section] + variable.offset_bytes
        found[name] = image[start : start + variable.size_bytes]
    return found


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode()
