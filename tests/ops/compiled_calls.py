"""Calls that torch.compile traced beside the same calls as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
Call = Callable[[dict[str, torch.Tensor]], Any]


def each_call(functions: Sequence[Call]) -> Callable[[Any], Any]:
    """Run a test of (function, backend, device) with each of them."""

    def decorate(test: Any) -> Any:
        test = pytest.mark.parametrize("function", functions, ids=lambda f: f.__name__)(test)
        test = pytest.mark.parametrize("backend", BACKENDS)(test)
        return pytest.mark.parametrize("device", DEVICES)(test)

    return decorate


def check_compiled(
    function: Call, inputs: Callable[[str], dict[str, torch.Tensor]], backend: str, device: str
) -> None:
    """The same numbers, in one graph."""
    expected = function(inputs(device))
    found = torch.compile(function, fullgraph=True, backend=backend)(inputs(device))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
