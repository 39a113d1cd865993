"""Whose launches share zeroed counters: those of one stream that lives as long as the process."""

from __future__ import annotations

import ctypes
import importlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernel_hub import driver
from kernel_hub.ops import linear

CUDA = torch.device("cuda", 0)
# What torch says of its streams (c10/cuda/CUDAStream.cpp): numbers of its own are odd, the default
# stream has 0, and a stream that somebody else made has its handle.
DEFAULT, POOL, OTHER_POOL, HANDLE = 0, 3, 35, 0x5581_1F20_7A40


def _module(name: str) -> Any:
    return importlib.import_module(f"kernel_hub.ops.{name}")


def _of_linear() -> torch.Tensor:
    seen: list[Any] = []
    choice = SimpleNamespace(
        boxes=None, num_partials=8, num_arrivals=0, grid=(), block=(), shared_bytes=0
    )
    launch = _module("matmul.linear_launch").LinearLaunch(
        lambda *given: seen.append(given[4]), choice
    )
    launch.run((), SimpleNamespace(device=CUDA), None, None)
    return seen[0][2]


def _of_grouped() -> torch.Tensor:
    choice = SimpleNamespace(num_partials=8, num_arrivals=4)
    return _module("matmul.grouped_launch").workspace(choice, CUDA)[1]


def _of_attention() -> torch.Tensor:
    seen: list[Any] = []
    q: Any = SimpleNamespace(dtype=torch.float16, device=CUDA)
    attention = _module("attention.forward_sm90")
    planned = attention.Launch(lambda *given: seen.append(given[4]))
    attention.launch(planned, (b"", b"", b""), q, q, q, None, None, attention.Options())
    return seen[0][11]


@pytest.fixture(params=[_of_linear, _of_grouped, _of_attention], ids=lambda f: f.__name__[4:])
def on_stream(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., torch.Tensor]:
    """The counters of a launch on a stream, as torch tells of it; memory is the CPU's."""
    state = SimpleNamespace(stream_id=DEFAULT, is_capturing=False)
    monkeypatch.setattr(_module("core.counters"), "_sets", {})
    monkeypatch.setattr(_module("core.counters"), "_reserves", {})
    monkeypatch.setattr(_module("core.counters"), "_returned", {})
    monkeypatch.setattr(_module("core.bounds"), "flag", lambda *_: None)
    for name in ("zeros", "empty"):
        make = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *size, device=None, make=make, **how: make(*size, **how)
        )
    monkeypatch.setattr(_module("attention.forward_sm90"), "tensor_map", lambda *_: b"")
    current = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(_module("core.counters"), "_stream_id", lambda _: state.stream_id)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.is_capturing)

    def counters(stream_id: int, is_capturing: bool = False) -> torch.Tensor:
        state.stream_id, state.is_capturing = stream_id, is_capturing
        found = request.param()
        assert found.dtype == torch.int32 and not found.any()
        return found

    return counters


@pytest.mark.parametrize("stream", [DEFAULT, POOL])
def test_a_stream_of_torch_has_one_set(on_stream: Callable[..., torch.Tensor], stream: int) -> None:
    first = on_stream(stream)
    assert on_stream(stream) is first
    assert on_stream(OTHER_POOL) is not first


def test_a_handle_that_comes_again_is_another_stream(
    on_stream: Callable[..., torch.Tensor],
) -> None:
    # The first was destroyed, and its work may still be on its way.
    first = on_stream(HANDLE)
    assert on_stream(HANDLE) is not first


def test_what_is_captured_has_its_own(on_stream: Callable[..., torch.Tensor]) -> None:
    on_stream(POOL)  # makes the reserve
    first = on_stream(POOL, is_capturing=True).data_ptr()
    assert on_stream(POOL, is_capturing=True).data_ptr() != first
    assert on_stream(POOL).data_ptr() != first


