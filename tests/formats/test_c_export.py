"""Kernels as C sources on the stand-in driver: they launch what was asked, from any thread."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exported import COMPILERS, Dim3, changed_probe, shared_library
from fakecuda import FakeCuda
from in_threads import in_threads

from kernel_hub import driver
from kernel_hub.collection.manifest import open_collection
from kernel_hub.errors import FunctionNotFoundError, ParamsError
from kernel_hub.formats import c_export

NAME = "launch_probe"
NO_BINARY, NOT_FOUND = 209, 500
COOPERATIVE = 2  # the launch attribute
RMS_NORM = "rms_norm_bf16_flat_vec1"


@pytest.fixture(params=COMPILERS)
def library(request: Any, tmp_path: Path, context: FakeCuda) -> ctypes.CDLL:
    """The exported launch_probe, compiled and bound to the stand-in."""
    c_export.export([NAME], tmp_path)
    return ctypes.CDLL(str(shared_library(tmp_path, NAME, request.param, context.path)))


def launch_5(library: ctypes.CDLL, shared_bytes: int = 0) -> int:
    addresses = [ctypes.c_uint64(address) for address in (0x1000, 0x2000, 0x3000)]
    return int(
        library.launch_probe_5(
            ctypes.c_void_p(0), Dim3(4, 2, 1), Dim3(64, 1, 1), ctypes.c_uint(shared_bytes),
            *addresses, ctypes.c_int(7), ctypes.c_float(2.5),
        )
    )  # fmt: skip


def test_a_launch_is_what_was_asked_for(library: ctypes.CDLL, context: FakeCuda) -> None:
    assert launch_5(library) == 0
    launch = context.launch()
    assert (launch.name, launch.gridDim, launch.blockDim) == (
        "launch_probe_5",
        (4, 2, 1),
        (64, 1, 1),
    )
    assert launch.params == tuple(
        [address.to_bytes(8, "little") for address in (0x1000, 0x2000, 0x3000)]
        + [(7).to_bytes(4, "little"), struct.pack("<f", 2.5)]
    )
    assert not launch.attributes
    before = context.calls("cuLibraryLoadData")
    assert launch_5(library) == 0
    assert context.calls("cuLibraryLoadData") == before == 1


def test_large_shared_memory_is_opted_in_once(library: ctypes.CDLL, context: FakeCuda) -> None:
    for shared_bytes in (100 * 1024, 200 * 1024, 60 * 1024):
        assert launch_5(library, shared_bytes) == 0
        assert context.launch().sharedMemBytes == shared_bytes
    assert context.calls("cuKernelSetAttribute") == 1
    assert launch_5(library, 400 * 1024) == 1
    library.launch_probe_unload()
    assert launch_5(library, 100 * 1024) == 0
    assert context.calls("cuKernelSetAttribute") == 2


def test_static_shared_memory_counts(tmp_path: Path, context: FakeCuda) -> None:
    """48 KiB a block without an opt-in are of both kinds together."""
    c_export.export(["rms_norm"], tmp_path, archs=["sm90"])
    library = ctypes.CDLL(str(shared_library(tmp_path, "rms_norm", "c", context.path)))
    function = open_collection("kernel_hub").manifest.cubins["rms_norm"]["sm90"].functions[RMS_NORM]
    assert function.static_shared_bytes > 0
    null, zero, real = ctypes.c_uint64(0), ctypes.c_int(0), ctypes.c_float(0)
    for shared_bytes, calls in ((48 * 1024 - function.static_shared_bytes, 0), (48 * 1024, 1)):
        given = (ctypes.c_void_p(0), Dim3(1, 1, 1), Dim3(32, 1, 1), ctypes.c_uint(shared_bytes))
        assert library[RMS_NORM](*given, null, null, null, zero, zero, real, real) == 0
        assert context.calls("cuKernelSetAttribute") == calls


@pytest.mark.parametrize("library", ["c"], indirect=True)
def test_the_drivers_handle(library: ctypes.CDLL, context: FakeCuda) -> None:
    kernel = ctypes.c_void_p()
    assert library.launch_probe_get(b"launch_probe_6", ctypes.byref(kernel)) == NOT_FOUND
    assert library.launch_probe_get(b"launch_probe_5", ctypes.byref(kernel)) == 0
    name = ctypes.c_char_p()
    driver.get().call("cuKernelGetName", ctypes.byref(name), kernel)
    assert name.value == b"launch_probe_5"
    assert context.calls("cuKernelSetAttribute") == 1


def test_gpus_of_two_kinds(tmp_path: Path, make_fakecuda: Callable[..., FakeCuda]) -> None:
    """Each runs the nearest image, each loaded once."""
    fake = make_fakecuda(devices=3, capability=(8, 6))
    fake.set_capability(1, 9, 0)
    fake.set_capability(2, 8, 9)
    c_export.export([NAME], tmp_path)
    library = ctypes.CDLL(str(shared_library(tmp_path, NAME, "c", fake.path)))
    runtime = driver.get()
    for _ in range(2):
        for device in range(3):
            with runtime.on_device(device):
                assert launch_5(library, 90 * 1024) == 0
                assert fake.launch().device == device
    assert fake.live("libraries") == fake.calls("cuLibraryLoadData") == 3
    assert fake.calls("cuKernelSetAttribute") == 3
    assert library.launch_probe_unload() == 0
    assert fake.live("libraries") == 0


def test_a_function_that_the_nearest_image_lacks(
    tmp_path: Path, make_fakecuda: Callable[..., FakeCuda]
) -> None:
    """It runs from the next one that the GPU takes; elsewhere there is no binary for it."""
    kept = ["launch_probe_12"]
    collection = changed_probe(
        lambda arch, functions: {n: functions[n] for n in kept} if arch == "sm89" else functions
    )
    fake = make_fakecuda(capability=(8, 9))
    for path, text in c_export.render(collection, NAME).items():
        (tmp_path / path).write_text(text)
    library = ctypes.CDLL(str(shared_library(tmp_path, NAME, "c", fake.path)))
    with driver.get().on_device(0):
        assert library.launch_probe_load() == 0
        assert fake.live("libraries") == 2
        assert launch_5(library) == 0
        fake.set_capability(0, 10, 0)
        assert launch_5(library) == NO_BINARY
    header = (tmp_path / f"{NAME}.h").read_text()
    comment = header[: header.index("CUresult launch_probe_5(")].rpartition("/*")[2]
    assert "sm89: not built." in comment


def test_what_a_function_needs_of_a_launch(tmp_path: Path, context: FakeCuda) -> None:
    needs: dict[str, Any] = {
        "cooperative": True,
        "required_block": (64, 1, 1),
        "cluster": (2, 1, 1),
    }
    collection = changed_probe(
        lambda _, functions: {n: f._replace(**needs) for n, f in functions.items()}
    )
    for path, text in c_export.render(collection, NAME).items():
        (tmp_path / path).write_text(text)
    library = ctypes.CDLL(str(shared_library(tmp_path, NAME, "c", context.path)))
    assert launch_5(library) == 0
    assert context.launch().attributes.keys() == {COOPERATIVE}
    assert context.launch().attribute(COOPERATIVE) == 1
    assert (
        "/* Exactly 64 x 1 x 1 threads a block; clusters of 2 x 1 x 1 blocks: the grid is a "
        "multiple; a cooperative launch: no more blocks than the GPU holds at once. */"
    ) in (tmp_path / f"{NAME}.h").read_text()


@pytest.mark.parametrize(("capability", "code"), [((7, 5), NO_BINARY), ((10, 0), NO_BINARY)])
def test_a_gpu_without_an_image(
    library: ctypes.CDLL, context: FakeCuda, capability: tuple[int, int], code: int
) -> None:
    context.set_capability(0, *capability)
    assert (launch_5(library), library.launch_probe_load()) == (code, code)
    assert context.launch_count == 0


def test_unload_and_load_again(library: ctypes.CDLL, context: FakeCuda) -> None:
    assert library.launch_probe_load() == 0
    assert context.live("libraries") == 1
    assert library.launch_probe_unload() == 0
    assert context.live("libraries") == 0
    assert launch_5(library) == 0
    assert context.calls("cuLibraryLoadData") == 2


def test_a_failed_load_is_returned_and_tried_again(library: ctypes.CDLL, context: FakeCuda) -> None:
    context.fail("cuLibraryGetKernel", 500)
    assert launch_5(library) == 500
    assert (context.live("libraries"), context.launch_count) == (0, 0)
    assert launch_5(library) == 0


def test_threads_load_once(library: ctypes.CDLL, context: FakeCuda) -> None:
    start = threading.Barrier(8)
    codes: list[int] = []

    def work() -> None:
        with driver.get().on_device(0):
            start.wait()
            codes.extend(launch_5(library) for _ in range(50))

    in_threads(*[work] * 8)
    assert set(codes) == {0}
    assert len(codes) == context.launch_count == 400
    assert context.calls("cuLibraryLoadData") == 1


@pytest.mark.parametrize("library", ["c"], indirect=True)
def test_unloading_while_others_launch(library: ctypes.CDLL, context: FakeCuda) -> None:
    """No launch meets an unloaded image, and nobody waits for ever."""
    context.set_latency("cuLaunchKernelEx", 20)
    codes: set[int] = set()
    unloads: list[int] = []
    done = threading.Event()

    def launch() -> None:
        with driver.get().on_device(0):
            while not done.is_set():
                codes.add(launch_5(library))

    threads = [threading.Thread(target=launch) for _ in range(6)]
    for thread in threads:
        thread.start()
    # On a busy machine a hundred may pass before a thread loads again.
    until = time.monotonic() + 60
    while len(unloads) < 100 or context.calls("cuLibraryLoadData") < 10:
        unloads.append(library.launch_probe_unload())
        if time.monotonic() > until:
            break
    done.set()
    for thread in threads:
        thread.join()
    assert codes == {0}
    assert set(unloads) == {0}
    assert context.live("libraries") <= 1
    assert context.calls("cuLibraryLoadData") >= 10


def test_a_prefix_keeps_names_apart(tmp_path: Path, context: FakeCuda) -> None:
    c_export.export([NAME], tmp_path, prefix="my_")
    library = ctypes.CDLL(str(shared_library(tmp_path, f"my_{NAME}", "c", context.path)))
    assert library.my_launch_probe_load() == 0
    given = [ctypes.c_uint64(0)] * 3
    code = library.my_launch_probe_5(
        ctypes.c_void_p(0), Dim3(1, 1, 1), Dim3(1, 1, 1), ctypes.c_uint(0),
        *given, ctypes.c_int(0), ctypes.c_float(0),
    )  # fmt: skip
    assert (code, context.launch().name) == (0, "launch_probe_5")
    with pytest.raises(FunctionNotFoundError, match=r"both have a function .*with a prefix"):
        c_export.export(["batched_matmul", "batched_matmul_sm90"], tmp_path / "two")
    with pytest.raises(ParamsError, match="prefix='my-' is put before names in C"):
        c_export.export([NAME], tmp_path / "two", prefix="my-")
    assert not (tmp_path / "two").exists()
