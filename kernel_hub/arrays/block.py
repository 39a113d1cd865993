"""A stretch of device memory and its life: who used it, and freeing it after them, once.

Finalisers may run at any moment (inside another allocation, in a forked child, at exit), so freeing
takes no lock. Ctrl-C may come at any moment too, and leaves nothing behind: see `Driver.within`.
"""

from __future__ import annotations

import os
import sys
from ctypes import byref, c_int, c_void_p
from typing import Any

from .. import driver as _driver
from ..driver.cuda_results import STICKY
from ..errors import CudaDriverError
from . import interop
from .lifetimes import Held, Watches

Call = tuple[Any, ...]  # what `Driver.within` takes
_SYNCHRONIZE: Call = ("cuCtxSynchronize",)
# CUresults of a call that a graph capture forbids: the memory is freed later instead.
_CAPTURING = frozenset({900, 901, 906})
_DEINITIALIZED, _INVALID_CONTEXT, _CONTEXT_IS_DESTROYED = 4, 201, 709
# After these there is nothing left to free, and an exit or an earlier error has said why.
LOST = STICKY | {_DEINITIALIZED, _INVALID_CONTEXT, _CONTEXT_IS_DESTROYED}

# Memory whose freeing a graph capture held up.
pending: dict[_Freeing, None] = {}


class _Freeing(Held):
    """What it takes to free an allocation.

    `owned` holds the driver and the block's watch while there is something to free.
    """

    __slots__ = ("cell", "device", "foreign", "owned", "owner", "size_bytes", "stream")

    def __init__(self, size_bytes: int, device: int, stream: int, owner: object) -> None:
        self.cell = c_void_p()
        self.size_bytes = size_bytes
        self.device = device
        self.stream = stream
        self.owner = owner
        self.foreign: set[int] = set()
        self.owned: list[Any] = []

    @property
    def is_held_up(self) -> bool:
        return self in pending

    def release(self) -> CudaDriverError | None:
        """Free it after all work recorded on it; while a capture forbids that, keep it for later.

        A second time does nothing. Ctrl-C comes before, and then nothing has happened, or after.
        """
        owned, address = self.owned[:2], self.cell.value
        if len(owned) < 2 or owned[0].pid != os.getpid():
            return None
        driver, watch = owned
        if not address:  # it never came to be
            watches.live.discard(watch)
            self.owned.clear()
            return None
        calls = unless_capturing(self.stream)
        if self.foreign:
            # The other streams may be gone by now, so nothing may be asked of their handles. A
            # capture in this thread is on torch's current stream and would not survive the
            # synchronisation; one in another thread cannot be seen.
            calls += [*unless_capturing(interop.current_stream(self.device)), _SYNCHRONIZE]
        calls += [
            (self.owned.remove, driver),
            ("cuMemFreeAsync", address, self.stream),
            (watches.live.discard, watch),
            (pending.pop, self, None),
            (self.owned.clear,),
        ]
        try:
            call, code = driver.within(self.device, *calls)
        except ValueError:  # another thread has just freed it
            return None
        if is_capture(call, code):
            self.owned[:] = owned
            pending[self] = None
            return None
        if code == 0:
            return None
        self.owned.clear()
        pending.pop(self, None)
        watches.live.discard(watch)
        asked = f"freeing {self.size_bytes:,} bytes at {address:#x}"
        return driver.error(call, code, asked)


watches: Watches[_Freeing] = Watches()  # one for each block that is freed here


class Block:
    """One allocation, or memory of somebody else kept alive through `owner`.

    owner: what must live as long as the memory does (its true owner, or the stream's object).
    stream: the stream it was allocated for, and is freed on.
    last_stream: where it was last used, as far as the runtime was told.
    """

    __slots__ = (
        "__weakref__",
        "_memory",
        "address",
        "device",
        "freed",
        "last_stream",
        "size_bytes",
        "stream",
    )

    def __init__(
        self, address: int, size_bytes: int, device: int, stream: int, owner: object = None
    ) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.device = device
        self.stream = self.last_stream = stream
        self.freed = False
        self._memory = _Freeing(size_bytes, device, stream, owner)

    @classmethod
    def owned(cls, driver: _driver.Driver, size_bytes: int, device: int, stream: int) -> Block:
        """One that frees what will be allocated into `cell`: it is there before the memory is."""
        self = cls(0, size_bytes, device, stream)
        memory = self._memory
        memory.owned += driver, watches.add(self, memory)
        return self

    @property
    def cell(self) -> c_void_p:
        """Where the driver writes the address of an `owned` one."""
        return self._memory.cell

    @property
    def owner(self) -> object:
        """What lives as long as the memory does."""
        return self._memory.owner

    @owner.setter
    def owner(self, owner: object) -> None:
        self._memory.owner = owner

    def record_use(self, stream: int) -> None:
        """Note work on `stream`: freeing will wait for it if it is not the block's own."""
        stream = 0 if stream == 1 else stream  # 1 names the legacy default stream too
        self.last_stream = stream
        if stream != self.stream:
            self._memory.foreign.add(stream)

    def recording(self, stream: int) -> list[Call]:
        """`record_use`, among other calls."""
        stream = 0 if stream == 1 else stream
        return [] if stream == self.stream else [(self._memory.foreign.add, stream)]

    def settling(self, stream: int) -> list[Call]:
        """The calls that let `stream` see all work recorded so far (see `attempt`).

        They wait for the device if it was elsewhere.
        """
        foreign = self._memory.foreign
        if self.stream == (0 if stream == 1 else stream) and not foreign:
            return []
        return [_SYNCHRONIZE, (foreign.clear,)]

    def settle(self, stream: int) -> None:
        """Make the calls of `settling`."""
        if calls := self.settling(stream):
            asked = "waiting for work on the array's other streams"
            _driver.get().run(self.device, *calls, asked=asked, relaxed=False)

    def free(self) -> None:
        """Give the memory back in stream order; a second call does nothing."""
        if self.freed:
            return
        owned = self._memory.owned[:1]
        if owned and owned[0].pid != os.getpid():
            raise _driver.forked_error()
        self.freed = True
        error = self._memory.release()
        self.owner = None if error or not self._memory.owned else self.owner
        if error:
            raise error

    def __del__(self) -> None:
        # At exit the modules this needs may be gone, and the process gives the memory back.
        if sys is None or sys.is_finalizing():
            return
        error = self._memory.release()
        if error is not None and error.code not in LOST:
            raise error  # shown by sys.unraisablehook


def unless_capturing(stream: int) -> list[Call]:
    """Calls of which one fails (see `is_capture`) if `stream` is recording a graph."""
    status = c_int()
    return [("cuStreamIsCapturing", stream, byref(status)), (getattr, status, "value")]


def is_capture(call: str, code: int) -> bool:
    """Whether what `Driver.within` gave means that a graph capture forbids the call."""
    return bool(code) and (not call or code in _CAPTURING)


def drain() -> None:
    """Free the memory that a graph capture or Ctrl-C held up, as far as the capture is over."""
    for memory in list(pending):
        if error := memory.release():
            raise error
    watches.drain()


def forget() -> None:
    """Forget the memory of a driver that a test is done with."""
    for memory in [*pending, *(watch.held for watch in watches.dead)]:
        memory.owned.clear()
    pending.clear()
    watches.clear()
