"""Ctrl-C at any moment: nothing is left relaxed, pushed, loaded or allocated, and work goes on."""

from __future__ import annotations

import ctypes
import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import BLOCK, GRID, PROBE_CUBIN, make_stream
from lots import Lots

from kernel_hub import (
    DeviceArray,
    Event,
    Kernel,
    Stream,
    driver,
    empty_pinned,
    loaded_images,
    memory_stats,
    trim,
)
from kernel_hub.driver import apart

pytestmark = [
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals here"),
    pytest.mark.timeout(300, method="thread"),  # the other method's timer is the one used here
]
IMAGE = PROBE_CUBIN.read_bytes()
Interrupted = Callable[[float, Callable[[], Any]], bool]


@pytest.fixture
def interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Interrupted]:
    """`interrupted(seconds, work)`: whether KeyboardInterrupt ended `work`, that long after its
    start; one that comes later than its end is caught too."""

    def ring(*_: Any) -> None:
        raise KeyboardInterrupt

    # Ctrl-C in a finaliser is shown and lost; pytest would keep what it was about alive.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = signal.signal(signal.SIGALRM, ring)

    def run(seconds: float, work: Callable[[], Any]) -> bool:
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                work()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            return True
        return False

    yield run
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def settled() -> None:
    """What Ctrl-C left running is at its end, garbage is collected."""
    time.sleep(0.1)
    apart.wait()
    gc.collect()


def check_thread(fake: FakeCuda, lots: Lots) -> None:
    mode = ctypes.c_int(0)
    driver.get().call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert mode.value == 0, f"left in capture mode {mode.value}: {lots}"
    assert fake.context_depth <= 1, f"a context stayed pushed: {lots}"


def interrupt(
    fake: FakeCuda, interrupted: Interrupted, lots: Lots, work: Callable[[], Any], times: int,
    seconds: tuple[float, float], least: int,
) -> None:  # fmt: skip
    """`work` so many times, cut off after a time by lot; at least so often it was."""
    came = 0
    for _ in range(times):
        came += interrupted(lots.uniform(*seconds), work)
        check_thread(fake, lots)
    assert came > least
    settled()


@pytest.mark.parametrize("latency", [0, 20])
@pytest.mark.parametrize("turn", range(3))
def test_allocations_and_copies(
    fakecuda: FakeCuda,
    interrupted: Interrupted,
    latency: int,
    turn: int,
) -> None:
    lots = Lots("interrupted arrays", turn, latency)
    for call in ("cuMemAllocFromPoolAsync", "cuMemFreeAsync", "cuMemcpyHtoDAsync_v2"):
        fakecuda.set_latency(call, latency)
    host = np.arange(300, dtype=np.float32)
    stream = make_stream()
    DeviceArray.zeros(4).free()

    def work() -> None:
        for _ in range(lots.randrange(1, 5)):
            array = DeviceArray.from_numpy(host, stream=lots.choice([None, stream]))
            assert (array.to_numpy() == host).all()
            DeviceArray.zeros(100)
            if lots.random() < 0.5:
                array.free()
            memory_stats()

    interrupt(fakecuda, interrupted, lots, work, 800, (2e-6, 4e-4), 100)
    assert memory_stats().live_arrays == 0, lots
    assert fakecuda.live_allocations == 0, lots
    assert fakecuda.live("pools") == 1


@pytest.mark.parametrize("turn", range(3))
def test_dlpack(fakecuda: FakeCuda, interrupted: Interrupted, turn: int) -> None:
    lots = Lots("interrupted DLPack", turn)
    DeviceArray.zeros(4).free()

    def work() -> None:
        for _ in range(5):
            array = DeviceArray.from_dlpack(DeviceArray.zeros(64))
            assert array.shape == (64,)
            array.__dlpack__()

    interrupt(fakecuda, interrupted, lots, work, 800, (2e-6, 6e-4), 100)
    trim()
    assert fakecuda.live_allocations == 0, lots


@pytest.mark.parametrize("turn", range(3))
def test_streams_and_events(
    make_fakecuda: Callable[..., FakeCuda],
    interrupted: Interrupted,
    turn: int,
) -> None:
    fake = make_fakecuda(devices=2)
    lots = Lots("interrupted streams", turn)
    stays = Stream(device=1)

    def work() -> None:
        for _ in range(lots.randrange(1, 5)):
            device = lots.randrange(2)
            stream, event = Stream(device=device), Event(device=device)
            stream.record(event)
            if device == 1:
                stays.wait(stream)
            assert event.is_done
            if lots.random() < 0.5:
                stream.close()

    interrupt(fake, interrupted, lots, work, 1500, (2e-6, 4e-4), 200)
    trim()
    assert (fake.live("streams"), fake.live("events")) == (1, 0), lots


