"""What other libraries' arrays are: address, dtype token, device, shape, strides; and streams.

Reads torch tensors, `__cuda_array_interface__`, DLPack and DeviceArray; never imports torch itself
(a torch tensor can only come from a process that has), never calls the driver.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from operator import index
from typing import Any, NamedTuple

from ..errors import LaunchConfigError, TensorError

# NumPy-style type strings (CUDA array interface) -> dtype token.
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
_TORCH_NAMES = {token: name for name, token in _TORCH_TOKENS.items()}

FIRST_ADDRESS = 4096  # no object lies in the first page
END_OF_ADDRESSES = 1 << 63  # nor in the system's half


class ArrayView(NamedTuple):
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
    return getattr(torch, _TORCH_NAMES.get(token, ""), None)


def torch_token(dtype: object) -> str | None:
    """The dtype token of a torch dtype, or None."""
    return _TORCH_TOKENS.get(str(dtype).removeprefix("torch."))


# What arrays of other libraries ask of the launch they go into: called with the stream that their
# own work is on (None: the producer orders itself), gives the launch's stream, -1 for no order.
Ready = Callable[[int | None], int]


def describe(value: Any, ready: Ready | None = None) -> ArrayView | None:
    """`value` as an ArrayView, or None if it is no array.

    ready: makes the work of another stream come first; None orders nothing.
    Raises TensorError for an array that lives on the CPU, on several GPUs, or whose memory is gone.
    """
    torch = loaded_torch()
    if torch is not None and isinstance(value, torch.Tensor):
        return _describe_torch(value)
    if getattr(value, "is_freed", False):
        raise TensorError(f"{type(value).__name__} was freed")
    module = type(value).__module__
    if not module.startswith("jax"):
        # Numba and CuPy raise from the property for arrays that are not theirs to give.
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is not None:
            return _describe_interface(value, interface, ready)
        if hasattr(value, "__array_interface__"):
            raise TensorError(
                f"{type(value).__name__} is on the CPU; copy it to the GPU first: "
                "DeviceArray.from_numpy(array)"
            )
    elif type(value).__name__.endswith("Tracer"):
        raise TensorError(
            f"{type(value).__name__} has no memory: JAX is tracing (jit, vmap, grad) here"
        )
    elif hasattr(value, "is_deleted") and value.is_deleted():
        raise TensorError(f"JAX's {type(value).__name__} was deleted or donated")
    if module.startswith("cuda.core") and hasattr(value, "memory_resource"):
        return _describe_buffer(value)
    # JAX's arrays are promises: only its DLPack export can wait for the work that fills them.
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _describe_dlpack(value, ready)
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


def _describe_interface(value: Any, interface: dict[str, Any], ready: Ready | None) -> ArrayView:
    typestr = interface["typestr"]
    token = _TYPESTR.get(typestr[1:]) if typestr[0] in "<|=" else None
    # Types NumPy lacks travel as raw bits: an array that knows its token or dtype says so itself.
    own = getattr(value, "dtype_token", None)
    if own is None and token is None:  # CuPy with ml_dtypes
        token = torch_token(getattr(value, "dtype", None))
    shape = tuple(interface["shape"])
    if (strides := interface.get("strides")) is None:
        strides = contiguous_strides(shape)
    else:
        itemsize = int(typestr[2:]) if typestr[2:].isdigit() else 1
        strides = tuple(stride // itemsize for stride in strides)
    device = getattr(value, "device", None)
    device = getattr(device, "id", device)  # CuPy: Device object; DeviceArray: int
    # DeviceArray keeps account of its streams by itself.
    if ready is not None and own is None and (stream := interface.get("stream")) is not None:
        if not is_handle(stream := index(stream)):
            raise TensorError(f"{type(value).__name__} names the stream {stream}, which is none")
        ready(stream)
    return ArrayView(
        int(interface["data"][0]),
        own or token,
        device if isinstance(device, int) else None,
        shape,
        strides,
        value,
    )


def _describe_buffer(buffer: Any) -> ArrayView:
    """cuda.core's Buffer: bytes without a dtype, which DLPack would call int8."""
    if getattr(buffer, "is_closed", False) or not buffer.handle:
        raise TensorError(f"cuda.core's {type(buffer).__name__} was closed")
    if not buffer.is_device_accessible:
        raise TensorError(f"cuda.core's {type(buffer).__name__} is memory that no GPU can reach")
    # Pinned memory is no GPU's, and says so by an error; managed memory is every GPU's.
    device = None if buffer.is_host_accessible else int(buffer.device_id)
    return ArrayView(int(buffer.handle), None, device, (buffer.size,), (1,), buffer)


