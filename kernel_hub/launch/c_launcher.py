"""The C twin of the generated launcher (native/launcher.c): loading it and filling in its structs.

Optional: where the shipped library does not fit this Python or platform, or KERNEL_HUB_NATIVE=0,
`available()` is false and the Python launchers do everything. It takes the common case alone and
leaves all else, every refusal included, to the Python launcher.

The library is the package's one file of machine code for the host. It is opened only where its
digest is the one in the package's manifest, where native/build.sh writes it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
import warnings
from ctypes import POINTER, c_int64, c_uint32, c_uint64, c_void_p, py_object
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays.interop import loaded_torch
from ..collection.manifest import open_collection
from ..errors import KernelHubError
from ..signature.c_types import type_info
from ..signature.params import Param
from .geometry import CONFIG, PORTABLE_CLUSTER

if TYPE_CHECKING:
    from .device_function import DeviceFunction

VARIABLE = "KERNEL_HUB_NATIVE"
LIBRARY = "native/launcher_linux_x86_64.so"
_VOUCHED = LIBRARY  # its name in the manifest
_MAX_PARAMS = 64
_POINTER, _INT, _FLOAT, _DOUBLE, _BYTES = range(5)
# In the order of the enum in native/launcher.c.
_NAMES = (
    "gridDim", "blockDim", "sharedMemBytes", "stream", "params", "sharedMem", "programmatic",
    "cluster",
)  # fmt: skip
# dtype token -> DLPack's code, bits and one lane.
_DLPACK_DTYPE = {
    token: code | bits << 8 | 1 << 16
    for token, code, bits in (
        ("int8", 0, 8), ("int16", 0, 16), ("int32", 0, 32), ("int64", 0, 64), ("uint8", 1, 8),
        ("uint16", 1, 16), ("uint32", 1, 32), ("uint64", 1, 64), ("fp16", 2, 16), ("fp32", 2, 32),
        ("fp64", 2, 64), ("bf16", 4, 16), ("bool", 6, 8), ("e4m3", 10, 8), ("e5m2", 12, 8),
    )
}  # fmt: skip
_LAUNCH_OFF = 0xFFFFFFFF  # a parameter count that no call has


class _Param(ctypes.Structure):
    _fields_ = [
        ("kind", c_uint32),
        ("size_bytes", c_uint32),
        ("least", c_int64),
        ("most", c_int64),
        ("dtype", c_void_p),
        ("dlpack_dtype", c_uint32),
        ("zero_bits", c_uint32),
    ]


class _Place(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("context", c_void_p),
        ("current_context", c_void_p),
    ]


class _State(ctypes.Structure):
    _fields_ = [
        ("launch_ex", c_void_p),
        ("function", c_void_p),
        ("fallback", c_void_p),
        ("current_stream", c_void_p),
        ("device", c_void_p),
        ("names", c_void_p * len(_NAMES)),
        ("name_dtype", c_void_p),
        ("name_is_cuda", c_void_p),
        ("name_data_ptr", c_void_p),
        ("tensor_types", c_void_p * 2),
        ("as_dltensor", c_void_p),
        ("work_stream", c_void_p),
        ("noted", c_void_p),
        ("place", _Place),
        ("max_grid", c_uint32 * 3),
        ("max_block", c_uint32 * 3),
        ("required_block", c_uint32 * 3),
        ("cluster", c_uint32 * 3),
        ("max_threads", c_uint32),
        ("num_params", c_uint32),
        ("fixed_block", c_uint32 * 3),
        ("fixed_shared", c_uint32),
        ("num_hidden", c_uint32),
        ("least_shared", c_uint32),
        ("max_cluster", c_uint32),
        ("pad", c_uint32),
        ("shared_ready", c_uint64),
        ("params", _Param * _MAX_PARAMS),
    ]


class _Bound(ctypes.Structure):
    _fields_ = [
        ("launch_ex", c_void_p),
        ("function", c_void_p),
        ("addresses", c_void_p),
        ("fallback", c_void_p),
        ("current_stream", c_void_p),
        ("device", c_void_p),
        ("work_stream", c_void_p),
        ("noted", c_void_p),
        ("place", _Place),
        ("config", ctypes.c_ubyte * CONFIG.size),
    ]


class _At(ctypes.Structure):
    _fields_ = [
        ("state", POINTER(_State)),
        ("fallback", c_void_p),
        ("grid", c_uint32 * 3),
        ("pad", c_uint32),
    ]


class Fixed(NamedTuple):
    """What the caller of a function does not give, or must respect.

    block, shared_bytes: the launch's own. num_hidden: null pointers after the caller's parameters.
    divisors: of each of those, an address or an int; 1 for any.
    """

    block: tuple[int, int, int]
    shared_bytes: int
    num_hidden: int
    divisors: tuple[int, ...]


_LAUNCH, _BOUND, _AT = range(3)  # what kernel_hub_make makes


@lru_cache(maxsize=1)
def _opened() -> tuple[Any, str]:
    """(the library, '') or (None, why it is not used)."""
    if (
        sys.implementation.name != "cpython"
        or "t" in sys.abiflags  # free-threaded: objects have another layout
        or (sys.platform, platform.machine()) != ("linux", "x86_64")
    ):
        return None, "there is none for this platform"
    path = Path(__file__).parent.parent / LIBRARY
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:  # a zip import
        return None, "it is no file of its own here"
    try:
        expected = open_collection().manifest.files.get(_VOUCHED)
    except KernelHubError as error:  # no cubins, or a damaged manifest
        return None, f"nothing vouches for it: {error}"
    if expected is None:
        return None, "the manifest of kernel_hub's cubins does not vouch for it"
    if found != expected:
        reason = (
            f"{path} is not the file that was built (sha256 expected {expected}, found "
            f"{found}): it is not opened; reinstall the package"
        )
        warnings.warn(f"{reason}. The Python launcher serves", RuntimeWarning, 2)
        return None, reason
    try:
        library = ctypes.PyDLL(str(path))
    except OSError as error:  # a Python built without exported symbols
        return None, f"it cannot be loaded: {error}"
    library.kernel_hub_state_bytes.restype = c_uint64
    state, bound, at = (ctypes.sizeof(kind) for kind in (_State, _Bound, _At))
    if library.kernel_hub_state_bytes() != state << 32 | bound << 16 | at:
        return None, "it is of another build of kernel_hub"
    library.kernel_hub_type_is.argtypes = [py_object, c_uint32]
    if not _knows_layout(library.kernel_hub_type_is):
        return None, "objects of this Python are laid out in a way that is not known"
    library.kernel_hub_make.restype = py_object
    library.kernel_hub_make.argtypes = [c_uint32, c_void_p, py_object]
    return library, ""


def _knows_layout(type_is: Any) -> bool:
    """Whether C finds an object's type where it looks, seen on objects of this very Python."""
    kinds = (int, float, tuple, list, bytes)
    samples = [
        0, -1, 2**70, True, 0.5, (), (1, 2), [], [None], None, "text", b"", {}, object(), int,
    ]  # fmt: skip
    return object.__basicsize__ == 2 * ctypes.sizeof(c_void_p) and all(
        bool(type_is(sample, number)) == (type(sample) is kind)
        for sample in samples
        for number, kind in enumerate(kinds)
    )


