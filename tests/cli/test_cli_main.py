"""The command itself: help, errors without tracebacks, and running as a module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_run import ROOT

from kernel_hub import __version__, cli


def python(*arguments: str, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )


@pytest.mark.parametrize("module", cli.COMMANDS, ids=lambda module: module.NAME)
def test_every_command_has_help_with_an_example(
    module: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([module.NAME, "--help"])  # type: ignore[attr-defined]
    assert stopped.value.code == 0
    assert f"example: kernel-hub {module.NAME}" in capsys.readouterr().out  # type: ignore[attr-defined]


def test_build_is_the_builder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["build", "--help"])
    assert stopped.value.code == 0
    assert "--csrc" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["frobnicate"], ["list", "--nonsense"]])
def test_a_wrong_command_line_is_exit_code_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([])
    said = capsys.readouterr().err
    assert all(f"    {module.NAME} " in said for module in cli.COMMANDS)


def test_an_error_is_one_message_and_exit_code_2() -> None:
    done = python("-m", "kernel_hub", "inspect", "launch_prob")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kernel-hub inspect: launch_prob is neither a file nor a cubin")
    assert "Traceback" not in done.stderr


def test_it_runs_as_a_module() -> None:
    done = python("-m", "kernel_hub", "--version")
    assert (done.returncode, done.stdout) == (0, f"kernel_hub {__version__}\n")


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f'"{sys.executable}" -m kernel_hub list --json | head -1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[\n", "")


def test_neither_rich_nor_torch_is_needed(tmp_path: Path) -> None:
    for name in ("rich", "torch"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    for command in ("list", "verify"):
        done = python("-m", "kernel_hub", command, path=path)
        assert done.returncode == 0, done.stderr
    done = python("-m", "kernel_hub", "demo", path=path)
    assert not done.stderr
    assert "the ops did not run: torch" in done.stdout
    # Right on a GPU, which needs neither; elsewhere there is nothing left to run.
    ran = "kernels are right on" in done.stdout
    assert done.returncode == (0 if ran else 1)
    assert ran != ("FAILED: nothing ran" in done.stdout)
