"""Loaded images: one CUlibrary an image for all devices, loaded once, and functions in them."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p
from dataclasses import replace
from typing import Any

from . import _probe
from . import driver as _driver
from ._geometry import Limits
from ._image import Chosen, FunctionSpec
from ._jit import compile_ptx
from ._launch import DeviceFunction
from .driver import Driver
from .errors import (
    CubinCorruptError,
    DriverNotFoundError,
    FunctionNotFoundError,
    LaunchConfigError,
)
from .params import Param

_MAX_THREADS, _STATIC_SHARED, _CLUSTER_REQUIRED = 0, 1, (11, 12, 13)
_BINARY_IS_PRESERVED = 1

_libraries: dict[str, Library] = {}
_lock = threading.Lock()


class Library:
    """One image in the driver. `users` are the kernels that hold it, as long as they live."""

    def __init__(
        self, driver: Driver, chosen: Chosen, handle: int, image: bytes, jit_log: str
    ) -> None:
        self.driver = driver
        self.key = chosen.key
        self.label = chosen.label
        self.handle = handle
        self.jit_log = jit_log
        self.users: weakref.WeakSet[object] = weakref.WeakSet()
        self._image = image  # the driver reads it lazily, at the first function asked for

    def find_function(self, name: str, device: int) -> tuple[int, int]:
        """(CUkernel, CUfunction of the device's primary context) of `name`."""
        kernel, function = c_void_p(), c_void_p()
        with self.driver.on_device(device):
            code = self.driver.try_call(
                "cuLibraryGetKernel", byref(kernel), self.handle, name.encode()
            )
            if code == 500:
                self.driver.take_log()  # it is said here, and no part of the next error
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

    def read_params(self, kernel: int) -> tuple[Param, ...]:
        """Sizes and offsets from the driver, for images only it can read."""
        if not self.driver.has("cuKernelGetParamInfo"):
            raise CubinCorruptError(
                f"{self.label} is compressed and this driver cannot tell its parameters "
                "(it takes 12.4): build it with -no-compress"
            )
        found: list[Param] = []
        offset, size = c_size_t(), c_size_t()
        while True:
            code = self.driver.try_call(
                "cuKernelGetParamInfo", kernel, len(found), byref(offset), byref(size)
            )
            if code == 1:  # past the last one
                self.driver.take_log()
                return tuple(found)
            if code:
                raise self.driver.error("cuKernelGetParamInfo", code)
            found.append(Param.make(len(found), None, None, size.value, offset.value))

    def check_unload(self, device: int) -> None:
        """Refuse an unload while the current stream captures."""
        from .tensors import current_stream

        with self.driver.on_device(device):
            for stream in {0, current_stream(device)}:
                if self.driver.is_capturing(stream):
                    raise LaunchConfigError(
                        f"{self.label} cannot be unloaded while a stream is capturing"
                    )

    def release(self, user: object) -> None:
        """One kernel less; the last one unloads."""
        with _lock:
            self.users.discard(user)
            if self.users or os.getpid() != self.driver.pid:
                return
            _libraries.pop(self.key, None)
            self.driver.call("cuLibraryUnload", self.handle, asked=f"unloading {self.label}")


def library_for(driver: Driver, chosen: Chosen, probe: bool, user: object, device: int) -> Library:
    """The library of `chosen`, loaded at most once a process however many threads ask.

    PTX is compiled for `device`, one of those that `chosen` is for.
    """
    with _lock:
        library = _libraries.get(chosen.key)
        if library is None:
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
            library = Library(driver, chosen, _load(driver, chosen, image), image, jit_log)
            _libraries[chosen.key] = library
        library.users.add(user)
        return library


def forget() -> None:
    """Drop the cache of libraries (tests give the next one another driver)."""
    _libraries.clear()


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
    if _probe.is_off():
        if unknown:
            _warn(f"{chosen.label} holds {unknown}, unknown here, and was loaded unprobed")
        return
    symbols = [spec.symbol or name for name, spec in chosen.functions.items()]
    if _probe.survives(driver, image, chosen.label, symbols, device) and unknown:
        _warn(
            f"{chosen.label} holds {unknown}, unknown to this version of kernel_hub. "
            "It was loaded in a child process first, and the driver took it"
        )


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def load_function(
    driver: Driver, library: Library, chosen: Chosen, spec: FunctionSpec, device: int
) -> DeviceFunction:
    """`spec` on `device`, with its limits read from the driver and from the chosen image."""
    kernel, handle = library.find_function(spec.symbol or spec.name, device)
    try:
        known = chosen.functions[spec.name]
    except KeyError:
        known = spec
    if known.params is None:
        known = chosen.declare(replace(known, params=library.read_params(kernel)))
    elif spec.params is not None and [p.size_bytes for p in known.params] != [
        p.size_bytes for p in spec.params
    ]:
        raise CubinCorruptError(
            f"{chosen.label}: {known.prototype()} differs from {spec.prototype()} of "
            "another architecture"
        )
    assert known.params is not None
    return DeviceFunction(driver, device, handle, known, _limits(driver, handle, known, device))


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
    x, y, z = _driver.MAX_GRID_DIM
    bx, by, bz = _driver.MAX_BLOCK_DIM
    return Limits(
        function=spec.name,
        device_name=driver.device_name(device),
        compute_capability=capability,
        max_grid=(of_device(x), of_device(y), of_device(z)),
        max_block=(of_device(bx), of_device(by), of_device(bz)),
        max_threads=read(_MAX_THREADS),
        required_block=spec.required_block,
        static_shared_bytes=static,
        max_dynamic_shared_bytes=of_device(_driver.SHARED_PER_BLOCK_OPTIN) - static,
        cluster=cluster,
        num_multiprocessors=of_device(_driver.MULTIPROCESSOR_COUNT),
    )