def _made(method: int, struct: ctypes.Structure, keep: object) -> Any:
    """The C callable for `struct`; it holds `keep`, which keeps all that the struct points to."""
    return _opened()[0].kernel_hub_make(method, ctypes.addressof(struct), (struct, keep))


class _Exchange(ctypes.Structure):
    """DLPackExchangeAPI of DLPack 1.3."""

    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("older", c_void_p),
        ("allocate", c_void_p),
        ("from_object", c_void_p),
        ("to_object", c_void_p),
        ("as_dltensor", c_void_p),
        ("work_stream", c_void_p),
    ]


@lru_cache(maxsize=1)
def _exchange(tensor_type: Any) -> _Exchange:
    """torch's C exchange API; one with null functions where it has none (before 2.11)."""
    capsule = getattr(tensor_type, "__dlpack_c_exchange_api__", None)
    if type(capsule).__name__ != "PyCapsule":
        return _Exchange()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = c_void_p, [py_object, ctypes.c_char_p]
    found = _Exchange.from_address(get_pointer(capsule, b"dlpack_exchange_api"))
    return found if found.major == 1 else _Exchange()


def available() -> bool:
    """Whether launches in this process go through the C launcher where they can."""
    return not why_not()


def why_not() -> str:
    """Why the C launcher takes no launches in this process; '' where it does."""
    return f"{VARIABLE}=0" if os.environ.get(VARIABLE, "1") == "0" else _opened()[1]


@lru_cache(maxsize=256)  # of a kernel's sixty most are alike
def _param_of(type_text: str | None, size_bytes: int, dtype: Any) -> _Param | None:
    info = type_info(type_text) if type_text else None
    code = Param(0, "", type_text, size_bytes, 0, info).code
    if code.endswith("s"):  # of no size that a number has
        return _Param(_BYTES, size_bytes)
    if info is None:
        # Eight bytes of unknown meaning: a tensor is the one value that goes in unasked.
        return _Param(_POINTER, 8, 0, 1, None) if size_bytes == 8 else None
    if info.kind == "pointer":
        kind = _DLPACK_DTYPE[info.dtype] if info.dtype else 0
        return _Param(_POINTER, 8, 0, 1, id(dtype) if info.dtype else None, kind)
    if info.kind in ("int", "uint"):
        bits = 8 * info.size_bytes
        if info.kind == "uint" and bits == 64:
            return _Param(_INT, 8, 0, 2**63 - 1, None)  # the upper half goes the Python way
        low, high = (
            (0, 2**bits - 1) if info.kind == "uint" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        )
        return _Param(_INT, info.size_bytes, low, high, None)
    if info.kind == "float" and info.struct_code in ("f", "d"):
        return _Param(_DOUBLE if info.struct_code == "d" else _FLOAT, info.size_bytes, 0, 0, None)
    return None


