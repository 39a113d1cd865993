"""Docstrings of this project as Markdown: lines like `x, y: what they are` become a list. What ops
return is said where their source says Any."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import griffe

_ARGUMENT = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (?=\S)")
_WORDS = {"Source", "Raises", "Returns", "NOTE", "Note"}  # of prose


def as_markdown(text: str) -> str:
    """Arguments, with their indented lines, as items; what is indented otherwise stays code."""
    lines: list[str] = []
    in_item = False
    for line in text.splitlines():
        found = _ARGUMENT.match(line)
        if found and found[1] not in _WORDS:
            if not in_item and lines and lines[-1]:
                lines.append("")
            lines.append(f"- **`{found[1]}`**: {line[found.end() :]}")
            in_item = True
        elif in_item and line.startswith("    "):
            lines.append(f"  {line.strip()}")
        else:
            if in_item and line:
                lines.append("")
            in_item = in_item and not line
            lines.append(line)
    return "\n".join(lines)


_OVERLOADS = runpy.run_path(str(Path(__file__).parents[1] / "op_types.py"))["OVERLOADS"]


def returned(op: str) -> str | None:
    """All that the overloads of an op return; None where it has none."""
    kinds = [kind for _, found in _OVERLOADS.get(op, ()) for kind in found.split(" | ")]
    return " | ".join(dict.fromkeys(kinds)) or None


class Arguments(griffe.Extension):  # type: ignore[misc, unused-ignore]
    """Rewrites each docstring as it is read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Of modules, classes, functions and attributes."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        if isinstance(obj, griffe.Function) and str(obj.returns) == "Any":
            obj.returns = returned(obj.name) or obj.returns
