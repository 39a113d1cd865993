"""CPU tensors on the way of CUDA tensors, up to the launch: checks, plans, addresses, marks."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from attention_devices import pretend
from call_cases import E4M3, Case
from launch_params import check_params
from ways import launch_for_cpu, op_modules

from kernel_hub.ops.core import bounds, common, operands
from kernel_hub.ops.core.device import PlannedGpu
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.matmul import linear_launch


class _NoLaunch:
    """A KernelFunction of which no launch arrives anywhere, of parameters that it would take."""

    def __init__(self, cubin: str, name: str) -> None:
        self.cubin, self.name = cubin, name

    def __call__(
        self, gridDim: Any, blockDim: Any, sharedMemBytes: int, stream: Any, params: Any, **_: Any
    ) -> None:
        check_params(self.cubin, self.name, params)


class OnGpu(torch.Tensor):
    """Says that it is on a GPU, so that it goes the quick ways of the ops too."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True


def on_gpu(case: Case) -> Case:
    """The same call, of tensors that say so; `plan_only` makes the ops believe it."""
    if "q" in case.required and case.tensors["q"].dtype == E4M3:
        return case  # its launch, which is not reached here, asks for the device
    case.tensors = {key: tensor.as_subclass(OnGpu) for key, tensor in case.tensors.items()}
    return case


@functools.cache
def _no_launch(cubin: str, name: str) -> Any:
    return _NoLaunch(cubin, name)


def plan_only(monkeypatch: Any) -> None:
    """CPU tensors go the whole way of CUDA tensors from here on, but nothing is launched.

    So nothing but the ops' own marks says that a tensor was written.
    """
    forget_all()
    monkeypatch.setattr(common, "shipped", _no_launch)
    believed = operands.PLAIN_TYPES | {OnGpu}
    for module in (*op_modules(), operands):
        for name in ("PLAIN_TYPES", "_PLAIN_TYPES"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, believed)
    launch_for_cpu(monkeypatch)
    pretend(monkeypatch, (8, 0))
    monkeypatch.setattr(bounds, "flag", lambda *_: None)
    fp8 = importlib.import_module("kernel_hub.ops.matmul.linear_fp8")
    monkeypatch.setattr(fp8, "device_of", lambda _: PlannedGpu((9, 0), 132))
    monkeypatch.setattr(linear_launch, "tensor_map", lambda *_: b"")
    attention_fp8 = importlib.import_module("kernel_hub.ops.attention.fp8")
    monkeypatch.setattr(attention_fp8, "cpu", SimpleNamespace(forward=lambda *_: None))
