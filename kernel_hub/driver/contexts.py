"""The calling thread's context and capture mode: set for some driver calls, then set back.

In a thread of our own that is a `with` block. In the caller's it is `within`: a signal handler
(Ctrl-C) runs between two bytecodes, those of a `finally` among them, and what it tears apart leaves
a context pushed or a mode relaxed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_void_p
from functools import partial
from itertools import chain, count, takewhile
from operator import methodcaller, not_
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import Driver

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_run = methodcaller("__call__")
Call = Callable[[], Any]


class ContextGuard:
    """Makes a context current for a `with` block and gives the previous one back.

    For threads that no signal reaches; elsewhere `Driver.within`.
    """

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        self._driver.call("cuCtxPushCurrent_v2", self._context)

    def __exit__(self, *exc: object) -> None:
        self._driver.try_call("cuCtxPopCurrent_v2", byref(c_void_p()))


class RelaxedCapture:
    """Inside, the thread's calls do not end a graph capture that runs on some other stream.

    Measured on an H200 (driver 580): while any stream of the process captures in the usual mode,
    allocating, freeing, trimming, reading a pool's figures and synchronising another stream all
    give 900 and invalidate that capture; in relaxed mode they neither fail nor harm it.
    cuCtxSynchronize invalidates it in either mode.

    For threads that no signal reaches; elsewhere `Driver.within`.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._mode = c_int(RELAXED)

    def __enter__(self) -> None:
        code = self._driver.try_call("cuThreadExchangeStreamCaptureMode", byref(self._mode))
        self._changed = code == 0

    def __exit__(self, *exc: object) -> None:
        if self._changed:
            self._driver.try_call("cuThreadExchangeStreamCaptureMode", byref(self._mode))


def within(
    enter: Sequence[Call], calls: Sequence[Call], leave: Sequence[Call]
) -> tuple[int, int] | None:
    """Run `enter` and `calls` up to the first that gives something true, then all of `leave`.

    Returns which of `enter` and `calls` that was and what it gave; None where all went through.
    The callables are C code (functions of the driver with their arguments bound), and one call of C
    code runs them all: no signal handler runs before the last of `leave` is done.
    """
    given: dict[int, int] = {}
    steps = takewhile(not_, map(given.setdefault, count(), map(_run, chain(enter, calls))))
    deque(chain(steps, map(_run, leave)), 0)
    number, value = len(given) - 1, given[len(given) - 1]
    return (number, value) if value else None


class Within:
    """What `Driver.within` does on one driver: made once, with its functions at hand."""

    def __init__(self, functions: dict[str, Any]) -> None:
        self._functions = functions
        self._exchange = functions["cuThreadExchangeStreamCaptureMode"]
        self._get = functions["cuCtxGetCurrent"]
        self._set = functions["cuCtxSetCurrent"]

    def __call__(
        self, context: int, calls: Sequence[tuple[Any, ...]], relaxed: bool
    ) -> tuple[str, int]:
        functions = self._functions
        bound = [
            partial(functions[call[0]] if type(call[0]) is str else call[0], *call[1:])
            for call in calls
        ]
        mode, previous = c_int(RELAXED), c_void_p()
        swap = partial(self._exchange, byref(mode))
        marks: list[int] = []  # one when the calls have begun, two when all is as before
        mark = partial(marks.append, 1)
        enter: list[Call] = [mark, swap] if relaxed else [mark]
        leave: list[Call] = [swap] if relaxed else []
        names = ["", "cuThreadExchangeStreamCaptureMode"] if relaxed else [""]
        if code := self._get(byref(previous)):
            return "cuCtxGetCurrent", code
        if previous.value != context:
            # Not pushed and popped: setting back the context that was current is right whether or
            # not setting this one succeeded.
            enter.append(partial(self._set, context))
            leave.append(partial(self._set, previous.value))
            names.append("cuCtxSetCurrent")
        leave.append(mark)
        try:
            failed = within(enter, bound, leave)
        except BaseException:
            # Ctrl-C comes before or after all of it; in between, an argument that ctypes refuses.
            if len(marks) == 1:
                deque(map(_run, leave), 0)
            raise
        if failed is None:
            return "", 0
        number, code = failed
        if number < len(enter):
            if relaxed and number == 1:
                # The mode was not exchanged, so what set it back has set it to relaxed.
                swap()
            return names[number], code
        name = calls[number - len(enter)][0]
        return name if type(name) is str else "", code
