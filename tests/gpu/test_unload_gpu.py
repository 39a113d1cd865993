"""Images that leave a real driver: work in flight, captures elsewhere, graphs, memory."""

from __future__ import annotations

import gc
import threading
import time
from ctypes import byref, c_size_t, c_void_p
from typing import Any

import pytest
from skips import alone

from kernel_hub import DeviceArray, Kernel, driver, loaded_images
from kernel_hub.arrays.device_array import trim
from kernel_hub.launch import libraries

pytest.importorskip("cuda.core", reason="from_source needs cuda-core")
SOURCE = """
extern "C" __global__ void slow_add(int* out, long long cycles, int add) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    atomicAdd(out, add);
}
// %d
"""
CYCLES = 1_000_000_000  # half a second and more
SIGNATURES = {"slow_add": ["int*", "long long", "int"]}


def kernel(number: int, **options: Any) -> Kernel:
    return Kernel.from_source(SOURCE % number, cache=False, signatures=SIGNATURES, **options)


def stream_of(non_blocking: bool) -> int:
    handle = c_void_p()
    driver.get().run(0, ("cuStreamCreate", byref(handle), int(non_blocking)))
    return handle.value or 0


@pytest.fixture
def out() -> Any:
    array = DeviceArray.zeros(1, "int32")
    yield array
    array.free()


def value(array: DeviceArray) -> int:
    return int(array.to_numpy()[0])


@pytest.mark.parametrize("where", ["legacy", "blocking stream", "non-blocking stream"])
def test_whether_cu_library_unload_waits(
    out: DeviceArray, where: str, record_property: Any
) -> None:
    """The driver's own answer, without our wait: printed, since the design is safe either way on
    the legacy stream, and `keep=False` relies on it elsewhere."""
    stream = 0 if where == "legacy" else stream_of(where == "non-blocking stream")
    made = kernel(1, keep=False)
    made.slow_add(1, 1, 0, stream, [out, 1, 1])
    driver.get().run(0, ("cuStreamSynchronize", stream))
    ((_, held),) = made._loader._held.items()
    made.slow_add(1, 1, 0, stream, [out, CYCLES, 10])
    started = time.perf_counter()
    driver.get().run(0, ("cuLibraryUnload", held.library.handle))
    took = time.perf_counter() - started
    code = driver.get().within(0, ("cuStreamSynchronize", stream))
    rest = time.perf_counter() - started - took
    print(f"\ncuLibraryUnload, work on the {where}: returned in {took * 1e3:.1f} ms, the work went "
          f"on for {rest * 1e3:.1f} ms; then {code}")  # fmt: skip
    record_property("unload_ms", took * 1e3)
    libraries._libraries.pop(held.library.key, None)  # it is gone already
    made._loader._held.clear()
    assert code == ("", 0)
    assert value(out) == 11
    assert took > 0.1, f"the driver does not wait for work on the {where}: keep=False needs a wait"


def test_a_dropped_kernel_in_flight(out: DeviceArray) -> None:
    def of_sources() -> int:
        return len([image for image in loaded_images() if "source" in image.label])

    held = of_sources()  # of other tests: a captured graph may hold them
    for number in range(5):
        made = kernel(number)
        made.slow_add(1, 1, 0, 0, [out, CYCLES // 5, 1])
        del made  # the next from_source loads, and so sweeps
    assert of_sources() <= held + 2
    trim()
    assert of_sources() <= held
    assert value(out) == 5


def test_a_dropped_kernel_in_flight_on_a_stream(out: DeviceArray) -> None:
    stream = stream_of(non_blocking=True)
    driver.get().run(0, ("cuStreamSynchronize", 0))
    for number in range(5):
        made = kernel(number, keep=False)
        made.slow_add(1, 1, 0, stream, [out, CYCLES // 5, 1])
        del made
    trim()
    driver.get().run(0, ("cuStreamSynchronize", stream))
    assert value(out) == 5


def test_a_captured_kernel_outlives_its_kernel() -> None:
    torch = pytest.importorskip("torch")
    made = kernel(77)
    made.slow_add.load()
    array = torch.zeros(1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.slow_add(1, 1, 0, None, [array, 1, 3])
    del made
    gc.collect()
    kernel(78).slow_add.load()
    trim()
    assert any("captured graph" in image.why for image in loaded_images())
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert array.item() == 9


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_sweeping_does_not_end_a_capture_elsewhere(mode: str) -> None:
    torch = pytest.importorskip("torch")
    for number in range(3):
        kernel(number).slow_add.load()
    array = torch.zeros(1, dtype=torch.int32, device="cuda")
    held = kernel(9)
    held.slow_add.load()
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            kernel(10).slow_add.load()
            trim()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        held.slow_add(1, 1, 0, None, [array, 1, 1])
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        held.slow_add(1, 1, 0, None, [array, 1, 1])
    graph.replay()
    torch.cuda.synchronize()
    assert not failures and array.item() == 2
    trim()


@alone
def test_device_memory_after_five_hundred_kernels(out: DeviceArray) -> None:
    def free_bytes() -> int:
        free, total = c_size_t(), c_size_t()
        driver.get().run(0, ("cuMemGetInfo_v2", byref(free), byref(total)))
        return free.value

    kernel(999).slow_add(1, 1, 0, 0, [out, 1, 1])
    trim()
    before = free_bytes()
    lowest = before
    for number in range(500):
        one = kernel(1000 + number)
        one.slow_add(1, 1, 0, 0, [out, 1, 1])
        del one
        lowest = min(lowest, free_bytes())
    trim()
    after = free_bytes()
    print(f"\nfree memory: {before:,} before 500 kernels, {lowest:,} at least, {after:,} after")
    assert value(out) == 501
    assert before - after < 8 << 20 and before - lowest < 32 << 20
