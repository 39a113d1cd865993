"""The documents name what is there: files by their paths, private names by their modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("benchmarks", "csrc", "docs", "examples", "kernel_hub", "native", "tests", "tools")
FILES = {
    f"/{path.relative_to(ROOT).as_posix()}"
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.*")
}
# Of other projects, and of whoever builds a collection.
THEIRS = {"tests/test_flash_attn.py", "kernels/tuned.json", "torch._C"}
_CODE = re.compile(r"`([\w./]+)`")
_FILE = re.compile(r"[\w.]+(/[\w.]+)+\.(py|cu|cuh|c|h|json)")
_PRIVATE = re.compile(r"(?:\w+\.)*(?:(_?[a-z]\w*)\.(_[a-z]\w*)|(_[a-z]\w*)\.(\w+))")


def is_there(named: str) -> bool:
    """Whether a file of that path, or a module of that name with such a definition, is there."""
    if _FILE.fullmatch(named):
        return any(path.endswith(f"/{named}") for path in FILES)
    private = _PRIVATE.fullmatch(named)
    if private is None:
        return True
    module, name = (part for part in private.groups() if part)
    defined = re.compile(rf"^ *(?:(?:def|class) {name}\b|{name}\b.* = )", re.MULTILINE)
    found = [ROOT / path[1:] for path in FILES if path.endswith(f"/{module}.py")]
    return any(defined.search(path.read_text(encoding="utf-8")) for path in found)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_named_is_there(document: Path) -> None:
    named = set(_CODE.findall(document.read_text(encoding="utf-8"))) - THEIRS
    assert not sorted(name for name in named if not is_there(name))


def test_what_is_not_there_is_seen() -> None:
    assert is_there("ops/core/counters.py") and is_there("launch.probing._ask")
    assert not is_there("ops/core/no_such.py") and not is_there("launch.probing._nobody")
    assert not is_there("_probing.survives")
