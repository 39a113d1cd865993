"""Loaded images: one CUlibrary an image for all devices, loaded once, and functions in them.

An image that nothing can launch any more is unloaded at the next load or `trim`, see `sweep`. All
that loads or unloads here is called in a thread of its own (`driver.apart`) with captures relaxed.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import deque
from ctypes import byref, c_int, c_size_t, c_uint32, c_ulonglong, c_void_p
from typing import Any, NamedTuple

from .. import driver as _driver
from ..arrays import pool
from ..driver import Driver, apart
from ..driver.contexts import RelaxedCapture
from ..errors import (
    CubinCorruptError,
    CudaDriverError,
    DriverNotFoundError,
    FunctionNotFoundError,
    LaunchConfigError,
)
from ..image.shipped import Chosen, FunctionSpec
from ..signature.params import Param
from . import probing
from .device_function import DeviceFunction
from .geometry import Limits
from .ptx import compile_ptx

_MAX_THREADS, _STATIC_SHARED, _CLUSTER_REQUIRED = 0, 1, (11, 12, 13)
_BINARY_IS_PRESERVED = 1

_libraries: dict[str, Library] = {}
_lock = threading.Lock()
# Holds whose lease ended. C code adds to it when a lease dies, at any moment (inside a load too),
# and does nothing else; Ctrl-C cannot end it.
_ended: deque[_Hold] = deque()


class Lease:
    """One kernel's hold on a library: kept by all that can launch its functions or reach its
    variables, and over when the last of them is gone."""

    __slots__ = ("__weakref__", "hold")

    def __init__(self, library: Library) -> None:
        self.hold = _Hold(self, _ended.append)
        self.hold.library = library
        library.holds.add(self.hold)


class _Hold(weakref.ref[Lease]):
    """The library's side of a lease."""

    __slots__ = ("library",)
    library: Library


class LoadedImage(NamedTuple):
    """An image that the driver holds. `num_kernels` can launch it; `why` says why it is loaded."""

    label: str
    size_bytes: int
    num_kernels: int
    why: str


class Library:
    """One image in the driver.

    stays: why it is never unloaded unasked, '' where it may be. noted: nonzero once it was launched
    where a graph capture may have recorded it (on another stream than the legacy default one, which
    no capture records): a graph launches it without our knowing.
    """

    def __init__(
        self, driver: Driver, chosen: Chosen, handle: int, image: bytes, jit_log: str
    ) -> None:
        self.driver = driver
        self.key = chosen.key
        self.label = chosen.label
        self.handle = handle
        self.jit_log = jit_log
        self.holds: set[_Hold] = set()
        self.stays = ""
        self.noted = bytearray(c_uint32())
        self.devices: set[int] = set()
        self.size_bytes = len(image)
        self._image = image  # the driver reads it lazily, at the first function asked for

    def find_function(self, name: str, device: int) -> tuple[int, int]:
        """(CUkernel, CUfunction of the device's primary context) of `name`."""
        kernel, function = c_void_p(), c_void_p()
        self.devices.add(device)
        self.driver.skip_log()
        with self.driver.on_device(device):
            code = self.driver.try_call(
                "cuLibraryGetKernel", byref(kernel), self.handle, name.encode()
            )
            if code == 500:
                self.driver.skip_log()  # it is said here, and no part of the next error
                raise FunctionNotFoundError(f"no function {name!r} in {self.label}")
            if code == 0:
                code = self.driver.try_call("cuKernelGetFunction", byref(function), kernel)
            if code:
                raise self.driver.error(
                    "cuKernelGetFunction", code, f"loading {name} of {self.label}"
                )
            if self.driver.has("cuFuncLoad"):
                # Lazy loading would otherwise happen inside the first launch.
                self.driver.call("cuFuncLoad", function, asked=f"loading {name}")
        return kernel.value or 0, function.value or 0

    def find_global(self, name: str, device: int) -> tuple[int, int]:
        """(address, bytes) of a variable."""
        address, size = c_ulonglong(), c_size_t()
        with self.driver.on_device(device):
            code = self.driver.try_call(
                "cuLibraryGetGlobal", byref(address), byref(size), self.handle, name.encode()
            )
        if code == 500:
            raise FunctionNotFoundError(f"no variable {name!r} in {self.label}")
        if code:
            raise self.driver.error("cuLibraryGetGlobal", code, f"finding {name}")
        return address.value, size.value

    def read_params(self, kernel: int, device: int) -> tuple[Param, ...]:
        """Sizes and offsets from the driver, for images only it can read."""
        if not self.driver.has("cuKernelGetParamInfo"):
            raise CubinCorruptError(
                f"{self.label} is compressed and this driver cannot tell its parameters "
                "(it takes 12.4): build it with -no-compress"
            )
        found: list[Param] = []
        offset, size = c_size_t(), c_size_t()
        with self.driver.on_device(device):
            while True:
                code = self.driver.try_call(
                    "cuKernelGetParamInfo", kernel, len(found), byref(offset), byref(size)
                )
                if code == 1:  # past the last one
                    self.driver.skip_log()
                    return tuple(found)
                if code:
                    raise self.driver.error("cuKernelGetParamInfo", code)
                found.append(Param.make(len(found), None, None, size.value, offset.value))

    def check_unload(self, device: int, current_stream: int) -> None:
        """Refuse an unload while the current stream captures."""
        with self.driver.on_device(device):
            for stream in {0, current_stream}:
                if self.driver.is_capturing(stream):
                    raise LaunchConfigError(
                        f"{self.label} cannot be unloaded while a stream is capturing"
                    )

    def release(self, lease: Lease) -> None:
        """End a kernel's lease; the last one unloads, whatever else speaks for staying."""
        with _lock:
            _ended.append(lease.hold)
            _count()
            if not self.holds:
                self._unload()

    @property
    def why(self) -> str:
        """Why it is loaded."""
        if self.holds:
            return "in use"
        if self.stays:
            return self.stays
        if any(self.noted):
            return "was launched on a stream: a captured graph may hold it"
        return "goes at the next load or trim()"

    def _may_go(self) -> bool:
        """Whether nothing can launch it any more, nor launched it a moment ago."""
        if self.holds or self.stays or any(self.noted) or os.getpid() != self.driver.pid:
            return False
        return all(self._is_done(device) for device in self.devices)

    def _is_done(self, device: int) -> bool:
        """Wait for the legacy default stream, where all its launches were that were not noted.

        False while a capture on another stream forbids that.
        """
        with self.driver.on_device(device):
            status = c_int()
            return not (
                self.driver.try_call("cuStreamIsCapturing", 0, byref(status))
                or self.driver.try_call("cuStreamSynchronize", 0)
            )

    def _unload(self) -> None:
        if os.getpid() == self.driver.pid:
            _libraries.pop(self.key, None)
            self.driver.call("cuLibraryUnload", self.handle, asked=f"unloading {self.label}")


