"""The JSON of measured choices: what a file may say, reading it with full messages, writing it.

Knows no op and no GPU: what is right for an op is in the `Layout` that comes with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import TableError

FORMAT = 1
_ARCH = re.compile(r"sm\d{2,3}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_VARIANT = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True)
class Row:
    """A variant and the launch numbers it was measured with."""

    variant: str
    numbers: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return " ".join([self.variant, *(f"{name}={n}" for name, n in self.numbers.items())])


class Choice(NamedTuple):
    """`row` holds for sizes above `above`, up to `most`."""

    above: int
    most: int
    row: Row


@dataclass(frozen=True)
class Layout:
    """What the tables of one op look like.

    op: its name, and the file's; function: how a variant becomes a function's name
    key: sizes that must be equal; bucket: the size of which a row says "up to"
    numbers: launch numbers a row may have -> (least, most)
    check: (row, arch, size of the bucket, **key) -> '' or why the variant cannot run there
    """

    op: str
    function: str
    key: tuple[str, ...]
    bucket: str
    numbers: Mapping[str, tuple[int, int]]
    check: Callable[..., str]

    def text(self, key: Mapping[str, int | str]) -> str:
        """{'n': 6144, 'k': 4096} -> 'n=6144 k=4096'."""
        return " ".join(f"{name}={key[name]}" for name in self.key)

    def parse(self, text: str) -> dict[str, int | str] | None:
        """The other way; None for what `text` does not write."""
        parts = [part.partition("=") for part in text.split(" ")]
        if tuple(name for name, _, _ in parts) != self.key or not all(v for _, _, v in parts):
            return None
        # Python refuses to read numbers of thousands of digits.
        return {name: int(v) if v.isdecimal() and len(v) < 20 else v for name, _, v in parts}


@dataclass(frozen=True)
class GpuSection:
    """What was measured on one GPU."""

    arch: str
    gpu: str
    num_sms: int
    cubins: Mapping[str, str]  # name -> sha256 of what was measured
    choices: dict[str, tuple[Choice, ...]]
    costs: dict[str, dict[str, float]] = field(default_factory=dict)

    def find(self, key: str, size: int) -> Row | None:
        """The choice for `size`, or None where nothing was measured."""
        for choice in self.choices.get(key, ()):
            if choice.above < size <= choice.most:
                return choice.row
        return None


class FileReader:
    """Fields of one JSON object with messages that name file and field."""

    def __init__(self, raw: object, where: str, field_name: str) -> None:
        self.where, self.name = where, field_name
        if not isinstance(raw, dict):
            raise self.bad("", "an object", raw)
        self.raw: dict[str, Any] = raw

    def bad(self, key: str, expected: str, found: object) -> TableError:
        path = ".".join(filter(None, (self.name, key))) or "the whole"
        shown = json.dumps(found, default=str)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return TableError(f"{self.where}: {path}: expected {expected}, found {shown}")

    def only(self, names: Iterable[str]) -> None:
        unknown = [name for name in self.raw if name not in names]
        if unknown:
            raise self.bad(unknown[0], f"one of {', '.join(names)} as a field", unknown[0])

    def text(self, key: str, pattern: re.Pattern[str] | None = None) -> str:
        value = self.raw.get(key)
        if not isinstance(value, str) or not (pattern.fullmatch(value) if pattern else value):
            raise self.bad(key, f"text like {pattern.pattern}" if pattern else "text", value)
        return value

    def number(self, key: str, least: int, most: int) -> int:
        value = self.raw.get(key)
        if type(value) is not int or not least <= value <= most:
            raise self.bad(key, f"a whole number from {least} to {most}", value)
        return value

    def table(self, key: str, *, optional: bool = False) -> dict[str, Any]:
        value = self.raw.get(key, {} if optional else None)
        if not isinstance(value, dict):
            raise self.bad(key, "an object", value)
        return value


_MAX_SIZE = 2**31 - 1


def read(text: str, layout: Layout, *, where: str) -> list[GpuSection]:
    """The sections of a file; raises TableError naming `where`, the field and what is wrong."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TableError(f"{where}: not JSON: {error}") from None
    whole = FileReader(raw, where, "")
    whole.only(("format", "op", "function", "gpus"))
    if whole.raw.get("format") != FORMAT:
        raise whole.bad("format", f"{FORMAT} (another kernel_hub?)", whole.raw.get("format"))
    for name in ("op", "function"):
        if whole.raw.get(name) != getattr(layout, name):
            raise whole.bad(name, repr(getattr(layout, name)), whole.raw.get(name))
    gpus = whole.raw.get("gpus")
    if not isinstance(gpus, list):
        raise whole.bad("gpus", "a list", gpus)
    return [_section(each, layout, where, f"gpus[{i}]") for i, each in enumerate(gpus)]


