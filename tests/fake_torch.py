"""A stand-in for torch: what the launchers look at in its tensors, its streams and its DLPack."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import pytest

from kernel_hub.arrays import interop
from kernel_hub.launch import c_launcher


class _Dtype:
    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"torch.{self.name}"


FP32, FP16 = _Dtype("float32"), _Dtype("float16")


class Tensor:
    """What the launchers look at in a torch tensor."""

    gpu = 0

    def __init__(self, address: int, dtype: _Dtype = FP32, cuda: bool = True, numel: int = 8):
        self.address, self.dtype, self.is_cuda, self.elements = address, dtype, cuda, numel
        self.device = "cuda:0" if cuda else "cpu"
        self.shape = (numel,)

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.gpu if self.is_cuda else -1

    def numel(self) -> int:
        return self.elements

    def stride(self) -> tuple[int, ...]:
        return (1,)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int), ("device_id", ctypes.c_int),
        ("ndim", ctypes.c_int), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_DLTensor))
def _as_dltensor(tensor: Any, out: Any) -> int:
    made = out.contents
    made.data, made.byte_offset = tensor.data_ptr(), 0
    made.device_type, made.device_id = (2, tensor.gpu) if tensor.is_cuda else (1, 0)
    made.code, made.bits, made.lanes = 2, 16 if tensor.dtype is FP16 else 32, 1
    return 0


def fake_torch(monkeypatch: pytest.MonkeyPatch, exchange: bool) -> list[int]:
    """Put the stand-in in sys.modules, with DLPack's C exchange API or without."""
    current = [0]
    torch = types.ModuleType("torch")
    torch.Tensor = Tensor  # type: ignore[attr-defined]
    torch.nn = types.SimpleNamespace(Parameter=Tensor)  # type: ignore[attr-defined]
    torch.float32, torch.float16 = FP32, FP16  # type: ignore[attr-defined]
    torch._C = types.SimpleNamespace(  # type: ignore[attr-defined]
        _cuda_getCurrentRawStream=lambda device: current[0]
    )
    torch.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        is_available=lambda: True, is_initialized=lambda: True, current_device=lambda: 0
    )
    if exchange:

        @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
        def work_stream(kind: int, device: int, out: int) -> int:
            ctypes.c_void_p.from_address(out).value = current[0]
            return 0

        def address(function: Any) -> int:
            return ctypes.cast(function, ctypes.c_void_p).value or 0

        api = c_launcher.Exchange(1, 3, 0, 0, 0, 0, address(_as_dltensor), address(work_stream))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [
            ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p,
        ]  # fmt: skip
        capsule = new(ctypes.addressof(api), b"dlpack_exchange_api", None)
        monkeypatch.setattr(Tensor, "__dlpack_c_exchange_api__", capsule, raising=False)
        torch.keep = (api, work_stream)  # type: ignore[attr-defined]
    c_launcher._exchange.cache_clear()
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(  # `fakecuda` hides the streams of a real torch
        interop, "raw_stream_getter", lambda: torch._C._cuda_getCurrentRawStream
    )
    return current
