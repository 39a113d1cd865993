"""The picture of all families in the READMEs: every case's ratio as a dot, written as SVG.

Written by make_results.py, the same text from the same rows, so that --check can compare it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 800, 190, 120, 46, 24
_LEAST, _MOST = 0.2, 2.5  # of ratios; what is beyond stands at the edge
_TICKS = (0.25, 0.5, 0.75, 1.0, 1.1, 1.5, 2.0)
_AHEAD, _BEHIND, _INK, _PALE = "#1a7f37", "#bc4c00", "#1f2328", "#d0d7de"


def _x(ratio: float) -> float:
    """Logarithmic."""
    held = min(max(ratio, _LEAST), _MOST)
    share = math.log(held / _LEAST) / math.log(_MOST / _LEAST)
    return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{text}</text>'


def _family(name: str, ratios: Sequence[float], y: float) -> list[str]:
    """Dots, the geometric mean as a bar, and both figures at the right."""
    mean, worst = statistics.geometric_mean(ratios), max(ratios)
    lines = [_text(_LEFT - 10, y + 4, name, f'text-anchor="end" fill="{_INK}"')]
    # A dot is a line of no length with round ends: many are one path.
    for colour, are_behind in ((_AHEAD, False), (_BEHIND, True)):
        dots = "".join(
            f"M{_x(ratio)} {y}h0" for ratio in sorted(ratios) if (ratio > 1) == are_behind
        )
        if dots:
            style = f'stroke="{colour}" stroke-width="6" stroke-linecap="round" opacity="0.35"'
            lines.append(f'<path d="{dots}" {style}/>')
    x = round(_x(mean) - 1.5, 1)
    lines.append(f'<rect x="{x}" y="{y - 9}" width="3" height="18" fill="{_INK}"/>')
    said = f"{mean:.2f} / {worst:.2f}"
    lines.append(_text(_WIDTH - _RIGHT + 14, y + 4, said, f'fill="{_INK}"'))
    return lines


def svg(families: Mapping[str, Sequence[float]], title: str) -> str:
    """families: name -> ratios of its cases, in the order to draw."""
    height = _TOP + _ROW * len(families) + 38
    bottom = height - 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_LEFT, 18, title, f'fill="{_INK}" font-weight="bold"'),
        _text(_WIDTH - _RIGHT + 14, 36, "mean / worst", f'fill="{_INK}"'),
    ]
    for ratio in _TICKS:
        colour = _INK if ratio == 1 else _PALE
        x = _x(ratio)
        lines.append(f'<line x1="{x}" x2="{x}" y1="{_TOP - 8}" y2="{bottom}" stroke="{colour}"/>')
        lines.append(_text(x, bottom + 14, f"{ratio:g}", f'text-anchor="middle" fill="{_INK}"'))
    below = (
        "time over the best peer's (left of 1: ahead); a dot a case, the bar their mean; "
        f"beyond {_LEAST} and {_MOST}: at the edge"
    )
    lines.append(_text(_WIDTH / 2, bottom + 29, below, f'text-anchor="middle" fill="{_INK}"'))
    for i, (name, ratios) in enumerate(families.items()):
        lines += _family(name, ratios, _TOP + _ROW * (i + 0.5))
    return "\n".join([*lines, "</svg>", ""])
