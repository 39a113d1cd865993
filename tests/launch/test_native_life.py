"""The C launcher's own life: what it holds, what it lets through, and when it is not opened."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_torch import Tensor, fake_torch
from fakecuda import FakeCuda
from lots import Lots
from test_native import BLOCK, GOOD, GRID, X, Y, Z

from kernel_hub import Kernel, KernelFunction
from kernel_hub.collection.manifest import open_collection
from kernel_hub.errors import KernelHubError, LaunchConfigError, ParamsError
from kernel_hub.launch import c_launcher

PACKAGE = Path(c_launcher.__file__).parent.parent
pytestmark = pytest.mark.skipif(
    not c_launcher.available(), reason="the shipped C launcher does not fit this Python or platform"
)


@pytest.fixture(params=["C", "C, exchange API", "Python"])
def make(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[[], KernelFunction]:
    """Makes a function that was launched once, with that launcher in front."""
    fake_torch(monkeypatch, request.param == "C, exchange API")
    if request.param == "Python":
        monkeypatch.setenv(c_launcher.VARIABLE, "0")

    def made(kernel: Kernel | None = None) -> KernelFunction:
        function = (kernel or Kernel("launch_probe")).launch_probe_5
        function(GRID, BLOCK, 0, None, GOOD)
        assert (function.func is not function._launch) == (request.param != "Python")
        return function

    return made


def test_its_callable_outlives_the_kernel(
    fakecuda: FakeCuda, make: Callable[[], KernelFunction]
) -> None:
    """`f.func` was called with a freed struct: the process died."""
    lots = Lots("outlives")
    held = [make().func for _ in range(20)]
    lots.shuffle(held)
    gc.collect()
    junk = [bytearray(4096) for _ in range(1000)]  # over what was freed
    for func in held:
        before = fakecuda.launch_count
        func(GRID, BLOCK, 0, None, GOOD)
        assert fakecuda.launch_count == before + 1, lots
        # What C leaves to Python may need the function, which is gone.
        with pytest.raises((ParamsError, LaunchConfigError), match=r"too few|keep the function"):
            func(GRID, BLOCK, 0, None, GOOD[:-1])
        with pytest.raises(LaunchConfigError, match=r"gridDim|keep the function"):
            func(0, BLOCK, 0, None, GOOD)
    del junk


def test_a_bound_callable_outlives_everything(
    fakecuda: FakeCuda, make: Callable[[], KernelFunction]
) -> None:
    held = [make().bind(GRID, BLOCK, 0, stream, GOOD).func for stream in (None, 0)]
    gc.collect()
    for func in held:
        before = fakecuda.launch_count
        func()
        func([X, Y, Z, 6, 0.5])
        assert fakecuda.launch_count == before + 2


def test_a_launcher_of_a_function_never_launched(fakecuda: FakeCuda) -> None:
    func = Kernel("launch_probe").launch_probe_5.func
    gc.collect()
    with pytest.raises(LaunchConfigError, match="keep the function"):
        func(GRID, BLOCK, 0, 0, [None, None, None, 1, 0.5])


def test_callables_refuse_after_an_unload(
    fakecuda: FakeCuda, make: Callable[..., KernelFunction]
) -> None:
    """Whoever kept one: it would launch a handle that the driver has forgotten."""
    kernel = Kernel("launch_probe")
    function = make(kernel)
    bounds = [function.bind(GRID, BLOCK, 0, stream, GOOD) for stream in (None, 0)]
    held = [bound.func for bound in bounds]
    kernel.unload()
    before = fakecuda.launch_count
    calls = fakecuda.calls("cuLaunchKernelEx")
    for launch in (*bounds, *held):
        with pytest.raises(LaunchConfigError, match="was unloaded"):
            launch()
        with pytest.raises(LaunchConfigError, match="was unloaded"):
            launch(GOOD)
    assert fakecuda.launch_count == before
    assert fakecuda.calls("cuLaunchKernelEx") == calls
    function(GRID, BLOCK, 0, None, GOOD)
    assert fakecuda.launch_count == before + 1


def test_nothing_is_kept_that_nobody_has(make: Callable[[], KernelFunction]) -> None:
    """Without a collection of garbage: there is no cycle through a function and its launchers."""
    gc.collect()
    gc.disable()
    try:
        function = make()
        bound = function.bind(GRID, BLOCK, 0, None, GOOD)
        state = weakref.ref(function._states[0])
        func = function.func
        del function, bound
        assert state() is not None
        del func
        assert state() is None
    finally:
        gc.enable()


class Sudden(BaseException):
    """No Exception, as what ends a program is none."""


ENDS = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, Sudden]
ERRORS = [RuntimeError, ValueError, TypeError, KeyError, MemoryError, OverflowError, RecursionError]


@pytest.mark.parametrize("turn", range(60))
def test_what_is_no_error_passes_through(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    """A KeyboardInterrupt that came while a tensor was read vanished, and the kernel launched."""
    lots = Lots("passes", turn)
    fake_torch(monkeypatch, False)
    function = Kernel("launch_probe").launch_probe_5
    function(GRID, BLOCK, 0, None, GOOD)
    kind, where = (
        lots.choice(ENDS + ERRORS),
        lots.choice(["data_ptr", "is_cuda", "dtype", "stream"]),
    )
    left = lots.choice([1, 2])  # how often it comes: a second reading may go well

    def come() -> None:
        nonlocal left
        if left:
            left -= 1
            raise kind("it came")

    class Reading(Tensor):
        def __getattribute__(self, name: str) -> Any:
            if name == where:
                come()
            return super().__getattribute__(name)

    def current_stream(device: int) -> int:
        come()
        return 0

    params = [X, Y, Z, 5, 0.5]
    if where == "stream":
        monkeypatch.setattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", current_stream)
        function = Kernel("launch_probe").launch_probe_5
        before = left
        left = 0
        function(GRID, BLOCK, 0, None, GOOD)
        left = before
    else:
        params[lots.randrange(3)] = Reading(0x7F0000004000)
    launches = fakecuda.launch_count
    if kind in ENDS:
        with pytest.raises(kind, match="it came"):
            function(GRID, BLOCK, 0, None, params)
        assert fakecuda.launch_count == launches, f"{lots}: {kind.__name__} in {where}"
    else:
        try:
            function(GRID, BLOCK, 0, None, params)
            launches += 1
        except (kind, KernelHubError):
            pass  # the Python launcher met it again
        assert fakecuda.launch_count == launches, f"{lots}: {kind.__name__} in {where}"
    left = 0
    function(GRID, BLOCK, 0, None, params)


@pytest.fixture
def reopened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library is opened anew within the test, and after it."""
    c_launcher._opened.cache_clear()
    yield
    monkeypatch.undo()
    c_launcher._opened.cache_clear()
    assert c_launcher.available()


