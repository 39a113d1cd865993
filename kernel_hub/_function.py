"""KernelFunction: one function of an image, and BoundLaunch, a launch with everything fixed.

The first launch on a device has the kernel load the function and generates its launcher; every
later launch is that launcher.
"""

from __future__ import annotations

import ctypes
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from . import _launch, tensors
from . import driver as _driver
from ._geometry import dims
from ._image import FunctionSpec
from ._launch import DeviceFunction, StreamConfigs
from .errors import LaunchConfigError
from .params import ordered, takes

live: weakref.WeakSet[KernelFunction] = weakref.WeakSet()


class Loader(Protocol):
    """What a function needs of its kernel."""

    def _load_function(self, spec: FunctionSpec, device: int, stream: Any) -> DeviceFunction: ...


class KernelFunction(partial):  # type: ignore[type-arg]
    """One function of a Kernel. Call it to launch:

    f(gridDim, blockDim, sharedMemBytes=0, stream=None, params=(), *, cluster=None,
      cooperative=False, programmatic=False, priority=None, carveout=None) -> None

    gridDim, blockDim: int or 1 to 3 ints, in blocks and threads. sharedMemBytes: dynamic shared
    memory a block, bytes. stream: None (torch's current stream, else the legacy default), an int
    handle, or a torch, CuPy or cuda.core stream. params: a sequence, or a dict by name. cluster:
    blocks a cluster. cooperative: grid-wide synchronisation allowed. programmatic: programmatic
    stream serialization (PDL). priority: stream priority of this launch. carveout: preferred
    shared-memory carve-out, percent.

    The call is asynchronous. Raises ParamsError, LaunchConfigError, CubinNotFoundError,
    CudaDriverError.
    """

    # A partial of its launcher: calling it is one C call, where a class with __call__ pays the
    # slot machinery (40 to 220 ns more with keywords, CPython 3.12).

    _kernel: Loader
    _spec: FunctionSpec

    @classmethod
    def _make(cls, kernel: Loader, spec: FunctionSpec) -> KernelFunction:
        # The launcher's code is replaced at the first launch and again when torch appears.
        launch = types.FunctionType(_first_launch.__code__, {}, spec.name)
        launch.__defaults__ = _first_launch.__defaults__
        self = cls(launch)
        self._kernel = kernel
        self._spec = spec
        self._states: dict[int, DeviceFunction] = {}
        self._lock = threading.RLock()
        self.__name__ = spec.name
        self.__doc__ = f"{spec.describe()}\n\n{cls.__doc__}"
        # Weak: the kernel holds the function, and a cycle would keep both past their last user.
        launch.__globals__.update(_namespace(weakref.ref(self)))
        live.add(self)
        return self

    @property
    def name(self) -> str:
        """The function's name in the image."""
        return self._spec.name

    @property
    def signature(self) -> str:
        """`name(float* out, …)`; parameters of unknown type show their size."""
        return self._spec.prototype()

    @property
    def params(self) -> tuple[Any, ...] | None:
        """The parameters: name, type, size_bytes, offset_bytes each; None if not yet known."""
        return self._spec.params

    @property
    def spec(self) -> FunctionSpec:
        """Resources and bounds: num_regs, static_shared_bytes, max_threads, …"""
        return self._spec

    def __repr__(self) -> str:
        return f"<KernelFunction {self._spec.describe()}>"

    def __reduce__(self) -> Any:
        raise TypeError("a KernelFunction cannot be pickled: make the Kernel in each process")

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def load(self, device: int | None = None) -> KernelFunction:
        """Load on `device` (None: the current one) now, as a graph capture needs it before."""
        self._state(self._device(device), 0)
        return self

    def attributes(self, device: int | None = None) -> dict[str, Any]:
        """What the loaded function has and may use on `device`.

        num_regs, local_bytes (a thread), static_shared_bytes, max_threads (a block),
        max_dynamic_shared_bytes, ptx_version, binary_version (80 = sm_80), cluster.
        """
        state = self._state(self._device(device), 0)
        limits = state.limits
        read = partial(_function_attribute, state)
        return {
            "num_regs": read(4),
            "local_bytes": read(3),
            "static_shared_bytes": limits.static_shared_bytes,
            "max_threads": limits.max_threads,
            "max_dynamic_shared_bytes": limits.max_dynamic_shared_bytes,
            "ptx_version": read(5),
            "binary_version": read(6),
            "cluster": limits.cluster,
        }

    def occupancy(self, blockDim: Any, sharedMemBytes: int = 0, device: int | None = None) -> int:
        """How many blocks of that shape one SM of `device` holds at once."""
        state = self._state(self._device(device), 0)
        x, y, z = dims(blockDim, "blockDim", self.name)
        if not 1 <= x * y * z <= state.limits.max_threads:
            raise LaunchConfigError(
                f"blockDim={blockDim} of {self.name}: 1 to {state.limits.max_threads} threads"
            )
        if not 0 <= sharedMemBytes <= state.limits.max_dynamic_shared_bytes:
            raise LaunchConfigError(
                f"sharedMemBytes={sharedMemBytes} of {self.name}: the limit is "
                f"{state.limits.max_dynamic_shared_bytes}"
            )
        return state.occupancy(x * y * z, sharedMemBytes)

    def bind(
        self,
        gridDim: Any,
        blockDim: Any,
        sharedMemBytes: int = 0,
        stream: Any = None,
        params: Any = None,
        **options: Any,
    ) -> BoundLaunch:
        """A launch with everything checked and packed now; see BoundLaunch.

        Arguments as in a launch; `options` are its keywords (cluster, cooperative, …).
        """
        return BoundLaunch._make(self, gridDim, blockDim, sharedMemBytes, stream, params, options)

    def _device(self, device: int | None) -> int:
        return tensors.current_device() if device is None else device

    def _state(self, device: int, stream: Any) -> DeviceFunction:
        """The function on `device`, loaded once."""
        state = self._states.get(device)
        if state is None:
            with self._lock:
                state = self._states.get(device)
                if state is None:
                    state = self._kernel._load_function(self._spec, device, stream)
                    if self._spec.params is None:
                        self._spec = state.spec
                    self._states[device] = state
        return state

    def _install(self, params: Sequence[Any], stream: Any) -> None:
        """Generate the launcher for this process: its devices, and torch or none."""
        driver = _driver.get()
        device = 0 if driver.device_count == 1 else self._device_of(params)
        state = self._state(device, stream)
        with self._lock:
            if driver.device_count == 1:
                self.func.__globals__.update(
                    state=state, plain=state.plain, function=state.argument
                )
            assert self._spec.params is not None
            namespace = self.func.__globals__
            namespace.update(_launch.fixed_names(driver, self._spec.params))
            namespace.update(_launch.torch_names(self._spec.params))
            text = _launch.launcher_source(
                self._spec.params,
                many_devices=driver.device_count > 1,
                blocking=_launch.is_blocking(),
                watch_torch=tensors.loaded_torch() is None,
            )
            local: dict[str, Any] = {}
            exec(compile(text, f"<launcher of {self.name}>", "exec"), namespace, local)
            # The swap is one store: other threads run either launcher whole.
            self.func.__code__ = local["launch"].__code__

    def _device_of(self, params: Any) -> int:
        expected = self._spec.params
        if expected is not None and isinstance(params, Mapping):
            params = ordered(params, expected)
        return _launch.device_of(params, _pointer_device)

    def _forget(self) -> None:
        """Back to the state before the first launch (after unload)."""
        with self._lock:
            self.func.__code__ = _first_launch.__code__
            self._states.clear()


