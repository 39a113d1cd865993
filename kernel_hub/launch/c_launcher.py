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
from ctypes import c_uint32, c_uint64, c_void_p, py_object
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays.interop import loaded_torch
from ..collection.manifest import open_collection
from ..errors import KernelHubError
from ..signature.c_types import type_info
from ..signature.params import Param
from .c_structs import (
    MAX_PARAMS,
    NAMES,
    At,
    Bound,
    Exchange,
    ParamStruct,
    Place,
    PlannedLaunch,
    State,
)  # fmt: skip
from .geometry import CONFIG

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .device_function import DeviceFunction

VARIABLE = "KERNEL_HUB_NATIVE"
LIBRARY = "native/launcher_linux_x86_64.so"
_VOUCHED = LIBRARY  # its name in the manifest
_POINTER, _INT, _FLOAT, _DOUBLE, _BYTES = range(5)
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


class Fixed(NamedTuple):
    """What the caller of a function does not give, or must respect.

    block, shared_bytes: the launch's own. num_hidden: null pointers after the caller's parameters.
    divisors: of each of those, an address or an int; 1 for any.
    """

    block: tuple[int, int, int]
    shared_bytes: int
    num_hidden: int
    divisors: tuple[int, ...]


_LAUNCH, _BOUND, _AT, _PLANNED = range(4)  # what kernel_hub_make makes


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
    sizes = 0
    for kind in (State, PlannedLaunch, Bound, At):
        sizes = sizes << 16 | ctypes.sizeof(kind)
    if library.kernel_hub_state_bytes() != sizes:
        return None, "it is of another build of kernel_hub"
    library.kernel_hub_type_is.argtypes = [py_object, c_uint32]
    if not _knows_layout(library.kernel_hub_type_is):
        return None, "objects of this Python are laid out in a way that is not known"
    library.kernel_hub_plan.argtypes = [c_void_p, py_object, py_object]
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


@lru_cache(maxsize=1)
def _exchange(tensor_type: Any) -> Exchange:
    """torch's C exchange API; one with null functions where it has none (before 2.11)."""
    capsule = getattr(tensor_type, "__dlpack_c_exchange_api__", None)
    if type(capsule).__name__ != "PyCapsule":
        return Exchange()
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = c_void_p, [py_object, ctypes.c_char_p]
    found = Exchange.from_address(get_pointer(capsule, b"dlpack_exchange_api"))
    return found if found.major == 1 else Exchange()


def available() -> bool:
    """Whether launches in this process go through the C launcher where they can."""
    return not why_not()


def why_not() -> str:
    """Why the C launcher takes no launches in this process; '' where it does."""
    return f"{VARIABLE}=0" if os.environ.get(VARIABLE, "1") == "0" else _opened()[1]


@lru_cache(maxsize=256)  # of a kernel's sixty most are alike
def _param_of(type_text: str | None, size_bytes: int, dtype: Any) -> ParamStruct | None:
    info = type_info(type_text) if type_text else None
    code = Param(0, "", type_text, size_bytes, 0, info).code
    if code.endswith("s"):  # of no size that a number has
        return ParamStruct(_BYTES, size_bytes)
    if info is None:
        # Eight bytes of unknown meaning: a tensor is the one value that goes in unasked.
        return ParamStruct(_POINTER, 8, 0, 1, None) if size_bytes == 8 else None
    if info.kind == "pointer":
        kind = _DLPACK_DTYPE[info.dtype] if info.dtype else 0
        return ParamStruct(_POINTER, 8, 0, 1, id(dtype) if info.dtype else None, kind)
    if info.kind in ("int", "uint"):
        bits = 8 * info.size_bytes
        if info.kind == "uint" and bits == 64:
            return ParamStruct(_INT, 8, 0, 2**63 - 1, None)  # the upper half goes the Python way
        low, high = (
            (0, 2**bits - 1) if info.kind == "uint" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        )
        return ParamStruct(_INT, info.size_bytes, low, high, None)
    if info.kind == "float" and info.struct_code in ("f", "d"):
        return ParamStruct(
            _DOUBLE if info.struct_code == "d" else _FLOAT, info.size_bytes, 0, 0, None
        )
    return None


def _place(function: DeviceFunction) -> Place:
    many = function.driver.device_count > 1
    asking = function.driver.current_context_address if many else None
    return Place(function.device, 0, function.context, asking)


class Launcher:
    """One C launcher, for what a KernelFunction takes; `fallback` gets what it leaves."""

    def __init__(self, fallback: Any) -> None:
        names = [sys.intern(name) for name in (*NAMES, "dtype", "is_cuda", "data_ptr")]
        self._state = State(num_params=_LAUNCH_OFF, fallback=id(fallback))
        self._state.names[:] = [id(name) for name in names[: len(NAMES)]]
        self._state.name_dtype, self._state.name_is_cuda, self._state.name_data_ptr = map(
            id, names[len(NAMES) :]
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
        if len(dtypes) > MAX_PARAMS or None in made or not (one_gpu or exchange.as_dltensor):
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
        state.max_cluster = function.cluster_ready if asks else 0
        state.max_threads, state.shared_ready = limits.max_threads, function.shared_ready
        state.params[: len(made)] = made
        if fixed is not None:
            for index in range(len(made)):
                state.params[index].zero_bits = fixed.divisors[index] - 1
            state.fixed_block[:], state.fixed_shared = fixed.block, fixed.shared_bytes
            state.num_hidden = fixed.num_hidden
        state.num_params = len(made)
        return True

    def at(self, grid: tuple[int, int, int], fallback: Any) -> Any:
        """A launcher of `grid` blocks (each below 2**32) that takes the parameters themselves.

        For a function with a fixed block; `fallback` gets what it leaves. Keeps this one alive.
        """
        made = At(ctypes.pointer(self._state), id(fallback), grid)
        return _made(_AT, made, (self, fallback))

    def planned(
        self, device: int, arguments: tuple[Any, ...], options: Mapping[str, Any],
        places: Sequence[int], make: tuple[Any, tuple[Any, ...]] | None, fallback: Any,
    ) -> Any:  # fmt: skip
        """A launcher of all of `arguments` and `options` (those of a launch) but the parameters at
        `places`, which it takes; None where it cannot be, or is not ready for tensors of `device`.

        make: (function, its arguments): makes parameter 0, a tensor, which a call returns.
        `fallback` gets what it leaves. Keeps this one alive.
        """
        if device != self._state.place.device or len(places) > MAX_PARAMS:
            return None
        made = PlannedLaunch(ctypes.pointer(self._state), id(fallback))
        if make is not None:
            made.make, made.make_arguments = id(make[0]), id(make[1])
        made.num_given, made.places[: len(places)] = len(places), places
        names = tuple(map(sys.intern, options))
        given = (*arguments, *options.values())
        if not _opened()[0].kernel_hub_plan(ctypes.addressof(made), given, names):
            return None
        return _made(_PLANNED, made, (self, fallback, make))

    def allow_shared(self, num_bytes: int) -> None:
        """Dynamic shared memory up to `num_bytes` needs no further opt-in."""
        self._state.shared_ready = num_bytes

    def allow_cluster(self, size: int) -> None:
        """Clusters of up to `size` blocks need no further opt-in."""
        if self._state.max_cluster:
            self._state.max_cluster = size

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
    made = Bound(
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
