"""README.zh-CN.md says what README.md says: the same parts, commands, code, names and figures."""

from __future__ import annotations

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


@pytest.mark.parametrize("part", [headings, code, rows, names], ids=lambda part: part.__name__)
def test_both_say_the_same(part: object) -> None:
    assert callable(part)
    english, chinese = (part((ROOT / name).read_text("utf-8")) for name in READMES)
    assert chinese == english
