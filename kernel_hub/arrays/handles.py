"""What the driver hands out and takes back: streams, events, page-locked memory.

Each is an object that gives its handle back at its death, also where Ctrl-C ends the finaliser.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict, deque
from contextlib import suppress
from ctypes import byref, c_void_p
from typing import Any

from .. import driver as _driver
from ..errors import CudaDriverError
from . import interop
from .block import LOST, Call, is_capture, unless_capturing
from .lifetimes import Held, Watches

NOT_READY = 600  # what is asked of a stream or an event that has work before it


class _Kept(Held):
    """A handle, and the call that takes it back; `once` is emptied by whoever makes it.

    waits: whether that call waits for the GPU, which no capture survives.
    """

    __slots__ = ("cell", "destroy", "device", "driver", "once", "size_bytes", "waits")

    def __init__(
        self, driver: _driver.Driver, device: int, destroy: str, size_bytes: int, waits: bool
    ) -> None:
        self.cell = c_void_p()
        self.driver, self.device, self.destroy = driver, device, destroy
        self.size_bytes, self.waits = size_bytes, waits
        self.once = {destroy}

    @property
    def is_held_up(self) -> bool:
        return bool(self.once)

    def release(self) -> CudaDriverError | None:
        if not self.once or self.driver.pid != os.getpid():
            return None
        calls: list[Call] = []
        if self.waits:
            for stream in {0, interop.current_stream(self.device)}:
                calls += unless_capturing(stream)
        # Another thread may have been quicker: the calls end where one gives something true.
        calls += [(self.once.isdisjoint, (self.destroy,)), (self.once.discard, self.destroy)]
        if self.cell.value:
            calls.append((self.destroy, self.cell.value))
        call, code = self.driver.within(self.device, *calls)
        if self.waits and is_capture(call, code):
            if call == self.destroy:
                self.once.add(call)
            return None
        self.once.clear()
        if not call or code in LOST:
            return None
        return self.driver.error(call, code, f"giving back {self.cell.value or 0:#x}")


watches: Watches[_Kept] = Watches()


class Handle:
    """A handle of the driver's, given back when the last that holds this object is gone."""

    _create = _destroy = ""
    _waits = False

    def __init__(self, device: int, *args: Any, asked: str, size_bytes: int = 0) -> None:
        self._device = device
        self._driver = driver = _driver.get()
        driver.primary_context(device)  # or there is nothing to give back, and no device to ask
        drain()
        self._kept = kept = _Kept(driver, device, self._destroy, size_bytes, self._waits)
        self._cell = kept.cell
        watches.add(self, kept)
        driver.run(device, (self._create, byref(kept.cell), *args), asked=asked)

    @property
    def device(self) -> int:
        """The GPU's number."""
        return self._device

    def __del__(self) -> None:
        # At exit the process gives it back; a forked child has no part in it.
        if sys is None or sys.is_finalizing() or not hasattr(self, "_kept"):
            return
        if error := self._kept.release():
            raise error  # shown by sys.unraisablehook

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__} is of this process: it cannot be pickled")


# By device and stream, oldest first: the mark behind a copy, and the host array that it works on.
_copying: defaultdict[tuple[int, int], deque[tuple[Handle, Any]]] = defaultdict(deque)
_spare: defaultdict[int, list[Handle]] = defaultdict(list)  # marks of copies that are done


def spare_event(device: int) -> Handle | None:
    """An event whose copy is done, for another one."""
    drain()
    try:
        return _spare[device].pop()
    except IndexError:
        return None


def holding(host: Any, event: Handle, stream: int, copy: Call) -> list[Call]:
    """The calls that copy, mark the end by `event`, and keep `host` alive until then."""
    # Kept first: of a copy that fails the mark was never put anywhere, and counts as reached.
    keep = _copying[event.device, stream].append
    return [(keep, (event, host)), copy, ("cuEventRecord", event._cell, stream)]


def drain() -> None:
    """Let go of host arrays whose copies are done, and give back what Ctrl-C held up."""
    for copies in list(_copying.values()):
        for copy in list(copies):
            event = copy[0]
            call = "cuEventQuery", event._cell
            if event._driver.within(event.device, call)[1] == NOT_READY:
                break
            with suppress(ValueError):  # another thread was there
                copies.remove(copy)
                _spare[event.device].append(event)
    watches.drain()


def forget() -> None:
    """Forget the handles of a driver that a test is done with."""
    _copying.clear()
    _spare.clear()
    watches.clear()
