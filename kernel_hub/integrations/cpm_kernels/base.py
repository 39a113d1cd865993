"""What `cpm_kernels.kernels.base` offers, on kernel_hub: its names, signatures and tolerances.

A client gives an image as bytes and names functions; nothing is read before the first launch. Every
refusal of a launch is a RuntimeError too and holds the driver's own words for it.
"""

from __future__ import annotations

import ctypes
import functools
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ... import driver as _driver
from ... import kernel as _kernel
from ...errors import (
    CubinCorruptError,
    CubinNotFoundError,
    CudaDriverError,
    FunctionNotFoundError,
    KernelHubError,
    LaunchConfigError,
    ParamsError,
)

__all__ = [
    "CUDAStream",
    "DevicePointer",
    "Kernel",
    "KernelFunction",
    "LazyKernelCModule",
    "round_up",
]

DevicePointer = int
CUDAStream = ctypes.c_void_p
OWN_CUBIN = "weight_extraction"

_INTEGERS = "bBhHiIlLqQ"  # ctypes' codes
_FILE_NAME = re.compile(r"\w[\w.-]*")  # and no path

_substitute = False


def set_substitute(wanted: bool) -> None:
    """Whether kernel_hub's kernels stand in where a client's image has no code for the GPU."""
    global _substitute
    _substitute = wanted


def is_substituting() -> bool:
    """What `set_substitute` was told."""
    return _substitute


def round_up(x: int, m: int) -> int:
    """The least multiple of `m` not below `x`."""
    return (x + m - 1) // m * m


class LazyKernelCModule:
    """An image (cubin, fatbin or PTX), loaded on each device at its first launch there.

    code: the image. Raises ParamsError for anything but bytes; what is wrong inside shows at the
    first launch.
    """

    def __init__(self, code: bytes) -> None:
        if not isinstance(code, (bytes, bytearray, memoryview)):
            raise ParamsError(
                f"LazyKernelCModule takes an image as bytes, not {type(code).__name__}"
            )
        image = bytes(code)
        caller = sys._getframe(1).f_globals.get("__name__", "?")
        self._setup(lambda: image, f"the image of {len(image):,} bytes that {caller} holds")

    def _setup(self, read: Callable[[], bytes], label: str) -> None:
        self._read = read
        self._label = label
        self._asked: list[str] = []  # by the KernelFunctions made so far
        self._kernel: _kernel.Kernel | None = None
        self._is_said = False
        self._lock = threading.Lock()

    def _setup_shipped(self, name: str, missing: CubinNotFoundError) -> None:
        """As `_setup`, of a cubin that kernel_hub ships; raises `missing` where it ships none."""
        try:
            kernel = _kernel.Kernel(name)
        except CubinNotFoundError:
            raise missing from None
        self._setup(kernel.image, f"kernel_hub's cubin {name!r}")
        self._kernel = kernel

    def get_module(self) -> _kernel.Kernel:
        """The image, loaded on the current device: a kernel_hub.Kernel, not a driver's handle."""
        try:
            kernel = self._whole() or _kernel.Kernel(self._read(), self._asked)
            kernel.load()
            return kernel
        except KernelHubError as error:
            raise _in_their_words(error, self._label) from error

    def unload(self) -> None:
        """Unload the image from the driver; a later launch loads it again."""
        with self._lock:
            if self._kernel is not None:
                self._kernel.unload()

    def _whole(self) -> _kernel.Kernel | None:
        """The image with all its functions; None where only the driver can list them."""
        with self._lock:
            if self._kernel is None:
                try:
                    self._kernel = _kernel.Kernel(self._read())
                except FunctionNotFoundError:
                    return None
            return self._kernel

    def _function(self, name: str) -> _kernel.KernelFunction:
        kernel = self._whole() or _kernel.Kernel(self._read(), [name])
        return kernel[name]

    def _own_function(self, name: str, refused: CubinNotFoundError) -> _kernel.KernelFunction:
        """kernel_hub's function in the place of `name`, which `refused` says has no code here."""
        misfit = self._misfit(name)
        if misfit or not _substitute:
            advice = misfit or (
                "kernel_hub has a kernel of that name and those parameters: "
                "cpm_kernels.install(substitute=True), or kernel-hub cpm-alias --substitute, "
                "launches it instead."
            )
            text = f"{refused}\n{advice}"
            raise CubinNotFoundError(text, rejected=refused.rejected) from refused
        with self._lock:
            is_said, self._is_said = self._is_said, True
        if not is_said:
            fitting = [name for name in self._asked if not self._misfit(name)]
            archs = ", ".join(sorted(refused.rejected))
            warnings.warn(
                f"{self._label} has no code for this GPU (it has {archs}); kernel_hub's own "
                f"kernels run in the place of {', '.join(fitting)}",
                RuntimeWarning,
                stacklevel=4,
            )
        return _own_kernel()[name]

    def _misfit(self, name: str) -> str:
        """Why kernel_hub's function cannot stand in for `name`, or ''."""
        own = _own_kernel()
        if name not in own:
            return f"kernel_hub has no kernel {name} to launch instead; it has {', '.join(own)}."
        try:
            theirs, ours = self._function(name).params, own[name].params
        except FunctionNotFoundError as error:
            return str(error)
        # None: not known before the driver loads it. The launch checks what it is given.
        if theirs is None or ours is None or _sizes(theirs) == _sizes(ours):
            return ""
        return (
            f"kernel_hub's {own[name].signature} cannot stand in: its parameters have "
            f"{_sizes(ours)} bytes, the image's {_sizes(theirs)}."
        )


