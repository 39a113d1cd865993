"""The arguments in Triton's own intermediate form (`.ttir`, `.ttgir`). Reads text only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ...errors import CubinCorruptError
from .signature import MAX_ARGUMENTS, MAX_DIVISOR, SCALARS, Argument, descriptor_parts, is_divisor

# MLIR has integers without a sign.
_MLIR = {"f16": "fp16", "f32": "fp32", "f64": "fp64", "f8E4M3FN": "fp8e4nv", "f8E5M2": "fp8e5"}

_ARGUMENT = re.compile(r"%([\w.$-]+)\s*:\s*")
_NAMED = re.compile(r'loc\("([A-Za-z_][\w.]*)"[(\s)]')
_DIVISOR = re.compile(r"tt\.divisibility\s*=\s*([^\s:,}]*)")
_POINTER = re.compile(r"!tt\.ptr<([\w!.<>]+?)(?:,\s*\d+)?>")
_TENSORDESC = re.compile(r"!tt\.tensordesc<(?:tensor<)?((?:\d+x){1,5})(\w+)[\w\s#,=.]*>{1,2}")


def read_ttir(text: str, function: str, label: str) -> tuple[Argument, ...]:
    """The arguments of `function` in Triton's own intermediate form.

    Names are there from Triton 3.5 on, before that they are arg0, arg1, …
    Raises CubinCorruptError naming `label` where there is no such function or its list is damaged.
    """
    start = re.search(rf"tt\.func\s+public\s+@\"?{re.escape(function)}\"?\s*\(", text)
    if start is None:
        raise CubinCorruptError(f"{label} has no public function {function!r}")
    flat: list[tuple[str | None, str, int]] = []
    for item in _split(text, start.end(), f"{label}: {function}"):
        match = _ARGUMENT.match(item)
        if match is None or len(flat) == MAX_ARGUMENTS:
            raise CubinCorruptError(f"{label}: argument {len(flat)} of {function}: {item[:60]!r}")
        kind = _read_type(item[match.end() :])
        if kind is None:
            raise CubinCorruptError(
                f"{label}: argument {len(flat)} of {function} has a type that is not known here: "
                f"{item[match.end() : match.end() + 60]!r}"
            )
        named = _NAMED.search(item)
        assumed = _DIVISOR.search(item)
        said = assumed[1] if assumed else "1"
        divisor = int(said) if re.fullmatch(r"\d{1,9}", said) else 0
        if not is_divisor(divisor):
            raise CubinCorruptError(
                f"{label}: argument {len(flat)} of {function}: tt.divisibility is {said:.40}; "
                f"expected a power of two up to {MAX_DIVISOR:,}"
            )
        flat.append((named[1] if named else None, kind, divisor))
    return tuple(_group(flat))


def _split(text: str, at: int, where: str) -> list[str]:
    """The comma-separated items up to the parenthesis that ends the list."""
    items: list[str] = []
    depth, start, quoted = 0, at, False
    for position in range(at, min(len(text), at + (1 << 20))):
        char = text[position]
        if char == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif char in "([{<":
            depth += 1
        elif char in ")]}>":
            if char == ")" and depth == 0:
                last = text[start:position].strip()
                return [*items, last] if last else items
            depth -= 1
        elif char == "," and depth == 0:
            items.append(text[start:position].strip())
            start = position + 1
    raise CubinCorruptError(f"{where}: its list of arguments has no end")


def _read_type(text: str) -> str | None:
    """An MLIR type as Triton spells it; None for one that is not known."""
    if match := _TENSORDESC.match(text):
        block = match[1].rstrip("x").replace("x", ",")
        return f"tensordesc<{_MLIR.get(match[2], match[2])}[{block}]>"
    if match := _POINTER.match(text):
        return "*" + _MLIR.get(match[1], match[1])
    match = re.match(r"\w+", text)
    kind = _MLIR.get(match[0], match[0]) if match else ""
    return kind if kind in SCALARS else None


def _group(flat: Sequence[tuple[str | None, str, int]]) -> list[Argument]:
    """The flat list with the parts of each tensor descriptor put together, names made unique."""
    found: list[Argument] = []
    at = 0
    while at < len(flat):
        name, kind, divisor = flat[at]
        parts = _descriptor_at(flat, at)
        if parts is not None:
            size = len(parts)
            declared = kind if kind.startswith("tensordesc") else f"tensordesc<{kind[1:]}[]>"
            divisors = tuple(item[2] for item in flat[at : at + size])
            found.append(Argument(name or f"arg{len(found)}", declared, divisors, parts))
        else:
            size = 1
            found.append(Argument(name or f"arg{len(found)}", kind, (divisor,)))
        at += size
    return _unique(found)


def _descriptor_at(flat: Sequence[tuple[str | None, str, int]], at: int) -> tuple[str, ...] | None:
    """The parts of the descriptor that begins at `at`, or None where none does."""
    name, kind = flat[at][:2]
    if not kind.startswith("tensordesc"):
        # Without TMA a descriptor is a pointer and numbers that all bear its name; names are what
        # tells it from a pointer with such numbers after it.
        if name is None or not kind.startswith("*"):
            return None
        first, ranks = kind, list(range(1, 6))
    else:
        first, ranks = "nvTmaDesc", [kind.count(",") + 1]
    follows = [item[1] for item in flat[at + 1 : at + 64]]
    same = 0
    for other, _, _ in flat[at + 1 :]:
        if name is not None and other != name and not (other or "").startswith(name + "."):
            break
        same += 1
    for rank in ranks:
        for num_flags in (0,) if first == "nvTmaDesc" else (2, 1, 0):
            parts = descriptor_parts(first, rank, num_flags)
            if len(parts) - 1 <= same and tuple(follows[: len(parts) - 1]) == parts[1:]:
                return parts
    return None


def _unique(arguments: list[Argument]) -> list[Argument]:
    """Elements of a tuple argument bear one name: they become name.0, name.1, …"""
    counts: dict[str, int] = {}
    for argument in arguments:
        counts[argument.name] = counts.get(argument.name, 0) + 1
    seen: dict[str, int] = {}
    named = []
    for argument in arguments:
        name = argument.name
        if counts[name] > 1:
            seen[name] = seen.get(name, -1) + 1
            argument = replace(argument, name=f"{name}.{seen[name]}")
        named.append(argument)
    return named
