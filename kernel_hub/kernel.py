"""Kernel and KernelFunction: from a name to a checked launch.

Making a Kernel reads names and signatures only. The first launch of a function on a device
resolves, verifies and loads the image, reads the function's limits and generates its launcher;
every later launch is that launcher.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from . import driver as _driver
from .arrays import interop
from .driver import apart
from .errors import (
    CudaDriverError,
    DriverNotFoundError,
    FunctionNotFoundError,
    KernelHubError,
    ParamsError,
)
from .image.demangle import Symbols, cxx_names
from .image.retyped import DeclaredImage
from .image.shipped import Image, ShippedImage, open_image
from .launch import c_launcher, loader
from .launch.bound import BoundLaunch
from .launch.function import KernelFunction, device_number, hook_fork, live
from .launch.hinted import HintedFunction
from .launch.libraries import Lease, Library, LoadedImage, loaded_images
from .launch.of_process import OfThisProcess

if TYPE_CHECKING:
    from .arrays.device_array import DeviceArray

__all__ = ["BoundLaunch", "Kernel", "KernelFunction", "LoadedImage", "loaded_images"]


class Kernel(OfThisProcess):
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
    keep: when the image leaves the driver. None: at some load, or `trim`, after nothing can
        launch it any more, unless it is a shipped one, or was once launched on another stream than
        the legacy default one, where a captured graph may hold it. True: at `unload()` alone.
        False: as None, and in those two cases too: not for kernels that a graph captures.

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
        keep: bool | None = None,
    ) -> None:
        if type(filename).__name__ == "ObjectCode":  # asked without importing cuda.core
            from .image.source import object_code_image

            image = object_code_image(filename)
        else:
            image = open_image(filename, package)
        if hint := getattr(image, "hint", ""):
            warnings.warn(hint, RuntimeWarning, stacklevel=2)
            self._function_type = partial(HintedFunction._hinted, hint)
        self._offer(image, _checked_names(function_names), signatures, probe, keep)

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
        keep: bool | None = None,
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
        keep: as for Kernel.

        `compiler_log` has the warnings. Raises CompileError with the compiler's log,
        CubinNotFoundError for a missing file, MissingPackageError, ParamsError,
        DriverNotFoundError.

            k = Kernel.from_source(text, ["scale<float>"])
            k["scale<float>"](grid, block, 0, None, [out, x, n, 2.0])
        """
        from .image.source import SourceImage

        names = _checked_names(function_names)
        at_hand = partial(_capability_at_hand, device)
        image = SourceImage(code, names, options, arch, at_hand, cache)
        self = cls.__new__(cls)
        self._offer(image, names, signatures, False, keep)
        self._log = image.log
        return self

    def _offer(
        self,
        image: Image,
        names: list[str] | None,
        signatures: Any,
        probe: bool,
        keep: bool | None = None,
    ) -> None:
        """What every way to make a Kernel ends with: the functions `names` of `image`."""
        if keep not in (None, True, False):
            raise ParamsError(f"keep={keep!r:.80}: True, False or None")
        # Of all that is shipped a list is made when somebody asks for it.
        self._shipped = image if type(image) is ShippedImage and names is None else None
        found = image.names() if self._shipped is None or signatures else ()
        available = Symbols(found or ())
        # Of None, too, Mapping asks all its subclasses: half a millisecond with torch's.
        if signatures is not None and isinstance(signatures, Mapping):
            signatures = {available.find(name): given for name, given in signatures.items()}
        self._image = DeclaredImage(image, signatures) if signatures else image
        self._loader = loader.Loader(self._image, probe, keep)
        self._lock = self._loader.lock
        self._log = ""
        self._functions: dict[str, KernelFunction] = {}
        self._symbols: dict[str, str] = {}  # by the C++ names that were asked for
        if self._shipped is not None:
            return
        if names is None:
            if found is None:
                raise FunctionNotFoundError(
                    f"{image.label} is compressed: its function names can only be read by the "
                    "driver; pass function_names=[…] (or, for zstd, install kernel_hub[fatbin])"
                )
            names = list(found)
        names = [available.find(name) for name in names]
        for name in names:
            if name not in available:
                image.spec(name)  # raises, unless it may be in what only the driver can unpack
        self._names = names

    @cached_property
    def _names(self) -> list[str]:
        return list(self._image.names() or ())

    @cached_property
    def _known(self) -> Symbols:
        return Symbols(self._names)

    def __getattr__(self, name: str) -> KernelFunction:
        # Reached only until the function is in the instance's dict.
        if name.startswith("_") and ("_functions" not in self.__dict__ or name not in self._known):
            raise AttributeError(name)  # but C++ functions have names like _Z6kernelPf
        return self[name]

    def __getitem__(self, name: str) -> KernelFunction:
        if (known := self._functions.get(name)) is not None:
            return known  # without the lock, which a load holds
        with self._lock:
            symbol = name if name in self._functions else self._symbol(name)
            if symbol not in self._functions:
                self._functions[symbol] = self._function_type(
                    self._loader, self._image.spec(symbol)
                )
            function = self._functions[symbol]
            if name not in type(self).__dict__:
                self.__dict__[name] = function
            return function

    def _symbol(self, name: str) -> str:
        """The function's name in the image, for that or its C++ name."""
        if self._shipped is not None and self._shipped.has(name):
            return name
        if name not in self._known and name not in self._symbols:
            symbol = self._known.find(name)
            if symbol not in self._known:
                known = cxx_names(self._names).values()
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
        return isinstance(name, str) and self._known.find(name) in self._known

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._names})

    def __repr__(self) -> str:
        shown = [self._image.spec(name).describe() for name in self._names[:16]]
        more = len(self._names) - len(shown)
        tail = [f"… and {more} more"] if more > 0 else []
        return f"<Kernel {self._image.label}:\n  " + "\n  ".join(shown + tail) + ">"

    def load(self, device: Any = None) -> None:
        """Load the image and every function on `device` (None: the current one) now."""
        device = device_number(device, self._image.label)
        functions = [self[name] for name in self._names]
        stream = interop.current_stream(device)
        hook_fork()
        apart.run(lambda: [function._load(device, stream) for function in functions])

    def image(self, device: Any = None) -> bytes:
        """The bytes that are, or would be, loaded on `device` (None: the current one).

        A cubin; of a fatbin the entry for that GPU, unpacked, or all of it where only the driver
        can unpack it; PTX as text where no machine code fits; of a source what it was compiled to.
        Loads nothing. Raises CubinNotFoundError when the image has nothing for that GPU,
        CubinCorruptError when a shipped file is not what its manifest says.
        """
        device = device_number(device, self._image.label)
        return self._loader.image(device)

    def get_global(self, name: str, dtype: Any = "uint8", *, device: Any = None) -> DeviceArray:
        """The `__device__` or `__constant__` variable `name` as a DeviceArray view.

        Its elements are of `dtype`; the shape is flat. Raises FunctionNotFoundError when the image
        has no such variable.
        """
        from .arrays.device_array import DeviceArray

        if not isinstance(name, str):
            raise ParamsError(f"name={name!r} of get_global: a str, not {type(name).__name__}")
        device = device_number(device, self._image.label)

        def find(library: Library, lease: Lease) -> tuple[Lease, int, int]:
            return lease, *library.find_global(name, device)

        lease, address, size_bytes = self._loader.with_library(device, find)
        flat = DeviceArray.from_address(address, (size_bytes,), "uint8", device, lease)
        return flat if dtype == "uint8" else flat.view(dtype)

    def jit_log(self, device: Any = None) -> str:
        """What the driver's compiler said of the image's PTX: registers, spills, warnings.

        Loads the image on `device` (None: the current one). '' where machine code was loaded.
        """
        device = device_number(device, self._image.label)
        return self._loader.with_library(device, lambda library, _: library.jit_log)

    def unload(self) -> None:
        """Unload the image from the driver; the next launch loads it again.

        Bound launches made before it are refused from then on. Must not be called while a stream is
        capturing, while another thread launches a function of this kernel, nor while a captured
        graph still holds one.
        """
        if streams := self._loader.current_streams():
            apart.run(self._loader.unload, streams, self._forget)

    def _forget(self) -> None:
        for function in self._functions.values():
            function._forget()

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.unload()


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


def open_ahead() -> None:
    """Open what the first launch of any kernel asks for: the C launcher's library, and where torch
    uses a GPU already, the driver. What is wrong with either, the launch says."""
    c_launcher.available()
    torch = interop.loaded_torch()
    if torch is not None and torch.cuda.is_initialized():
        with contextlib.suppress(DriverNotFoundError, CudaDriverError):
            _driver.get()


def read_ahead(kernel: Kernel, compute_capability: tuple[int, int]) -> None:
    """Have a shipped image read and verified ahead of its load. What is wrong with it, the load
    says."""
    if kernel._shipped is not None:
        with contextlib.suppress(KernelHubError):
            kernel._shipped.read_ahead(compute_capability)


def _reset_for_tests() -> None:
    """Forget everything that was loaded, as if no driver had been opened yet."""
    loader._reset_for_tests()
    for function in list(live):
        function._forget()