class BoundLaunch(partial):  # type: ignore[type-arg]
    """A launch with its geometry, stream and params fixed; made by `KernelFunction.bind`.

    Call it with nothing to repeat the bound launch, or with `params` alone to launch other values.
    It keeps the bound params alive. A bound stream of None follows torch's current stream.
    """

    _keep: Any

    @classmethod
    def _make(
        cls, function: KernelFunction, gridDim: Any, blockDim: Any, sharedMemBytes: Any,
        stream: Any, params: Any, options: dict[str, Any],
    ) -> BoundLaunch:
        geometry = (gridDim, blockDim, sharedMemBytes, stream)
        again = partial(_launch_with, function, geometry, options)
        spec_params = function._spec.params
        if params is None and spec_params is not None and not spec_params:
            params = ()
        if params is None:
            self = cls(_needs_params(again, function))
            self._keep = function
            return self
        if isinstance(params, Mapping):
            params = ordered(params, function._spec.params or ())
        params = tuple(params)
        driver = _driver.get()
        device = 0 if driver.device_count == 1 else function._device_of(params)
        state = function._state(device, stream)
        expected = state.params
        if len(params) != len(expected):
            raise _launch.wrong_count(params, expected)
        follow = stream is None and tensors.raw_stream_getter() is not None
        handle = tensors.stream_handle(stream, device)
        pool = state.options_pool(**options)
        slot = state.new_slot(pool)
        state.shape(pool, slot, gridDim, blockDim, sharedMemBytes)
        values = [p.convert(v, device, handle) for p, v in zip(expected, params, strict=True)]
        slot[4](slot[3], 32, handle, *values)
        configs = StreamConfigs(state, pool, slot)
        configs.arrays = params
        launch = _bound_launcher(
            driver, state, slot, configs, again, handle,
            follow=follow, guard=driver.device_count > 1, blocking=_launch.is_blocking(),
        )
        self = cls(launch)
        self._keep = (function, params, configs)
        return self

    def __repr__(self) -> str:
        return f"<BoundLaunch of {self._keep[0] if isinstance(self._keep, tuple) else self._keep}>"