class KernelFunction:
    """One function of an image.

    cmodule: a LazyKernelCModule. func_name: its name there; a wrong one shows at the first launch.
    """

    def __init__(self, cmodule: LazyKernelCModule, func_name: str) -> None:
        if not isinstance(cmodule, LazyKernelCModule):
            raise ParamsError(
                f"KernelFunction({func_name!r}) takes a LazyKernelCModule of kernel_hub's "
                f"cpm_kernels, not {type(cmodule).__module__}.{type(cmodule).__qualname__}"
            )
        if not isinstance(func_name, str):
            raise _ParamsError(f"KernelFunction takes a function's name, not {func_name!r:.80}")
        self._module = cmodule
        self._func_name = func_name
        self._launch: _kernel.KernelFunction | None = None
        cmodule._asked.append(func_name)

    def __repr__(self) -> str:
        return f"<KernelFunction {self._func_name} of {self._module._label}>"

    def find(self) -> None:
        """Look the function up now. Raises as a launch of a function that is not there."""
        if self._launch is None:
            try:
                self._launch = self._module._function(self._func_name)
            except KernelHubError as error:
                where = f"{self._func_name} of {self._module._label}"
                raise _in_their_words(error, where) from error

    @property
    def params(self) -> Sequence[Any] | None:
        """The parameters as kernel_hub knows them; None where only the driver can tell."""
        self.find()
        assert self._launch is not None
        return self._launch.params

    def __call__(
        self,
        gridDim: tuple[int, int, int],
        blockDim: tuple[int, int, int],
        sharedMemBytes: int,
        stream: Any,
        params: Sequence[Any],
    ) -> None:
        """Launch on torch's current device.

        gridDim, blockDim: blocks, threads. sharedMemBytes: dynamic shared memory a block, bytes.
        stream: a handle (int, c_void_p), a torch.cuda.Stream, an object with `_as_parameter_`; 0
        or None is the legacy default stream. params: ctypes instances, their bytes are read before
        the call returns; or whatever a kernel_hub launch takes.
        Raises: the errors of a kernel_hub launch, as RuntimeErrors.
        """
        if stream is None:
            stream = 0
        try:
            if self._launch is None:
                self._launch = self._module._function(self._func_name)
            try:
                self._launch(gridDim, blockDim, sharedMemBytes, stream, params)
            except (CubinNotFoundError, ParamsError) as refused:
                self._once_more(refused, (gridDim, blockDim, sharedMemBytes, stream), params)
        except KernelHubError as error:
            where = f"{self._func_name} of {self._module._label}"
            raise _in_their_words(error, where) from error

    def _once_more(self, refused: KernelHubError, launch: tuple[Any, ...], params: Any) -> None:
        """After a refusal: with kernel_hub's function, with narrower integers, or raise it."""
        if isinstance(refused, CubinNotFoundError):
            self._launch = self._module._own_function(self._func_name, refused)
            try:
                return self._launch(*launch, params)
            except ParamsError as error:
                refused = error
        assert self._launch is not None
        narrowed = _narrowed(params, self._launch.params)
        if narrowed is None:
            raise refused
        return self._launch(*launch, narrowed)