@pytest.mark.parametrize("turn", range(3))
def test_page_locked_memory(fakecuda: FakeCuda, interrupted: Interrupted, turn: int) -> None:
    lots = Lots("interrupted page-locked memory", turn)
    array = DeviceArray.zeros(64)

    def work() -> None:
        for _ in range(lots.randrange(1, 4)):
            host = empty_pinned(64)
            host[:] = 1
            array.copy_from(host, non_blocking=True)
            del host
            assert array.copy_to(empty_pinned(64), non_blocking=True)[-1] == 1

    interrupt(fakecuda, interrupted, lots, work, 1000, (2e-6, 8e-4), 100)
    trim()
    assert fakecuda.live_host_allocations == 0, lots
    assert fakecuda.live("events") <= 2, lots  # they are used again
    assert memory_stats().pinned_host_bytes == 0, lots


@pytest.mark.parametrize("turn", range(3))
def test_loads(fakecuda: FakeCuda, interrupted: Interrupted, turn: int) -> None:
    lots = Lots("interrupted loads", turn)
    for call in ("cuLibraryLoadData", "cuKernelGetFunction", "cuFuncLoad", "cuLibraryUnload"):
        fakecuda.set_latency(call, 30)
    params = [DeviceArray.zeros(8)] * 3 + [ctypes.c_int(5), ctypes.c_float(0.5)]

    def work() -> None:
        kernel = Kernel(IMAGE)
        kernel.launch_probe_5(GRID, BLOCK, 0, 0, params)
        if lots.random() < 0.3:
            kernel.unload()

    work()  # imports are Python's: 3.10 turns Ctrl-C in a class's body into a RuntimeError
    interrupt(fakecuda, interrupted, lots, work, 400, (5e-5, 3e-3), 50)
    kernel = Kernel(IMAGE)
    before = fakecuda.launch_count
    kernel.launch_probe_5(GRID, BLOCK, 0, 0, params)
    assert fakecuda.launch_count == before + 1
    assert [image.num_kernels for image in loaded_images()] == [1], lots
    del kernel
    trim()
    assert loaded_images() == [] and fakecuda.live("libraries") == 0, lots
    assert fakecuda.live("contexts") <= 1


def test_apart_gives_what_the_function_gives() -> None:
    assert apart.run(lambda a: a + 1, 2) == 3
    assert apart.run(threading.get_ident) != threading.get_ident()
    inner = apart.run(lambda: (threading.get_ident(), apart.run(threading.get_ident)))
    assert inner[0] == inner[1]
    with pytest.raises(ZeroDivisionError):
        apart.run(lambda: 1 / 0)


def test_an_interrupted_function_goes_on_to_its_end(
    interrupted: Interrupted,
) -> None:
    came, may_end, ended = (threading.Event() for _ in range(3))

    def ring(*_: Any) -> None:
        came.set()
        raise KeyboardInterrupt

    def work() -> None:
        assert main.ident is not None
        while not came.is_set():  # Python sees one that comes just before a wait after it alone
            signal.pthread_kill(main.ident, signal.SIGALRM)  # once it runs, however late that is
            came.wait(5)
        may_end.wait(60)
        ended.set()

    main = threading.main_thread()
    signal.signal(signal.SIGALRM, ring)
    assert interrupted(0, lambda: apart.run(work))
    assert came.is_set() and not ended.is_set()
    may_end.set()
    assert ended.wait(60)


def test_a_process_ends_after_any_ctrl_c() -> None:
    """Ctrl-C in threading.Thread.start() left threads that never began; exit waited for them."""
    code = f"""
import random, signal, sys, time
from kernel_hub.driver import apart
def ring(*_): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, ring)
sys.unraisablehook = lambda _: None
rng = random.Random({Lots("ctrl-c in a thread's start").randrange(10**9)})
came, began = 0, time.monotonic()
while (spent := time.monotonic() - began) < 2 or (came <= 100 and spent < 40):
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 2e-4))
            apart.run(int)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        came += 1
apart.wait()
deadline = time.monotonic() + 30
while len(sys._current_frames()) > 1 and time.monotonic() < deadline:
    time.sleep(0.01)
print(came, len(sys._current_frames()))
"""
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    came, threads = map(int, child.stdout.split())
    assert came > 100 and threads == 1, child.stderr
    assert not child.stderr


def test_a_process_that_ends_waits_for_what_ctrl_c_left() -> None:
    code = """
import signal, threading, time
from kernel_hub.driver import apart
def ring(*_): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, ring)
main = threading.get_ident()
apart.run(lambda: (signal.pthread_kill(main, signal.SIGALRM), time.sleep(0.5), print("whole")))
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert child.stdout == "whole\n" and "KeyboardInterrupt" in child.stderr
