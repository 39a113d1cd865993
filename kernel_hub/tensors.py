"""What other libraries' arrays are: address, dtype token, device, shape, strides; and streams.

Reads torch tensors, `__cuda_array_interface__`, DLPack and DeviceArray; never imports torch itself
(a torch tensor can only come from a process that has), never calls the driver.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from operator import index
from typing import Any

from .errors import LaunchConfigError, TensorError

# NumPy-style type strings (CUDA array interface) and DLPack (code, bits) -> dtype token.
_TYPESTR = {
    "b1": "bool",
    "i1": "int8",
    "u1": "uint8",
    "i2": "int16",
    "u2": "uint16",
    "i4": "int32",
    "u4": "uint32",
    "i8": "int64",
    "u8": "uint64",
    "f2": "fp16",
    "f4": "fp32",
    "f8": "fp64",
}
_DLPACK_LETTER = {0: "i", 1: "u", 2: "f", 6: "b"}
_DLPACK_BF16, _DLPACK_E4M3FN, _DLPACK_E5M2 = 4, 10, 12
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged
_TORCH_TOKENS = {
    "float16": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "bool": "bool",
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class ArrayView:
    """A device array as a kernel sees it. Strides in elements; None where they are not known."""

    address: int
    dtype: str | None
    device: int | None
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    keep: object


def loaded_torch() -> Any:
    """The torch module if this process has imported it, else None."""
    torch = sys.modules.get("torch")
    # While torch is still being imported by another thread it has no Tensor yet.
    return torch if torch is not None and hasattr(torch, "Tensor") else None


def torch_dtype(token: str | None) -> Any:
    """The torch dtype for a dtype token, or None where torch is absent or has none."""
    torch = loaded_torch()
    if torch is None or token is None:
        return None
    for name, known in _TORCH_TOKENS.items():
        if known == token:
            return getattr(torch, name, None)
    return None


def torch_token(dtype: object) -> str | None:
    """The dtype token of a torch dtype, or None."""
    return _TORCH_TOKENS.get(str(dtype).removeprefix("torch."))


def describe(value: Any) -> ArrayView | None:
    """`value` as an ArrayView, or None if it is no array.

    Raises TensorError for an array that lives on the CPU or whose memory is gone.
    """
    torch = loaded_torch()
    if torch is not None and isinstance(value, torch.Tensor):
        return _describe_torch(value)
    if getattr(value, "is_freed", False):
        raise TensorError(f"{type(value).__name__} was freed")
    # Numba and CuPy raise from the property for arrays that are not theirs to give.
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is not None:
        return _describe_interface(value, interface)
    if hasattr(value, "__array_interface__"):
        raise TensorError(f"{type(value).__name__} is on the CPU; copy it to the GPU first")
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _describe_dlpack(value)
    return None


def _describe_torch(tensor: Any) -> ArrayView:
    if not tensor.is_cuda:
        raise TensorError(f"torch tensor is on {tensor.device}; move it with .cuda()")
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:  # fake, functorch and other storage-less tensors
        raise TensorError(f"torch tensor has no memory of its own: {error}") from error
    if not address and tensor.numel():
        raise TensorError("torch tensor's storage was freed (its data pointer is null)")
    return ArrayView(
        address,
        torch_token(tensor.dtype),
        tensor.get_device(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor,
    )


def _describe_interface(value: Any, interface: dict[str, Any]) -> ArrayView:
    typestr = str(interface["typestr"])
    token = _TYPESTR.get(typestr[1:]) if typestr[:1] in "<|=" else None
    # Types NumPy lacks travel as raw integers: an array that knows its token says so itself.
    token = getattr(value, "dtype_token", None) or token
    shape = tuple(interface["shape"])
    itemsize = int(typestr[2:]) if typestr[2:].isdigit() else 1
    strides = interface.get("strides")
    device = getattr(value, "device", None)
    device = getattr(device, "id", device)  # CuPy: Device object; DeviceArray: int
    return ArrayView(
        int(interface["data"][0]),
        token,
        device if isinstance(device, int) else None,
        shape,
        contiguous_strides(shape) if strides is None else tuple(s // itemsize for s in strides),
        value,
    )


def _describe_dlpack(value: Any) -> ArrayView:
    kind, device = (int(part) for part in value.__dlpack_device__())
    if kind not in _DLPACK_CUDA:
        raise TensorError(
            f"{type(value).__name__} is not in CUDA memory (DLPack device type {kind}); "
            "copy it to the GPU first"
        )
    # -1: no synchronisation by the producer; the caller orders streams, as with torch tensors.
    capsule = value.__dlpack__(stream=-1)
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _DLTensor.from_address(get_pointer(capsule, b"dltensor"))
    rank = tensor.ndim
    shape = tuple(tensor.shape[:rank]) if rank else ()
    strides = tuple(tensor.strides[:rank]) if rank and tensor.strides else contiguous_strides(shape)
    code, bits = tensor.dtype_code, tensor.dtype_bits
    special = {_DLPACK_BF16: "bf16", _DLPACK_E4M3FN: "e4m3", _DLPACK_E5M2: "e5m2"}
    token = special.get(code) or _TYPESTR.get(f"{_DLPACK_LETTER.get(code, '?')}{max(1, bits // 8)}")
    return ArrayView(
        (tensor.data or 0) + tensor.byte_offset,
        token if tensor.dtype_lanes == 1 else None,
        device,
        shape,
        strides,
        (capsule, value),
    )


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def raw_stream_getter() -> Any:
    """`device -> raw handle of torch's current stream`, or None without torch CUDA."""
    torch = loaded_torch()
    return getattr(torch._C, "_cuda_getCurrentRawStream", None) if torch is not None else None


def current_stream(device: int) -> int:
    """torch's current stream of `device` when torch is loaded, else 0 (legacy default stream)."""
    getter = raw_stream_getter()
    return int(getter(device)) if getter is not None else 0


def current_device() -> int:
    """torch's current device when torch is loaded and uses CUDA, else 0."""
    torch = loaded_torch()
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    return 0


def stream_handle(stream: Any, device: int) -> int:
    """The CUstream behind any kind of stream object, checked to be of `device` where it says."""
    if stream is None:
        return current_stream(device)
    handle: Any
    if isinstance(stream, int):
        handle = -1 if isinstance(stream, bool) else stream
    elif hasattr(stream, "cuda_stream"):  # torch
        handle = stream.cuda_stream
        of_device = getattr(stream, "device_index", None)
        if isinstance(of_device, int) and of_device not in (-1, device):
            raise LaunchConfigError(
                f"stream belongs to device {of_device}, the params are on device {device}; "
                f"pass a stream of device {device}"
            )
    elif hasattr(stream, "__cuda_stream__"):  # cuda.core and others: (version, handle)
        pair = stream.__cuda_stream__
        pair = pair() if callable(pair) else pair
        handle = pair[1] if isinstance(pair, (tuple, list)) and len(pair) == 2 else None
    elif hasattr(stream, "_as_parameter_"):
        handle = stream._as_parameter_
    elif hasattr(stream, "ptr"):  # CuPy
        handle = stream.ptr
    else:
        handle = stream
    if isinstance(handle, ctypes._SimpleCData):
        handle = handle.value or 0
    try:
        handle = index(handle)
    except TypeError:
        handle = -1
    if not 0 <= handle < 1 << 64:
        raise LaunchConfigError(
            f"stream={stream!r} is no stream: pass None, an int handle, or an object with "
            "cuda_stream, __cuda_stream__, _as_parameter_ or ptr"
        )
    return handle
