"""DLPack capsules through ctypes: taking them apart, and making them. Knows no driver.

Structures and rules: https://dmlc.github.io/dlpack/latest/ (version 1.0; the older unversioned
capsule is taken and given too).
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import math
import sys
import threading
from collections import deque
from ctypes import (
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from typing import Any

from ..errors import KernelHubError, TensorError
from . import dtypes
from .dtypes import Dtype
from .lifetimes import Held, Watches

CUDA, CUDA_MANAGED = 2, 13
_READ_ONLY = 1  # bit of DLManagedTensorVersioned.flags


class DLTensor(ctypes.Structure):
    """DLTensor: 48 bytes; strides in elements, or NULL for row-major."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """The unversioned holder, capsule name 'dltensor'."""

    _fields_ = (("tensor", DLTensor), ("manager", c_void_p), ("deleter", c_void_p))


class DLManagedTensorVersioned(ctypes.Structure):
    """The holder of DLPack 1.0, capsule name 'dltensor_versioned'."""

    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", DLTensor),
    )


_HOLDERS: dict[bytes, tuple[type[Any], bytes]] = {
    b"dltensor": (DLManagedTensor, b"used_dltensor"),
    b"dltensor_versioned": (DLManagedTensorVersioned, b"used_dltensor_versioned"),
}
_DELETER = ctypes.CFUNCTYPE(None, c_void_p)

# Own prototypes, so that nobody else's argtypes on ctypes.pythonapi matter. The capsule's
# destructor gets a dying object, which must not become a Python reference: hence c_void_p.
_is_valid = ctypes.PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_get_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
_new = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_increase = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


@dataclass(frozen=True)
class Consumed:
    """What a consumed capsule holds. `owner` calls the producer's deleter when it dies."""

    address: int
    size_bytes: int
    device: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: Dtype
    read_only: bool
    owner: object


class _Taken(Held):
    """A managed tensor whose deleter is ours to call, once, from when its capsule was renamed."""

    __slots__ = ("_capsule", "_deleter", "_once", "_used")

    def __init__(self, capsule: object, used: bytes, address: int, deleter: int | None) -> None:
        self._capsule, self._used = capsule, used
        self._once = iter((address,))
        self._deleter = _DELETER(deleter) if deleter else None

    def release(self) -> None:
        if self._deleter is not None and _is_valid(id(self._capsule), self._used):
            deque(map(self._deleter, self._once), 0)


_watches: Watches[_Taken] = Watches()


class _Owner:
    """Calls a managed tensor's deleter at its own death. It is there before the tensor is taken."""

    __slots__ = ("__weakref__", "_taken")

    def __init__(self, taken: _Taken) -> None:
        self._taken = taken
        _watches.add(self, taken)

    def __del__(self) -> None:
        if sys is not None and not sys.is_finalizing():
            self._taken.release()
            _watches.drain()


HOST_DATA = "use DeviceArray.from_numpy for host data"


def device_of(producer: Any, advice: str = HOST_DATA) -> int:
    """The GPU's number of an object with DLPack methods; TensorError for other memory."""
    name = type(producer).__name__
    if not hasattr(producer, "__dlpack__") or not hasattr(producer, "__dlpack_device__"):
        raise TensorError(f"{name} has no __dlpack__; {advice}")
    try:
        kind, device = (int(part) for part in producer.__dlpack_device__())
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TensorError(_refused(name, error)) from error
    if kind not in (CUDA, CUDA_MANAGED):
        raise TensorError(f"{name} is not in CUDA memory (DLPack device type {kind}); {advice}")
    return device


def _refused(name: str, error: Exception) -> str:
    # A JAX array spread over several devices, or one that was deleted or donated.
    return f"{name} is not one array in the memory of one GPU ({type(error).__name__}: {error})"


def consume(producer: Any, stream: int, *, any_dtype: bool = False) -> Consumed:
    """Take the producer's capsule, ordered before work on `stream` (-1: not ordered).

    any_dtype: one without a token comes as a Dtype whose token is ''.
    """
    number: int | None = stream or 1  # 0 is not allowed; 1 names the legacy default stream
    if stream == -1 and type(producer).__module__.startswith("jax"):
        number = None  # to JAX -1 is a stream of that number, and None no order
    try:
        try:
            capsule = producer.__dlpack__(stream=number, max_version=(1, 0))
        except TypeError:  # a producer older than DLPack 1.0
            capsule = producer.__dlpack__(stream=number)
    except KernelHubError:  # a DeviceArray's
        raise
    except (BufferError, RuntimeError, ValueError) as error:
        raise TensorError(_refused(type(producer).__name__, error)) from error
    handle = id(capsule)
    name = next((name for name in _HOLDERS if _is_valid(handle, name)), None)
    if name is None:
        raise TensorError(
            f"{type(producer).__name__}.__dlpack__ gave {capsule!r}: no unused DLPack capsule"
        )
    holder, used = _HOLDERS[name]
    address = _get_pointer(handle, name)
    managed = holder.from_address(address)
    if holder is DLManagedTensorVersioned and managed.major != 1:
        raise TensorError(
            f"{type(producer).__name__} gave DLPack version {managed.major}.{managed.minor}; "
            "kernel_hub reads 1.x"
        )
    tensor = managed.tensor
    # Before the capsule is taken over: an error here leaves it to its own destructor.
    dtype = dtypes.of_dlpack(tensor.code, tensor.bits, tensor.lanes, any_dtype=any_dtype)
    rank = tensor.ndim
    shape = tuple(tensor.shape[:rank]) if rank else ()
    strides = None
    if rank and tensor.strides:
        strides = tuple(tensor.strides[:rank])
    owner = _Owner(_Taken(capsule, used, address, managed.deleter))
    _set_name(handle, used)
    return Consumed(
        address=(tensor.data or 0) + tensor.byte_offset,
        size_bytes=math.prod(shape) * dtype.size_bytes,
        device=tensor.device_id,
        shape=shape,
        strides=strides,
        dtype=dtype,
        read_only=holder is DLManagedTensorVersioned and bool(managed.flags & _READ_ONLY),
        owner=owner,
    )


