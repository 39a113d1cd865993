"""The zeroed counters by which the blocks of a launch find out about each other: one owner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .launch import nothing

Taken = tuple[int | None, torch.Tensor]  # the index of its device, zeros
_sets: dict[tuple[int | None, int, int], torch.Tensor] = {}
# Zeros of each device that no launch has yet, for captured launches.
_reserves: dict[int | None, torch.Tensor] = {}
# (index of the device, how many) -> what graphs that are gone gave back.
_returned: dict[tuple[int | None, int], list[torch.Tensor]] = {}
_capture = threading.local()  # its taken: what the capture under way in this thread has so far
_RESERVE = 1 << 20  # counters
_LINE = 32  # counters of a cache line
_FEW = 4096  # counters
# (number, index of the device, type of the device) of a device's; not a public name of torch's.
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", None)


def counters(device: torch.device, count: int) -> torch.Tensor:
    """`count` int32 zeros for a launch on the current stream of `device`; it leaves zeros behind.

    Launches on one stream follow each other and share one set. A captured launch may be replayed
    beside anything: it keeps some of a reserve that an earlier launch made, or zeroes its own in
    the graph. So does one on a stream that torch did not make: when that one is destroyed, another
    may have its handle before its work is done.
    """
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            returned = _returned.get((device.index, _whole(count)))
            found = returned.pop() if returned else _of_reserve(device, count)
            if found is not None:
                getattr(_capture, "taken", []).append((device.index, found))
                return found[:count]
        else:
            _keep_reserve(device)
            stream_id = _stream_id(device)
            # torch's own have odd numbers (c10/cuda/CUDAStream.cpp), the default stream 0.
            if stream_id == 0 or stream_id % 2 == 1:
                key = (device.index, stream_id, count)
                found = _sets.get(key)
                if found is None:
                    found = _sets[key] = lasting_zeros(count, device)
                return found
    return torch.zeros(count, dtype=torch.int32, device=device)


def lasting_zeros(count: int, device: torch.device) -> torch.Tensor:
    """`count` int32 zeros of a GPU that stay for good, for launches on any stream."""
    _keep_reserve(device)
    found = _of_reserve(device, count)
    return zeros_begun(count, device)() if found is None else found[:count]


def _keep_reserve(device: torch.device) -> None:
    if device.index not in _reserves:
        _reserves[device.index] = zeros_begun(_RESERVE, device)()


def zeros_begun(
    count: int, device: torch.device, before: Callable[[], object] = nothing
) -> Callable[[], torch.Tensor]:
    """What waits for `count` int32 zeros, and gives them. A thread of their own asks for them: the
    caller's may be in inference mode, or about to record a graph (torch.compile's
    "reduce-overhead"), whose pool would own what is allocated meanwhile. It does `before` first.
    """
    from ...driver import apart

    def make() -> torch.Tensor:
        before()
        if count <= _FEW:  # by a copy, which waits by itself: a kernel that fills is to be loaded
            return torch.zeros(count, dtype=torch.int32, device="cpu").to(device)
        made = torch.zeros(count, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()
        return made

    return apart.begin(make)


def _stream_id(device: torch.device) -> int:
    """The number of the current stream of `device`, without the object torch makes of it."""
    if _current_stream is None:
        return int(torch.cuda.current_stream(device).stream_id)
    return int(_current_stream(device.index)[0])


def _of_reserve(device: torch.device, count: int) -> torch.Tensor | None:
    """Zeros that stay the launch's for ever; None where the reserve has too few.

    NOTE: memory zeroed within a graph is a launch of its own, and the next one waits for it.
    """
    reserve = _reserves.get(device.index)
    if reserve is None or reserve.numel() < _whole(count):
        _reserves.pop(device.index, None)  # the next launch that is not captured makes another
        return None
    _reserves[device.index] = reserve[_whole(count) :]
    return reserve[: _whole(count)]


def _whole(count: int) -> int:
    """So many that no other launch's share a line with them."""
    return -(-count // _LINE) * _LINE


@contextmanager
def lent(taken: list[Taken]) -> Iterator[None]:
    """Append what launches captured meanwhile take; `give_back` it once their graph is gone."""
    _capture.taken = taken
    try:
        yield
    finally:
        del _capture.taken


def give_back(taken: list[Taken]) -> None:
    """Let later graphs have the zeros of one that will not be replayed again."""
    for index, zeros in taken:
        _returned.setdefault((index, zeros.numel()), []).append(zeros)