def _place(function: DeviceFunction) -> _Place:
    many = function.driver.device_count > 1
    asking = function.driver.current_context_address if many else None
    return _Place(function.device, 0, function.context, asking)


class Launcher:
    """One C launcher, for what a KernelFunction takes; `fallback` gets what it leaves."""

    def __init__(self, fallback: Any) -> None:
        names = [sys.intern(name) for name in (*_NAMES, "dtype", "is_cuda", "data_ptr")]
        self._state = _State(num_params=_LAUNCH_OFF, fallback=id(fallback))
        self._state.names[:] = [id(name) for name in names[: len(_NAMES)]]
        self._state.name_dtype, self._state.name_is_cuda, self._state.name_data_ptr = map(
            id, names[len(_NAMES) :]
        )
        # The struct holds addresses of Python objects: these keep them alive.
        self._keep: list[Any] = [fallback, names]

    def callable(self) -> Any:
        """The C callable; whoever has it may call it, whatever else is gone."""
        return _made(_LAUNCH, self._state, self)

    def arm(
        self,
        function: DeviceFunction,
        dtypes: list[Any],
        torch: Any,
        current_stream: Any,
        fixed: Fixed | None = None,
    ) -> bool:
        """Take over launches of `function`; False where it has a parameter of a rare kind.

        dtypes: the torch dtype of each parameter's tensor, None where any goes. fixed: for a
        function whose launches are partly given.
        """
        given = len(function.params) - (fixed.num_hidden if fixed else 0)
        every = zip(function.params, dtypes, strict=True)
        made = [_param_of(p.type, p.size_bytes, dtype) for p, dtype in every][:given]
        exchange = _exchange(torch.Tensor)
        one_gpu = function.driver.device_count == 1
        if len(dtypes) > _MAX_PARAMS or None in made or not (one_gpu or exchange.as_dltensor):
            return False
        if fixed is not None and (
            fixed.shared_bytes > function.shared_ready or any(d & (d - 1) for d in fixed.divisors)
        ):
            return False
        state, limits, device = self._state, function.limits, function.device
        state.num_params = _LAUNCH_OFF
        self._keep[2:] = [dtypes, torch, current_stream, device, function]
        state.tensor_types[:] = [id(torch.Tensor), id(torch.nn.Parameter)]
        state.as_dltensor, state.work_stream = exchange.as_dltensor, exchange.work_stream
        state.launch_ex, state.function = function.driver.launch_ex_address, function.handle
        state.current_stream, state.device = id(current_stream), id(device)
        state.noted = function.noted_address
        state.place = _place(function)
        state.max_grid[:], state.max_block[:] = limits.max_grid, limits.max_block
        state.required_block[:] = limits.required_block or limits.built_block or (0, 0, 0)
        state.cluster[:] = limits.cluster or (1, 1, 1)
        state.least_shared = limits.least_shared_bytes
        # What is compiled for a cluster of its own, or may ask for more, is for Python to look at.
        asks = limits.cluster is None and limits.compute_capability >= (9, 0)
        state.max_cluster = PORTABLE_CLUSTER if asks else 0
        state.max_threads, state.shared_ready = limits.max_threads, function.shared_ready
        for index, param in enumerate(made):
            state.params[index] = param
            if fixed is not None:
                state.params[index].zero_bits = fixed.divisors[index] - 1
        if fixed is not None:
            state.fixed_block[:], state.fixed_shared = fixed.block, fixed.shared_bytes
            state.num_hidden = fixed.num_hidden
        state.num_params = len(made)
        return True

    def at(self, grid: tuple[int, int, int], fallback: Any) -> Any:
        """A launcher of `grid` blocks (each below 2**32) that takes the parameters themselves.

        For a function with a fixed block; `fallback` gets what it leaves. Keeps this one alive.
        """
        made = _At(ctypes.pointer(self._state), id(fallback), grid)
        return _made(_AT, made, (self, fallback))

    def allow_shared(self, num_bytes: int) -> None:
        """Dynamic shared memory up to `num_bytes` needs no further opt-in."""
        self._state.shared_ready = num_bytes

    def disarm(self) -> None:
        """Leave every launch to the fallback."""
        self._state.num_params = _LAUNCH_OFF


def bound(
    function: DeviceFunction,
    buffer: bytearray,
    addresses: Any,
    fallback: Any,
    current_stream: Any,
) -> tuple[Any, Any]:
    """The C twin of a bound launch: `call()` launches, `call(params)` goes to the fallback.

    With it the struct behind it: without its `launch_ex` every call goes to the fallback.
    """
    device = function.device
    torch = loaded_torch()
    made = _Bound(
        function.driver.launch_ex_address,
        function.handle,
        ctypes.addressof(addresses),
        id(fallback),
        id(current_stream) if current_stream is not None else None,
        id(device),
        _exchange(torch.Tensor).work_stream if torch is not None else None,
        function.noted_address,
        _place(function),
    )
    ctypes.memmove(made.config, bytes(buffer[: CONFIG.size]), CONFIG.size)
    keep = (function, fallback, buffer, addresses, current_stream, device)
    return _made(_BOUND, made, keep), made