# ---- export ----
# Address of the managed tensor -> it, its shape and strides, and what keeps the memory alive.
_exported: dict[int, tuple[Any, Any, object]] = {}
# Capsules that nobody had consumed when this was last looked at, and the managed tensor of each.
# NOTE: a capsule has no destructor: one of ctypes is Python, which must not run where an exception
# is on its way (numpy.from_dlpack that refuses the array), and takes its place.
_given: dict[int, tuple[Any, Any]] = {}
_numbers = itertools.count()
_lock = threading.Lock()
_at_exit_registered = False


def _counts(given: dict[int, tuple[Any, Any]]) -> list[tuple[int, int]]:
    """(number, references) of each. How many of these are our own depends on the Python."""
    return [(number, sys.getrefcount(capsule)) for number, (capsule, _) in list(given.items())]


_OURS = _counts({0: (object(), None)})[0][1]


def sweep() -> None:
    """Give back what is in capsules that died before anybody consumed them."""
    _watches.drain()
    for number, references in _counts(_given):
        pair = _given.get(number) if references <= _OURS else None
        # A consumed one is its consumer's, who calls the deleter.
        if pair and any(_is_valid(id(pair[0]), name) for name in _HOLDERS):
            _exported.pop(ctypes.addressof(pair[1]), None)
        if pair:  # last: Ctrl-C may come before it, and until then the address is no other's
            _given.pop(number, None)


# What consumers call, from any thread, when they are done. C code, which Ctrl-C cannot end.
_c_delete = _DELETER(_exported.pop)


def _disarm() -> None:
    """At exit: consumers that die after the interpreter must not call into it.

    Their deleter becomes a C function that does nothing and is callable at any time, and the
    structure, one reference of which is nobody's, outlives the interpreter's own teardown.
    """
    harmless = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, c_void_p).value
    for managed, _, _ in tuple(_exported.values()):
        managed.deleter = harmless
        _increase(managed)


def export(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: Dtype,
    device: int,
    *,
    owner: object,
    read_only: bool,
    max_version: tuple[int, int] | None,
) -> Any:
    """A capsule for the memory; `owner` lives until the consumer is done with it."""
    global _at_exit_registered
    versioned = max_version is not None and max_version[0] >= 1
    if read_only and not versioned:
        raise BufferError("a read-only array needs a consumer of DLPack 1.0 (max_version=(1, 0))")
    name = b"dltensor_versioned" if versioned else b"dltensor"
    managed = _HOLDERS[name][0]()
    numbers = (c_int64 * (2 * len(shape)))(*shape, *strides)
    base = ctypes.addressof(numbers)
    pointer = ctypes.POINTER(c_int64)
    tensor = managed.tensor
    tensor.data = address
    tensor.device_type, tensor.device_id = CUDA, device
    tensor.ndim = len(shape)
    tensor.code, tensor.bits, tensor.lanes = dtype.dlpack_code, 8 * dtype.size_bytes, 1
    tensor.shape = ctypes.cast(base, pointer)
    tensor.strides = ctypes.cast(base + 8 * len(shape), pointer)
    managed.deleter = ctypes.cast(_c_delete, c_void_p).value
    if versioned:
        managed.major, managed.minor = 1, 0
        managed.flags = _READ_ONLY if read_only else 0
    with _lock:
        if not _at_exit_registered:
            atexit.register(_disarm)
            _at_exit_registered = True
    managed._numbers = numbers
    where = ctypes.addressof(managed)
    sweep()
    capsule = _new(where, _name_pointer(name), None)
    _given[next(_numbers)] = capsule, managed
    _exported[where] = (managed, numbers, owner)
    return capsule


# PyCapsule_New keeps the pointer, not the text: the buffers live as long as the module.
_NAMES = {name: ctypes.create_string_buffer(name) for name in _HOLDERS}


def _name_pointer(name: bytes) -> Any:
    return ctypes.cast(_NAMES[name], c_char_p)
