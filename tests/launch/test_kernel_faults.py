"""Launches when things go wrong: drivers, contexts, threads, captures, forks, faults injected."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import BLOCK, GRID, PROBE_CUBIN, arrays, make_stream
from in_threads import in_threads

from kernel_hub import Kernel, KernelFunction, driver
from kernel_hub.driver import apart
from kernel_hub.driver.cuda_results import RESULTS, STICKY
from kernel_hub.errors import (
    CubinCorruptError,
    CudaDriverError,
    DriverNotFoundError,
    FunctionNotFoundError,
    LaunchConfigError,
)
from kernel_hub.launch import libraries


def test_digest_mismatch_is_found_at_load(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernel_hub.collection import manifest

    read = manifest.Collection.read
    path = PROBE_CUBIN
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    collection = manifest.open_collection()
    root = collection.root

    class Root:
        def joinpath(self, *parts: str) -> Any:
            made = root.joinpath(*parts)
            return (
                type("File", (), {"read_bytes": lambda self: bytes(damaged)})()
                if parts and parts[-1].endswith("launch_probe.cubin")
                else made
            )

    entry = collection.manifest.cubins["launch_probe"]["sm90"]
    changed = type(collection)(collection.package, Root(), collection.manifest)
    with pytest.raises(CubinCorruptError, match=entry.sha256[:12]):
        read(changed, entry)
    assert fakecuda.calls("cuLibraryLoadData") == 0


def test_a_load_that_was_begun_is_waited_for(fakecuda: FakeCuda) -> None:
    kernel = Kernel("launch_probe")
    functions = kernel.launch_probe_5, kernel.launch_probe_12
    fakecuda.set_latency("cuLibraryLoadData", 50_000)
    functions[0].load(0, functions[1], wait=False)
    functions[0](GRID, BLOCK, 0, None, [*arrays(), 1024, 0.5])
    functions[0].load(0, functions[1])
    assert fakecuda.calls("cuLibraryLoadData") == 1 and fakecuda.launch_count == 1
    assert all(0 in function._states for function in functions)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_load_whose_thread_is_late_is_waited_for(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """And where the system has no thread to give the launch loads, which waits for none."""
    started: list[Any] = []
    params = [*arrays(), 1024, 0.5]
    start = apart._thread.start_new_thread

    def late(work: Callable[[], None], args: tuple[()]) -> None:
        if not is_there:
            raise RuntimeError("can't start new thread")
        started.append(work)
        start(lambda: (time.sleep(0.1), work()), args)

    monkeypatch.setattr(apart, "_thread", SimpleNamespace(start_new_thread=late))
    kernel = Kernel("launch_probe")
    functions = kernel.launch_probe_5, kernel.launch_probe_12
    functions[0].load(0, functions[1], wait=False)
    functions[0](GRID, BLOCK, 0, None, params)
    assert fakecuda.launch_count == 1 and fakecuda.calls("cuLibraryLoadData") == 1
    assert not is_there or len(started) == 1
    functions[1].load(0)


def test_a_function_that_is_known_is_given_while_it_loads(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, real = Kernel("launch_probe"), libraries._load
    function = kernel["launch_probe_5"]
    loads, may_end, waited = threading.Event(), threading.Event(), []

    def load(*given: Any) -> int:
        loads.set()
        if not may_end.wait(60):
            waited.append("it waited for the load")
        return real(*given)

    monkeypatch.setattr(libraries, "_load", load)
    function.load(0, wait=False)
    assert loads.wait(60)
    assert kernel["launch_probe_5"] is function
    may_end.set()
    apart.wait()
    assert not waited and fakecuda.calls("cuLibraryLoadData") == 1


def test_a_load_that_was_begun_and_failed_is_said_by_the_launch(fakecuda: FakeCuda) -> None:
    function = Kernel("launch_probe").launch_probe_5
    fakecuda.fail("cuLibraryLoadData", 2, count=2)
    function.load(0, wait=False)
    apart.wait()
    with pytest.raises(CudaDriverError, match="loading kernel_hub's cubin 'launch_probe'"):
        function.load(0)
    function(GRID, BLOCK, 0, None, [*arrays(), 1024, 0.5])
    assert fakecuda.launch_count == 1


def test_an_old_driver_is_named(make_fakecuda: Callable[..., FakeCuda]) -> None:
    make_fakecuda(version=12080)
    with pytest.raises(DriverNotFoundError) as caught:
        Kernel("launch_probe").load()
    assert "13.0" in str(caught.value)
    assert "12.8" in str(caught.value)


def test_no_driver_and_no_device(
    monkeypatch: pytest.MonkeyPatch, make_fakecuda: Callable[..., FakeCuda]
) -> None:
    make_fakecuda().set_init_code(100)
    with pytest.raises(CudaDriverError, match="NO_DEVICE"):
        Kernel("launch_probe").load()
    make_fakecuda()
    monkeypatch.setenv(driver.LIBRARY_VARIABLE, "/nowhere/libcuda.so")
    with pytest.raises(DriverNotFoundError, match="/nowhere"):
        Kernel("launch_probe").load()
    with pytest.raises(CudaDriverError, match="device 7"):
        make_fakecuda()
        Kernel("launch_probe").load(7)


def test_a_fresh_thread_gets_a_context(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    params = [*arrays(), 5, 0.5]
    probe(GRID, BLOCK, 0, 0, params)
    errors: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(100):
                probe(GRID, BLOCK, 0, 0, params)
        except CudaDriverError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert fakecuda.launch_count == 101


def test_eight_threads_never_share_a_slot(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    seen: dict[int, list[int]] = {}
    lock = threading.Lock()

    def note(launch: Any, addresses: list[int]) -> None:
        value = ctypes.c_int.from_address(addresses[3]).value
        with lock:
            seen.setdefault(launch.thread, []).append(value)

    fakecuda.set_callback("launch_probe_5", note)
    fakecuda.record(False)
    params = arrays()
    start = threading.Barrier(8)

    def work(base: int) -> None:
        start.wait()
        for i in range(500):
            probe((1 + i % 3, 1, 1), BLOCK, 0, 0, [*params, base + i, 0.5])

    in_threads(*[partial(work, 1000 * n) for n in range(8)])
    assert sorted(map(tuple, seen.values())) == [
        tuple(range(1000 * n, 1000 * n + 500)) for n in range(8)
    ]


def test_one_load_however_many_threads_ask(fakecuda: FakeCuda) -> None:
    fakecuda.set_latency("cuLibraryLoadData", 20000)
    kernel = Kernel("launch_probe")
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        kernel.launch_probe_5.load()

    in_threads(*[work] * 8)
    assert fakecuda.calls("cuLibraryLoadData") == 1


LOADING = ["cuDevicePrimaryCtxRetain", "cuLibraryLoadData", "cuLibraryGetKernel",
           "cuKernelGetFunction", "cuFuncLoad", "cuFuncGetAttribute", "cuDeviceGetAttribute",
           "cuCtxPushCurrent_v2", "cuLaunchKernelEx"]  # fmt: skip


@pytest.mark.parametrize("call", LOADING)
@pytest.mark.parametrize("code", sorted(RESULTS))
def test_every_call_failing_with_every_error(fakecuda: FakeCuda, call: str, code: int) -> None:
    probe = Kernel("launch_probe").launch_probe_5
    params = [ctypes.c_void_p(1), ctypes.c_void_p(2), ctypes.c_void_p(3), 5, 0.5]
    driver.get()
    fakecuda.fail(call, code)
    if call == "cuLaunchKernelEx" and code in (201, 709, 400):
        # Taken for a missing context: set and tried again.
        probe(GRID, BLOCK, 0, 0, params)
        assert fakecuda.launch_count == 1
        return
    expected = (CudaDriverError, FunctionNotFoundError)
    with pytest.raises(expected) as caught:
        probe(GRID, BLOCK, 0, 0, params)
    if isinstance(caught.value, CudaDriverError):
        assert caught.value.code == code
        assert RESULTS[code][0] in str(caught.value)
        assert ("sticky" in str(caught.value)) == (code in STICKY)
    else:
        assert (call, code) == ("cuLibraryGetKernel", 500)
    assert fakecuda.launch_count == 0
    assert fakecuda.context_depth == 0
    probe(GRID, BLOCK, 0, 0, params)
    assert fakecuda.launch_count == 1
    assert fakecuda.live("libraries") == 1


def test_a_launch_error_says_what_was_asked_and_the_driver_log(
    fakecuda: FakeCuda, probe: KernelFunction
) -> None:
    probe.load()
    fakecuda.log("the driver's own words")
    fakecuda.fail("cuLaunchKernelEx", 701)
    with pytest.raises(CudaDriverError) as caught:
        probe(GRID, BLOCK, 77, 0, [*arrays(), 5, 0.5])
    error = caught.value
    assert (error.call, error.code, error.name) == (
        "cuLaunchKernelEx", 701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    )  # fmt: skip
    for part in ("launch_probe_5", "(4, 1, 1)", "(256, 1, 1)", "77", "1024 threads", "own words"):
        assert part in str(error)


def test_a_sticky_error_is_said_to_be_of_an_earlier_kernel(
    fakecuda: FakeCuda, probe: KernelFunction
) -> None:
    params = [*arrays(), 5, 0.5]
    probe(GRID, BLOCK, 0, 0, params)
    fakecuda.set_sticky(700)
    with pytest.raises(CudaDriverError, match="ran earlier"):
        probe(GRID, BLOCK, 0, 0, params)


def test_blocking_names_the_kernel_that_failed(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNEL_HUB_LAUNCH_BLOCKING", "1")
    probe = Kernel("launch_probe").launch_probe_5
    params = [*arrays(), 5, 0.5]
    probe(GRID, BLOCK, 0, 0, params)
    assert fakecuda.calls("cuStreamSynchronize") >= 1
    fakecuda.fail("cuStreamSynchronize", 700)
    with pytest.raises(CudaDriverError, match="this kernel is the one that failed"):
        probe(GRID, BLOCK, 0, 0, params)


def test_capture_needs_a_load_before(fakecuda: FakeCuda) -> None:
    stream = make_stream()
    params = [*arrays(), 5, 0.5]
    fakecuda.set_capture(stream)
    fakecuda.strict_capture()
    kernel = Kernel("launch_probe")
    with pytest.raises(LaunchConfigError, match=r"call \.load\(\)"):
        kernel.launch_probe_5(GRID, BLOCK, 0, stream, params)
    assert fakecuda.calls("cuLibraryLoadData") == 0
    fakecuda.set_capture(stream, 0)
    kernel.load()
    fakecuda.set_capture(stream)
    kernel.launch_probe_5(GRID, BLOCK, 0, stream, params)
    assert fakecuda.launch().stream == stream


@pytest.mark.slow
def test_two_thousand_load_and_unload_cycles_leave_nothing(fakecuda: FakeCuda) -> None:
    data = PROBE_CUBIN.read_bytes()
    kernel = Kernel(data, ["launch_probe_5"])
    params = [None, None, None, ctypes.c_int(1), ctypes.c_float(1)]
    fakecuda.record(False)
    for _ in range(2000):
        kernel.launch_probe_5(GRID, BLOCK, 0, 0, params)
        kernel.unload()
    assert fakecuda.live("libraries") == 0
    assert fakecuda.launch_count == 2000
    with Kernel("launch_probe") as held, Kernel("launch_probe") as other:
        held.load()
        other.load()
        assert fakecuda.live("libraries") == 1
        held.unload()
        assert fakecuda.live("libraries") == 1
    assert fakecuda.live("libraries") == 0


def _launch_in_child(queue: Any, function: KernelFunction, params: list[Any]) -> None:
    texts = []
    for call in (lambda: function(GRID, BLOCK, 0, 0, params), BOUND):
        try:
            call()
            texts.append("launched")
        except CudaDriverError as error:
            texts.append(f"{type(error).__name__}: {error}")
    queue.put(texts)


BOUND: Any = None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_launch_after_fork_says_so(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    global BOUND
    params: list[Any] = [None, None, None, 5, 0.5]
    probe(GRID, BLOCK, 0, 0, params)
    BOUND = probe.bind(GRID, BLOCK, 0, 0, params)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_launch_in_child, args=(queue, probe, params))
    child.start()
    texts = queue.get(timeout=30)
    child.join()
    assert len(texts) == 2
    for text in texts:
        assert text.startswith("CudaDriverError")
        assert "spawn" in text
    probe(GRID, BLOCK, 0, 0, params)