def _count() -> None:
    """Take the leases that ended off their libraries; the caller holds the lock."""
    while _ended:
        _ended[0].library.holds.discard(_ended[0])
        _ended.popleft()


def sweep() -> None:
    """Unload the images that nothing can launch any more and that may go.

    Of those, the shipped ones stay, and what a captured graph may hold. Work in flight is waited
    for. A driver that refuses is said in a warning.
    """
    with _lock:
        _sweep()


def _sweep() -> None:
    _count()
    for library in list(_libraries.values()):
        if library._may_go():
            try:
                library._unload()
            except CudaDriverError as error:
                _warn(str(error))


def _sweep_apart() -> None:
    """`sweep`, for whoever gives device memory back."""
    if _libraries:
        apart.run(_relaxed_sweep, _driver.get())


def _relaxed_sweep(driver: Driver) -> None:
    with RelaxedCapture(driver):
        sweep()


pool.trims.append(_sweep_apart)


def loaded_images() -> list[LoadedImage]:
    """The images that the driver holds for kernel_hub, oldest first, each with the reason."""
    with _lock:
        _count()
        return [
            LoadedImage(library.label, library.size_bytes, len(library.holds), library.why)
            for library in _libraries.values()
        ]


def library_for(
    driver: Driver, chosen: Chosen, probe: bool, keep: bool | None, device: int
) -> tuple[Library, Lease]:
    """The library of `chosen`, loaded at most once a process however many threads ask.

    PTX is compiled for `device`, one of those that `chosen` is for. keep: see Kernel.
    """
    with _lock:
        library = _libraries.get(chosen.key)
        lease = Lease(library) if library else None  # before the sweep, which else might take it
        _sweep()
        if library is None or lease is None:
            library = _libraries[chosen.key] = _loaded(driver, chosen, probe, device)
            lease = Lease(library)
        if keep or (keep is None and chosen.vouched):
            library.stays = "keep=True" if keep else "shipped: it stays for the next Kernel of it"
        return library, lease


