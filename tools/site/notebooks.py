"""An executed notebook as Markdown: its text, its code, and what each cell printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def as_markdown(path: Path) -> str:
    """The cells of the notebook in `path`. Raises ValueError for one that shows pictures."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(_block("python", source))
        if printed := "".join(_text(path, output) for output in cell["outputs"]):
            parts.append(_block("text", printed))
    return "\n\n".join(parts) + "\n"


def _text(path: Path, output: dict[str, Any]) -> str:
    found = output.get("text") or output.get("data", {}).get("text/plain")
    if found is None or "image/png" in output.get("data", {}):
        raise ValueError(f"{path}: an output that is no text: {output['output_type']}")
    return "".join(found)


def _block(language: str, text: str) -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
