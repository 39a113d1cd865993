"""A function loaded on one device, and the slots of packed memory that its launches use.

A slot is a bytearray holding CUlaunchConfig, the parameter values and the launch attributes, with
the addresses the driver needs made once. A launcher packs stream and parameters with one
`pack_into` and calls `cuLaunchKernelEx` with four prebuilt arguments. Slots are taken from and
given back to a list, so threads never share one while ctypes has released the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from .. import driver as _driver
from ..arrays import interop
from ..driver import Driver
from ..errors import CudaDriverError, LaunchConfigError
from ..image.shipped import FunctionSpec
from ..signature.params import layout
from .c_launcher import Launcher
from .generated import PARAMS_AT, STREAM_AT
from .geometry import (
    ATTRIBUTE_BYTES,
    CONFIG,
    PORTABLE_CLUSTER,
    LaunchOptions,
    Limits,
    check,
    check_keywords,
)

BLOCKING_VARIABLE = "KERNEL_HUB_LAUNCH_BLOCKING"
_PUT_STREAM = struct.Struct("<Q").pack_into
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14
_MAX_STREAMS = 64
_OPT_IN_FROM = 48 * 1024
_WRONG_CONTEXT = (201, 400, 709)
# The places of a slot, which is a plain list because generated launchers unpack it.
GRID, BLOCK, SHARED, BUFFER, PACK, CONFIG_REF, VALUES_REF = range(7)
# Stands in a slot for a gridDim or blockDim that no later launch may be recognised by: nothing that
# a caller can pass (None can be passed).
_UNKNOWN = object()


class Pool(list[list[Any]]):
    """Idle slots of one function, device and set of options."""

    # NOTE: nothing in it leads back to the function, which so dies with its last user and not with
    # the next collection of garbage.
    __slots__ = ("options",)

    def __init__(self, options: LaunchOptions) -> None:
        super().__init__()
        self.options = options


class DeviceFunction:
    """A function loaded on one device: its handle, limits and slots.

    keep: lives as long as anything can launch the function. noted: its first byte is set by a
    launch on a stream that a graph capture may be recording; None: nobody wants to know.
    """

    def __init__(
        self,
        driver: Driver,
        device: int,
        handle: int,
        spec: FunctionSpec,
        limits: Limits,
        keep: object = None,
        noted: bytearray | None = None,
    ) -> None:
        self.driver = driver
        self.device = device
        self.context = driver.primary_context(device)
        self.handle = handle
        self.spec = spec
        self.params = spec.params or ()
        self.limits = limits
        self.argument = ctypes.c_void_p.from_param(handle)
        self.keep = keep
        self.noted = noted
        self.streams: set[int] = set()  # that `admit` let through
        self.is_gone = False  # its image was unloaded
        self._native: Callable[[], Launcher | None] = lambda: None
        self.bounds: weakref.WeakSet[Any] = weakref.WeakSet()  # launches bound to this handle
        self.plain = Pool(LaunchOptions())
        self._optioned: dict[Any, Pool] = {}
        self._lock = threading.Lock()
        # What a launch may use of dynamic shared memory without a further opt-in.
        self.shared_ready = max(0, _OPT_IN_FROM - limits.static_shared_bytes)
        self.cluster_ready = PORTABLE_CLUSTER  # likewise, of blocks of a cluster

    def options_pool(
        self,
        *,
        cluster: Any = None,
        cooperative: Any = False,
        programmatic: Any = False,
        priority: Any = None,
        carveout: Any = None,
        **unknown: Any,
    ) -> Pool:
        """The pool of a launch with these attributes (the keywords of a launch)."""
        if unknown:
            check_keywords(self.limits.function, unknown)
        given = (cluster, cooperative, programmatic, priority, carveout)
        # By identity: a priority or carve-out of 0 is a wish too.
        if all(part is None or part is False for part in given):
            return self.plain
        if isinstance(cluster, list):
            cluster = tuple(cluster)
        key: Any = (cluster, *given[1:], type(cluster), type(priority), type(carveout))
        try:
            pool = self._optioned.get(key)
        except (TypeError, ValueError, RuntimeError):
            # An array of ints cannot be hashed, or compares by element; others the check refuses.
            key = LaunchOptions.make(self.limits, *given)
            pool = self._optioned.get(key)
        if pool is None:
            options = LaunchOptions.make(self.limits, *given)
            if options.cluster is not None:
                self._allow_cluster(options.cluster)
            pool = self._optioned[key] = Pool(options)
        return pool

    def _allow_cluster(self, cluster: tuple[int, int, int]) -> None:
        size = cluster[0] * cluster[1] * cluster[2]
        if size > self.cluster_ready:
            self.driver.call(
                "cuFuncSetAttribute",
                self.handle,
                _NON_PORTABLE_CLUSTER,
                1,
                asked=f"allowing cluster={cluster} for {self.limits.function}",
            )
            self.cluster_ready = size
            if (native := self.native) is not None:
                native.allow_cluster(size)

    @cached_property
    def _layout(self) -> tuple[Any, Any, list[int], int]:
        """What packs stream and parameters where they lie together, and where attributes lie in
        between; offsets; the end. Made for a slot: the C launcher needs none of it."""
        text, offsets, end = layout(self.params, PARAMS_AT)
        plain = struct.Struct(f"<Q24x{text}").pack_into
        return plain, partial(_pack_apart, struct.Struct(f"<{text}").pack_into), offsets, end

    def new_slot(self, pool: Pool) -> list[Any]:
        """A slot that no geometry was written into."""
        if os.getpid() != self.driver.pid:
            raise _driver.forked_error()
        if self.is_gone:
            raise LaunchConfigError(
                f"{self.limits.function} was unloaded: take the function of its Kernel anew"
            )
        pack_plain, pack_apart, offsets, end = self._layout
        attributes = pool.options.encode()
        attributes_at = end + (-end % 8)
        buffer = bytearray(attributes_at + len(attributes))
        buffer[attributes_at:] = attributes
        base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        if attributes:
            count = len(attributes) // ATTRIBUTE_BYTES
            CONFIG.pack_into(buffer, 0, *[0] * 7, 0, base + attributes_at, count)
        values = (ctypes.c_void_p * max(1, len(self.params)))(
            *[base + offset for offset in offsets]
        )
        config = ctypes.byref(ctypes.c_char.from_buffer(buffer))
        pack = pack_apart if attributes else pack_plain
        return [_UNKNOWN, _UNKNOWN, -1, buffer, pack, config, ctypes.byref(values)]

    @property
    def noted_address(self) -> int | None:
        """The address of `noted`, for C; None where nobody wants to know."""
        if self.noted is None:
            return None
        return ctypes.addressof(ctypes.c_char.from_buffer(self.noted))

    @property
    def native(self) -> Launcher | None:
        """The C launcher in front of this function, while something can call it."""
        return self._native()

    @native.setter
    def native(self, launcher: Launcher) -> None:
        self._native = weakref.ref(launcher)

    def admit(self, stream: int) -> None:
        """Check a handle that is not 0, and note what a graph capture may record on it.

        The driver takes other numbers than the default streams for addresses, and dies of them.
        """
        interop.stream_handle(stream, self.device)
        if self.noted is not None:
            self.noted[0] = 1
        if len(self.streams) >= _MAX_STREAMS:
            self.streams.clear()
        self.streams.add(stream)

    def shape(
        self, pool: Pool, slot: list[Any], gridDim: Any, blockDim: Any, sharedMemBytes: Any
    ) -> None:
        """Check the geometry and write it into the slot."""
        limits, options = self.limits, pool.options
        numbers = check(limits, gridDim, blockDim, sharedMemBytes, options)
        if numbers[6] > self.shared_ready:
            self._opt_in(numbers[6])
        if options.cooperative:
            self._check_cooperative(numbers)
        struct.pack_into("<7I", slot[BUFFER], 0, *numbers)
        # Only what cannot change may be recognised by identity at the next launch.
        slot[GRID] = gridDim if _is_constant(gridDim) else _UNKNOWN
        slot[BLOCK] = blockDim if _is_constant(blockDim) else _UNKNOWN
        slot[SHARED] = numbers[6]

    def _opt_in(self, shared_bytes: int) -> None:
        with self._lock:
            if shared_bytes > self.shared_ready:  # raised only: a smaller limit would race
                self.driver.call(
                    "cuFuncSetAttribute",
                    self.handle,
                    _MAX_DYNAMIC_SHARED,
                    shared_bytes,
                    asked=f"allowing {self.limits.function} {shared_bytes} bytes of dynamic "
                    "shared memory a block",
                )
                self.shared_ready = shared_bytes
                if (native := self.native) is not None:
                    native.allow_shared(shared_bytes)

    def allow(self, shared_bytes: Any) -> None:
        """Opt in for a launch to come; what is wrong with it, the launch says."""
        most = self.limits.max_dynamic_shared_bytes
        if type(shared_bytes) is int and self.shared_ready < shared_bytes <= most:
            with contextlib.suppress(CudaDriverError):
                self._opt_in(shared_bytes)

    def attribute(self, number: int) -> int:
        """A CUfunction_attribute."""
        value = ctypes.c_int()
        self.driver.call("cuFuncGetAttribute", ctypes.byref(value), number, self.handle)
        return value.value

    def occupancy(self, threads: int, shared_bytes: int) -> int:
        """Blocks an SM holds at once."""
        if shared_bytes > self.shared_ready:
            self._opt_in(shared_bytes)
        blocks = ctypes.c_int()
        asking = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        call = asking, ctypes.byref(blocks), self.handle, threads, shared_bytes
        self.driver.run(self.device, call, relaxed=False)
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
                code = self.driver.launch_ex(
                    slot[CONFIG_REF], self.argument, slot[VALUES_REF], None
                )
            elif current != primary:
                call = (
                    self.driver.launch_ex,
                    slot[CONFIG_REF],
                    self.argument,
                    slot[VALUES_REF],
                    None,
                )
                code = self.driver.within(self.device, call, relaxed=False)[1]
        if code:
            raise self.driver.error("cuLaunchKernelEx", code, self.asked(slot, stream))

    def asked(self, slot: list[Any], stream: int) -> str:
        """The launch in words, with the function's own limits."""
        *numbers, _, _, _ = CONFIG.unpack_from(slot[BUFFER], 0)
        limits = self.limits
        return (
            f"launching {limits.function} on device {self.device} ({limits.device_name}): gridDim="
            f"{tuple(numbers[:3])}, blockDim={tuple(numbers[3:6])}, sharedMemBytes={numbers[6]}, "
            f"stream={stream:#x}; the function takes at most {limits.max_threads} threads a block "
            f"and {limits.max_dynamic_shared_bytes} bytes of dynamic shared memory"
        )

    def finish(self, slot: list[Any], stream: int) -> None:
        """Wait for the launch (KERNEL_HUB_LAUNCH_BLOCKING) and name the kernel if it failed."""
        if self.driver.is_capturing(stream, self.device):
            return
        call = "cuStreamSynchronize", stream
        name, code = self.driver.within(self.device, call, relaxed=False)
        if code:
            raise self.driver.error(
                name,
                code,
                f"{self.asked(slot, stream)}; found by "
                f"{BLOCKING_VARIABLE}=1: this kernel is the one that failed",
            )

    def expire(self) -> None:
        """The image was unloaded: whoever still holds a launcher is refused by it."""
        self.is_gone = True
        self.forget_slots()
        for bound in list(self.bounds):
            bound._expire()

    def forget_slots(self) -> None:
        """Empty pools, so that every launch meets `new_slot` and its error (in a forked child)."""
        if (native := self.native) is not None:
            native.disarm()
        self.plain.clear()
        for pool in self._optioned.values():
            pool.clear()


