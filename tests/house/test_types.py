"""What type checkers say of kernel_hub's users: of right calls nothing, of wrong ones an error."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernel_hub
from kernel_hub import errors

ROOT = Path(__file__).resolve().parents[2]
CALLS, SETTINGS = ROOT / "tests/typing_calls.py", ROOT / "tests/typing_stubs"


def mypy(file: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--config-file", str(SETTINGS / "mypy.ini")]
    command += ["--cache-dir", str(cache), str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_takes_right_calls_and_flags_wrong_ones(tmp_path: Path) -> None:
    done = mypy(CALLS, tmp_path / "cache")
    assert done.returncode == 0, done.stdout + done.stderr
    # And the file can fail: without the comments each wrong line is an error.
    text = CALLS.read_text()
    bare = tmp_path / "bare_calls.py"
    bare.write_text("\n".join(line.partition("  # type: ignore")[0] for line in text.splitlines()))
    wrong = {n for n, line in enumerate(text.splitlines(), 1) if "# type: ignore" in line}
    lines = [
        line for line in mypy(bare, tmp_path / "cache").stdout.splitlines() if "error:" in line
    ]
    assert {int(line.split(":")[1]) for line in lines} == wrong and len(wrong) >= 10


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_takes_right_calls_and_flags_wrong_ones() -> None:
    command = ["pyright", "-p", str(SETTINGS), "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_ops_types_are_those_of_the_ops() -> None:
    pytest.importorskip("torch", reason="the ops are torch ops")
    code = "from op_types import TARGET, text; assert TARGET.read_text() == text(), 'run it'"
    path = os.pathsep.join((str(ROOT / "tools"), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"python tools/op_types.py: {done.stderr}"


def test_every_error_is_at_the_top() -> None:
    every = [
        name for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.KernelHubError)
    ]  # fmt: skip
    assert len(every) > 10
    for name in every:
        assert name in kernel_hub.__all__ and getattr(kernel_hub, name) is getattr(errors, name)


def test_formats_are_found_when_they_are_asked_for() -> None:
    code = (
        "import sys, kernel_hub; assert 'kernel_hub.formats' not in sys.modules; "
        "kernel_hub.formats.carray.load; assert 'kernel_hub.formats.triton' not in sys.modules; "
        "print(dir(kernel_hub.formats))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'c_export', 'carray', 'fmha_v2', 'triton'" in done.stdout
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kernel_hub.formats.nothing  # type: ignore[attr-defined]
