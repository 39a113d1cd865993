"""Draws benchmarks/results/<gpu>_sweep_linear_s<seed>.json as SVG: ours and cuBLAS over the number
of rows, a panel a weight.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_hub.measure import results

_WIDTH, _LEFT, _RIGHT, _TOP, _PANEL, _GAP = 800, 56, 24, 34, 170, 44
_STEP_X = 128  # between two lines of a grid
_COLOURS = {"kernel_hub": "#1a7f37"}
_PEER, _INK, _PALE = "#bc4c00", "#1f2328", "#d0d7de"
CASE = re.compile(r"(\d+x\d+) m(\d+) \w+")
Lines = dict[str, list[tuple[int, float]]]


def panels(rows: list[dict[str, Any]]) -> dict[str, Lines]:
    """Weight -> contender -> (m, microseconds), ascending."""
    found: dict[str, Lines] = {}
    for row in rows:
        if case := CASE.fullmatch(row["case"]):
            lines = found.setdefault(case[1], {})
            lines.setdefault(row["contender"], []).append((int(case[2]), row["median"]))
    return {
        weight: {name: sorted(x) for name, x in lines.items()} for weight, lines in found.items()
    }


def _step(most: float) -> float:
    """Between two lines of a grid, of which four or five are drawn."""
    size = 10.0 ** math.floor(math.log10(most))
    return next(size * x for x in (0.2, 0.5, 1, 2) if most / (size * x) <= 5.5)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{_INK}">{text}</text>'


def _panel(weight: str, lines: Lines, top: float) -> list[str]:
    """The grid, then a line a contender."""
    most_x = -(-max(x for points in lines.values() for x, _ in points) // _STEP_X) * _STEP_X
    most_y = 1.05 * max(y for points in lines.values() for _, y in points)
    right, bottom = _WIDTH - _RIGHT, top + _PANEL

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + x / most_x * (right - _LEFT), bottom - y / most_y * _PANEL

    found = [_text(_LEFT, top - 6, f"weight (n x k) {weight.replace('x', ' x ')}, us")]
    for i in range(int(most_y / _step(most_y)) + 1):
        _, y = place(0, i * _step(most_y))
        found.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="{_PALE}"/>')
        found.append(_text(_LEFT - 6, y + 4, f"{i * _step(most_y):g}", "end"))
    for i in range(most_x // _STEP_X + 1):
        x, _ = place(_STEP_X * i, 0)
        found.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="{_PALE}"/>')
        found.append(_text(x, bottom + 15, f"{_STEP_X * i}", "middle"))
    for name, points in lines.items():
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
        colour = _COLOURS.get(name, _PEER)
        dot = f"url(#{_dot(colour)})"  # a measurement; between them lines alone
        found.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" '
            f'marker-start="{dot}" marker-mid="{dot}" marker-end="{dot}"/>'
        )
    return found


def _dot(colour: str) -> str:
    """The name of the dots of that colour."""
    return f"dot_{colour.removeprefix('#')}"


def svg(found: Mapping[str, Lines], title: str) -> str:
    """Weight -> its lines, in the order to draw."""
    height = _TOP + len(found) * (_PANEL + _GAP) + 10
    names = dict.fromkeys(name for lines in found.values() for name in lines)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 16, title),
    ]
    for colour in dict.fromkeys(_COLOURS.get(name, _PEER) for name in names):
        lines.append(
            f'<marker id="{_dot(colour)}" viewBox="-2 -2 4 4" markerWidth="3" markerHeight="3">'
            f'<circle r="1.6" fill="{colour}"/></marker>'
        )
    for i, name in enumerate(names):
        x, colour = _WIDTH - 120 * (len(names) - i), _COLOURS.get(name, _PEER)
        lines.append(f'<path d="M{x} 12h24" stroke="{colour}" stroke-width="3"/>')
        lines.append(_text(x + 30, 16, name))
    for i, (weight, each) in enumerate(found.items()):
        lines += _panel(weight, each, _TOP + i * (_PANEL + _GAP) + 14)
    lines.append(_text(_WIDTH - _RIGHT, height - 4, "rows (m)", "end"))
    return "\n".join([*lines, "</svg>", ""])


def picture_of(rows: list[dict[str, Any]]) -> str:
    """The rows of a file. Raises ValueError where none is of a sweep."""
    found = panels(rows)
    if not found:
        raise ValueError("no rows of a sweep")
    return svg(found, f"linear, bf16, time over the number of rows, {rows[0]['gpu']}")


def main(argv: list[str] | None = None) -> int:
    """One picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, help="default: the source's name with .svg")
    options = parser.parse_args(argv)
    try:
        text = picture_of(results.read(options.source))
    except ValueError as error:
        sys.exit(f"{options.source}: {error}")
    (options.out or options.source.with_suffix(".svg")).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
