"""Tables, progress and units, with rich and without."""

from __future__ import annotations

import importlib.util
import io
import re
import sys

import pytest

from kernel_hub.cli.parts import console

needs_rich = pytest.mark.skipif(
    importlib.util.find_spec("rich") is None, reason="rich is not installed"
)


class Terminal(io.StringIO):
    """Text that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_plain_table_is_aligned_and_holds_lines() -> None:
    text = console.plain_table(["name", "n"], [["a", "1"], ["long\nname", "23"]], right=["n"])
    assert text.splitlines() == ["name   n", "----  --", "a      1", "long  23", "name"]


def test_a_pipe_gets_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    console.heading("all of it")
    console.table(["a"], [[None], [3]])
    assert capsys.readouterr().out == "all of it\na\n-\n\n3\n"


GREEN, RED = "\x1b[32m", "\x1b[1;31m"


@pytest.mark.parametrize(
    ("environment", "is_terminal", "coloured"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
        ({"TERM": "xterm"}, False, False),
    ],
)
@pytest.mark.parametrize("has_rich", [False, pytest.param(True, marks=needs_rich)])
def test_verdicts_have_a_colour_on_a_terminal(
    has_rich: bool,
    environment: dict[str, str],
    is_terminal: bool,
    coloured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if not has_rich:
        monkeypatch.setattr(console, "is_rich", lambda stream: False)
    rows = [["a", console.good("ok")], ["b", console.bad("WRONG")], ["c", "ok"]]
    console.table(["name", "result"], rows, right=["result"])
    text = stream.getvalue()
    assert ("\x1b[32m" in text) is coloured
    assert ("31m" in text) is coloured
    assert text.count("32m") <= 1  # the plain "ok" has none
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    shown = [words for line in plain.splitlines() if len(words := line.split()) == 2]
    assert shown[-3:] == [["a", "ok"], ["b", "WRONG"], ["c", "ok"]]


def test_colours_do_not_move_columns() -> None:
    rows = [[console.good("ok"), "x"], [console.bad("WRONG"), "y"]]
    text = console.plain_table(["result", "z"], rows, right=["result"], colours=True)
    plain = console.plain_table(["result", "z"], rows, right=["result"])
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == plain
    assert plain.splitlines()[2:] == ["    ok  x", " WRONG  y"]
    assert f"{GREEN}    ok\x1b[0m  x" in text and f"{RED} WRONG\x1b[0m  y" in text


@needs_rich
def test_a_terminal_gets_rich_and_brackets_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    console.heading("[bold]")
    console.table(["kernel", "n"], [["f(int[3])", 1]], right=["n"])
    assert "[bold]" in terminal.getvalue()
    assert "f(int[3])" in terminal.getvalue()


def test_a_terminal_without_rich_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    console.table(["a"], [["b"]])
    assert terminal.getvalue() == "a\n-\nb\n"


@pytest.mark.parametrize("terminal", [False, pytest.param(True, marks=needs_rich)])
def test_progress_counts_on_stderr(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with console.progress(2, "work") as advance:
        advance("first")
        advance("second")
    if not terminal:
        assert stream.getvalue() == "[1/2] work: first\n[2/2] work: second\n"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 << 20, "3.0 MiB"),
        (1 << 40, "1024.0 GiB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert console.size(num_bytes) == text


def test_cuda_versions() -> None:
    assert [console.cuda_version(n) for n in (12040, 13000)] == ["12.4", "13.0"]


def test_fields_align(capsys: pytest.CaptureFixture[str]) -> None:
    console.fields([("a", 1), ("long", 2)])
    assert capsys.readouterr().out == "a     1\nlong  2\n"
