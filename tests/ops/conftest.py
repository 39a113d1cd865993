"""The fixture that runs a test both ways: kernels emulated on the CPU, and on the GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="the ops work on torch tensors, and torch is not installed")
from emulated import CannotEmulateError, EmulatedFunction, build
from ways import Way

from kernel_hub.ops import _common

MODULES = [
    importlib.import_module(f"kernel_hub.ops.{name}")
    for name in ("rms_norm", "silu_and_mul", "rope")
]


@functools.cache
def emulated_function(cubin: str, name: str) -> EmulatedFunction:
    return EmulatedFunction(cubin, name)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """CPU tensors and the kernels' source run by the emulator, or CUDA tensors and the cubins."""
    for module in MODULES:
        monkeypatch.setattr(module, "_plans", {})
    if request.param == "gpu":
        yield Way("gpu", "cuda")
        return
    try:
        build("silu_and_mul")
    except CannotEmulateError as missing:
        pytest.skip(str(missing))
    monkeypatch.setattr(_common, "shipped", emulated_function)
    for module in MODULES:
        monkeypatch.setattr(module, "_cpu_into", module._cuda_into)
    yield Way("emulated", "cpu")
