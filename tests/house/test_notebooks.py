"""The notebooks were executed as they are, from the first cell to the last, without an error."""

from __future__ import annotations

import ast
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "docs" / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(notebook: Path, kind: str) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


def test_there_are_some() -> None:
    assert len(NOTEBOOKS) == 3


@each
def test_executed_in_order(notebook: Path) -> None:
    cells = cells_of(notebook, "code")
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds and "error" not in kinds


@each
def test_what_is_imported_is_there(notebook: Path) -> None:
    pytest.importorskip("torch", reason="the notebooks call torch")
    for cell in cells_of(notebook, "code"):
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("kernel_hub"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names)


@each
def test_links_lead_somewhere(notebook: Path) -> None:
    for cell in cells_of(notebook, "markdown"):
        for part in "".join(cell["source"]).split("](")[1:]:
            assert (notebook.parent / part.partition(")")[0]).is_file(), part
