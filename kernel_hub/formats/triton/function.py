"""TritonFunction: a KernelFunction called with a Triton kernel's declared arguments only.

Checks that cubin, metadata and arguments belong together. Knows nothing of files.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...arrays import interop
from ...errors import CubinCorruptError, LaunchConfigError, ParamsError
from ...image.shipped import FunctionSpec
from ...launch.bound import BoundLaunch
from ...launch.c_launcher import Fixed, Launcher
from ...launch.device_function import DeviceFunction
from ...launch.function import KernelFunction
from ...signature.c_types import type_info
from ...signature.params import wrong_count
from . import scratch
from .grid import Grid
from .launcher import blocks, generate, integer
from .metadata import Metadata
from .signature import TENSOR_MAP_BYTES, Argument, c_types, of_sizes

_MAX_GRIDS = 64


class TritonFunction(KernelFunction):
    """A compiled Triton kernel. Call it to launch, with its declared run-time arguments:

    f(gridDim, blockDim=None, sharedMemBytes=None, stream=None, params=(), **options) -> None
    f[grid](*params, stream=None) -> None

    gridDim: int or 1 to 3 ints, in blocks; a kernel of several CTAs a program takes a multiple of
    its cluster. grid: the same in programs, as Triton counts; nothing is launched where one is 0.
    blockDim, sharedMemBytes: known from the metadata; where given they must be that. stream: None
    (torch's current stream, else the legacy default), an int handle, or a torch, CuPy or cuda.core
    stream. params: the run-time arguments (no constexprs, no arguments equal to 1 that Triton
    folded away) as a sequence, or a dict by name; for a tuple argument a tuple less its constants,
    or its elements one by one. options: those of a KernelFunction; cluster, cooperative and
    programmatic are the kernel's own.

    Scratch memory is allocated for each launch, in stream order. Raises ParamsError,
    LaunchConfigError, TensorError, CubinNotFoundError, CudaDriverError.
    """

    metadata: Metadata
    arguments: tuple[Argument, ...]
    constexprs: Mapping[str, Any]
    grid: Grid | None
    _inner: KernelFunction
    _names: dict[str, Any]  # of the generated launcher
    _grids: dict[Any, Any]

    @classmethod
    def wrap(
        cls,
        function: KernelFunction,
        metadata: Metadata,
        arguments: Sequence[Argument] | None = None,
        constexprs: Mapping[str, Any] | None = None,
        grid: Grid | None = None,
    ) -> TritonFunction:
        """`function` (of a Kernel, by name) as the Triton kernel that `metadata` describes.

        arguments: the declared ones; None where only sizes are known. constexprs: the values it was
        compiled with, kept under that name; grid: what `run` launches. Raises ParamsError where the
        arguments do not fit the function, CubinCorruptError where the metadata does not.
        """
        spec = function.spec
        where = metadata.label
        if isinstance(function, TritonFunction) or spec.params is None:
            raise ParamsError(f"{where}: {spec.name} is no plain function with known parameters")
        if arguments is None:
            arguments = declared_of(spec, metadata)
        arguments = tuple(arguments)
        check_fit(spec, metadata, arguments)
        names = generate(function, metadata, arguments)
        self = cls._before(function, names["launch"], names["expected"])
        self._inner, self._names, self._grids = function, names, {}
        self.metadata, self.arguments = metadata, arguments
        self.constexprs = dict(constexprs or {})
        self.grid = grid
        names["arm"] = partial(_arm, weakref.ref(self))
        return self

    def __getitem__(self, grid: Any) -> Any:
        """`f[grid]`: a launcher of `grid` programs that takes the run-time arguments."""
        try:
            return self._grids[grid]
        except KeyError:
            pass
        except TypeError:  # not hashable
            if isinstance(grid, list):
                return self[tuple(grid)]
        size = blocks(grid, self.metadata)
        with self._lock:  # against `_arm`, which empties the dict
            run = self._names["nowhere"]() if size is None else self._names["at"](size)
            # Who holds the result holds what C points to.
            if self._native is not None and size is not None and max(size) < 1 << 32:
                run = self._native.at(size, run)
            if type(grid) is int or (type(grid) is tuple and all(type(x) is int for x in grid)):
                if len(self._grids) >= _MAX_GRIDS:
                    self._grids.clear()
                self._grids[grid] = run
        return run

    def run(self, *params: Any, stream: Any = None, **named: Any) -> None:
        """`f[grid](*params)` with the grid that was kept with the kernel (`compile(grid=…)`)."""
        values = self._names["by_name"](params, named)
        self[self.programs(values)](*values, stream=stream)

    def programs(self, values: Sequence[Any]) -> tuple[int, int, int]:
        """What the kept grid is for these run-time arguments. Raises LaunchConfigError."""
        if self.grid is None:
            raise LaunchConfigError(
                f"{self.name}: no grid was kept with it: launch f[grid](…), or build it with one "
                "(compile(grid=…), kernel-hub build-triton --grid)"
            )
        expected = self._names["expected"]
        if len(values) != len(expected):
            raise wrong_count(values, expected)
        sizes = {name: int(v) for name, v in self.constexprs.items() if isinstance(v, int)}
        for param, value in zip(expected, values, strict=True):
            if param.name in self.grid.names:
                sizes[param.name] = integer(value, f"{param.name} of {self.name}")
        return self.grid(sizes)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(_call_signature)

    def __repr__(self) -> str:
        return f"<TritonFunction {self._spec.describe()}>"

    def occupancy(
        self, blockDim: Any = None, sharedMemBytes: Any = None, device: int | None = None
    ) -> int:
        """How many blocks of the kernel one SM of `device` holds at once."""
        self._names["settle"](blockDim, sharedMemBytes, {})
        metadata = self.metadata
        return self._inner.occupancy(metadata.block_threads, metadata.shared_bytes, device)

    def bind(
        self,
        gridDim: Any = ...,
        blockDim: Any = None,
        sharedMemBytes: Any = None,
        stream: Any = None,
        params: Any = None,
        **options: Any,
    ) -> BoundLaunch:
        """A launch with everything checked and packed now; see BoundLaunch.

        Arguments as in a launch. A kernel with scratch memory is bound to one stream, which must
        be given, and keeps its scratch as long as the bound launch lives.
        """
        metadata, names = self.metadata, self._names
        options = names["settle"](blockDim, sharedMemBytes, options)
        values = None
        if params is not None or not self.arguments:
            values = names["expanded"](names["ordered"](() if params is None else params))
            values += scratch.bound(self._inner, metadata, gridDim, stream, values)
        shape = (gridDim, (metadata.block_threads, 1, 1), metadata.shared_bytes, stream)
        return BoundLaunch._make(self, *shape, values, options)

    def _arm(self) -> None:
        """After a launch: put the C launcher in front, for the device it was on."""
        metadata, names = self.metadata, self._names
        with self._lock:
            state = next(iter(self._states.values()), None)
            if names["armed"] or state is None or interop.raw_stream_getter() is None:
                return  # torch may yet come
            names["armed"] = True
            divisors = tuple(argument.divisors[0] for argument in self.arguments)
            block = (metadata.block_threads, 1, 1)
            fixed = Fixed(block, metadata.shared_bytes, metadata.num_hidden, divisors)
            native = self._native_for(state, fixed)
            if native is None:
                return
            # Who holds a launcher of f[grid] holds its names, and with them what C points to.
            names["native"], names["call"] = _Armed(native, names), native.callable()
            state.bounds.add(names["native"])
            if self._put_in_front(native):
                self._grids.clear()

    def _state(self, device: int, stream: Any) -> DeviceFunction:
        return self._inner._state(device, stream)

    def _device_of(self, params: Any) -> int:
        return self._inner._device_of(params)


def _arm(owner: weakref.ref[TritonFunction]) -> None:
    if (function := owner()) is not None:
        function._arm()


class _Armed:
    """A C launcher in use: disarmed when the kernel is unloaded, as a bound launch is."""

    def __init__(self, native: Launcher, names: dict[str, Any]) -> None:
        self._native, self._names = native, names

    def _expire(self) -> None:
        self._native.disarm()
        self._names["armed"] = False


def _call_signature(
    gridDim: int | tuple[int, ...],
    blockDim: int | tuple[int, ...] | None = None,
    sharedMemBytes: int | None = None,
    stream: Any = None,
    params: Sequence[Any] | Mapping[str, Any] = (),
    *,
    priority: int | None = None,
    carveout: int | None = None,
) -> None: ...


def declared_of(spec: FunctionSpec, metadata: Metadata) -> tuple[Argument, ...]:
    """The arguments of a cubin's function of which only sizes are known."""
    params = spec.params or ()
    declared = params[: max(0, len(params) - metadata.num_hidden)]
    return of_sizes([(None, param.size_bytes) for param in declared], metadata)


def check_fit(spec: FunctionSpec, metadata: Metadata, arguments: Sequence[Argument]) -> None:
    """Cubin, metadata and arguments belong together, or ParamsError; CubinCorruptError where it is
    cubin and metadata that do not."""
    where, found = metadata.label, spec.params or ()
    expected = c_types(arguments, metadata)
    if len(found) != len(expected):
        raise ParamsError(
            f"{where}: {spec.name} takes {len(found)} parameters; declared are "
            f"{len(expected) - metadata.num_hidden} and {metadata.num_hidden} hidden "
            "(global_scratch_size, profile_scratch_size): cubin, json and signature are not of "
            "one compilation, or the kernel was instrumented"
        )
    for param, (kind, name) in zip(found, expected, strict=True):
        info = type_info(kind)
        if info is not None and info.size_bytes != param.size_bytes:
            raise ParamsError(
                f"{where}: parameter {param.position} ({name}) is declared {kind} "
                f"({info.size_bytes} bytes), {spec.name} takes {param.size_bytes} bytes there"
            )
    digits = re.search(r"(\d+)(\d)", spec.arch)
    if digits and (int(digits[1]), int(digits[2])) != metadata.compute_capability:
        major, minor = metadata.compute_capability
        raise CubinCorruptError(
            f"{where}: target.arch is {major}{minor}, the cubin is for {spec.arch}"
        )
    threads = metadata.block_threads
    if spec.required_block not in (None, (threads, 1, 1)) or threads != (
        spec.max_threads or threads
    ):
        raise CubinCorruptError(
            f"{where}: num_warps {metadata.num_warps} means {threads} threads a block; the cubin "
            f"is compiled for {spec.required_block or spec.max_threads}"
        )
    known = spec.cluster is not None or metadata.cluster_is_compiled_in
    if known and (spec.cluster or (1, 1, 1)) != (metadata.cluster or (1, 1, 1)):
        raise CubinCorruptError(
            f"{where}: num_ctas is {metadata.num_ctas}, the cubin is compiled for clusters of "
            f"{spec.cluster or 1}"
        )
    maps = sum(param.size_bytes == TENSOR_MAP_BYTES for param in found)
    if maps != len(metadata.maps):
        raise CubinCorruptError(
            f"{where}: tensordesc_meta has {len(metadata.maps)} entries, {spec.name} takes "
            f"{maps} TMA descriptors"
        )
