"""BoundLaunch: a launch with geometry, stream and params fixed, checked and packed once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .. import driver as _driver
from ..arrays import interop
from ..driver.stream_order import Order
from ..errors import LaunchConfigError, ParamsError
from ..signature.params import ordered, takes, wrong_count
from . import c_launcher, generated
from .device_function import (
    BUFFER,
    CONFIG_REF,
    PACK,
    VALUES_REF,
    DeviceFunction,
    StreamConfigs,
    is_blocking,
)

if TYPE_CHECKING:
    from .function import KernelFunction


class BoundLaunch(partial):  # type: ignore[type-arg]
    """A launch with its geometry, stream and params fixed; made by `KernelFunction.bind`.

    Call it with nothing to repeat the bound launch, or with `params` alone to launch other values.
    It keeps the bound params alive. A bound stream of None follows torch's current stream.
    """

    _keep: Any

    def __copy__(self) -> BoundLaunch:
        return self

    def __deepcopy__(self, memo: Any) -> BoundLaunch:
        raise TypeError("a BoundLaunch is of the params that it was bound with: bind the copy's")

    def __reduce__(self) -> Any:
        raise TypeError("a BoundLaunch cannot be pickled: bind it in each process")

    @classmethod
    def _make(
        cls,
        function: KernelFunction,
        gridDim: Any,
        blockDim: Any,
        sharedMemBytes: Any,
        stream: Any,
        params: Any,
        options: dict[str, Any],
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
        if type(params) not in (list, tuple):
            params = ordered(params, function._spec.params or ())
        params = tuple(params)
        driver = _driver.get()
        device = 0 if driver.device_count == 1 else function._device_of(params)
        state = function._state(device, stream)
        expected = state.params
        if len(params) != len(expected):
            raise wrong_count(params, expected)
        follow = stream is None and interop.raw_stream_getter() is not None
        handle = interop.stream_handle(stream, device)
        pool = state.options_pool(**options)
        slot = state.new_slot(pool)
        state.shape(pool, slot, gridDim, blockDim, sharedMemBytes)
        values = generated.convert_all(Order(driver), expected, params, device, handle)
        try:
            slot[PACK](slot[BUFFER], generated.STREAM_AT, handle, *values)
        except generated.PACK_ERRORS:
            raise generated.explain(params, expected, handle, device) from None
        if handle:
            state.admit(handle)
        configs = StreamConfigs(state, pool, slot)
        configs.arrays = params
        launch, expire = _bound_launcher(
            driver,
            state,
            slot,
            configs,
            again,
            handle,
            follow=follow,
            guard=driver.device_count > 1,
            blocking=is_blocking(),
        )
        call, twin = launch, None
        # Which streams use a DeviceArray is noted in Python, at each stream's first launch.
        noting = follow and any(hasattr(value, "_record_use") for value in params)
        if not noting and not is_blocking() and c_launcher.available():
            getter = interop.raw_stream_getter() if follow else None
            call, twin = c_launcher.bound(
                state, slot[BUFFER], slot[VALUES_REF]._obj, launch, getter
            )
        self = cls(call)
        self._keep = (function, params, configs, expire, twin)
        state.bounds.add(self)
        return self

    def _expire(self) -> None:
        """The function's image was unloaded: launching its old handle could crash the process."""
        _, _, _, expire, twin = self._keep
        expire()
        if twin is not None:
            twin.launch_ex = None  # and C leaves it to the launcher that now refuses

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return f"<BoundLaunch of {self._keep[0] if isinstance(self._keep, tuple) else self._keep}>"


def _launch_with(
    function: KernelFunction, geometry: tuple[Any, ...], options: dict[str, Any], params: Any
) -> None:
    function(*geometry, params, **options)


def _needs_params(again: Any, function: KernelFunction) -> Any:
    def launch(params: Any = None) -> None:
        if params is None:
            raise ParamsError(
                f"{function.name} was bound without params: call it with them; "
                + (takes(function.params) if function.params is not None else "")
            )
        again(params)

    return launch


def _bound_launcher(
    driver: Any,
    state: DeviceFunction,
    slot: list[Any],
    configs: StreamConfigs,
    again: Any,
    handle: int,
    *,
    follow: bool,
    guard: bool,
    blocking: bool,
) -> tuple[Any, Any]:
    """(the launch, what makes it refuse from now on)."""
    launch_ex, function, config, values = (
        driver.launch_ex,
        state.argument,
        slot[CONFIG_REF],
        slot[VALUES_REF],
    )
    current_stream, device = interop.raw_stream_getter(), state.device

    def follow_stream(params: Any = None) -> None:
        if params is not None:
            return again(params)
        if code := launch_ex(configs[current_stream(device)], function, values, None):
            state.recover(
                code, [*slot[:CONFIG_REF], configs[current_stream(device)], values], handle
            )
        return None

    def fixed_stream(params: Any = None) -> None:
        if params is not None:
            return again(params)
        if code := launch_ex(config, function, values, None):
            state.recover(code, slot, handle)
        return None

    def expire() -> None:
        nonlocal launch_ex, again

        def refuse(*_: Any) -> None:
            raise LaunchConfigError(
                f"{state.limits.function} was unloaded after this launch was bound: bind it again"
            )

        launch_ex = again = refuse

    quick = follow_stream if follow else fixed_stream
    if not (guard or blocking):
        return quick, expire

    def guarded(params: Any = None) -> None:
        if params is not None:
            return again(params)
        with driver.on_device(device):
            quick()
        if blocking:
            state.finish(slot, current_stream(device) if follow else handle)
        return None

    return guarded, expire