@pytest.mark.parametrize("turn", range(20))
def test_a_library_with_another_digest_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reopened: None, turn: int
) -> None:
    lots = Lots("digest", turn)
    data = bytearray((PACKAGE / c_launcher.LIBRARY).read_bytes())
    match lots.randrange(3):
        case 0:
            data[lots.randrange(len(data))] ^= 1 << lots.randrange(8)
        case 1:
            del data[lots.randrange(len(data)) :]
        case 2:
            data += bytes([lots.randrange(256)])
    path = tmp_path / "launcher.so"
    path.write_bytes(data)
    monkeypatch.setattr(c_launcher, "LIBRARY", str(path))
    monkeypatch.setattr(ctypes, "PyDLL", lambda *_: pytest.fail(f"{lots}: it was opened"))
    with pytest.warns(RuntimeWarning, match="is not the file that was built") as warned:
        assert not c_launcher.available()
    assert not c_launcher.available() and len(warned) == 1
    assert hashlib.sha256(data).hexdigest() in c_launcher.why_not()


def test_the_shipped_library_is_the_one_that_is_vouched_for() -> None:
    data = (PACKAGE / c_launcher.LIBRARY).read_bytes()
    assert hashlib.sha256(data).hexdigest() == open_collection().manifest.files[c_launcher.LIBRARY]


@pytest.mark.parametrize("turn", range(30))
def test_a_python_of_another_layout_is_left_to_the_python_launcher(turn: int) -> None:
    """As one that puts an object's type elsewhere would look: some answer is wrong."""
    lots = Lots("layout", turn)
    assert c_launcher._knows_layout(c_launcher._opened()[0].kernel_hub_type_is)
    wrong = lots.randrange(15 * 5)
    asked = iter(range(15 * 5))

    def type_is(sample: object, number: int) -> int:
        right = type(sample) is (int, float, tuple, list, bytes)[number]
        return right != (next(asked) == wrong)

    assert not c_launcher._knows_layout(type_is), lots


def test_a_library_that_does_not_fit_says_why(
    monkeypatch: pytest.MonkeyPatch, reopened: None, fakecuda: FakeCuda
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(c_launcher, "_knows_layout", lambda _: False)
        assert "laid out" in c_launcher.why_not()
        function = Kernel("launch_probe").launch_probe_5
        function(GRID, BLOCK, 0, 0, [None, None, None, 1, 0.5])
        assert function.func is function._launch
    monkeypatch.setenv(c_launcher.VARIABLE, "0")
    assert c_launcher.why_not() == "KERNEL_HUB_NATIVE=0"
