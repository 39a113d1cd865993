"""The launch path: one generated function a kernel function, slots of packed memory, bound launches.

A slot is a bytearray holding CUlaunchConfig, the parameter values and the launch attributes, with
the addresses the driver needs made once. The generated launcher checks each value in line, packs
stream and parameters with one `pack_into`, and calls `cuLaunchKernelEx` with four prebuilt
arguments. Slots are taken from and given back to a list, so threads never share one while ctypes
has released the GIL.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from . import driver as _driver
from . import tensors
from ._geometry import CONFIG, PORTABLE_CLUSTER, Limits, Options, check
from ._image import FunctionSpec
from .driver import Driver
from .errors import LaunchConfigError, ParamsError
from .params import Param, layout, ordered, wrong_count

BLOCKING_VARIABLE = "KERNEL_HUB_LAUNCH_BLOCKING"
_PARAMS_AT = 64
_STREAM_AT = 32
_NO_TORCH = type("_NoTorch", (), {})  # stands for torch's types while torch is not loaded
_PACK_ERRORS = (struct.error, OverflowError)
_PUT_STREAM = struct.Struct("<Q").pack_into
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14
_OPT_IN_FROM = 48 * 1024
_WRONG_CONTEXT = (201, 400, 709)


class Pool(list[list[Any]]):
    """Idle slots of one function, device and set of options."""

    __slots__ = ("function", "options")

    def __init__(self, function: DeviceFunction, options: Options) -> None:
        super().__init__()
        self.function = function
        self.options = options


class DeviceFunction:
    """A function loaded on one device: its handle, limits and slots."""

    def __init__(
        self, driver: Driver, device: int, handle: int, spec: FunctionSpec, limits: Limits
    ) -> None:
        self.driver = driver
        self.device = device
        self.context = driver.primary_context(device)
        self.handle = handle
        self.spec = spec
        self.params = params = spec.params or ()
        self.limits = limits
        self.argument = ctypes.c_void_p.from_param(handle)
        self.plain = Pool(self, Options())
        self._optioned: dict[tuple[Any, ...], Pool] = {}
        self._lock = threading.Lock()
        # What a launch may use of dynamic shared memory without a further opt-in.
        self._shared_ready = max(0, _OPT_IN_FROM - limits.static_shared_bytes)
        text, self._offsets, self._end = layout(params, _PARAMS_AT)
        self._pack_plain = struct.Struct(f"<Q24x{text}").pack_into
        self._pack_params = struct.Struct(f"<{text}").pack_into

    def options_pool(
        self,
        *,
        cluster: Any = None,
        cooperative: Any = False,
        programmatic: Any = False,
        priority: Any = None,
        carveout: Any = None,
    ) -> Pool:
        """The pool of a launch with these attributes (the keywords of a launch)."""
        if isinstance(cluster, list):
            cluster = tuple(cluster)
        given = (cluster, cooperative, programmatic, priority, carveout)
        if not any(part not in (None, False) for part in given):
            return self.plain
        key = (*given, type(priority), type(carveout))
        pool = self._optioned.get(key)
        if pool is None:
            options = Options.make(self.limits, *given)
            if options.cluster is not None:
                self._allow_cluster(options.cluster)
            pool = self._optioned[key] = Pool(self, options)
        return pool

    def _allow_cluster(self, cluster: tuple[int, int, int]) -> None:
        if cluster[0] * cluster[1] * cluster[2] > PORTABLE_CLUSTER:
            self.driver.call(
                "cuFuncSetAttribute", self.handle, _NON_PORTABLE_CLUSTER, 1,
                asked=f"allowing cluster={cluster} for {self.limits.function}",
            )

    def new_slot(self, pool: Pool) -> list[Any]:
        """[gridDim, blockDim, sharedMemBytes, buffer, pack, config argument, params argument]."""
        if os.getpid() != self.driver.pid:
            raise _driver.forked_error()
        attributes = pool.options.encode()
        attributes_at = self._end + (-self._end % 8)
        buffer = bytearray(attributes_at + len(attributes))
        buffer[attributes_at:] = attributes
        base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        if attributes:
            CONFIG.pack_into(
                buffer, 0, *[0] * 7, 0, base + attributes_at, pool.options.count
            )
        values = (ctypes.c_void_p * max(1, len(self.params)))(
            *[base + offset for offset in self._offsets]
        )
        config = ctypes.byref(ctypes.c_char.from_buffer(buffer))
        pack = self._pack_apart if attributes else self._pack_plain
        return [None, None, -1, buffer, pack, config, ctypes.byref(values)]

    def _pack_apart(self, buffer: bytearray, at: int, stream: int, *values: Any) -> None:
        # The plain packer zeroes the attribute pointer that lies between stream and params.
        _PUT_STREAM(buffer, at, stream)
        self._pack_params(buffer, _PARAMS_AT, *values)

    def shape(
        self, pool: Pool, slot: list[Any], gridDim: Any, blockDim: Any, sharedMemBytes: Any
    ) -> None:
        """Check the geometry and write it into the slot."""
        limits, options = self.limits, pool.options
        numbers = check(limits, gridDim, blockDim, sharedMemBytes, options)
        if numbers[6] > self._shared_ready:
            self._opt_in(numbers[6])
        if options.cooperative:
            self._check_cooperative(numbers)
        struct.pack_into("<7I", slot[3], 0, *numbers)
        # Only what cannot change may be recognised by identity at the next launch.
        slot[0] = gridDim if _is_constant(gridDim) else None
        slot[1] = blockDim if _is_constant(blockDim) else None
        slot[2] = numbers[6]

    def _opt_in(self, shared_bytes: int) -> None:
        with self._lock:
            if shared_bytes > self._shared_ready:  # raised only: a smaller limit would race
                self.driver.call(
                    "cuFuncSetAttribute", self.handle, _MAX_DYNAMIC_SHARED, shared_bytes,
                    asked=f"allowing {self.limits.function} {shared_bytes} bytes of dynamic "
                    "shared memory a block",
                )
                self._shared_ready = shared_bytes

    def occupancy(self, threads: int, shared_bytes: int) -> int:
        """Blocks an SM holds at once."""
        if shared_bytes > self._shared_ready:
            self._opt_in(shared_bytes)
        blocks = ctypes.c_int()
        with self.driver.on_device(self.device):
            self.driver.call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                ctypes.byref(blocks), self.handle, threads, shared_bytes,
            )
        return blocks.value

    def _check_cooperative(self, numbers: tuple[int, ...]) -> None:
        grid, threads = numbers[:3], numbers[3] * numbers[4] * numbers[5]
        blocks = grid[0] * grid[1] * grid[2]
        fits = self.occupancy(threads, numbers[6]) * self.limits.num_multiprocessors
        if blocks > fits:
            raise LaunchConfigError(
                f"gridDim={grid} of {self.limits.function}: a cooperative grid must fit on the "
                f"GPU at once, {fits} blocks of {threads} threads do on {self.limits.device_name}"
            )

    def recover(self, code: int, slot: list[Any], stream: int) -> None:
        """After a failed launch: retry once where only the context was missing, else raise."""
        if os.getpid() != self.driver.pid:
            raise _driver.forked_error()
        if code in _WRONG_CONTEXT:
            primary = self.context
            current = self.driver.current_context()
            if current == 0:
                # A fresh thread: give it the context for good, later launches need no retry.
                self.driver.call("cuCtxSetCurrent", primary)
                code = self.driver.launch_ex(slot[5], self.argument, slot[6], None)
            elif current != primary:
                with self.driver.on_device(self.device):
                    code = self.driver.launch_ex(slot[5], self.argument, slot[6], None)
        if code:
            raise self.driver.error("cuLaunchKernelEx", code, self.asked(slot, stream))

    def asked(self, slot: list[Any], stream: int) -> str:
        """The launch in words, with the function's own limits."""
        *numbers, _, _, _ = CONFIG.unpack_from(slot[3], 0)
        limits = self.limits
        return (
            f"launching {limits.function} on device {self.device} ({limits.device_name}): gridDim="
            f"{tuple(numbers[:3])}, blockDim={tuple(numbers[3:6])}, sharedMemBytes={numbers[6]}, "
            f"stream={stream:#x}; the function takes at most {limits.max_threads} threads a block "
            f"and {limits.max_dynamic_shared_bytes} bytes of dynamic shared memory"
        )

    def finish(self, slot: list[Any], stream: int) -> None:
        """Wait for the launch (KERNEL_HUB_LAUNCH_BLOCKING) and name the kernel if it failed."""
        with self.driver.on_device(self.device):
            if self.driver.is_capturing(stream):
                return
            code = self.driver.try_call("cuStreamSynchronize", stream)
        if code:
            raise self.driver.error(
                "cuStreamSynchronize", code, f"{self.asked(slot, stream)}; found by "
                f"{BLOCKING_VARIABLE}=1: this kernel is the one that failed"
            )

    def forget_slots(self) -> None:
        """In a forked child: empty pools, so that every launch meets `new_slot` and its error."""
        self.plain.clear()
        for pool in self._optioned.values():
            pool.clear()


