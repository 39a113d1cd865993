"""`new`: the written package, its README's commands, and finding it once it is installed."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from cli_run import ROOT, Run
from fakecuda import FakeCuda

from kernel_hub.cli import new
from kernel_hub.compilers.nvcc import find_nvcc
from kernel_hub.errors import KernelHubError

EXAMPLE = ROOT / "examples/scale_add"

try:
    find_nvcc()
    REASON = ""
except KernelHubError as error:
    REASON = str(error)
needs_nvcc = pytest.mark.skipif(bool(REASON), reason=REASON)


def shell(script: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """`script` in bash, with this Python as `python` and kernel_hub from this checkout."""
    names = cwd / ".bin"
    names.mkdir(exist_ok=True)
    for name, command in (
        ("python", f'exec "{sys.executable}" "$@"'),
        ("kernel-hub", f'exec "{sys.executable}" -m kernel_hub "$@"'),
    ):
        (names / name).write_text(f"#!/bin/sh\n{command}\n")
        (names / name).chmod(0o755)
    settings = {
        **os.environ,
        "PATH": f"{names}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        **env,
    }
    return subprocess.run(
        ["bash", "-euc", script], cwd=cwd, env=settings, capture_output=True, text=True, check=False
    )


def can_build_wheels() -> bool:
    """Whether this Python's own setuptools can: pip may fetch nothing here."""
    try:
        major, minor = map(int, metadata.version("setuptools").split(".")[:2])
    except metadata.PackageNotFoundError:
        return False
    return (major, minor) >= (70, 1) or importlib.util.find_spec("wheel") is not None


def commands(readme: Path) -> list[str]:
    """The README's code block that makes a package."""
    blocks = readme.read_text().split("\n```")[1::2]
    (block,) = [block for block in blocks if "kernel-hub new" in block]
    return block.strip().splitlines()


def test_it_writes_the_package(kernel_hub_cli: Run, tmp_path: Path) -> None:
    ran = kernel_hub_cli("new", "my_kernel2", "--into", str(tmp_path))
    assert ran.code == 0
    root = tmp_path / "my_kernel2"
    files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    assert files == {
        *("README.md", "pyproject.toml", "build_cubins.sh", "csrc/my_kernel2.cu"),
        *("my_kernel2/__init__.py", "test_my_kernel2.py"),
    }
    assert os.access(root / "build_cubins.sh", os.X_OK)
    for path in root.rglob("*"):
        if path.is_file():
            assert "@" + "NAME@" not in path.read_text() and "scale_add" not in path.read_text()
            if path.suffix == ".py":
                ast.parse(path.read_text())
    assert ran.out.count("wrote ") == len(files)


def test_a_word_of_python_is_said_to_be_one(kernel_hub_cli: Run, tmp_path: Path) -> None:
    ran = kernel_hub_cli("new", "lambda", "--into", str(tmp_path))
    assert "'lambda' cannot name a package: it is a word of Python's own" in ran.err
    ran = kernel_hub_cli("new", "kernel_hub", "--into", str(tmp_path))
    assert "it would hide the installed module" in " ".join(ran.err.split())
    ran = kernel_hub_cli("new", "x_", "--into", str(tmp_path))
    assert "not ending with an underscore" in " ".join(ran.err.split())


