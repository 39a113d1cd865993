"""libcuda through ctypes: the only file that opens it. Knows prototypes, error texts and contexts.

`get()` opens and initialises the driver once; `Driver.call` runs one driver function and turns a
failure into `CudaDriverError` with the driver's own log lines. Hot launches use `launch_ex` raw.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from ..errors import CudaDriverError, DeviceOutOfMemoryError, DriverNotFoundError
from .contexts import ContextGuard, Within
from .cuda_results import NO_DEVICE, RESULTS, STICKY, STUB_LIBRARY
from .prototypes import (
    COMPUTE_CAPABILITY_MAJOR,
    COMPUTE_CAPABILITY_MINOR,
    FUNCTIONS,
    NEWEST,
    TYPES,
)

LIBRARY_VARIABLE = "KERNEL_HUB_LIBCUDA"


class _Functions(dict[str, Any]):
    """The driver's functions by name, found and typed when one is first asked for: a first launch
    asks for a third of them."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        super().__init__()
        self._library, self._path = library, path

    def __missing__(self, name: str) -> Any:
        letters = FUNCTIONS[name]
        try:
            function = self._library[name]
        except AttributeError:
            raise DriverNotFoundError(
                f"{self._path} has no {name}: kernel_hub needs a driver of CUDA 12.0 or later "
                "(525 and up). Update the NVIDIA driver.",
                tried=[self._path],
            ) from None
        function.argtypes = [TYPES[letter] for letter in letters]
        function.restype = c_int
        self[name] = function
        return function


class Driver:
    """An initialised libcuda. `version` is cuDriverGetVersion's (13000 = CUDA 13.0)."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        self.pid = os.getpid()
        self._library = library
        self._functions = _Functions(library, path)
        self._functions[NEWEST]  # or it is too old, which is said here
        # Untyped twin: prebuilt byref()/from_param arguments skip the per-argument conversion.
        self.launch_ex = library["cuLaunchKernelEx"]
        self.launch_ex_address = ctypes.cast(self.launch_ex, c_void_p).value or 0
        asking = self._functions["cuCtxGetCurrent"]
        self.current_context_address = ctypes.cast(asking, c_void_p).value or 0
        self._within = Within(self._functions)
        self._contexts: dict[int, int] = {}
        self._retained: dict[int, c_void_p] = {}
        self._attributes: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()
        self._initialise()
        self.version = self._read_int("cuDriverGetVersion")
        self.device_count = self._read_int("cuDeviceGetCount")
        self._log_position = c_uint(0)
        self._has_logs = self.has("cuLogsCurrent") and self.has("cuLogsDumpToMemory")
        if self._has_logs and self._functions["cuLogsCurrent"](byref(self._log_position), 0):
            self._has_logs = False

    def _initialise(self) -> None:
        code = self._functions["cuInit"](0)
        if code == 0:
            return
        name, meaning = RESULTS.get(code, (f"CUresult {code}", "the driver does not say"))
        if code == STUB_LIBRARY:
            raise DriverNotFoundError(
                f"{self.path} cannot be used: cuInit says {name}: {meaning}", tried=[self.path]
            )
        raise CudaDriverError(
            f"cuInit failed: {name} ({code}): {meaning} (library {self.path})",
            call="cuInit",
            code=code,
            name=name,
        )

    def _read_int(self, name: str) -> int:
        value = c_int()
        self.call(name, byref(value))
        return value.value

    def has(self, name: str) -> bool:
        """Whether this driver exports `name` (newer calls are optional)."""
        return name in self._functions or hasattr(self._library, name)

    def call(self, name: str, *args: Any, asked: str = "") -> None:
        """Run a driver function; a nonzero result raises with `asked` as the context."""
        code = self._functions[name](*args)
        if code:
            raise self.error(name, code, asked)

    def try_call(self, name: str, *args: Any) -> int:
        """Run a driver function and return its CUresult."""
        return int(self._functions[name](*args))

    def error(self, call: str, code: int, asked: str = "") -> CudaDriverError:
        """The exception for `code` from `call`; `asked` says what was being done."""
        name, meaning = RESULTS.get(code, ("", ""))
        if not name:
            text = c_char_p()
            getter = self._library["cuGetErrorName"]
            name = f"CUresult {code}"
            if getter(c_int(code), byref(text)) == 0 and text.value:
                name = text.value.decode(errors="replace")
        lines = [f"{call} failed: {name} ({code})" + (f": {meaning}" if meaning else "")]
        if asked:
            lines.append(asked)
        if os.getpid() != self.pid:
            lines.append(_FORKED)
        elif code in STICKY:
            lines.append(
                "This error is sticky: a kernel that ran earlier caused it, not necessarily this "
                "call, and the process must be restarted. Run again with "
                "KERNEL_HUB_LAUNCH_BLOCKING=1 to learn which kernel."
            )
        if log := self.take_log():
            lines.append(f"driver log: {log}")
        kind = DeviceOutOfMemoryError if code == 2 else CudaDriverError
        return kind("\n  ".join(lines), call=call, code=code, name=name)

    def take_log(self) -> str:
        """What the driver logged since the last call (drivers of 12.9 and later), else ''."""
        if not self._has_logs or os.getpid() != self.pid:
            return ""
        size = c_size_t(_MOST_LOG)
        buffer = ctypes.create_string_buffer(size.value)
        code = self._functions["cuLogsDumpToMemory"](
            byref(self._log_position), buffer, byref(size), 0
        )
        return buffer.value.decode(errors="replace").strip() if code == 0 else ""

    def skip_log(self) -> None:
        """What was logged until now is no part of what `take_log` will say."""
        if self._has_logs and os.getpid() == self.pid:
            self._functions["cuLogsCurrent"](byref(self._log_position), 0)

    def attribute(self, device: int, attribute: int) -> int:
        """A CUdevice_attribute of `device`, read once."""
        key = (device, attribute)
        if key not in self._attributes:
            value = c_int()
            self.call("cuDeviceGetAttribute", byref(value), attribute, device)
            self._attributes[key] = value.value
        return self._attributes[key]

    def compute_capability(self, device: int) -> tuple[int, int]:
        """(major, minor) of `device`."""
        return (
            self.attribute(device, COMPUTE_CAPABILITY_MAJOR),
            self.attribute(device, COMPUTE_CAPABILITY_MINOR),
        )

    def device_name(self, device: int) -> str:
        """The marketing name of `device`."""
        buffer = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", buffer, len(buffer), device)
        return buffer.value.decode(errors="replace")

    def primary_context(self, device: int) -> int:
        """The device's primary context, retained once for the life of the process."""
        known = self._contexts.get(device)
        # Without the lock: a finaliser may ask while this very thread holds it.
        if known is not None:
            return known
        with self._lock:
            if device not in self._contexts:
                if not 0 <= device < self.device_count:
                    raise self.error(
                        "cuDevicePrimaryCtxRetain",
                        101 if self.device_count else NO_DEVICE,
                        f"asked for device {device}; there are {self.device_count}",
                    )
                # Kept before it is filled: Ctrl-C behind the call must not have it retained twice.
                context = self._retained.setdefault(device, c_void_p())
                if not context.value:
                    self.call(
                        "cuDevicePrimaryCtxRetain",
                        byref(context),
                        device,
                        asked=f"making the primary context of device {device}",
                    )
                self._contexts[device] = context.value or 0
            return self._contexts[device]

    def current_context(self) -> int:
        """The calling thread's context, or 0."""
        context = c_void_p()
        self.call("cuCtxGetCurrent", byref(context))
        return context.value or 0

    def on_device(self, device: int) -> ContextGuard:
        """`with driver.on_device(d):` the primary context of `d` is current inside.

        In the caller's own thread Ctrl-C may leave it so: `within` there.
        """
        return ContextGuard(self, self.primary_context(device))

    def within(self, device: int, *calls: tuple[Any, ...], relaxed: bool = True) -> tuple[str, int]:
        """Make driver calls with `device` current, in relaxed capture mode unless told otherwise.

        calls: (name, *arguments) each, or another C function in the place of the name. They are
            made in turn up to the first that gives something else than 0.
        Returns: the name of that one ('' where it has none) and what it gave; ('', 0) without.
        Context and mode are as before in any case: Ctrl-C waits until all is done.
        """
        return self._within(self.primary_context(device), calls, relaxed)

    def run(
        self, device: int, *calls: tuple[Any, ...], asked: str = "", relaxed: bool = True
    ) -> None:
        """As `within`; a failure raises with `asked` as the context."""
        name, code = self.within(device, *calls, relaxed=relaxed)
        if code:
            raise self.error(name, code, asked)

    def is_capturing(self, stream: int, device: int | None = None) -> bool:
        """Whether `stream` is recording a CUDA graph; a default one of `device`, or of the current
        context."""
        status = c_int()
        call = "cuStreamIsCapturing", stream, byref(status)
        code = self.try_call(*call) if device is None else self.within(device, call)[1]
        if code == 906:  # asked of the legacy stream while another stream captures
            return True
        if code:
            raise self.error("cuStreamIsCapturing", code, f"asking about stream {stream:#x}")
        return status.value != 0