def _is_constant(value: Any) -> bool:
    return type(value) is int or (type(value) is tuple and all(type(x) is int for x in value))


# **options and not keyword-only names: five absent ones cost a dict look-up each (60 ns).
SIGNATURE = "gridDim, blockDim, sharedMemBytes=0, stream=None, params=(), **options"


def launcher_source(
    params: Sequence[Param], *, many_devices: bool, blocking: bool, watch_torch: bool
) -> str:
    """The text of the launcher for one signature; `fixed_names` and `torch_names` fill its names.

    watch_torch: torch is not loaded yet; the launcher is made anew once it is.
    """
    device = "device" if many_devices else "0"
    names = [f"a{param.index}" for param in params]
    lines = [f"def launch({SIGNATURE}):"]
    add = lines.append
    if watch_torch:
        add("    if loaded_torch() is not None:")
        add("        torch_appeared(params, stream)(gridDim, blockDim, sharedMemBytes, stream, "
            "params, **options)")
        add("        return")
    add("    if type(params) is not tuple and type(params) is not list:")
    add("        params = ordered(params, expected)")
    if names:
        add("    try:")
        add(f"        {', '.join(names)}, = params")
        add("    except ValueError:")
        add("        raise wrong_count(params, expected) from None")
    else:
        add("    if params:")
        add("        raise wrong_count(params, expected)")
    if many_devices:
        pointers = [param for param in params if _may_be_pointer(param)]
        first = f"a{pointers[0].index}" if pointers else ""
        quick = f"{first}.get_device() if type({first}) is Tensor and {first}.is_cuda else "
        add(f"    device = {quick if first else ''}device_of(params)")
        add("    state = states.get(device) or load(device, stream)")
        add("    plain = state.plain")
        add("    function = state.argument")
    add("    if stream is None:")
    add(f"        stream = current_stream({device})")
    add("    elif type(stream) is not int:")
    add(f"        stream = stream_handle(stream, {device})")
    lines += _argument_lines(params, device, many_devices)
    add("    pool = plain if not options else state.options_pool(**options)")
    add("    try:")
    add("        slot = pool.pop()")
    add("    except IndexError:")
    add("        slot = state.new_slot(pool)")
    add("    grid, block, shared, buffer, pack, config, values = slot")
    add("    if grid is not gridDim or block is not blockDim or shared != sharedMemBytes:")
    add("        state.shape(pool, slot, gridDim, blockDim, sharedMemBytes)")
    add("    try:")
    add(f"        pack(buffer, {_STREAM_AT}, {', '.join(['stream', *names])})")
    add("    except PACK_ERRORS:")
    add(f"        raise explain(params, expected, stream, {device}) from None")
    if many_devices:
        # A NULL stream means the current context, which may be another device's.
        add("    if not stream and current_context() != state.context:")
        add("        with driver.on_device(device):")
        add("            code = launch_ex(config, function, values, None)")
        add("    else:")
        add("        code = launch_ex(config, function, values, None)")
    else:
        add("    code = launch_ex(config, function, values, None)")
    add("    if code:")
    add("        state.recover(code, slot, stream)")
    if blocking:
        add("    state.finish(slot, stream)")
    add("    pool.append(slot)")
    return "\n".join(lines) + "\n"