def _loaded(driver: Driver, chosen: Chosen, probe: bool, device: int) -> Library:
    if driver.version < chosen.minimum_driver:
        raise DriverNotFoundError(
            f"{chosen.label} needs a driver of CUDA {_version(chosen.minimum_driver)} or "
            f"later, {driver.path} is of CUDA {_version(driver.version)}: update the "
            "NVIDIA driver"
        )
    image = chosen.read()
    if chosen.kind == "fatbin" or chosen.unknown or (probe and not chosen.vouched):
        _probe_first(driver, image, chosen, device)
    jit_log = ""
    if chosen.jit_target:
        image, jit_log = compile_ptx(driver, chosen, image, device)
    return Library(driver, chosen, _load(driver, chosen, image), image, jit_log)


def forget() -> None:
    """Drop the cache of libraries (tests give the next one another driver)."""
    _libraries.clear()
    _ended.clear()


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _load(driver: Driver, chosen: Chosen, image: bytes) -> int:
    handle = c_void_p()
    options = (c_int * 1)(_BINARY_IS_PRESERVED)
    values = (c_void_p * 1)(1)
    # The driver unpacks and chooses within a fatbin, so that one cannot be promised to stay.
    count = 0 if chosen.kind == "fatbin" and not chosen.jit_target else 1
    driver.call(
        "cuLibraryLoadData",
        byref(handle),
        image,
        None,
        None,
        0,
        options,
        values,
        count,
        asked=f"loading {chosen.label}",
    )
    return handle.value or 0


def _probe_first(driver: Driver, image: bytes, chosen: Chosen, device: int) -> None:
    """Load what no reader could vouch for in a child process, and say so the first time."""
    unknown = "; ".join(chosen.unknown)
    if probing.is_off():
        if unknown:
            _warn(f"{chosen.label} holds {unknown}, unknown here, and was loaded unprobed")
        return
    symbols = [spec.symbol or name for name, spec in chosen.functions.items()]
    if probing.survives(driver, image, chosen.label, symbols, device) and unknown:
        _warn(
            f"{chosen.label} holds {unknown}, unknown to this version of kernel_hub. "
            "It was loaded in a child process first, and the driver took it"
        )


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def load_function(
    driver: Driver,
    library: Library,
    chosen: Chosen,
    spec: FunctionSpec,
    device: int,
    lease: Lease,
    noted: bytearray | None,
) -> DeviceFunction:
    """`spec` on `device`, with its limits read from the driver and from the chosen image."""
    kernel, handle = library.find_function(spec.symbol or spec.name, device)
    try:
        known = chosen.functions[spec.name]
    except KeyError:
        known = spec
    if known.params is None:
        known = chosen.declare(known._replace(params=library.read_params(kernel, device)))
    elif spec.params is not None and [p.size_bytes for p in known.params] != [
        p.size_bytes for p in spec.params
    ]:
        raise CubinCorruptError(
            f"{chosen.label}: {known.prototype()} differs from {spec.prototype()} of "
            "another architecture"
        )
    assert known.params is not None
    limits = _limits(driver, handle, known, device)
    return DeviceFunction(driver, device, handle, known, limits, keep=lease, noted=noted)


def _limits(driver: Driver, handle: int, spec: FunctionSpec, device: int) -> Limits:
    def read(attribute: int) -> int:
        value = c_int()
        driver.call("cuFuncGetAttribute", byref(value), attribute, handle)
        return value.value

    def of_device(attribute: int) -> int:
        return driver.attribute(device, attribute)

    static = read(_STATIC_SHARED)
    cluster: Any = spec.cluster
    capability = driver.compute_capability(device)
    if cluster is None and capability >= (9, 0):
        required = tuple(read(attribute) for attribute in _CLUSTER_REQUIRED)
        cluster = required if all(required) else None
    return Limits(
        function=spec.name,
        device_name=driver.device_name(device),
        compute_capability=capability,
        max_grid=tuple(map(of_device, _driver.MAX_GRID_DIM)),  # type: ignore[arg-type]
        max_block=tuple(map(of_device, _driver.MAX_BLOCK_DIM)),  # type: ignore[arg-type]
        max_threads=read(_MAX_THREADS),
        required_block=spec.required_block,
        static_shared_bytes=static,
        max_dynamic_shared_bytes=of_device(_driver.SHARED_PER_BLOCK_OPTIN) - static,
        cluster=cluster,
        num_multiprocessors=of_device(_driver.MULTIPROCESSOR_COUNT),
        built_block=spec.launch.block if spec.launch else None,
        least_shared_bytes=(spec.launch.shared_bytes or 0) if spec.launch else 0,
    )
