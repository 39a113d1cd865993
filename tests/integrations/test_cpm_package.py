"""The published cpm_kernels on top of the alias, on the stand-in driver, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from fakecuda import FakeCuda

from kernel_hub.integrations import cpm_kernels


@pytest.fixture
def functions() -> Any:
    """Every public function of cpm_kernels.kernels with arguments of the annotated kinds."""
    if importlib.util.find_spec("cpm_kernels") is None:
        pytest.skip("cpm_kernels is not installed (pip install --no-deps cpm_kernels)")
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