def test_it_overwrites_nothing(kernel_hub_cli: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    ran = kernel_hub_cli("new", "mine", "--into", str(tmp_path))
    assert ran.code == 2 and "exists already" in ran.err
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize(
    "name", ["9x", "Big", "with-dash", "class", "kernel_hub", "x_", "../x", ""]
)
def test_names_that_cannot_be(kernel_hub_cli: Run, tmp_path: Path, name: str) -> None:
    ran = kernel_hub_cli("new", name, "--into", str(tmp_path))
    assert ran.code == 2 and "cannot name a package" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_the_example_is_the_template() -> None:
    files = {path: EXAMPLE / path for path in new.render("scale_add")}
    shipped = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."],
        cwd=EXAMPLE,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    assert set(shipped) <= set(files)
    for path, text in new.render("scale_add").items():
        assert files[path].read_text() == text, f"{path}: kernel-hub new scale_add gives another"
    assert os.access(EXAMPLE / "build_cubins.sh", os.X_OK)


def test_the_kernel_is_small() -> None:
    assert len((EXAMPLE / "csrc/scale_add.cu").read_text().splitlines()) <= 20


def test_both_readmes_give_the_same_five_commands() -> None:
    assert commands(ROOT / "README.md") == commands(EXAMPLE / "README.md")
    assert len(commands(ROOT / "README.md")) == 5


@needs_nvcc
def test_the_readmes_commands_up_to_the_launch(fakecuda: FakeCuda, tmp_path: Path) -> None:
    # All but the installation, on a stand-in driver that takes the launch and runs nothing.
    script = "\n".join(commands(ROOT / "README.md")[1:])
    done = shell(script, tmp_path, KERNEL_HUB_LIBCUDA=fakecuda.path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 cubins in scale_add/cubins: 3 built" in done.stdout


@pytest.mark.gpu
@needs_nvcc
def test_the_readmes_commands_on_a_gpu(tmp_path: Path) -> None:
    done = shell("\n".join(commands(ROOT / "README.md")[1:]), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("[1. 3. 5. 7. 9.]\n")
    assert shell("cd scale_add && python -m pytest -q", tmp_path).returncode == 0


FIND = """
from kernel_hub import Kernel, registry
expected = "scale_add_fp32(float* out, float* x, int64_t num_elements)"
assert registry.scale_add.scale_add.scale_add_fp32.signature == expected
assert Kernel("scale_add", package="scale_add").scale_add_fp32.signature == expected
assert "scale_add" in dir(registry)
import scale_add
assert "site" in scale_add.__file__, scale_add.__file__
"""


@needs_nvcc
@pytest.mark.skipif(
    importlib.util.find_spec("pip") is None or not can_build_wheels(),
    reason="pip, or a setuptools that builds wheels (70.1, or the package wheel), is missing",
)
def test_an_installed_package_is_found(tmp_path: Path) -> None:
    new.write("scale_add", tmp_path)
    script = """
        (cd scale_add && ./build_cubins.sh --arch sm90)
        python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation \
            --no-index --target site ./scale_add
    """
    done = shell(script, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    path = f"{tmp_path / 'site'}{os.pathsep}{ROOT}"
    for script in (
        f"python - <<'EOF'\n{FIND}EOF",
        "kernel-hub list | grep 'scale_add  *scale_add  *sm90'",
        "kernel-hub verify",
        "kernel-hub inspect scale_add --package scale_add | grep 'int64_t num_elements'",
        "cd scale_add && mv scale_add hidden && python -m pytest -q -p no:cacheprovider",
    ):
        done = shell(script, tmp_path, PYTHONPATH=path)
        assert done.returncode == 0, script + done.stdout + done.stderr


@needs_nvcc
def test_an_op_of_torch_passes_its_own_tests(kernel_hub_cli: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch", "2.4", reason="torch 2.4 is not installed")
    ran = kernel_hub_cli("new", "my_op", "--torch", "--into", str(tmp_path))
    assert ran.code == 0 and "print(my_op.my_op(torch.arange(5.0)))" in ran.out
    written = "".join(p.read_text() for p in (tmp_path / "my_op").rglob("*") if p.is_file())
    words = {*new.TORCH.words, *new.NUMPY.words, "NAME"}
    assert not [word for word in words if f"@{word}@" in written] and "torch>=2.4" in written
    (line,) = [line for line in commands(tmp_path / "my_op/README.md") if "python -c" in line]
    script = f"cd my_op\n./build_cubins.sh\npython -m pytest -q -p no:cacheprovider\n{line}"
    done = shell(script, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 cubins in my_op/cubins: 3 built" in done.stdout
    assert done.stdout.endswith("tensor([1., 3., 5., 7., 9.])\n")


@pytest.mark.parametrize("name", ["numpy", "json", "pytest", "sys", "string"])
def test_the_name_of_a_module_there_is_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(KernelHubError, match=f"'{name}' cannot name a package: it would hide"):
        new.write(name, tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_plain_folder_on_the_path_is_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_scale_add").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    new.render("my_scale_add")
