"""What is done after a capture that failed, with torch's names stood in for."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_hub.integrations.transformers import capturing  # noqa: E402


class FakeCapture:
    """torch's graph and its context, of which the capture, its end, or nothing fails."""

    ended = True

    def __init__(self, calls: list[Any], end: str | None) -> None:
        self.calls, self.end = calls, end

    def pool(self) -> tuple[int, int]:
        if not self.ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return (0, 7)

    def reset(self) -> None:
        self.calls.append("reset")

    def __enter__(self) -> None:
        self.ended = False

    def __exit__(self, *error: Any) -> None:
        if self.end is not None and error[0] is not None:
            raise RuntimeError(self.end)
        self.ended = True
        self.calls.append("ended")


@pytest.mark.parametrize("end", [None, "operation failed due to a previous error"])
def test_after_a_capture_that_failed(end: str | None, monkeypatch: Any) -> None:
    """One that has not ended is ended for torch's allocator and generator; one that has is not."""
    calls: list[Any] = []
    nothing = contextlib.nullcontext
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeCapture(calls, end))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: graph)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nothing())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nothing())
    for name in ("current_stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C, name, lambda *given, name=name: calls.append((name, *given)), raising=False
        )
    monkeypatch.setattr(capturing, "_unended", [])

    def run() -> None:
        raise RuntimeError("a wait")

    with pytest.raises(RuntimeError) as caught:
        capturing.capture(run, torch.device("cpu", 3), None)
    assert capturing.first_line(caught.value) == "a wait"
    if end is None:
        assert calls == ["ended"] and not capturing._unended
    else:
        assert calls == [
            "reset", ("_cuda_endAllocateToPool", 3, (0, 7)), ("_cuda_releasePool", 3, (0, 7)),
            "ended",
        ]  # fmt: skip
        assert len(capturing._unended) == 1
