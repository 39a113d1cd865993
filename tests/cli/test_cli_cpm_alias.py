"""`kernel-hub cpm-alias`: the script runs as under Python, with cpm_kernels resolved here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import helper
from cpm_kernels.kernels.base import Kernel, round_up

print(__name__, sys.argv[1:], helper.NAME, Kernel.__module__, round_up(3, 4))
if "--fail" in sys.argv:
    Kernel("none", [])
sys.exit(3)
"""


def alias(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kernel_hub", "cpm-alias", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "helper.py").write_text("NAME = 'beside it'\n")
    (folder / "run.py").write_text(SCRIPT)
    return "program/run.py"


def test_a_script(tmp_path: Path, script: str) -> None:
    module = "kernel_hub.integrations.cpm_kernels.base"
    for options in ((), ("--",), ("--substitute", "--")):
        done = alias(tmp_path, *options, script, "--substitute", "-x", "--", "a b")
        assert done.stdout.split("\n")[0] == (
            f"__main__ ['--substitute', '-x', '--', 'a b'] beside it {module} 4"
        ), done.stderr
        assert done.returncode == 3


def test_the_scripts_own_errors_keep_their_lines(tmp_path: Path, script: str) -> None:
    done = alias(tmp_path, "--", script, "--fail")
    assert done.returncode == 1
    assert 'Kernel("none", [])' in done.stderr
    assert "none.fatbin" in done.stderr


@pytest.mark.parametrize("arguments", [(), ("--",), ("--", "absent.py"), ("--substitute",)])
def test_nothing_to_run(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = alias(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("kernel-hub cpm-alias: no script")
    assert "Traceback" not in done.stderr


def test_a_misspelt_option_shows_the_commands_own_usage(tmp_path: Path) -> None:
    done = alias(tmp_path, "--substitue", "--", "run.py")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: kernel-hub cpm-alias")
    assert "unrecognized arguments: --substitue" in done.stderr
