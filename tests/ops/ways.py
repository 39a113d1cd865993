"""The two ways a kernel runs in these tests: emulated on the CPU, and on the GPU; Hopper's too."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import drawn
import ops_coverage  # noqa: F401 (it counts)
import pytest
import torch
from attention_devices import pretend
from emulated import CannotEmulateError, EmulatedFunction, build
from emulated_hopper import HopperFunction, make_map

from kernel_hub import ops
from kernel_hub.ops.core import bounds, common, tensor_maps
from kernel_hub.ops.core.device import PlannedGpu
from kernel_hub.ops.core.device import pretend as plan_for

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
EMULATED_SMS = 4
T = TypeVar("T")


@dataclass(frozen=True)
class Way:
    """Where the tensors are; the public ops then run the kernels there."""

    name: str
    device: str

    @property
    def is_gpu(self) -> bool:
        return self.name == "gpu"

    @property
    def num_sms(self) -> int:
        """Few where each thread is a fibre: so that blocks have several tiles."""
        if self.is_gpu:
            return torch.cuda.get_device_properties(0).multi_processor_count
        return EMULATED_SMS

    def some(self, cases: Iterable[T], number: int, *what: object) -> list[T]:
        """All on a GPU; of the emulator's `number` by lot in a run that draws."""
        return list(cases) if self.is_gpu else drawn.some(list(cases), number, *what)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
        """The same numbers on both ways."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(dtype).to(self.device)


@functools.cache
def op_modules() -> list[ModuleType]:
    """All modules of kernel_hub.ops."""
    found = pkgutil.walk_packages(ops.__path__, "kernel_hub.ops.")
    return [importlib.import_module(each.name) for each in found if not each.ispkg]


def launch_for_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What launches takes the place of what torch computes, by their names: `_cpu_into`, ..."""
    for module in op_modules():
        for name, launches in list(vars(module).items()):
            by_torch = name.replace("cuda", "cpu", 1)
            if name.lstrip("_").startswith("cuda") and hasattr(module, by_torch):
                monkeypatch.setattr(module, by_torch, launches)


@functools.cache
def emulated_function(cubin: str, name: str) -> EmulatedFunction:
    return EmulatedFunction(cubin, name)


def forget_reports(device: str) -> None:
    """What the tables of earlier tests led to is no business of the next."""
    bounds.take(torch.empty(0, device=device))


def emulate(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    """CPU tensors go to function(cubin, name); skips where no kernel can be built for the CPU."""
    try:
        build("silu_and_mul")
    except CannotEmulateError as missing:
        pytest.skip(str(missing))
    monkeypatch.setattr(common, "shipped", function)
    launch_for_cpu(monkeypatch)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """CPU tensors and the kernels' source run by the emulator, or CUDA tensors and the cubins."""
    if request.param == "gpu":
        forget_reports("cuda")
        yield Way("gpu", "cuda")
        return
    forget_reports("cpu")
    emulate(monkeypatch, emulated_function)
    pretend(monkeypatch, (9, 0))
    yield Way("emulated", "cpu")


@functools.cache
def hopper_function(cubin: str, name: str) -> HopperFunction:
    return HopperFunction(cubin, name)


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def hopper_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """The same of the bodies for Hopper, planned for such a GPU of few multiprocessors."""
    if request.param == "gpu":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("these kernels need a GPU of compute capability 9.0")
        forget_reports("cuda")
        yield Way("gpu", "cuda")
        return
    forget_reports("cpu")
    emulate(monkeypatch, hopper_function)
    monkeypatch.setattr(tensor_maps, "make", make_map)
    with plan_for(PlannedGpu((9, 0), EMULATED_SMS)):
        yield Way("emulated", "cpu")
    tensor_maps.known.clear()