def _may_be_pointer(param: Param) -> bool:
    return param.is_pointer or (param.info is None and param.size_bytes == 8)


def _argument_lines(params: Sequence[Param], device: str, many_devices: bool) -> list[str]:
    """Each value checked in line where it is a torch tensor or a plain number, else converted.

    No type check on tensors: what has torch's dtype object, is_cuda and data_ptr is one, and an
    object without these attributes lands in `convert_all`.
    """
    pointers, others = [], []
    for param in params:
        name = f"a{param.index}"
        convert = f"convert{param.index}({name}, {device}, stream)"
        info = param.info
        if _may_be_pointer(param):
            checks = [f"{name}.get_device() == device" if many_devices else f"{name}.is_cuda"]
            if info is not None and info.dtype:
                checks.insert(0, f"{name}.dtype is dtype{param.index}")
            # A null pointer is an empty tensor or freed storage: the converter tells them apart.
            quick = f"{name}.data_ptr() or {convert} if {' and '.join(checks)} else {convert}"
            none = "0 if " + name + " is None else " if param.is_pointer else ""
            pointers.append(f"        {name} = {none}{quick}")
        elif info is not None and info.kind in ("int", "uint"):
            others += [f"    if type({name}) is not int:", f"        {name} = {convert}"]
        elif info is not None and info.kind == "float" and info.struct_code:
            others += [f"    if type({name}) is not float:", f"        {name} = {convert}"]
        else:
            others.append(f"    {name} = {convert}")
    if not pointers:
        return others
    names = ", ".join(f"a{param.index}" for param in params)
    return [
        "    try:",
        *pointers,
        "    except AttributeError:",
        f"        {names}, = convert_all(expected, params, {device}, stream)",
        "    else:" if others else "",
        *("    " + line for line in others),
    ]


