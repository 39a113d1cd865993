"""KernelFunction: one function of an image.

The first launch on a device has the kernel load the function and generates its launcher; every
later launch is that launcher.
"""

from __future__ import annotations

import os
import threading
import types
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import driver as _driver
from ..arrays import interop
from ..driver import apart
from ..errors import LaunchConfigError
from ..signature.function_spec import Documented, FunctionSpec
from ..signature.params import ordered
from . import generated
from .c_launcher import Fixed, Launcher
from .c_launcher import available as native_available
from .device_function import DeviceFunction, device_of, is_blocking, pointer_device
from .geometry import NOT_GIVEN, dims, index, one_shared
from .loader import Loader
from .of_process import OfThisProcess

if TYPE_CHECKING:
    from typing_extensions import Self

    from .bound import BoundLaunch

live: weakref.WeakSet[KernelFunction] = weakref.WeakSet()


class KernelFunction(OfThisProcess, partial, Documented):  # type: ignore[type-arg]
    """One function of a Kernel. Call it to launch:

    f(gridDim, blockDim, sharedMemBytes=0, stream=None, params=(), *, cluster=None,
      cooperative=False, programmatic=False, priority=None, carveout=None) -> None

    gridDim, blockDim: int or 1 to 3 ints, in blocks and threads. sharedMemBytes: dynamic shared
    memory a block, bytes (sharedMem= is another name for it). stream: None (torch's current stream,
    else the legacy default), an int handle, or a torch, CuPy or cuda.core stream. params: a
    sequence, or a dict by name. cluster: blocks a cluster. cooperative: grid-wide synchronisation
    allowed. programmatic: programmatic stream serialization (PDL). priority: stream priority of
    this launch. carveout: preferred shared-memory carve-out, percent.

    The call is asynchronous. Raises ParamsError, LaunchConfigError, CubinNotFoundError,
    CudaDriverError.
    """

    # A partial of its launcher: calling it is one C call, where a class with __call__ pays the
    # slot machinery (40 to 220 ns more with keywords, CPython 3.12).

    __name__: str
    _loader: Loader
    _spec: FunctionSpec
    _launch: Any  # the Python launcher: a function whose code is replaced
    _native: Launcher | None
    _armed: bool
    _states: dict[int, DeviceFunction]
    _lock: threading.RLock
    _under_way: threading.Lock | None  # held by the thread of a `load` that nobody waited for

    @classmethod
    def _make(cls, loader: Loader, spec: FunctionSpec) -> KernelFunction:
        # The launcher's code is replaced at the first launch and again when torch appears.
        launch = types.FunctionType(_first_launch.__code__, {}, spec.name)
        launch.__defaults__ = _first_launch.__defaults__
        self = cls._of(launch, loader, spec, {})
        # Weak: a cycle would keep the function past its last user.
        launch.__globals__.update(_namespace(weakref.ref(self)))
        live.add(self)
        return self

    @classmethod
    def _before(cls, function: KernelFunction, launch: Any, params: tuple[Any, ...]) -> Self:
        """A function of these `params` whose `launch` ends in one of `function`.

        For a subclass that adds to a launch. What is loaded is `function`'s: the subclass asks it
        in `_state` and `_device_of`.
        """
        spec = function._spec._replace(params=params)
        return cls._of(launch, function._loader, spec, function._states)

    @classmethod
    def _of(cls, launch: Any, loader: Loader, spec: FunctionSpec, states: Any) -> Self:
        launch.__qualname__ = spec.name  # Python's own errors about arguments show it
        self = cls(launch)
        self._launch, self._native, self._under_way, self._armed = launch, None, None, False
        self._loader, self._spec, self._states, self._lock = loader, spec, states, loader.lock
        self.__name__ = spec.name
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

    @property
    def __signature__(self) -> Any:
        # The launchers take **options for speed; help() and editors should see the names.
        from inspect import signature

        return signature(_call_signature)

    def __repr__(self) -> str:
        return f"<KernelFunction {self._spec.describe()}>"

    def __getitem__(self, grid: Any) -> Any:
        form = f"{self.__name__}(gridDim, blockDim, params=[...])"
        raise TypeError(f"{self.__name__}[{grid!r:.40}]: a launch is no subscript but {form}")

    __iter__ = None  # which __getitem__ alone would give

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def load(self, device: Any = None, *others: Self, wait: bool = True) -> Self:
        """Load on `device` (None: the current one) now, as a graph capture needs it before.

        others: functions loaded behind it, which is quicker than each by itself. wait: False only
        begins it; the first launch waits, and says what was wrong.
        """
        number, functions = self._device(device), (self, *others)
        if all(number in function._states for function in functions):
            return self

        def load_all() -> None:
            for function in functions:
                function._state(number, 0)

        if wait:
            apart.run(load_all)
        else:
            under_way = apart.begin_held(load_all)
            for function in functions:
                function._under_way = under_way
            native_available()  # the first launch asks for its library: opened under the load
        return self

    def attributes(self, device: Any = None) -> dict[str, Any]:
        """What the loaded function has and may use on `device`.

        num_regs, local_bytes (a thread), static_shared_bytes, max_threads (a block),
        max_dynamic_shared_bytes, ptx_version, binary_version (80 = sm_80), cluster.
        """
        state = self._state(self._device(device), 0)
        limits = state.limits
        read = state.attribute
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

    def occupancy(self, blockDim: Any, sharedMemBytes: int = 0, device: Any = None) -> int:
        """How many blocks of that shape one SM of `device` holds at once."""
        state = self._state(self._device(device), 0)
        x, y, z = dims(blockDim, "blockDim", self.name)
        sharedMemBytes = index(sharedMemBytes, "sharedMemBytes", self.name)
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
        gridDim: Any = ...,
        blockDim: Any = ...,
        sharedMemBytes: int = NOT_GIVEN,
        stream: Any = None,
        params: Any = None,
        **options: Any,
    ) -> BoundLaunch:
        """A launch with everything checked and packed now; see BoundLaunch.

        Arguments as in a launch; `options` are its keywords (cluster, cooperative, …).
        """
        from .bound import BoundLaunch

        sharedMemBytes = one_shared(sharedMemBytes, options, self.name)
        return BoundLaunch._make(self, gridDim, blockDim, sharedMemBytes, stream, params, options)

    def planned(self, device: int, *how: Any) -> Any:
        """As `Launcher.planned`, after a launch; None where C does not launch on `device`."""
        native = self._native if self._armed else None
        return native and native.planned(device, *how)

    def _device(self, device: Any) -> int:
        return device_number(device, self.name)

    def _state(self, device: int, stream: Any) -> DeviceFunction:
        """The function on `device`, loaded once."""
        if (state := self._states.get(device)) is None:
            if self._under_way is not None and not apart.is_apart():
                with self._under_way:  # its thread may not have come to the lock yet
                    pass
            with self._lock:  # it may be loading
                state = self._states.get(device)
        if state is None:
            hook_fork()
            state = apart.run(self._load, device, interop.stream_handle(stream, device))
        return state

    def _load(self, device: int, stream: int) -> DeviceFunction:
        with self._lock:
            if (state := self._states.get(device)) is None:
                state = self._loader.function(self._spec, device, stream)
                if self._spec.params is None:
                    self._spec = state.spec
                self._states[device] = state
            return state

    def _prepare(self, params: Any, stream: Any, shared_bytes: Any = 0) -> Any:
        """Load where needed; the launcher to go on with: the C one, later the generated one."""
        driver = _driver.get()
        device = 0 if driver.device_count == 1 else self._device_of(params)
        state = self._state(device, stream)
        with self._lock:
            # The generated launcher costs a millisecond to make: not before the C one leaves
            # something to it.
            if not self._armed and (native := self._native_for(state)) is not None:
                state.native = native
                state.allow(shared_bytes)  # which the C launcher would leave to the generated one
                self._put_in_front(native)
                self._armed = True  # for this device; tensors on others go the Python way
                return self.func
            self._generate(driver, state)
            return self._launch

    def _generate(self, driver: _driver.Driver, state: DeviceFunction) -> None:
        """Replace the Python launcher's code by that for this process: its devices, its torch."""
        namespace = self._launch.__globals__
        if driver.device_count == 1:
            namespace.update(
                state=state, streams=state.streams, plain=state.plain, function=state.argument
            )
        namespace.update(generated.fixed_names(driver, state.params))
        namespace.update(generated.torch_names(state.params))
        namespace["wrong_launch"] = partial(generated.wrong_launch, self.name)
        text = generated.launcher_source(
            state.params,
            many_devices=driver.device_count > 1,
            blocking=is_blocking(),
            watch_torch=interop.loaded_torch() is None,
        )
        local: dict[str, Any] = {}
        exec(compile(text, f"<launcher of {self.name}>", "exec"), namespace, local)
        # The swap is one store: other threads run either launcher whole.
        self._launch.__code__ = local["launch"].__code__

    def _native_for(self, state: DeviceFunction, fixed: Fixed | None = None) -> Launcher | None:
        """The C launcher, ready for `state`'s device; None before torch is there, or if it blocks.

        fixed: what of a launch is given (see Launcher.arm).
        """
        getter = interop.raw_stream_getter()
        if getter is None or is_blocking() or not native_available():
            return None
        native = self._native or Launcher(self._launch)
        dtypes = generated.torch_dtypes(state.params)
        return native if native.arm(state, dtypes, interop.loaded_torch(), getter, fixed) else None

    def _put_in_front(self, native: Launcher) -> bool:
        """Launch through C from now on; False where it was so before."""
        if self._native is not None:
            return False
        self._native = native  # for good: calls under way hold no reference of their own
        self.__setstate__((native.callable(), (), {}, self.__dict__))  # type: ignore[attr-defined]
        return True

    def _device_of(self, params: Any) -> int:
        expected = self._spec.params
        if expected is not None and isinstance(params, Mapping):
            params = ordered(params, expected)
        if not isinstance(params, (list, tuple)):
            # An iterator must not be used up here; anything else the launcher refuses in words.
            return interop.current_device()
        return device_of(params, pointer_device)

    def _forget(self) -> None:
        """Back to the state before the first launch (after unload)."""
        with self._lock:
            if self._native is not None:
                self._native.disarm()
            self._armed = False
            self._launch.__code__ = _first_launch.__code__
            for state in self._states.values():
                state.expire()
            self._states.clear()


