"""README.zh-CN.md says what README.md says: the same parts, commands, code, names and figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READMES = "README.md", "README.zh-CN.md"
_CODE = re.compile(r"```.*?```", re.DOTALL)


def headings(text: str) -> list[str]:
    """Their levels."""
    return re.findall(r"^(#+) ", _CODE.sub("", text), re.MULTILINE)


def code(text: str) -> list[str]:
    return _CODE.findall(text)


def rows(text: str) -> list[list[str]]:
    """Of each row of a table, what is code and each number."""
    lines = [line for line in _CODE.sub("", text).splitlines() if line.startswith("|")]
    return [sorted(re.findall(r"`[^`]+`|\d[\d.,%]*\d|\d", line)) for line in lines]


def names(text: str) -> list[str]:
    """Commands, names and links of the rest."""
    rest = "\n".join(
        line
        for line in _CODE.sub("", text).splitlines()
        if not re.match(r"\||\[[^]]*\]\(README", line)  # tables, and the link to the other
    )
    return sorted(re.findall(r"`[^`\n]+`|\]\([^)]+\)", rest))


def test_each_kernel_has_the_architectures_of_the_manifest() -> None:
    shipped = json.loads((ROOT / "cubins/manifest.json").read_text("utf-8"))["cubins"]
    lines = (ROOT / READMES[0]).read_text("utf-8").splitlines()
    told = [x.strip("| ").split(" | ") for x in lines if re.search(r"\| (sm\d+ ?)+\|$", x)]
    assert len(told) > 30
    for first, *_, archs in told:
        found = {arch for stem in re.findall(r"`(\w+)`", first) for arch in shipped[stem]}
        assert archs.split() == sorted(found), first


@pytest.mark.parametrize("part", [headings, code, rows, names], ids=lambda part: part.__name__)
def test_both_say_the_same(part: object) -> None:
    assert callable(part)
    english, chinese = (part((ROOT / name).read_text("utf-8")) for name in READMES)
    assert chinese == english