def _describe_dlpack(value: Any, ready: Ready | None) -> ArrayView:
    from . import dlpack

    dlpack.device_of(value, "copy it to the GPU first")
    given = dlpack.consume(value, -1 if ready is None else ready(None), any_dtype=True)
    return ArrayView(
        given.address,
        given.dtype.token or None,
        given.device,
        given.shape,
        contiguous_strides(given.shape) if given.strides is None else given.strides,
        (given.owner, value),
    )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    if len(shape) == 1:
        return (1,)
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


def device_index(device: Any) -> int:
    """The GPU's number in an int, 'cuda:1' or a device of torch, cuda.core or CuPy; TypeError."""
    if isinstance(device, str):
        kind, _, name = device.partition(":")
        if kind == "cuda" and (name.isdecimal() or device == kind):
            return int(name) if name else current_device()
    if not isinstance(device, int):
        if type(device).__module__ == "torch" and device.type == "cuda":
            return current_device() if device.index is None else int(device.index)
        for name in ("device_id", "id"):  # cuda.core, CuPy
            if isinstance(number := getattr(device, name, None), int):
                return number
    return index(device)


def is_handle(number: int) -> bool:
    """Whether `number` can be a CUstream: a default stream (0, 1, 2), or an address of the host.

    The driver takes any other number for an address too, and the process dies of it.
    """
    return 0 <= number <= 2 or FIRST_ADDRESS <= number < END_OF_ADDRESSES


def stream_handle(stream: Any, device: int) -> int:
    """The CUstream behind any kind of stream object, checked to be of `device` where it says."""
    if stream is None:
        return current_stream(device)
    handle: Any
    of_device = None
    if isinstance(stream, int):
        handle = -1 if isinstance(stream, bool) else stream
    elif hasattr(stream, "cuda_stream"):  # torch
        handle = stream.cuda_stream
        of_device = getattr(stream, "device_index", None)
    elif hasattr(stream, "__cuda_stream__"):  # cuda.core, CuPy, Numba: (version, handle)
        pair = stream.__cuda_stream__
        pair = pair() if callable(pair) else pair
        handle = pair[1] if isinstance(pair, (tuple, list)) and len(pair) == 2 else None
        of_device = getattr(stream, "device_id", None)
    elif hasattr(stream, "_as_parameter_"):
        handle = stream._as_parameter_
    elif hasattr(stream, "ptr") and not hasattr(stream, "__cuda_array_interface__"):  # older CuPy
        handle = stream.ptr
        of_device = getattr(stream, "device_id", None)
    elif hasattr(stream, "handle"):  # older Numba
        handle = stream.handle
    else:
        handle = stream
    if isinstance(handle, ctypes._SimpleCData):
        handle = handle.value or 0
    elif type(handle).__name__ in ("CUstream", "cudaStream_t"):  # cuda.bindings
        handle = int(handle)
    try:
        handle = index(handle)
    except TypeError:
        handle = -1
    if not is_handle(handle):
        raise LaunchConfigError(
            f"stream={stream!r:.80} is no stream: pass None, an int handle (0, 1 and 2 are the "
            "default streams), or an object with cuda_stream, __cuda_stream__, _as_parameter_, "
            "ptr or handle"
        )
    if isinstance(of_device, int) and of_device not in (-1, device):
        raise LaunchConfigError(
            f"stream belongs to device {of_device}, the params are on device {device}; "
            f"pass a stream of device {device}"
        )
    return handle