def test_what_a_graph_gave_back_is_the_next_ones(on_stream: Callable[..., torch.Tensor]) -> None:
    counters = _module("core.counters")
    on_stream(POOL)  # makes the reserve
    taken: list[Any] = []
    with counters.lent(taken):
        first, second = (on_stream(POOL, is_capturing=True).data_ptr() for _ in range(2))
    assert [each.data_ptr() for _, each in taken] == [first, second] and first != second
    assert on_stream(POOL, is_capturing=True).data_ptr() not in (first, second)
    counters.give_back(taken)
    again = [on_stream(POOL, is_capturing=True).data_ptr() for _ in range(3)]
    assert set(again[:2]) == {first, second} and again[2] not in (first, second)
    assert on_stream(POOL).data_ptr() not in again and len(taken) == 2


def test_captured_launches_share_nothing_of_the_reserve(
    on_stream: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = _module("core.counters")
    monkeypatch.setattr(counters, "_RESERVE", 3 * 4096)
    on_stream(POOL)  # makes the reserve
    kept = [on_stream(POOL, is_capturing=True) for _ in range(3)]
    reserve = kept[0].untyped_storage().data_ptr()
    taken = [one for one in kept if one.untyped_storage().data_ptr() == reserve]
    ranges = sorted((one.data_ptr(), one.data_ptr() + 4 * one.numel()) for one in taken)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    while counters._of_reserve(CUDA, 4096) is not None:
        pass
    alone = on_stream(POOL, is_capturing=True)  # there is no reserve: it zeroes its own
    assert alone.untyped_storage().data_ptr() != reserve
    on_stream(POOL)
    assert counters._reserves[CUDA.index].numel() == 3 * 4096


@pytest.mark.gpu
def test_torch_numbers_its_streams_so() -> None:
    made = [torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(40)]
    assert all(stream.stream_id % 2 == 1 for stream in made)
    assert torch.cuda.default_stream().stream_id == DEFAULT
    others = torch.cuda.ExternalStream(made[0].cuda_stream)
    assert others.stream_id % 2 == 0 and others.stream_id != DEFAULT
    for stream in (made[0], others, torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            assert _module("core.counters")._stream_id(CUDA) == stream.stream_id


@pytest.mark.gpu
def test_graphs_of_torch_compile_own_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first run is a rehearsal, on a stream of theirs, whose memory has to be theirs."""
    monkeypatch.setattr(_module("core.counters"), "_sets", {})
    monkeypatch.setattr(_module("core.counters"), "_reserves", {})
    a, b = (torch.randn(rows, 16384, device="cuda").half() for rows in (4, 64))
    run = torch.compile(lambda a, b: linear(a, b) + 1, mode="reduce-overhead")
    with torch.inference_mode():
        for _ in range(4):  # it raises where a tensor in the pool is no result
            found = run(a, b).clone()
    assert torch.equal(found, linear(a, b) + 1)
    assert _module("core.counters")._sets, "this product shares no k"


@pytest.mark.gpu
def test_streams_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products that share k, on streams that somebody else makes and destroys at once.

    What they work in is kept: torch's allocator takes a new stream of the same handle for the old
    one, and would give it the memory of what the GPU is still at. Whoever destroys a stream early
    gets that from every op of torch too.
    """
    launch, kept = _module("matmul.linear_launch"), []
    workspace = launch.workspace

    def keeping(*given: Any) -> Any:
        kept.append(workspace(*given))
        return kept[-1]

    monkeypatch.setattr(launch, "workspace", keeping)
    libcuda = ctypes.CDLL(driver.get().path)
    a, b = (torch.randn(rows, 16384, device="cuda").half() for rows in (4, 64))
    expected = linear(a, b)
    torch.cuda.synchronize()
    found, handles = [], set()
    for _ in range(200):
        handle = ctypes.c_void_p()
        assert libcuda.cuStreamCreate(ctypes.byref(handle), 1) == 0
        handles.add(handle.value)
        with torch.cuda.stream(torch.cuda.ExternalStream(handle.value)):
            found += [linear(a, b) for _ in range(3)]
        assert libcuda.cuStreamDestroy_v2(handle) == 0
    torch.cuda.synchronize()
    print(f"{len(handles)} handles")
    assert len(kept) == 1 + len(found), "these products share no k"
    wrong = [i for i, out in enumerate(found) if not torch.equal(out, expected)]
    assert not wrong, f"{len(wrong)} of {len(found)} differ, on {len(handles)} handles: {wrong[:9]}"
