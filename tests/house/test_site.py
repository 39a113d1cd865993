"""The site of the documentation: what becomes of docstrings and links. CI builds it whole."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> ModuleType:
    for package in ("griffe", "mkdocs"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[docs]'")
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / f"tools/site/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_arguments_become_a_list() -> None:
    end = "\n\nReturns y.\nSource: a book."
    text = f"Say.\n\n    y = x + 1\n\nx, y: rows\n    of it.\n*more: others.{end}"
    found = load("docstrings").as_markdown(text)
    assert "    y = x + 1" in found
    assert "- **`x, y`**: rows\n  of it.\n- **`*more`**: others." in found
    assert found.endswith(end)


def test_what_an_op_returns_is_that_of_its_overloads() -> None:
    returned = load("docstrings").returned
    assert returned("flash_attention") == "Tensor | tuple[Tensor, Tensor]"
    assert returned("rms_norm") == "Tensor | tuple[Tensor, Tensor] | tuple[Tensor, ...]"
    assert returned("linear") is None


@pytest.mark.parametrize(
    ("text", "source", "page", "expected"),
    [
        ("[a](docs/formats.md#x)", "README.md", "index.md", "[a](formats.md#x)"),
        ("[a](../formats.md)", "docs/notes/rope.md", "notes/rope.md", "[a](../formats.md)"),
        ("[examples/](examples)", "README.md", "index.md", "examples/"),
        ("[b](https://x.y)", "README.md", "index.md", "[b](https://x.y)"),
        ("[c](benchmarks/RESULTS.md)", "README.md", "index.md", "[c](results.md)"),
        ("a:\n- b\n- c", "README.md", "index.md", "a:\n\n- b\n- c"),
        ("```python gpu needs=torch\nx\n```", "docs/a.md", "a.md", "```python\nx\n```"),
    ],
)
def test_links(text: str, source: str, page: str, expected: str) -> None:
    assert load("pages").linked(text, source, page) == expected


def test_notebooks_are_pages() -> None:
    pages = load("pages")
    there = {f"docs/notebooks/{path.name}" for path in (ROOT / "docs/notebooks").glob("*.ipynb")}
    assert there == {source for source in pages.COPIES.values() if source.endswith(".ipynb")}
    text = "[a](docs/notebooks/patch_a_model.ipynb)"
    assert pages.linked(text, "README.md", "index.md") == "[a](notebooks/patch_a_model.md)"


def test_a_notebook_as_markdown(tmp_path: Path) -> None:
    output = {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "words"]},
        {"cell_type": "code", "source": ["print(1)\n", "print(2)"], "outputs": [output]},
        {"cell_type": "code", "source": ["x = 1"], "outputs": []},
    ]
    file = tmp_path / "a.ipynb"
    file.write_text(json.dumps({"cells": cells}))
    expected = "# Title\nwords\n\n```python\nprint(1)\nprint(2)\n```\n\n```text\n1\n2\n```\n\n"
    as_markdown = load("notebooks").as_markdown
    assert as_markdown(file) == f"{expected}```python\nx = 1\n```\n"
    cells[1]["outputs"] = [{"output_type": "display_data", "data": {"image/png": "…"}}]
    file.write_text(json.dumps({"cells": cells}))
    with pytest.raises(ValueError, match="an output that is no text: display_data"):
        as_markdown(file)


def test_every_op_has_a_page() -> None:
    pytest.importorskip("torch", reason="the ops are torch ops")
    from kernel_hub import ops

    assert {f"reference/ops/{op}.md" for op in ops.__all__} <= load("pages").reference().keys()