def _launch_with(
    function: KernelFunction, geometry: tuple[Any, ...], options: dict[str, Any], params: Any
) -> None:
    function(*geometry, params, **options)


def _needs_params(again: Any, function: KernelFunction) -> Any:
    def launch(params: Any = None) -> None:
        if params is None:
            raise _launch.ParamsError(
                f"{function.name} was bound without params: call it with them; "
                + (takes(function.params) if function.params is not None else "")
            )
        again(params)

    return launch


def _bound_launcher(
    driver: Any, state: DeviceFunction, slot: list[Any], configs: StreamConfigs, again: Any,
    handle: int, *, follow: bool, guard: bool, blocking: bool,
) -> Any:
    launch_ex, function, config, values = driver.launch_ex, state.argument, slot[5], slot[6]
    current_stream, device = tensors.raw_stream_getter(), state.device

    def follow_stream(params: Any = None) -> None:
        if params is not None:
            return again(params)
        if code := launch_ex(configs[current_stream(device)], function, values, None):
            state.recover(code, [*slot[:5], configs[current_stream(device)], values], handle)
        return None

    def fixed_stream(params: Any = None) -> None:
        if params is not None:
            return again(params)
        if code := launch_ex(config, function, values, None):
            state.recover(code, slot, handle)
        return None

    quick = follow_stream if follow else fixed_stream
    if not (guard or blocking):
        return quick

    def guarded(params: Any = None) -> None:
        if params is not None:
            return again(params)
        with driver.on_device(device):
            quick()
        if blocking:
            state.finish(slot, current_stream(device) if follow else handle)
        return None

    return guarded


def _first_launch(
    gridDim: Any, blockDim: Any, sharedMemBytes: Any = 0, stream: Any = None, params: Any = (),
    **options: Any,
) -> None:
    # Runs with the namespace of `_namespace` as its globals.
    me = owner()  # type: ignore[name-defined]  # noqa: F821
    me._install(params, stream)
    me.func(gridDim, blockDim, sharedMemBytes, stream, params, **options)


def _namespace(owner: Any) -> dict[str, Any]:
    def load(device: int, stream: Any) -> DeviceFunction:
        return owner()._state(device, stream)  # type: ignore[no-any-return]

    def torch_appeared(params: Any, stream: Any) -> Any:
        owner()._install(params, stream)
        return owner().func

    return {
        "__builtins__": __builtins__,
        "owner": owner,
        "load": load,
        "device_of": lambda params: _launch.device_of(params, _pointer_device),
        "torch_appeared": torch_appeared,
        "states": owner()._states,
    }


def _pointer_device(address: int) -> int:
    """The device a raw address belongs to (for arrays that do not say)."""
    driver = _driver.get()
    device = ctypes.c_int()
    code = driver.try_call("cuPointerGetAttribute", ctypes.byref(device), 9, address)
    return device.value if code == 0 else tensors.current_device()


def _function_attribute(state: DeviceFunction, attribute: int) -> int:
    value = ctypes.c_int()
    state.driver.call("cuFuncGetAttribute", ctypes.byref(value), attribute, state.handle)
    return value.value