def _pack_apart(pack_params: Any, buffer: bytearray, at: int, stream: int, *values: Any) -> None:
    # The plain packer zeroes the attribute pointer that lies between stream and params.
    _PUT_STREAM(buffer, at, stream)
    pack_params(buffer, PARAMS_AT, *values)


def _is_constant(value: Any) -> bool:
    return type(value) is int or (type(value) is tuple and all(type(x) is int for x in value))


def is_blocking() -> bool:
    """Whether KERNEL_HUB_LAUNCH_BLOCKING asks for a wait after each launch."""
    return os.environ.get(BLOCKING_VARIABLE, "0") not in ("", "0")


def pointer_device(address: int) -> int:
    """The device a raw address belongs to (for arrays that do not say)."""
    driver = _driver.get()
    device = ctypes.c_int()
    code = driver.try_call("cuPointerGetAttribute", ctypes.byref(device), 9, address)
    return device.value if code == 0 else interop.current_device()


def device_of(params: Sequence[Any], pointer_device: Callable[[int], int]) -> int:
    """The device of the first array among `params`, else torch's current, else 0."""
    for value in params:
        if value is None or isinstance(value, (int, float, bytes, ctypes._SimpleCData)):
            continue
        if hasattr(value, "get_device") and getattr(value, "is_cuda", False):
            return int(value.get_device())
        try:
            view = interop.describe(value)
        except (KeyError, IndexError, TypeError, ValueError):
            continue  # the parameter's own check says what is wrong with it
        if view is not None:
            return pointer_device(view.address) if view.device is None else view.device
    return interop.current_device()


class StreamConfigs(dict[int, Any]):
    """stream -> the config argument of a bound launch on it, made at first use."""

    def __init__(self, function: DeviceFunction, pool: Pool, slot: list[Any]) -> None:
        super().__init__()
        self._function, self._pool, self.slot = function, pool, slot
        self.arrays: Sequence[Any] = ()

    def __missing__(self, stream: int) -> Any:
        if stream:
            self._function.admit(stream)
        if len(self) >= _MAX_STREAMS:  # stream handles come and go; ours are cheap to make again
            self.clear()
        fresh = self._function.new_slot(self._pool)
        fresh[BUFFER][:STREAM_AT] = self.slot[BUFFER][:STREAM_AT]
        _PUT_STREAM(fresh[BUFFER], STREAM_AT, stream)
        for array in self.arrays:
            if (record := getattr(array, "_record_use", None)) is not None:
                record(stream)
        self[stream] = fresh[CONFIG_REF]
        return fresh[CONFIG_REF]