def device_number(device: Any, where: str) -> int:
    """The number of `device` (see `tensors.device_index`), or of the current one for None."""
    if device is None:
        return interop.current_device()
    try:
        return interop.device_index(device)
    except TypeError:
        return index(device, "device", where)  # says what is wrong


def _call_signature(
    gridDim: int | tuple[int, ...], blockDim: int | tuple[int, ...], sharedMemBytes: int = 0,
    stream: Any = None, params: Sequence[Any] | Mapping[str, Any] = (), *,
    cluster: int | tuple[int, ...] | None = None, cooperative: bool = False,
    programmatic: bool = False, priority: int | None = None, carveout: int | None = None,
    sharedMem: int | None = None,
) -> None: ...  # fmt: skip


def _first_launch(
    gridDim: Any = ..., blockDim: Any = ..., sharedMemBytes: Any = NOT_GIVEN, stream: Any = None,
    params: Any = (), *more: Any, **options: Any,
) -> None:  # fmt: skip
    # Runs with the namespace of `_namespace` as its globals.
    launch = prepare(params, stream, sharedMemBytes)  # type: ignore[name-defined]  # noqa: F821
    launch(gridDim, blockDim, sharedMemBytes, stream, params, *more, **options)


def _namespace(owner: weakref.ref[KernelFunction]) -> dict[str, Any]:
    function = owner()
    assert function is not None
    name = function.name

    def alive() -> KernelFunction:
        if (function := owner()) is None:
            raise LaunchConfigError(
                f"{name} is gone, and what is left of it launches no more than it did: keep the "
                "function, or its Kernel"
            )
        return function

    def load(device: int, stream: Any) -> DeviceFunction:
        return alive()._state(device, stream)

    def prepare(params: Any, stream: Any, shared_bytes: Any = 0) -> Any:
        return alive()._prepare(params, stream, shared_bytes)

    return {
        "__builtins__": __builtins__,
        "load": load,
        "device_of": lambda params: device_of(params, pointer_device),
        "prepare": prepare,
        "torch_appeared": prepare,
        "states": function._states,
    }


_fork_hook = threading.Lock()
_fork_hooked = False


def hook_fork() -> None:
    """See to it, once, that a forked child's launches meet the error that names the fork."""
    global _fork_hooked
    with _fork_hook:
        if not _fork_hooked and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
            _fork_hooked = True


def _after_fork() -> None:
    for function in list(live):
        for state in function._states.values():
            state.forget_slots()
