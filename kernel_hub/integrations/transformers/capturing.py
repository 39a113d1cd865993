"""One capture of a CUDA graph by torch, and what is to be done where it fails."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...ops.core import counters

_unended: list[Any] = []  # graphs whose captures failed


def is_under_way() -> bool:
    """Whether somebody captures the current stream."""
    return torch.cuda.is_current_stream_capturing()


@functools.cache
def _stream_of(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def capture(run: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Any, Any]:
    """A graph of run() and what it gave."""
    graph, stream = torch.cuda.CUDAGraph(), _stream_of(device)
    taken: list[counters.Taken] = []
    weakref.finalize(graph, counters.give_back, taken).atexit = False
    options = {
        "pool": pool or torch.cuda.graph_pool_handle(), "stream": stream,
        "capture_error_mode": "thread_local",
    }  # fmt: skip
    try:
        # Where the end of a capture raises, torch leaves its stream the current one.
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
            with torch.cuda.graph(graph, **options), counters.lent(taken):
                found = run()
    except BaseException:
        try:
            graph.pool()
        except RuntimeError:  # it has not ended
            _clean_up(graph, device, options["pool"])
        raise
    return graph, found


def _clean_up(graph: Any, device: torch.device, pool: Any) -> None:
    """What torch leaves undone where the end of a capture raises: to its allocator and its
    generator the capture goes on, empty_cache() and draws would raise."""
    _unended.append(graph)  # its allocators have the address
    graph.reset()
    with contextlib.suppress(RuntimeError, AttributeError):  # where it had not begun
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    with torch.cuda.device(device):
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_stream_of(device)):
            torch.zeros(1, device=device)  # a capture that ends well ends the generator's


def first_line(error: BaseException) -> str:
    """What went wrong in a capture; its end raises too, behind what did."""
    return str(error.__context__ or error).strip().partition("\n")[0]