_MOST_LOG = 25601  # bytes that a driver keeps, and a zero
_FORKED = (
    "This process was forked from one that had already used CUDA, and CUDA does not survive "
    "fork: start workers with multiprocessing's 'spawn' (or 'forkserver') method."
)
_lock = threading.Lock()
_driver: Driver | None = None


def get() -> Driver:
    """The driver, opened and initialised at the first call.

    Raises DriverNotFoundError when there is none (or a stub), CudaDriverError when cuInit fails or
    after a fork.
    """
    global _driver
    if _driver is None:
        with _lock:
            if _driver is None:
                _driver = _open()
    if _driver.pid != os.getpid():
        raise forked_error()
    return _driver


def forked_error() -> CudaDriverError:
    """The error for any use of CUDA in a forked child."""
    return CudaDriverError(
        f"CUDA was used before this process was forked. {_FORKED}",
        call="fork",
        code=3,
        name="CUDA_ERROR_NOT_INITIALIZED",
    )


def candidates() -> list[str]:
    """Library names in the order they are tried; KERNEL_HUB_LIBCUDA alone when it is set."""
    if override := os.environ.get(LIBRARY_VARIABLE):
        return [override]
    if sys.platform == "win32":
        return ["nvcuda.dll"]
    if sys.platform == "darwin":
        return []
    return ["libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1", "libcuda.so"]


def _open() -> Driver:
    tried = candidates()
    if not tried:
        raise DriverNotFoundError("NVIDIA has no CUDA driver for macOS: nothing can be launched.")
    reasons = []
    for name in tried:
        try:
            # nvcuda.dll is stdcall; getattr, because ctypes has WinDLL on Windows alone.
            opener = getattr(ctypes, "WinDLL" if sys.platform == "win32" else "CDLL")
            library = opener(name)
        except OSError as error:
            reasons.append(f"{name}: {error}")
            continue
        return Driver(library, name)
    raise DriverNotFoundError(
        "no CUDA driver library could be loaded. Tried:\n  "
        + "\n  ".join(reasons)
        + "\nInstall the NVIDIA driver (the toolkit alone does not bring it), or, in a container, "
        f"start it with GPU access; {LIBRARY_VARIABLE}=PATH names a library elsewhere.",
        tried=tried,
    )
