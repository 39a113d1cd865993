"""Stream, Event and synchronize: the order of work on a GPU, for programs without torch."""

from __future__ import annotations

from ctypes import byref, c_float
from typing import TYPE_CHECKING, Any

from .. import driver as _driver
from ..errors import LaunchConfigError
from . import handles, interop
from .handles import NOT_READY, Handle
from .pool import device_number

if TYPE_CHECKING:
    from typing_extensions import Self

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class _Ordered(Handle):
    """A stream or an event: work comes before it.

    NOTE: closing gives nothing back: arrays that were allocated on a stream are freed on it, and
    hold the object for that.
    """

    _query = _wait = ""

    def __init__(self, device: Any, flags: int) -> None:
        self._closed = False
        number = device_number(device)
        kind = type(self).__name__.lower()
        super().__init__(number, flags, asked=f"making a {kind} on device {number}")

    @property
    def handle(self) -> int:
        """The driver's handle (CUstream, CUevent). Raises LaunchConfigError once closed."""
        if self._closed:
            raise LaunchConfigError(f"this {type(self).__name__} was closed: make another")
        return self._cell.value or 0

    @property
    def is_done(self) -> bool:
        """Whether all the work that came before is done; waits for nothing."""
        call, code = self._driver.within(self._device, (self._query, self.handle))
        if code not in (0, NOT_READY):
            raise self._driver.error(call, code, f"asking about {self!r}")
        return code == 0

    def synchronize(self) -> None:
        """Wait until that work is done. Raises CudaDriverError for what failed in it."""
        call = self._wait, self.handle
        self._driver.run(self._device, call, asked=f"waiting for {self!r}", relaxed=False)
        handles.drain()

    def close(self) -> None:
        """Wait for the work; from then on this is refused. A second call does nothing."""
        if not self._closed:
            self.synchronize()
            self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"handle={self._cell.value or 0:#x}"
        return f"{type(self).__name__}(device={self._device}, {state})"


class Stream(_Ordered):
    """A queue of work on one GPU: what is put on it runs in order, beside what is on others.

    device: a number, 'cuda:1', or a device of torch, CuPy or cuda.core; None is the current one.
    blocking: whether it and the legacy default stream (0) wait for each other, as those that
        `cudaStreamCreate` makes do; torch's do not.

    Everything here that has a `stream` takes it, and so does what knows `__cuda_stream__`. As a
    context manager it is closed at the end, after its work. Raises TensorError for a device that is
    none, CudaDriverError.

        with Stream() as stream:
            x = DeviceArray.from_numpy(host, stream=stream)
            f(grid, block, 0, stream, (x, n))
    """

    _create, _destroy = "cuStreamCreate", "cuStreamDestroy_v2"
    _query, _wait = "cuStreamQuery", "cuStreamSynchronize"

    def __init__(self, device: Any = None, *, blocking: bool = False) -> None:
        super().__init__(device, 0 if blocking else _NON_BLOCKING)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    @property
    def device_id(self) -> int:
        """As `device`, under the name that cuda.core has for it."""
        return self._device

    def record(self, event: Event | None = None) -> Event:
        """An event (a new one for None) that is done when the work put here so far is."""
        made = Event(self._device) if event is None else event
        made.record(self)
        return made

    def wait(self, other: Event | Stream) -> None:
        """Let what is put here from now on come after the event, or the work so far of a stream."""
        event = other.record() if isinstance(other, Stream) else other
        call = "cuStreamWaitEvent", self.handle, event.handle, 0
        self._driver.run(self._device, call, asked=f"making {self!r} wait", relaxed=False)


class Event(_Ordered):
    """A mark in a stream's work: done when all that came before it is.

    device: as for Stream, and the streams it is recorded on are of that device.
    timing: whether `elapsed_ms` can be asked of it; without, recording is cheaper.
    """

    _create, _destroy = "cuEventCreate", "cuEventDestroy_v2"
    _query, _wait = "cuEventQuery", "cuEventSynchronize"

    def __init__(self, device: Any = None, *, timing: bool = False) -> None:
        self.timing = timing
        super().__init__(device, 0 if timing else _NO_TIMING)

    def record(self, stream: Any = None) -> None:
        """Put the mark into `stream` (of any kind; None as in a launch), after its work so far."""
        handle = interop.stream_handle(stream, self._device)
        call = "cuEventRecord", self.handle, handle
        self._driver.run(self._device, call, asked=f"recording {self!r}", relaxed=False)

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds on the GPU from `since` to this event; waits for both."""
        for event in (since, self):
            if not event.timing:
                raise LaunchConfigError(f"{event!r} takes no time: make it with Event(timing=True)")
            event.synchronize()
        found = c_float()
        call = "cuEventElapsedTime", byref(found), since.handle, self.handle
        self._driver.run(self._device, call, asked="asking for the time between events")
        return found.value


def synchronize(device: Any = None) -> None:
    """Wait for all the work on a GPU (None: the current one), of every stream.

    Raises CudaDriverError for what failed in it.
    """
    number = device_number(device)
    asked = f"waiting for device {number}"
    _driver.get().run(number, ("cuCtxSynchronize",), asked=asked, relaxed=False)
    handles.drain()