def _section(raw: object, layout: Layout, where: str, name: str) -> GpuSection:
    reader = FileReader(raw, where, name)
    reader.only(("arch", "gpu", "num_sms", "cubins", "choices", "costs"))
    cubins = reader.table("cubins", optional=True)
    hashes = FileReader(cubins, where, f"{name}.cubins")
    for cubin in cubins:
        hashes.text(cubin, _SHA256)
    arch = reader.text("arch", _ARCH)
    choices = {}
    for text, rows in reader.table("choices", optional=True).items():
        path = f"{name}.choices.{text}"
        key = layout.parse(text)
        if key is None:
            expected = "a key like " + " ".join(f"{part}=…" for part in layout.key)
            raise reader.bad("choices", expected, text)
        choices[text] = _rows(rows, layout, arch, key, FileReader({}, where, path))
    costs: dict[str, dict[str, float]] = {}
    for variant, figures in reader.table("costs", optional=True).items():
        cost = FileReader(figures, where, f"{name}.costs.{variant}")
        costs[variant] = {}
        for figure, value in cost.raw.items():
            if type(value) not in (int, float) or not 0 <= value < 1e9:
                raise cost.bad(figure, "a number from 0 up", value)
            costs[variant][figure] = float(value)
    return GpuSection(
        arch,
        reader.text("gpu"),
        reader.number("num_sms", 1, 10000),
        cubins,
        choices,
        costs,
    )


def _rows(
    raw: object, layout: Layout, arch: str, key: Mapping[str, int | str], at: FileReader
) -> tuple[Choice, ...]:
    if not isinstance(raw, list) or not raw:
        raise at.bad("", "a list of choices", raw)
    rows: list[Choice] = []
    for i, each in enumerate(raw):
        reader = FileReader(each, at.where, f"{at.name}[{i}]")
        reader.only((layout.bucket, "above", "variant", *layout.numbers))
        before = rows[-1].most if rows else 0
        most = reader.number(layout.bucket, before + 1, _MAX_SIZE)
        above = reader.number("above", before, most - 1) if "above" in reader.raw else before
        numbers = {
            name: reader.number(name, *span)
            for name, span in layout.numbers.items()
            if name in reader.raw
        }
        row = Row(reader.text("variant", _VARIANT), numbers)
        try:
            problem = layout.check(row, arch, most, **key)
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            problem = f"what the key says is no size: {error}"  # as in n=many
        if problem:
            raise reader.bad("variant", f"one that runs there ({problem})", row.variant)
        rows.append(Choice(above, most, row))
    return tuple(rows)


def text_of(sections: Iterable[GpuSection], layout: Layout) -> str:
    """The same bytes for the same content, one choice a line."""
    blocks = [_block(section, layout) for section in sections]
    head = {"format": FORMAT, "op": layout.op, "function": layout.function}
    gpus = ",\n".join(blocks)
    return json.dumps(head)[:-1] + f', "gpus": [\n{gpus}\n]}}\n'


def _block(section: GpuSection, layout: Layout) -> str:
    head = {"arch": section.arch, "gpu": section.gpu, "num_sms": section.num_sms}
    parts = [json.dumps(head)[1:-1]]
    if section.cubins:
        lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(section.cubins.items())]
        parts.append('"cubins": {\n' + ",\n".join(lines) + "\n }")
    tables = []
    for key, choices in section.choices.items():
        before, rows = 0, []
        for choice in choices:
            row: dict[str, Any] = {layout.bucket: choice.most}
            if choice.above != before:
                row["above"] = choice.above
            row |= {"variant": choice.row.variant, **choice.row.numbers}
            rows.append("   " + json.dumps(row))
            before = choice.most
        tables.append(f"  {json.dumps(key)}: [\n" + ",\n".join(rows) + "\n  ]")
    parts.append('"choices": {\n' + ",\n".join(tables) + "\n }")
    if section.costs:
        lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in section.costs.items()]
        parts.append('"costs": {\n' + ",\n".join(lines) + "\n }")
    return "{" + ",\n ".join(parts) + "}"


def merged(old: GpuSection | None, new: GpuSection) -> GpuSection:
    """`new`, with what `old` measured of other keys and sizes."""
    if old is None:
        return new
    choices = dict(old.choices)
    for key, rows in new.choices.items():
        by_size = {choice.most: choice for choice in (*choices.get(key, ()), *rows)}
        kept: list[Choice] = []
        for most in sorted(by_size):
            before = kept[-1].most if kept else 0
            choice = by_size[most]
            kept.append(Choice(max(choice.above, before), most, choice.row))
        choices[key] = tuple(kept)
    return GpuSection(
        new.arch, new.gpu, new.num_sms, new.cubins, choices, {**old.costs, **new.costs}
    )  # fmt: skip


def write(path: Path, text: str) -> None:
    """Replace `path` whole, making its folder; raises TableError where that is not possible."""
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except OSError as error:
        if part is not None:
            with contextlib.suppress(OSError):
                os.unlink(part)
        raise TableError(f"cannot write {path}: {error.strerror or error}") from error
