"""What people read on a terminal of 80 columns: no line is longer, and no name is folded."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from cli_run import ROOT, Run

from kernel_hub.cli.parts import console, inspect_text
from kernel_hub.collection.manifest import open_collection

WIDTH = 80


def on_a_terminal(*arguments: str, code: int = 0, **env: str) -> list[str]:
    """The lines that `kernel-hub` writes to a terminal of 24 x 80, less their colours."""
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", **env}
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "kernel_hub", *arguments]
    with subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, env=environment, close_fds=True
    ) as running:
        os.close(other)
        written = b""
        try:
            while part := os.read(main, 1 << 16):
                written += part
        except OSError:  # Linux: the other end is closed
            pass
    os.close(main)
    assert running.returncode == code, written.decode()
    return re.sub(r"\x1b\[[0-9;]*m", "", written.decode()).replace("\r", "").splitlines()


CUBINS = sorted(open_collection().manifest.cubins)


@pytest.mark.parametrize("command", ["list", "verify"])
def test_cubins_in_80_columns(command: str) -> None:
    lines = on_a_terminal(command)
    assert max(map(len, lines)) <= WIDTH
    firsts = [line.split()[0] for line in lines if line.strip()]
    assert all(name in firsts for name in CUBINS)
    (said,) = [line for line in lines if line.startswith("all of these: ")]
    assert "package kernel_hub" in said


@pytest.mark.parametrize(
    "command",
    [
        ["list", "--arch", "hopper"],
        ["inspect", "rope", "--function", "rope_fp3"],
        ["build", "--csrc", "/nowhere"],
        ["lits"],
    ],
    ids=" ".join,
)
def test_what_is_wrong_breaks_between_words(command: list[str]) -> None:
    lines = on_a_terminal(*command, code=2)
    assert len(lines) > 1 and max(map(len, lines)) <= WIDTH
    piped = subprocess.run(
        [sys.executable, "-m", "kernel_hub", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert " ".join(lines).split() == piped.stderr.split(), "a word was broken"


def test_many_kernels_are_summed_up_on_a_terminal_alone(kernel_hub_cli: Run) -> None:
    lines = on_a_terminal("inspect", "rms_norm", "--arch", "90")
    functions = list(open_collection().manifest.cubins["rms_norm"]["sm90"].functions)
    more = len(functions) - inspect_text.MOST_SHOWN
    assert max(map(len, lines)) <= WIDTH and len(lines) < 48
    assert f"… and {more} more (--functions shows all, --function NAME one)" in lines
    firsts = [line.split()[0] for line in lines if line.strip()]
    assert len({*firsts} & {*functions}) == inspect_text.MOST_SHOWN
    whole = on_a_terminal("inspect", "rms_norm", "--arch", "90", "--functions")
    assert not any("… and" in line for line in whole)
    piped = kernel_hub_cli("inspect", "rms_norm", "--arch", "90").out
    for text in ("\n".join(whole), piped):
        assert [n for n in functions if f"\n{n} " not in text or f"  {n}(" not in text] == []


def test_rows_too_wide_are_stacked() -> None:
    lines = on_a_terminal("inspect", "flash_attention_fp8_sm90")
    assert max(map(len, lines)) <= WIDTH
    assert "flash_attention_fp8_sm90_e4m3_hdim256_full_blocks" in lines


def test_commands_and_code_are_not_broken(tmp_path: Path) -> None:
    name = "a_kernel_of_a_long_name_whose_command_is_wide"
    said = on_a_terminal("new", name, "--into", str(tmp_path))
    command = f'  python -c "import numpy, {name}; print({name}.{name}(numpy.arange(5)))"'
    assert command in said


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setattr(console, "is_rich", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "30")


@pytest.mark.usefixtures("narrow")
def test_texts_wrap_where_they_may(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["a_name_of_its_own", "some words of a text"], ["b", "c"]]
    console.table(["name", "text"], rows, wraps=["text"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 30
    assert lines[2].split() == ["a_name_of_its_own", "some", "words"]
    assert lines[3].split() == ["of", "a", "text"]


@pytest.mark.usefixtures("narrow")
def test_headers_are_broken_before_rows_are_stacked(capsys: pytest.CaptureFixture[str]) -> None:
    columns = ["name", "static shared"]
    console.table(columns, [["a_name_of_its_own_20", 1], ["b", 2]], right=["static shared"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [["static"], ["name", "shared"]]
    console.table(columns, [["a_name_of_its_own_that_is_long", 1]], right=["static shared"])
    said = capsys.readouterr().out.splitlines()
    assert said == ["a_name_of_its_own_that_is_long", "    static shared 1"]


def test_columns_that_agree_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["a", "x", 1, ""], ["b", "x", 1, ""]]
    console.table(["name", "package", "n", "none"], rows, once=["package", "none"])
    assert capsys.readouterr().out.splitlines() == [
        *("name  n", "----  -", "a     1", "b     1", "all of these: package x, none -"),
    ]
    console.table(["name", "package"], [["a", "x"]], once=["package"])
    assert capsys.readouterr().out.splitlines()[0] == "name  package"


def test_without_rich_it_fits_too(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ImportError('no rich here')\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    hidden = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *a: "
    hidden += "None if n == 'rich' else f(n, *a)\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    lines = on_a_terminal("list", PYTHONPATH=path)
    assert max(map(len, lines)) <= WIDTH and any(set(line) <= {"-", " "} for line in lines)
