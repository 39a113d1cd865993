"""The C launcher and the Python launcher side by side: same launches, same refusals.

A stand-in for torch gives both their tensors; the C launcher needs nothing more of torch.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from fake_torch import FP16, FP32, Tensor, fake_torch
from fakecuda import FakeCuda
from fakecuda.helpers import make_stream
from in_threads import in_threads

from kernel_hub import DeviceArray, Kernel, KernelFunction, driver
from kernel_hub.arrays import interop
from kernel_hub.errors import CudaDriverError, KernelHubError, LaunchConfigError, ParamsError
from kernel_hub.launch import c_launcher

pytestmark = pytest.mark.skipif(not c_launcher.available(), reason="no C launcher fits here")
GRID, BLOCK = (4, 1, 1), (256, 1, 1)


@pytest.fixture(params=["attributes", "exchange API"])
def stream(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> list[int]:
    """A torch in sys.modules; the list holds its current stream."""
    return fake_torch(monkeypatch, request.param == "exchange API")


@pytest.fixture
def probe(fakecuda: FakeCuda, stream: list[int]) -> KernelFunction:
    made = Kernel("launch_probe").launch_probe_5
    made(GRID, BLOCK, 0, None, [None, None, None, 1, 0.5])
    assert made.func is not made._launch, "the C launcher is in front"
    return made


def three() -> list[Tensor]:
    return [Tensor(0x7F0000001000 + 256 * i) for i in range(3)]


# Launch arguments: (positional, keywords). Each is given to both launchers.
X, Y, Z = three()
GOOD = [X, Y, Z, 5, 0.5]
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((GRID, BLOCK, 0, None, GOOD), {}),
    ((GRID, BLOCK, 0, None, tuple(GOOD)), {}),
    ((4, 256), {"params": GOOD}),
    ((), {"params": GOOD, "blockDim": 64, "gridDim": (1, 2, 3), "sharedMemBytes": 9, "stream": 0}),
    ((GRID, BLOCK), {"params": GOOD, "sharedMem": 48}),
    ((GRID, BLOCK), {"sharedMem": 48, "params": GOOD, "sharedMemBytes": 48}),
    ((GRID, BLOCK, 0, None, GOOD), {"sharedMem": 0}),
    ((GRID, BLOCK, 0, None, [None, None, X, -(2**31), float("inf")]), {}),
    ((GRID, BLOCK, 0, None, [X, Y, Z, True, 3]), {}),
    ((GRID, BLOCK, 0, None, [X, Y, Z, 2**31, 0.5]), {}),
    ((GRID, BLOCK, 0, None, [X, Y, Z, 5, 1e300]), {}),
    ((GRID, BLOCK, 0, None, [X, Y, Z, 5, -0.0]), {}),
    ((GRID, BLOCK, 0, None, [X, Y, Z, 0.5, 0.5]), {}),
    ((GRID, BLOCK, 0, None, [X, Y, Z, 5, "x"]), {}),
    ((GRID, BLOCK, 0, None, [X, Y, Z, 5]), {}),
    ((GRID, BLOCK, 0, None, [*GOOD, 6]), {}),
    ((GRID, BLOCK, 0, None, {"out": X, "x": Y, "y": Z, "num_elements": 1, "scale": 1}), {}),
    ((GRID, BLOCK, 0, None, 7), {}),
    ((GRID, BLOCK, 0, None, "abcde"), {}),
    ((GRID, BLOCK, 0, None, [Tensor(16, FP16), Y, Z, 5, 0.5]), {}),
    ((GRID, BLOCK, 0, None, [Tensor(16, cuda=False), Y, Z, 5, 0.5]), {}),
    ((GRID, BLOCK, 0, None, [Tensor(0), Y, Z, 5, 0.5]), {}),
    ((GRID, BLOCK, 0, None, [Tensor(0, numel=0), Y, Z, 5, 0.5]), {}),
    ((GRID, BLOCK, 0, None, [X, 3, Z, 5, 0.5]), {}),
    ((GRID, BLOCK, 0, None, [X, object(), Z, 5, 0.5]), {}),
    (((0, 1, 1), BLOCK, 0, None, GOOD), {}),
    (((1, 65536, 1), BLOCK, 0, None, GOOD), {}),
    (((2**31 - 1, 65535, 65535), BLOCK, 0, None, GOOD), {}),
    ((-1, BLOCK, 0, None, GOOD), {}),
    ((2**70, BLOCK, 0, None, GOOD), {}),
    ((1.0, BLOCK, 0, None, GOOD), {}),
    (((4,), [32, 2], 0, None, GOOD), {}),
    ((GRID, 1025, 0, None, GOOD), {}),
    ((GRID, (32, 33, 1), 0, None, GOOD), {}),
    ((GRID, (2**16, 2**16, 1), 0, None, GOOD), {}),
    ((GRID, BLOCK, -1, None, GOOD), {}),
    ((GRID, BLOCK, 49152, None, GOOD), {}),
    ((GRID, BLOCK, 60000, None, GOOD), {}),
    ((GRID, BLOCK, 300000, None, GOOD), {}),
    ((GRID, BLOCK, 0, -5, GOOD), {}),
    ((GRID, BLOCK, 0, "s", GOOD), {}),
    *(
        ((GRID, BLOCK, 0, stream, GOOD), {})
        for stream in (0, 1, 2, -1, 3, 17, 4095, 2**63, 2**64 - 1, 2**64, 2**70, True)
    ),
    ((GRID, BLOCK, 0, None, GOOD), {"cluster": 2}),
    *(
        ((GRID, BLOCK, 0, None, GOOD), {"cluster": cluster})
        for cluster in ((1, 1, 1), (2, 1, 1), (4,), (3, 1, 1), (1, 2, 1), 9, 0, [2, 1, 1], None)
    ),
    ((GRID, BLOCK, 0, None, GOOD), {"cluster": (2, 1, 1), "programmatic": True}),
    *(
        ((GRID, BLOCK, 0, None, GOOD), {"programmatic": asked})
        for asked in (True, False, 1, None, "s")
    ),
    ((GRID, BLOCK, 0, None, GOOD), {"colour": 1}),
    ((GRID, BLOCK, 0, None, GOOD), {"params": GOOD}),
    ((GRID,), {}),
    ((), {}),
    ((GRID, BLOCK, 0, None, GOOD, 1), {}),
]


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_both_launchers_do_the_same(fakecuda: FakeCuda, probe: KernelFunction, number: int) -> None:
    args, keywords = CALLS[number]

    def outcome(launch: Callable[..., None]) -> tuple[Any, ...]:
        before = fakecuda.launch_count
        try:
            launch(*args, **keywords)
        except (KernelHubError, TypeError) as error:
            assert fakecuda.launch_count == before
            return type(error), str(error).replace("launch_probe_5.", "").replace("launch()", "")
        assert fakecuda.launch_count == before + 1
        made = fakecuda.launch()
        return (
            made.gridDim,
            made.blockDim,
            made.sharedMemBytes,
            made.stream,
            made.params,
            (made.attributes),
        )

    assert outcome(probe) == outcome(probe._launch)


def test_the_c_launcher_calls_the_driver_once_and_nothing_of_python(
    fakecuda: FakeCuda, probe: KernelFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fakecuda.all_calls
    probe._native.disarm()  # type: ignore[union-attr]
    probe(GRID, BLOCK, 0, None, GOOD)  # through Python: also sets this thread's context
    calls = fakecuda.all_calls
    assert probe._native is not None
    dtypes = [FP32, FP32, FP32, None, None]
    assert probe._native.arm(probe._states[0], dtypes, sys.modules["torch"], lambda device: 0)
    probe._launch.__code__ = (lambda *a, **k: 1 / 0).__code__
    probe(GRID, BLOCK, 0, None, GOOD)
    assert fakecuda.all_calls == calls + 1
    probe(GRID, BLOCK, sharedMem=512, params=GOOD)
    assert (fakecuda.all_calls, fakecuda.launch().sharedMemBytes) == (calls + 2, 512)
    for asked in ({"programmatic": True}, {"cluster": (2, 1, 1)}):
        probe(GRID, BLOCK, 0, None, GOOD, **asked)
    assert fakecuda.all_calls == calls + 4


def test_much_shared_memory_generates_no_launcher(
    fakecuda: FakeCuda, probe: KernelFunction
) -> None:
    """The opt-in is made ahead of the C launcher, which would leave the launch to another."""
    assert probe.name  # its launch has made the context the current one
    made = Kernel("launch_probe").launch_probe_5
    code = made._launch.__code__
    made(GRID, BLOCK, 60_000, None, [None, None, None, 1, 0.5])
    assert fakecuda.launch().sharedMemBytes == 60_000 and made._launch.__code__ is code
    with pytest.raises(LaunchConfigError, match="sharedMemBytes"):
        Kernel("launch_probe").launch_probe_5(GRID, BLOCK, 10**9, None, [None] * 3 + [1, 0.5])


def test_a_parameter_that_changed_its_dtype_is_noticed(probe: KernelFunction) -> None:
    tensor = Tensor(64)
    probe(GRID, BLOCK, 0, None, [tensor, Y, Z, 5, 0.5])
    tensor.dtype = FP16
    with pytest.raises(ParamsError, match="fp16"):
        probe(GRID, BLOCK, 0, None, [tensor, Y, Z, 5, 0.5])


def test_a_list_that_shrinks_while_it_is_read(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    params: list[Any] = [*GOOD]

    class Shrinking(Tensor):
        def data_ptr(self) -> int:
            params.clear()
            return 16

    params[0] = Shrinking(16)
    before = fakecuda.launch_count
    with pytest.raises(ParamsError, match="too few"):
        probe(GRID, BLOCK, 0, None, params)
    assert fakecuda.launch_count == before


def test_failures_reach_python_with_their_words(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    fakecuda.fail("cuLaunchKernelEx", 701, count=2)
    with pytest.raises(CudaDriverError, match="LAUNCH_OUT_OF_RESOURCES"):
        probe(GRID, BLOCK, 0, None, GOOD)
    probe(GRID, BLOCK, 0, None, GOOD)


def test_the_current_stream_is_followed(
    fakecuda: FakeCuda, probe: KernelFunction, stream: list[int]
) -> None:
    handle = make_stream()
    bound = probe.bind(GRID, BLOCK, 0, None, GOOD)
    fixed = probe.bind(GRID, BLOCK, 0, 0, GOOD)
    for number in (handle, 0):
        stream[0] = number
        for launch in (lambda: probe(GRID, BLOCK, 0, None, GOOD), bound):
            launch()
            assert fakecuda.launch().stream == number
            assert fakecuda.launch().params == tuple(
                [struct.pack("<Q", t.address) for t in (X, Y, Z)]
                + [struct.pack("<i", 5), struct.pack("<f", 0.5)]
            )
        fixed()
        assert fakecuda.launch().stream == 0
    bound([X, Y, Z, 6, 0.5])
    assert fakecuda.launch().params is not None
    assert fakecuda.launch().params[3] == struct.pack("<i", 6)  # type: ignore[index]
    fakecuda.fail("cuLaunchKernelEx", 719, count=2)
    with pytest.raises(CudaDriverError, match="719"):
        bound()


def test_two_gpus(make_fakecuda: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch) -> None:
    """The C launcher serves the first device used; the other's tensors go the Python way."""
    fake = make_fakecuda(devices=2)
    fake_torch(monkeypatch, exchange=True)
    probe = Kernel("launch_probe").launch_probe_5
    on = [three(), three()]
    for tensor in on[1]:
        tensor.gpu = 1
    for device in (1, 0, 1, 0):
        for current in (0, 1):
            with driver.get().on_device(current):
                probe(GRID, BLOCK, 0, None, [*on[device], 5, 0.5])
            assert fake.launch().device == device
    assert probe.func is not probe._launch
    bound = probe.bind(GRID, BLOCK, 0, None, [*on[0], 5, 0.5])
    for current in (0, 1):
        with driver.get().on_device(current):
            bound()
        assert fake.launch().device == 0
    with pytest.raises(ParamsError, match="device 1"):
        probe(GRID, BLOCK, 0, None, [on[0][0], on[1][0], on[0][1], 5, 0.5])


