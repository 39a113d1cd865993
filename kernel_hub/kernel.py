"""Kernel and KernelFunction: from a name to a checked launch. Holds the cache of loaded libraries.

Making a Kernel reads names and signatures only. The first launch of a function on a device
resolves, verifies and loads the image, reads the function's limits and generates its launcher;
every later launch is that launcher.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from . import _demangle, _library, tensors
from . import driver as _driver
from ._bound import BoundLaunch
from ._declared import DeclaredImage
from ._function import HintedFunction, KernelFunction, device_number, live
from ._image import Chosen, FunctionSpec, Image, open_image
from ._launch import DeviceFunction
from ._library import Library, library_for, load_function
from .errors import (
    CudaDriverError,
    DriverNotFoundError,
    FunctionNotFoundError,
    LaunchConfigError,
    ParamsError,
)

if TYPE_CHECKING:
    from .memory import DeviceArray

__all__ = ["BoundLaunch", "Kernel", "KernelFunction"]

_kernels: weakref.WeakSet[Kernel] = weakref.WeakSet()
_fork_hook = threading.Lock()
_fork_hooked = False


class Kernel:
    """The functions of one image: a shipped cubin, a file, or bytes.

    filename: name of a cubin shipped by `package` (`.cubin`/`.fatbin` is tolerated), a path (`str`
        with a suffix, or `Path`) to a .cubin, .fatbin or .ptx, the image itself as bytes (PTX
        also as text), or a cuda.core ObjectCode.
    function_names: the functions to offer; None offers every one in the image. A C++ kernel goes by
        its mangled name or by its own, with template arguments: 'scale<float, 4>', or with
        parameters too where several are called so.
    package: the package whose collection `filename` is looked up in; None is kernel_hub's own.
    signatures: C types for images that carry only sizes: {function: ['float*', 'int']}, a dict
        name -> type, or a text 'float* out, int n'. Types of your own are written `struct Params`.
    probe: load an image nobody vouches for in a child process first (a damaged image can kill the
        driver, and then kills the child).

    Needs no GPU, driver or torch. Raises CubinNotFoundError, CubinCorruptError,
    FunctionNotFoundError.

        k = Kernel("silu_and_mul")
        k.silu_and_mul_bf16(grid, block, 0, None, [out, x, …])
    """

    _function_type: Callable[..., KernelFunction] = KernelFunction._make

    def __init__(
        self,
        filename: Any,
        function_names: Sequence[str] | None = None,
        *,
        package: str | None = None,
        signatures: Mapping[str, Any] | None = None,
        probe: bool = False,
    ) -> None:
        if type(filename).__name__ == "ObjectCode":  # asked without importing cuda.core
            from ._source import object_code_image

            image = object_code_image(filename)
        else:
            image = open_image(filename, package)
        if hint := getattr(image, "hint", ""):
            warnings.warn(hint, RuntimeWarning, stacklevel=2)
            self._function_type = partial(HintedFunction._hinted, hint)
        self._offer(image, _checked_names(function_names), signatures, probe)

    @classmethod
    def from_source(
        cls,
        code: str | os.PathLike[str],
        function_names: Sequence[str] | None = None,
        *,
        options: Sequence[str] = (),
        arch: str | tuple[int, int] | None = None,
        device: Any = None,
        signatures: Mapping[str, Any] | None = None,
        cache: bool = True,
    ) -> Kernel:
        """Compile CUDA C++ with NVRTC, now; needs the extra `jit` (cuda-core).

        code: the source, or a Path to a file of it (UTF-8).
        function_names: the kernels to offer; instances of templates as C++ writes them:
            ['scale<float>', 'ns::sum<__half, 256>'], reached as k['scale<float>']. None offers
            every kernel that is no template.
        options: NVRTC's options, e.g. ['-std=c++20', '-DTILE=64', '-Iinclude', '-lineinfo']. CUDA's
            own headers are found without one. Those that write files of their own (--time,
            --create-pch), or make something else than machine code (-dlto), are refused.
        arch: 'sm90' (or 'sm_90', (9, 0)) for the instructions that all GPUs of 9.x have; 'sm_90a'
            with those of 9.0 alone (wgmma needs it). Neither needs a GPU. None: everything that
            `device` (None: the current one) can do, sm_90a on a Hopper GPU, sm_89 on an Ada one,
            and later the same for every GPU it is launched on.
        signatures: as for Kernel, for parameters whose types could not be read from the source.
        cache: keep the result in the user's cache folder ($KERNEL_HUB_CACHE, '0' for none), by
            content: source, included files, options, architecture and compiler.

        `compiler_log` has the warnings. Raises CompileError with the compiler's log,
        CubinNotFoundError for a missing file, MissingPackageError, ParamsError,
        DriverNotFoundError.

            k = Kernel.from_source(text, ["scale<float>"])
            k["scale<float>"](grid, block, 0, None, [out, x, n, 2.0])
        """
        from ._source import SourceImage

        names = _checked_names(function_names)
        capability = None
        if arch is None:
            capability = _capability_at_hand(device)
        image = SourceImage(code, names, options, arch, capability, cache)
        self = cls.__new__(cls)
        self._offer(image, names, signatures, False)
        self._log = image.log
        return self

    def _offer(self, image: Image, names: list[str] | None, signatures: Any, probe: bool) -> None:
        """What every way to make a Kernel ends with: the functions `names` of `image`."""
        if isinstance(signatures, Mapping):
            known = image.names() or ()
            signatures = {_symbol_in(known, name): given for name, given in signatures.items()}
        self._image = DeclaredImage(image, signatures) if signatures else image
        self._probe = probe
        self._log = ""
        self._lock = threading.RLock()
        self._functions: dict[str, KernelFunction] = {}
        self._symbols: dict[str, str] = {}  # by the C++ names that were asked for
        self._libraries: dict[int, tuple[Library, Chosen]] = {}
        _kernels.add(self)
        available = self._image.names()
        if names is None:
            if available is None:
                raise FunctionNotFoundError(
                    f"{image.label} is compressed: its function names can only be read by the "
                    "driver; pass function_names=[…] (or, for zstd, install kernel_hub[fatbin])"
                )
            names = list(available)
        names = [_symbol_in(available or (), name) for name in names]
        for name in names:
            if available is None or name not in available:
                image.spec(name)  # raises, unless it may be in what only the driver can unpack
        self._names = names

    def __getattr__(self, name: str) -> KernelFunction:
        # Reached only until the function is in the instance's dict.
        if name.startswith("_") and name not in self.__dict__.get("_names", ()):
            raise AttributeError(name)  # but C++ functions have names like _Z6kernelPf
        return self[name]

    def __getitem__(self, name: str) -> KernelFunction:
        with self._lock:
            symbol = name if name in self._functions else self._symbol(name)
            if symbol not in self._functions:
                self._functions[symbol] = self._function_type(self, self._image.spec(symbol))
            function = self._functions[symbol]
            if name not in type(self).__dict__:
                self.__dict__[name] = function
            return function

    def _symbol(self, name: str) -> str:
        """The function's name in the image, for that or its C++ name."""
        if name not in self._names and name not in self._symbols:
            symbol = _symbol_in(self._names, name)
            if symbol not in self._names:
                known = _demangle.cxx_names(self._names).values()
                raise FunctionNotFoundError.among(name, known, self._image.label)
            self._symbols[name] = symbol
        return self._symbols.get(name, name)

    @property
    def function_names(self) -> list[str]:
        """The functions this kernel offers."""
        return list(self._names)

    @property
    def compiler_log(self) -> str:
        """What the compiler said of a source that it compiled (warnings); '' for other images."""
        return self._log

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _symbol_in(self._names, name) in self._names

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._names})

    def __repr__(self) -> str:
        shown = [self._image.spec(name).describe() for name in self._names[:16]]
        more = len(self._names) - len(shown)
        tail = [f"… and {more} more"] if more > 0 else []
        return f"<Kernel {self._image.label}:\n  " + "\n  ".join(shown + tail) + ">"

    def load(self, device: Any = None) -> None:
        """Load the image and every function on `device` (None: the current one) now."""
        for name in self._names:
            self[name].load(device)

    def image(self, device: Any = None) -> bytes:
        """The bytes that are, or would be, loaded on `device` (None: the current one).

        A cubin; of a fatbin the entry for that GPU, unpacked, or all of it where only the driver
        can unpack it; PTX as text where no machine code fits; of a source what it was compiled to.
        Loads nothing. Raises CubinNotFoundError when the image has nothing for that GPU,
        CubinCorruptError when a shipped file is not what its manifest says.
        """
        device = device_number(device, self._image.label)
        with self._lock:
            if device in self._libraries:
                return self._libraries[device][1].read()
            capability = _driver.get().compute_capability(device)
            return self._image.choose(capability).read()

    def get_global(self, name: str, dtype: Any = "uint8", *, device: Any = None) -> DeviceArray:
        """The `__device__` or `__constant__` variable `name` as a DeviceArray view.

        Its elements are of `dtype`; the shape is flat. Raises FunctionNotFoundError when the image
        has no such variable.
        """
        from .memory import DeviceArray

        if not isinstance(name, str):
            raise ParamsError(f"name={name!r} of get_global: a str, not {type(name).__name__}")
        device = device_number(device, self._image.label)
        driver = _driver.get()
        with self._lock, _driver.RelaxedCapture(driver):
            library, _ = self._library(driver, device, None)
            address, size_bytes = library.find_global(name, device)
        flat = DeviceArray.from_address(address, (size_bytes,), "uint8", device, library)
        return flat if dtype == "uint8" else flat.view(dtype)

    def jit_log(self, device: Any = None) -> str:
        """What the driver's compiler said of the image's PTX: registers, spills, warnings.

        Loads the image on `device` (None: the current one). '' where machine code was loaded.
        """
        device = device_number(device, self._image.label)
        driver = _driver.get()
        with self._lock, _driver.RelaxedCapture(driver):
            return self._library(driver, device, None)[0].jit_log

    def unload(self) -> None:
        """Unload the image from the driver; the next launch loads it again.

        Bound launches made before it are refused from then on. Must not be called while a stream is
        capturing, while another thread launches a function of this kernel, nor while a captured
        graph still holds one.
        """
        with self._lock:
            libraries = {}
            for device, (library, _) in self._libraries.items():
                library.check_unload(device)
                libraries[id(library)] = library
            self._libraries.clear()
            for function in self._functions.values():
                function._forget()
            failures = []
            for library in libraries.values():
                try:
                    library.release(self)
                except CudaDriverError as error:  # the others are still to go
                    failures.append(error)
            if failures:
                first = failures[0]
                text = "\n".join(map(str, failures))
                raise CudaDriverError(text, call=first.call, code=first.code, name=first.name)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.unload()

    def _library(self, driver: Any, device: int, stream: Any) -> tuple[Library, Chosen]:
        """What runs on `device`, loaded; the caller holds the lock and a RelaxedCapture."""
        if device not in self._libraries:
            _refuse_capture(driver, self._image.label, device, stream)
            # Checks the device number, and that it can be used at all.
            driver.primary_context(device)
            chosen = self._image.choose(driver.compute_capability(device))
            held = next((lib for lib, _ in self._libraries.values() if lib.key == chosen.key), None)
            library = held or library_for(driver, chosen, self._probe, self, device)
            self._libraries[device] = library, chosen
        return self._libraries[device]

    def _load_function(self, spec: FunctionSpec, device: int, stream: Any) -> DeviceFunction:
        _hook_fork()
        driver = _driver.get()
        # Another thread may be capturing a graph, which a load must not end.
        with self._lock, _driver.RelaxedCapture(driver):
            library, chosen = self._library(driver, device, stream)
            return load_function(driver, library, chosen, spec, device)


