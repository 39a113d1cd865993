"""What a first call does not do, and what the import of the ops does for it."""

from __future__ import annotations

import importlib
import types
from typing import Any

import pytest
import torch
from fakecuda import FakeCuda

from kernel_hub import driver, kernel
from kernel_hub.errors import DriverNotFoundError
from kernel_hub.launch import c_launcher


def _module(name: str) -> Any:
    return importlib.import_module(f"kernel_hub.ops.{name}")


def _torch(is_begun: bool) -> Any:
    return types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_initialized=lambda: is_begun), Tensor=torch.Tensor
    )


@pytest.mark.parametrize("is_begun", [True, False])
def test_what_is_opened_ahead(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:  # fmt: skip
    """The driver only where torch has: a process may fork before."""
    asked: list[bool] = []
    monkeypatch.setattr(c_launcher, "available", lambda: asked.append(True) or True)
    monkeypatch.setattr(kernel.interop, "loaded_torch", lambda: _torch(is_begun))
    kernel.open_ahead()
    assert asked and fakecuda.calls("cuInit") == is_begun


def test_no_driver_is_no_matter_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.interop, "loaded_torch", lambda: _torch(True))
    monkeypatch.setenv("KERNEL_HUB_LIBCUDA", "/nowhere/libcuda.so")
    monkeypatch.setattr(importlib.import_module("kernel_hub.driver.library"), "_driver", None)
    kernel.open_ahead()
    with pytest.raises(DriverNotFoundError):
        driver.get()


def test_a_gpu_is_described_without_counting_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _module("core.device")
    found = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="GPU")

    def refuse(*_: Any) -> None:
        pytest.fail("the GPUs were counted")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    monkeypatch.setattr(torch.cuda, "_get_device_properties", lambda index: found, raising=False)
    monkeypatch.setattr(device, "_pretended", None)
    asked = device.device_of.__wrapped__(torch.device("cuda", 0))
    assert asked[:3] == ((9, 0), 132, "GPU")


def test_few_zeros_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel that fills would be loaded for them."""
    counters = _module("core.counters")
    made: list[Any] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: made.append(k["device"]) or zeros(*a, **k))
    found = counters.zeros_begun(64, torch.device("cpu"))()
    assert made == ["cpu"] and found.dtype == torch.int32 and found.tolist() == [0] * 64
