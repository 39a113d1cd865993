"""The published cpm_kernels on top of the alias, on the stand-in driver, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients import needs_package
from fakecuda import FakeCuda

from kernel_hub.integrations import cpm_kernels

ROOT = Path(__file__).parents[2]


@pytest.fixture
def functions() -> Any:
    """Every public function of cpm_kernels.kernels with arguments of the annotated kinds."""
    needs_package()
    cpm_kernels.install()
    module = importlib.import_module("cpm_kernels.kernels")
    assert module.gelu_forward
    values = {float: 1.0, bool: False}
    found = []
    for function in vars(module).values():
        if inspect.isfunction(function) and function.__name__ != "round_up":
            parameters = inspect.signature(function).parameters
            # cuBLASLt's products are no kernels of the package's own.
            if "cublasLt" not in inspect.getsource(function):
                given = {k: values.get(p.annotation, 64) for k, p in parameters.items()}
                found.append((function, {**given, "stream": 0}))
    yield found
    cpm_kernels.uninstall()


def test_every_function_launches(functions: Any, make_fakecuda: Callable[..., FakeCuda]) -> None:
    fake = make_fakecuda(capability=(8, 6))
    for function, given in functions:
        function(**given)
    assert fake.launch_count == len(functions) > 50


def test_hopper_is_refused_in_words(functions: Any, make_fakecuda: Callable[..., FakeCuda]) -> None:
    fake = make_fakecuda(capability=(9, 0))
    for function, given in functions:
        with pytest.raises(RuntimeError, match=r"(?s)^CUDA Error: no kernel image.*sm_61.*sm_86"):
            function(**given)
    assert fake.calls("cuLibraryLoadData") == 0


def test_its_own_base_imports_pkg_resources(
    functions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another name, as the alias has the place of `kernels.base`."""
    place = importlib.import_module("cpm_kernels.kernels").__path__[0]
    spec = importlib.util.spec_from_file_location(
        "cpm_kernels.kernels.their_base", f"{place}/base.py"
    )
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, theirs)
    spec.loader.exec_module(theirs)
    kernel = theirs.Kernel("gelu", ["cu_gelu_forward"])
    assert kernel.code[:4] == b"\x50\xed\x55\xba"  # a fatbin
    with pytest.raises(RuntimeError, match=r"File .* not found"):
        theirs.Kernel("gelo", [])


def test_a_missing_package_fails_where_it_is_required(tmp_path: Path) -> None:
    test = Path(__file__).with_name("test_cpm_package.py")
    command = [sys.executable, "-m", "pytest", "-rsE", "-p", "no:cacheprovider", str(test)]
    command += ["-k", "hopper", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    for required, code, said in (("", 0, "SKIPPED"), ("triton,cpm_kernels", 1, "ERROR")):
        (tmp_path / "sitecustomize.py").write_text(
            "import importlib.util\nfind = importlib.util.find_spec\n"
            "importlib.util.find_spec = lambda name, *a: (\n"
            "    None if name == 'cpm_kernels' else find(name, *a))\n"
        )
        path = [str(tmp_path), str(ROOT), str(ROOT / "tests"), str(test.parent)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "KERNEL_HUB_TEST_REQUIRES": required,
        }
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
        assert done.returncode == code, done.stdout + done.stderr
        assert said in done.stdout and "pip install --no-deps cpm_kernels" in done.stdout