def _symbol_in(symbols: Sequence[str], name: Any) -> Any:
    """The one of `symbols` that is `name`, or is called so in C++; else `name`."""
    if name in symbols or not isinstance(name, str):
        return name
    return _demangle.symbol_of(name, symbols) or name


def _checked_names(names: Any) -> list[str] | None:
    """`function_names` as a list, or None."""
    if names is None:
        return None
    if isinstance(names, str):
        return [names]
    found = list(names) if isinstance(names, Iterable) else [names]
    if not all(isinstance(name, str) for name in found):
        raise ParamsError(f"function_names={names!r}: a list of names, or None")
    return found


def _capability_at_hand(device: Any) -> tuple[int, int]:
    try:
        return _driver.get().compute_capability(device_number(device, "from_source"))
    except DriverNotFoundError as error:
        raise DriverNotFoundError(
            f"arch=None compiles for the GPU at hand; without one name it: arch='sm90'. {error}",
            tried=error.tried,
        ) from error


def _refuse_capture(driver: Any, label: str, device: int, stream: Any) -> None:
    """Loading inside a capture would be recorded or invalidate it: refuse before it happens."""
    handle = tensors.stream_handle(stream, device)
    with driver.on_device(device):
        capturing = driver.is_capturing(handle)
    if capturing:
        raise LaunchConfigError(
            f"{label} is not loaded on device {device} and stream {handle:#x} is capturing a "
            "graph: call .load() (or launch once) before the capture"
        )


def _hook_fork() -> None:
    global _fork_hooked
    with _fork_hook:
        if not _fork_hooked and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
            _fork_hooked = True


def _after_fork() -> None:
    for function in list(live):
        for state in function._states.values():
            state.forget_slots()


def _reset_for_tests() -> None:
    """Forget everything that was loaded, as if no driver had been opened yet."""
    _library.forget()
    for kernel in list(_kernels):
        kernel._libraries.clear()
    for function in list(live):
        function._forget()