def convert_all(
    expected: Sequence[Param], params: Sequence[Any], device: int, stream: int
) -> list[Any]:
    """Every value by its careful converter."""
    return [
        param.convert(value, device, stream)
        for param, value in zip(expected, params, strict=True)
    ]


def explain(
    params: Sequence[Any], expected: Sequence[Param], stream: int, device: int
) -> Exception:
    """Why packing failed: the careful converters find the value that does not fit."""
    for param, value in zip(expected, params, strict=True):
        param.convert(value, device)
    tensors.stream_handle(stream, device)
    return ParamsError(f"the parameters {params!r} cannot be packed")


def is_blocking() -> bool:
    """Whether KERNEL_HUB_LAUNCH_BLOCKING asks for a wait after each launch."""
    return os.environ.get(BLOCKING_VARIABLE, "0") not in ("", "0")


def device_of(params: Sequence[Any], pointer_device: Callable[[int], int]) -> int:
    """The device of the first array among `params`, else torch's current, else 0."""
    for value in params:
        if value is None or isinstance(value, (int, float, bytes, ctypes._SimpleCData)):
            continue
        if hasattr(value, "get_device") and getattr(value, "is_cuda", False):
            return int(value.get_device())
        try:
            view = tensors.describe(value)
        except ValueError:
            continue  # the parameter's own check says what is wrong with it
        if view is not None:
            return pointer_device(view.address) if view.device is None else view.device
    return tensors.current_device()


def torch_names(params: Sequence[Param]) -> dict[str, Any]:
    """The names of the launcher that depend on whether torch is loaded."""
    torch = tensors.loaded_torch()
    names: dict[str, Any] = {
        "Tensor": torch.Tensor if torch else _NO_TORCH,
        "current_stream": tensors.raw_stream_getter() or tensors.current_stream,
    }
    for param in params:
        if param.info is not None and param.info.dtype:
            names[f"dtype{param.index}"] = tensors.torch_dtype(param.info.dtype) or _NO_TORCH
    return names


def fixed_names(driver: Driver, params: Sequence[Param]) -> dict[str, Any]:
    """The names of the launcher that never change."""
    names: dict[str, Any] = {
        "expected": params,
        "ordered": ordered,
        "wrong_count": wrong_count,
        "stream_handle": tensors.stream_handle,
        "loaded_torch": tensors.loaded_torch,
        "explain": explain,
        "convert_all": convert_all,
        "PACK_ERRORS": _PACK_ERRORS,
        "launch_ex": driver.launch_ex,
        "driver": driver,
        "current_context": driver.current_context,
    }
    names.update({f"convert{param.index}": param.convert for param in params})
    return names


class StreamConfigs(dict[int, Any]):
    """stream -> the config argument of a bound launch on it, made at first use."""

    def __init__(self, function: DeviceFunction, pool: Pool, slot: list[Any]) -> None:
        super().__init__()
        self._function, self._pool, self.slot = function, pool, slot
        self.arrays: Sequence[Any] = ()

    def __missing__(self, stream: int) -> Any:
        if len(self) >= 64:  # stream handles come and go; ours are cheap to make again
            self.clear()
        fresh = self._function.new_slot(self._pool)
        fresh[3][:_STREAM_AT] = self.slot[3][:_STREAM_AT]
        _PUT_STREAM(fresh[3], _STREAM_AT, stream)
        for array in self.arrays:
            if (record := getattr(array, "_record_use", None)) is not None:
                record(stream)
        self[stream] = fresh[5]
        return fresh[5]
