"""A Kernel's loaded side: its image on each device, and what holds it there.

Functions keep this and not the Kernel, which keeps them: so both go with their last user, and the
image after them. Loads run in a thread of their own, see `driver.apart`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from .. import driver as _driver
from ..arrays import interop
from ..driver import Driver, apart
from ..driver.contexts import RelaxedCapture
from ..errors import CudaDriverError, LaunchConfigError
from ..image.shipped import Chosen, FunctionSpec, Image
from . import libraries
from .device_function import DeviceFunction
from .libraries import Lease, Library, library_for, load_function

T = TypeVar("T")
_loaders: weakref.WeakSet[Loader] = weakref.WeakSet()


class _Held(NamedTuple):
    library: Library
    chosen: Chosen
    lease: Lease


class Loader:
    """Loads `image` and functions of it, once a device; `keep` and `probe` as Kernel has them."""

    def __init__(self, image: Image, probe: bool, keep: bool | None) -> None:
        self._image = image
        self._probe, self._keep = probe, keep
        # For the kernel and its functions: a load and an unload take it in either order.
        self.lock = threading.RLock()
        self._held: dict[int, _Held] = {}
        _loaders.add(self)

    def image(self, device: int) -> bytes:
        """The bytes that are, or would be, loaded on `device`."""
        with self.lock:
            if device in self._held:
                return self._held[device].chosen.read()
            capability = _driver.get().compute_capability(device)
            return self._image.choose(capability).read()

    def function(self, spec: FunctionSpec, device: int, stream: int) -> DeviceFunction:
        """`spec` loaded on `device`; the caller is in a thread of ours and holds the lock."""
        driver = _driver.get()
        with RelaxedCapture(driver):
            library, chosen, lease = self._hold(driver, device, stream)
            # What is never unloaded need not be watched, nor what is unloaded in any case.
            noted = None if self._keep is not None or chosen.vouched else library.noted
            return load_function(driver, library, chosen, spec, device, lease, noted)

    def with_library(self, device: int, ask: Callable[[Library, Lease], T]) -> T:
        """What `ask` says of the library on `device`, which is loaded where it is not."""
        stream = interop.current_stream(device)

        def work() -> T:
            driver = _driver.get()
            with self.lock, RelaxedCapture(driver):
                library, _, lease = self._hold(driver, device, stream)
                return ask(library, lease)

        return apart.run(work)

    def _hold(self, driver: Driver, device: int, stream: int) -> _Held:
        if device not in self._held:
            _refuse_capture(driver, self._image.label, device, stream)
            # Checks the device number, and that it can be used at all.
            driver.primary_context(device)
            chosen = self._image.choose(driver.compute_capability(device))
            known = next((h for h in self._held.values() if h.library.key == chosen.key), None)
            library, lease = known[::2] if known else self._load(driver, chosen, device)
            self._held[device] = _Held(library, chosen, lease)
        return self._held[device]

    def _load(self, driver: Driver, chosen: Chosen, device: int) -> tuple[Library, Lease]:
        return library_for(driver, chosen, self._probe, self._keep, device)

    def current_streams(self) -> dict[int, int]:
        """The caller's current stream on each device that the image is loaded on."""
        return {device: interop.current_stream(device) for device in list(self._held)}

    def unload(self, streams: dict[int, int], forget: Callable[[], None]) -> None:
        """Give up the image on every device, `forget` just before; nothing where a stream captures.

        streams: what `current_streams` said in the caller's thread.
        """
        with self.lock, RelaxedCapture(_driver.get()):
            for device, held in self._held.items():
                held.library.check_unload(device, streams.get(device, 0))
            every = {id(held.library): held for held in self._held.values()}
            self._held.clear()
            forget()
            failures = []
            for held in every.values():
                try:
                    held.library.release(held.lease)
                except CudaDriverError as error:  # the others are still to go
                    failures.append(error)
        if failures:
            first = failures[0]
            text = "\n".join(map(str, failures))
            raise CudaDriverError(text, call=first.call, code=first.code, name=first.name)


def _refuse_capture(driver: Driver, label: str, device: int, stream: int) -> None:
    """Loading inside a capture would be recorded or invalidate it: refuse before it happens."""
    with driver.on_device(device):
        capturing = driver.is_capturing(stream)
    if capturing:
        raise LaunchConfigError(
            f"{label} is not loaded on device {device} and stream {stream:#x} is capturing a "
            "graph: call .load() (or launch once) before the capture"
        )


def _reset_for_tests() -> None:
    """Forget everything that was loaded."""
    libraries.forget()
    for loader in list(_loaders):
        loader._held.clear()