class Kernel:
    """Functions of a fatbin of the installed cpm_kernels package, or of a cubin of kernel_hub's.

    filename: of `kernels/cuda/<filename>.fatbin` there; where there is none, the name of a cubin
    that kernel_hub ships. function_names: each becomes an attribute.
    Raises CubinNotFoundError (a RuntimeError) when there is no such file, which is read at the
    first launch; ParamsError (a RuntimeError too) for anything but names.
    """

    def __init__(self, filename: str, function_names: Iterable[str]) -> None:
        if not isinstance(filename, str) or not _FILE_NAME.fullmatch(filename):
            raise _ParamsError(f"Kernel takes the name of a file, such as 'gemm', not {filename!r}")
        is_list = isinstance(function_names, Iterable) and not isinstance(function_names, str)
        names = list(function_names) if is_list else []
        if not is_list or not all(isinstance(name, str) for name in names):
            raise _ParamsError(f"Kernel({filename!r}) takes a list of functions' names")
        self.filename = f"cuda/{filename}.fatbin"
        self._function_names = names
        self._cmodule = LazyKernelCModule.__new__(LazyKernelCModule)
        try:
            path = _package_data(f"{filename}.fatbin")
            self._cmodule._setup(path.read_bytes, str(path))
        except CubinNotFoundError as missing:
            self._cmodule._setup_shipped(filename, missing)
        for name in self._function_names:
            setattr(self, name, KernelFunction(self._cmodule, name))

    @property
    def code(self) -> bytes:
        """The file's bytes; of a cubin of kernel_hub's those for the current device."""
        return self._cmodule._read()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise FunctionNotFoundError.among(name, self._function_names, self.filename)


def _package_data(name: str) -> Path:
    """cuda/<name> of the installed package's `kernels`."""
    spec = find_spec("cpm_kernels.kernels")
    folders = [Path(place, "cuda") for place in (spec and spec.submodule_search_locations) or ()]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    found = f"it is not in {folders[0]}" if folders else "no cpm_kernels is installed"
    raise CubinNotFoundError(
        f"Kernel reads {name} from the package data of cpm_kernels, and {found}: "
        "`pip install --no-deps cpm_kernels`, or give LazyKernelCModule the image's bytes"
    )


@functools.cache
def _own_kernel() -> _kernel.Kernel:
    return _kernel.Kernel(OWN_CUBIN)


def _narrowed(values: Any, expected: Sequence[Any] | None) -> list[Any] | None:
    """`values` with integers that are wider than the kernel takes cut to size, where they fit.

    cpm_kernels hands over addresses alone, so that c_int64(3) passes for an int; one function of
    the package itself does that. None: nothing to cut.
    """
    if not isinstance(values, (list, tuple)) or len(values) != len(expected or ()):
        return None
    found = list(values)
    for i, (value, param) in enumerate(zip(values, expected or (), strict=True)):
        size = param.size_bytes
        kind = getattr(type(value), "_type_", None)
        if isinstance(kind, str) and kind in _INTEGERS and ctypes.sizeof(value) > size:
            number = value.value
            if -(1 << (8 * size - 1)) <= number < 1 << (8 * size):
                found[i] = number.to_bytes(size, "little", signed=number < 0)
    return found if any(a is not b for a, b in zip(found, values, strict=True)) else None


def _sizes(params: Iterable[Any]) -> list[int]:
    return [param.size_bytes for param in params]


class _UnknownFunctionError(FunctionNotFoundError, RuntimeError):
    pass


class _LaunchConfigError(LaunchConfigError, RuntimeError):
    pass


class _ParamsError(ParamsError, RuntimeError):
    pass


class _CubinCorruptError(CubinCorruptError, RuntimeError):
    pass


# What is refused before the driver sees it: the error, and the CUresult the driver would give.
_REFUSALS: tuple[tuple[type[KernelHubError], type[KernelHubError], int], ...] = (
    (CubinNotFoundError, CubinNotFoundError, 209),
    (FunctionNotFoundError, _UnknownFunctionError, 500),
    (LaunchConfigError, _LaunchConfigError, 1),
    (ParamsError, _ParamsError, 1),
    (CubinCorruptError, _CubinCorruptError, 200),
)


def _in_their_words(error: KernelHubError, where: str) -> KernelHubError:
    """`error` as a RuntimeError that begins like cpm_kernels' own: with the driver's text."""
    if isinstance(error, CudaDriverError):
        text = f"{_driver_text(error.code)}{where}: {error}"
        return type(error)(text, call=error.call, code=error.code, name=error.name)
    for kind, made, code in _REFUSALS:
        if isinstance(error, kind):
            raised = made(f"{_driver_text(code)}{where}: {error}")
            if isinstance(raised, CubinNotFoundError):
                raised.rejected = getattr(error, "rejected", {})
            return raised
    return error


def _driver_text(code: int) -> str:
    """'CUDA Error: invalid argument\\n', or '' where no driver has words for it."""
    words = driver_words(code)
    return f"CUDA Error: {words}\n" if words else ""


def driver_words(code: int) -> str:
    """'invalid argument' for 1, or '' where no driver has words for it."""
    words = ctypes.c_char_p()
    try:
        driver = _driver.get()
        if driver.has("cuGetErrorString"):
            driver.try_call("cuGetErrorString", code, ctypes.byref(words))
    except KernelHubError:  # there is no driver
        pass
    return words.value.decode(errors="replace") if words.value else ""
