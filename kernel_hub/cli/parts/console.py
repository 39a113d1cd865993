"""Terminal output: through rich on a terminal that has it, else as plain aligned text.

Pipes and files always get the plain text: it does not wrap and greps well.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from ...progress import is_rich
from ...progress import progress as progress


class Cell(str):
    """Text of a table that has a colour on a terminal: "green" or "red"."""

    __slots__ = ("colour",)
    colour: str


def good(text: str) -> Cell:
    """`text`, green on a terminal."""
    return _coloured(text, "green")


def bad(text: str) -> Cell:
    """`text`, red on a terminal."""
    return _coloured(text, "red")


def _coloured(text: str, colour: str) -> Cell:
    cell = Cell(text)
    cell.colour = colour
    return cell


_ANSI = {"green": "\x1b[32m", "red": "\x1b[1;31m", "": ""}


def _shows_colour() -> bool:
    """Whether plain text on stdout may hold colours (https://no-color.org)."""
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and sys.stdout.isatty()


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    right: Sequence[str] = (),
    once: Sequence[str] = (),
    wraps: Sequence[str] = (),
) -> None:
    """Print `rows` under `columns`; those named in `right` are right-aligned.

    once: columns that are said in one line under the table where all rows agree. wraps: those whose
    text may take several lines on a terminal: names, which people copy, may not.
    """
    cells = [
        ["" if cell is None else cell if isinstance(cell, Cell) else str(cell) for cell in row]
        for row in rows
    ]
    agreed = {
        name: cells[0][place]
        for place, name in enumerate(columns)
        if name in once and len(cells) > 1 and len({row[place] for row in cells}) == 1
    }
    kept = [place for place, name in enumerate(columns) if name not in agreed]
    columns = [columns[place] for place in kept]
    cells = [[row[place] for place in kept] for row in cells]
    if is_rich(sys.stdout):
        _rich_table(columns, cells, right, wraps)
    else:
        print(plain_table(columns, cells, right, colours=_shows_colour()))
    if agreed:
        said = ", ".join(f"{name} {value or '-'}" for name, value in agreed.items())
        note(f"all of these: {said}")


def plain_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str] = (),
    *,
    colours: bool = False,
) -> str:
    """Aligned text; a line break in a cell continues the row."""
    lines: list[list[str]] = [list(columns)]
    for row in rows:
        parts = [[cell] if isinstance(cell, Cell) else cell.split("\n") for cell in row]
        height = max(map(len, parts))
        padded = [part + [""] * (height - len(part)) for part in parts]
        lines += [list(line) for line in zip(*padded, strict=True)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    ways = [str.rjust if name in right else str.ljust for name in columns]

    def shown(cell: str, text: str) -> str:
        start = _ANSI[getattr(cell, "colour", "")] if colours else ""
        return f"{start}{text}\x1b[0m" if start else text

    return "\n".join(
        "  ".join(
            shown(cell, way(cell, width))
            for way, cell, width in zip(ways, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _rich_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Sequence[str],
    wraps: Sequence[str],
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    most, least = [], []  # characters that a column takes, and can do with
    for at, name in enumerate(columns):
        cells = [row[at] for row in rows]
        most.append(max(map(len, [name, *cells])))
        words = " ".join([name, *cells] if name in wraps else [name]).split()
        least.append(max(map(len, words if name in wraps else [*words, *cells]), default=0))
    gaps = len(columns) - 1
    if sum(least) + gaps > console.width:
        _print_stacked(columns, rows)
        return
    gap = 2 if sum(most) + 2 * gaps <= console.width else 1
    # Without edges, and the box's own space is one of the gap.
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
    tight = sum(most) + gaps > console.width
    for name in columns:
        made.add_column(
            name.replace(" ", "\n") if tight and name not in wraps else name,
            justify="right" if name in right else "left",
            no_wrap=name not in wraps,
        )
    for row in rows:
        # Text: a "[" in a signature is no markup.
        made.add_row(*(Text(cell, style=getattr(cell, "colour", "")) for cell in row))
    console.print(made)


def _print_stacked(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows too wide for the terminal: the first cell, the others below it by their names."""
    for first, *others in rows:
        print(first)
        named = zip(columns[1:], others, strict=True)
        note("    " + ", ".join(f"{name} {cell}" for name, cell in named if cell))


def heading(text: str) -> None:
    """A line that starts a part of the output."""
    if is_rich(sys.stdout):
        from rich.console import Console

        Console().print(text, style="bold", markup=False, highlight=False)
    else:
        print(text)


def note(text: str, *, wraps: bool = True) -> None:
    """Plain lines; on a terminal broken between words, what follows further in.

    wraps: no for what people copy (commands), or what has columns of its own.
    """
    _print_lines(text, sys.stdout, wraps)


def complain(text: str) -> None:
    """The same on stderr, of what is wrong."""
    _print_lines(text, sys.stderr, True)


class Parser(argparse.ArgumentParser):
    """A command line whose complaints break between words too."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        complain(f"{self.prog}: error: {message}")
        self.exit(2)


def _print_lines(text: str, stream: TextIO, wraps: bool) -> None:
    if not (wraps and stream.isatty()):
        print(text, file=stream)
        return
    width = shutil.get_terminal_size().columns
    for line in text.split("\n"):
        start = " " * (len(line) - len(line.lstrip()))
        print(
            textwrap.fill(
                line.lstrip(), width, initial_indent=start, subsequent_indent=f"{start}    ",
                break_long_words=False, break_on_hyphens=False,
            ),
            file=stream,
        )  # fmt: skip


def is_terminal() -> bool:
    """Whether somebody reads stdout as it comes: long lists are summed up there."""
    return sys.stdout.isatty()


def count(number: int, what: str) -> str:
    """'1 cubin', '60 cubins'."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def fields(rows: Sequence[tuple[str, object]]) -> None:
    """Names and values, the values aligned; an empty name continues the one before."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name.ljust(width)}  {value}")


def as_json(value: Any) -> None:
    """`value` as indented JSON."""
    print(json.dumps(value, indent=2))


def size(num_bytes: int) -> str:
    """'512 B', '34.1 KiB', '139.8 GiB'."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def cuda_version(number: int) -> str:
    """13000 -> '13.0'."""
    return f"{number // 1000}.{number % 1000 // 10}"