def test_unload_and_load_again(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    for _ in range(5):
        probe._loader.unload({}, probe._forget)
        assert fakecuda.live("libraries") == 0
        probe(GRID, BLOCK, 0, None, GOOD)
    assert fakecuda.live("libraries") == 1


def test_eight_threads(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    seen: list[tuple[int, int]] = []
    fakecuda.set_callback(
        "launch_probe_5",
        lambda launch, at: seen.append((launch.thread, ctypes.c_int.from_address(at[3]).value)),
    )
    fakecuda.record(False)

    def work(base: int) -> None:
        for i in range(500):
            probe(GRID, BLOCK, 0, None, [X, Y, Z, base + i, 0.5])

    in_threads(*[partial(work, 1000 * n) for n in range(8)])
    per_thread = itertools.groupby(sorted(seen, key=lambda pair: pair[0]), lambda pair: pair[0])
    runs = [[value for _, value in group] for _, group in per_thread]
    assert sorted(value for run in runs for value in run) == sorted(
        1000 * n + i for n in range(8) for i in range(500)
    )


def test_references_are_given_back(probe: KernelFunction) -> None:
    params = [*three(), 5, 0.5]
    watched = [params[0], params, FP32, GRID, True, None]
    before = [sys.getrefcount(value) for value in watched]
    for _ in range(1000):
        probe(gridDim=GRID, blockDim=BLOCK, params=params)
        with pytest.raises(LaunchConfigError):
            probe((0, 1, 1), BLOCK, 0, None, params)
    after = [sys.getrefcount(value) for value in watched]
    assert all(b - a < 50 for a, b in zip(before, after, strict=True))


def test_it_can_be_turned_off(
    fakecuda: FakeCuda, stream: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNEL_HUB_NATIVE", "0")
    plain = Kernel("launch_probe").launch_probe_5
    plain(GRID, BLOCK, 0, None, GOOD)
    assert plain.func is plain._launch
    bound = plain.bind(GRID, BLOCK, 0, None, GOOD)
    bound()
    assert fakecuda.launch_count == 2


def test_without_a_tensor_the_current_device_decides(
    make_fakecuda: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = make_fakecuda(devices=2)
    fake_torch(monkeypatch, exchange=True)
    probe = Kernel("launch_probe").launch_probe_5
    for device in (0, 1, 0):
        monkeypatch.setattr(interop, "current_device", lambda device=device: device)
        probe(GRID, BLOCK, 0, None, [None, None, None, 1, 0.5])
        assert fake.launch().device == device


def test_a_bound_device_array_is_noted_on_every_stream(
    fakecuda: FakeCuda, stream: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = DeviceArray.zeros(8, "fp32")
    bound = Kernel("launch_probe").launch_probe_5.bind(GRID, BLOCK, 0, None, [x, x, x, 5, 0.5])
    seen: list[int] = []
    monkeypatch.setattr(DeviceArray, "_record_use", lambda self, stream: seen.append(stream))
    handle = make_stream()
    for stream[0] in (0, handle):
        bound()
        assert fakecuda.launch().stream == stream[0]
    assert handle in seen
