"""The two ways a kernel runs in these tests: emulated on the CPU, and on the GPU."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from attention_devices import BACKWARD, FORWARD, pretend
from emulated import CannotEmulateError, EmulatedFunction, build

from kernel_hub.ops import _common

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@dataclass(frozen=True)
class Way:
    """Where the tensors are; the public ops then run the kernels there."""

    name: str
    device: str

    @property
    def is_gpu(self) -> bool:
        return self.name == "gpu"

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
        """The same numbers on both ways."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(dtype).to(self.device)


MODULES = [
    importlib.import_module(f"kernel_hub.ops.{name}")
    for name in (
        "rms_norm",
        "silu_and_mul",
        "rope",
        "append_kv",
        "merge_states",
        "decode_attention",
        "linear",
        "grouped_linear",
        "batched_matmul",
        "swiglu_linear",
        "qkv_linear",
    )
]
# Attention has its launches apart from its public op.
ATTENTION = importlib.import_module("kernel_hub.ops._attention_run")


@functools.cache
def emulated_function(cubin: str, name: str) -> EmulatedFunction:
    return EmulatedFunction(cubin, name)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """CPU tensors and the kernels' source run by the emulator, or CUDA tensors and the cubins."""
    for module in MODULES:
        monkeypatch.setattr(module, "_plans", {})
    for module in (FORWARD, BACKWARD):
        monkeypatch.setattr(module, "_plans", {}, raising=False)
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
    pretend(monkeypatch, (9, 0))
    for direction in ("forward", "backward"):
        launch = getattr(ATTENTION, f"cuda_{direction}")
        monkeypatch.setattr(ATTENTION, f"cpu_{direction}", launch)
    yield Way("emulated", "cpu")
