"""Every example runs alone: with a GPU to its check, without one to saying so."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
NEEDS = "needs an NVIDIA GPU"
each = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)


def skip_without_packages(example: Path) -> None:
    for package in ("torch", "triton"):
        text = f"import {package}\n"
        if text in example.read_text() and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def cold(example: Path, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """In a process of its own from the start."""
    command = [sys.executable, str(example)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


@each
def test_without_a_gpu(example: Path, tmp_path: Path) -> None:
    skip_without_packages(example)
    hidden = {"KERNEL_HUB_LIBCUDA": "/nowhere/libcuda.so.1", "CUDA_VISIBLE_DEVICES": ""}
    env = {**os.environ, "PYTHONPATH": str(ROOT), **hidden}
    if "import torch\n" in example.read_text():
        done = warm.run([str(example)], cwd=tmp_path, env=env)
    else:
        done = cold(example, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout
    assert NEEDS in out
    assert len(out.splitlines()) >= 2, "it does what it can without a GPU"
    assert list(tmp_path.iterdir()) == [], "it leaves files behind"


@pytest.mark.gpu
@each
def test_with_a_gpu(example: Path, tmp_path: Path) -> None:
    skip_without_packages(example)
    done = cold(example, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert NEEDS not in done.stdout


def test_they_are_numbered_and_say_what_they_show() -> None:
    assert [int(path.name[:2]) for path in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))
    for path in EXAMPLES:
        assert path.read_text().startswith('"""')


def test_the_snippet_of_the_study_is_literal() -> None:
    text = " ".join((ROOT / "examples/02_matmul_cache_kernel.py").read_text().split())
    assert (
        'k = Kernel(filename="matmul_cache_kernel", function_names=["matmul_cache_kernel_0d1d2d"])'
        in text
    )
    call = (
        "k.matmul_cache_kernel_0d1d2d( gridDim=(8, 8, 1), blockDim=(32, 32, 1), "
        "sharedMemBytes=16384, stream=0, params=[arg1, arg2, arg3], )"
    )
    assert call in text


def test_the_readmes_snippet_runs_up_to_the_launch() -> None:
    text = (ROOT / "README.md").read_text()
    snippet = text.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in snippet.splitlines() if line.strip()]) <= 15
    compile(snippet, "README.md", "exec")
    hello = (ROOT / "examples/01_hello_launch.py").read_text()
    launch = snippet[snippet.index("out = torch") : snippet.index("q =")].strip()
    assert launch in hello
