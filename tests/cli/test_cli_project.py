"""Building in a project of `kernel-hub new`: where from, where to, with which Python; no folders
that cannot be written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_run import ROOT, Run

from kernel_hub import build, cli
from kernel_hub.cli import new


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return new.write("my_kernel", tmp_path)


def asked(monkeypatch: pytest.MonkeyPatch, folder: Path, *argv: str) -> tuple[Path, Path]:
    monkeypatch.chdir(folder)
    args = build._parse(argv, build.parser("build"))
    return args.csrc, args.out


def test_a_project_is_built_where_it_lies(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = project / "csrc", project / "my_kernel/cubins"
    for folder in (project, project / "csrc"):
        assert asked(monkeypatch, folder) == expected
    assert asked(monkeypatch, project, "--out", "x") == (project / "csrc", project / "x")


def test_without_a_project_the_checkout_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(monkeypatch, tmp_path) == (ROOT / "csrc", ROOT / "cubins")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n[tool.x]\na = "b"\n')
    assert asked(monkeypatch, tmp_path) == (ROOT / "csrc", ROOT / "cubins")


def test_an_installed_kernel_hub_builds_nothing_into_site_packages(
    project: Path, tmp_path: Path
) -> None:
    site = tmp_path / "site-packages"
    shutil.copytree(
        ROOT / "kernel_hub", site / "kernel_hub", ignore=shutil.ignore_patterns("__pycache__")
    )
    env = {**os.environ, "PYTHONPATH": str(site), "NVCC": "/nowhere/nvcc"}
    command = [sys.executable, "-m", "kernel_hub", "build"]

    def built(folder: Path) -> str:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode
        return done.stderr

    assert "kernel-hub build: error: no sources here: run it in a project" in built(tmp_path)
    assert "/nowhere/nvcc" in built(project)
    assert not (site / "cubins").exists()


def test_sources_without_a_place_for_their_cubins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a project they would take the place of its own."""
    new.write("my_op", tmp_path)
    monkeypatch.chdir(tmp_path / "my_op")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["build", "--csrc", str(tmp_path)])
    assert stopped.value.code == 2
    assert f"--csrc {tmp_path} without --out" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["build"], ["export", "rope", "--to"], ["new", "x", "--into"]])
def test_a_folder_that_cannot_be_written(
    kernel_hub_cli: Run, tmp_path: Path, command: list[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    more = ["--out"] if command == ["build"] else []
    ran = kernel_hub_cli(*command, *more, str(file / "below"))
    assert ran.code in (1, 2) and str(file) in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize("tokens", ["-5", "0", "1.5", "many"])
def test_no_number_of_rows(
    kernel_hub_cli: Run, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        kernel_hub_cli("demo", "--tokens", tokens)
    assert f"{tokens} is not a number of rows: 1 or more" in capsys.readouterr().err


def script(project: Path, path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The project's script, where the commands are those of `path` and of the system."""
    clean = {
        k: v for k, v in os.environ.items() if k not in ("PYTHON", "VIRTUAL_ENV", "PYTHONPATH")
    }
    clean |= {"PATH": f"{path}{os.pathsep}/usr/bin{os.pathsep}/bin", "NVCC": "/nowhere/nvcc", **env}
    return subprocess.run(
        [str(project / "build_cubins.sh")], env=clean, capture_output=True, text=True, check=False
    )


def command(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("where", ["python", "kernel-hub", "PYTHON", ".venv", "VIRTUAL_ENV"])
def test_the_script_finds_the_python_that_has_kernel_hub(
    project: Path, tmp_path: Path, where: str
) -> None:
    none = "#!/bin/sh\nexit 1\n"
    path = tmp_path / "bin with space"
    for name in ("python", "python3", "kernel-hub"):
        command(path / name, none)
    has = f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "$@"\n'
    env = {}
    if where == "python":
        command(path / "python", has)
    elif where == "kernel-hub":
        one = command(tmp_path / "its/python3", has)
        command(path / "kernel-hub", f"#!{one}\nimport kernel_hub\n")
    elif where == "PYTHON":
        env["PYTHON"] = str(command(tmp_path / "another one/python", has))
    elif where == ".venv":
        command(project / ".venv/bin/python", has)
    else:
        command(tmp_path / "env/bin/python", has)
        env["VIRTUAL_ENV"] = str(tmp_path / "env")
    assert "/nowhere/nvcc" in script(project, path, **env).stderr


def test_the_script_says_that_no_python_has_it(project: Path, tmp_path: Path) -> None:
    for name in ("python", "python3"):
        command(tmp_path / "bin" / name, "#!/bin/sh\nexit 1\n")
    done = script(project, tmp_path / "bin")
    assert done.returncode == 1
    assert f"none of these has kernel_hub: {project}/.venv/bin/python python python3" in done.stderr
    assert "PYTHON=/path/to/python" in done.stderr
    done = script(project, tmp_path / "bin", PYTHON="/no/such python")
    assert "none of these has kernel_hub: /no/such python\n" in done.stderr
