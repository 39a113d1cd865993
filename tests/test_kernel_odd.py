"""Odd arguments of Kernel and its functions: accepted where they mean something, else refused."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import BLOCK, GRID, PROBE_CUBIN, arrays

from kernel_hub import Kernel, KernelFunction
from kernel_hub.errors import (
    CubinNotFoundError,
    CudaDriverError,
    KernelHubError,
    LaunchConfigError,
    ParamsError,
)


class Malformed:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (2,)}


@pytest.mark.parametrize("devices", [1, 2])
def test_shared_memory_has_two_names(make_fakecuda: Callable[..., FakeCuda], devices: int) -> None:
    fake = make_fakecuda(devices=devices)
    params: list[Any] = [None, None, None, 1, 0.5]
    for launch in (probe := Kernel("launch_probe").launch_probe_5, probe._launch):
        for size in (100, 0, 64 * 1024, np.int64(32), True):
            launch(1, 1, params=params, sharedMem=size)
            assert fake.launch().sharedMemBytes == size
            launch(1, 1, sharedMem=size, params=params, priority=1)
            assert (fake.launch().sharedMemBytes, fake.launch().attributes.keys()) == (size, {8})
            probe.bind(1, 1, params=params, sharedMem=size)()
            assert fake.launch().sharedMemBytes == size
        launch(1, 1, params=params)
        assert fake.launch().sharedMemBytes == 0
    bound = probe.bind(1, 1, sharedMem=80)  # without params: launched with them
    bound(params)
    assert fake.launch().sharedMemBytes == 80
    count = fake.launch_count
    for wrong, said in (
        (lambda f: f(1, 1, 0, None, params, sharedMem=0), "sharedMemBytes=0 is given too"),
        (lambda f: f(1, 1, sharedMemBytes=8, params=params, sharedMem=8), "=8 is given too"),
        (lambda f: f(1, 1, params=params, sharedMem=-1), "sharedMemBytes=-1 of launch_probe_5"),
        (lambda f: f(1, 1, params=params, sharedMem="8"), "sharedMemBytes='8' of launch_probe_5"),
        (lambda f: f(1, 1, params=params, sharedMem=None), "sharedMemBytes=None of launch_probe_5"),
    ):
        for launch in (probe, probe._launch, probe.bind):
            with pytest.raises(LaunchConfigError, match=said):
                wrong(launch)
    assert fake.launch_count == count


@pytest.mark.parametrize("blocking", ["0", "1"])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("before", [(1, 1), ([2], [32]), (np.int64(2), (1, 2)), ((3, 1, 1), [4])])
def test_no_geometry_is_never_the_one_before(
    make_fakecuda: Callable[..., FakeCuda],
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    before: Any,
    blocking: str,
) -> None:
    """What a launch recognises by identity is nothing that a caller can pass for no geometry."""
    monkeypatch.setenv("KERNEL_HUB_LAUNCH_BLOCKING", blocking)
    fake = make_fakecuda(devices=devices)
    params: list[Any] = [None, None, None, 1, 0.5]
    for launch in (probe := Kernel("launch_probe").launch_probe_5, probe._launch):
        for options in ({}, {"priority": 1}):
            for _ in range(2):
                launch(*before, 0, None, params, **options)
                count = fake.launch_count
                for wrong in ((None, None), (None, 1), (1, None), ((), ()), (NotImplemented,) * 2):
                    with pytest.raises(LaunchConfigError, match=r"(gridDim|blockDim)="):
                        launch(*wrong, 0, None, params, **options)
                for shared in (None, 0.0, -0.0, "", np.zeros(1), np.zeros(2), ()):
                    with pytest.raises(LaunchConfigError, match="sharedMemBytes="):
                        launch(*before, shared, None, params, **options)
                assert fake.launch_count == count
    with pytest.raises(LaunchConfigError, match="gridDim=None"):
        probe.bind(None, None, params=params)


def test_zero_is_a_priority_and_a_carveout(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    params = [None, None, None, 1, 0.5]
    probe(1, 1, 0, None, params, priority=0, carveout=0)
    assert fakecuda.launch().attributes.keys() == {8, 14}
    probe(2, 1, 0, None, params, cluster=np.array([2, 1, 1]))
    assert fakecuda.launch().attributes.keys() == {4}
    wrong: list[dict[str, Any]] = [
        {"cluster": 0}, {"cluster": 2.0}, {"cluster": [[1], 2]}, {"priority": 2**40},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(LaunchConfigError):
            probe(2, 1, 0, None, params, **options)


@pytest.mark.parametrize("devices", [1, 2])
def test_odd_arguments_are_refused_in_words(
    make_fakecuda: Callable[..., FakeCuda], devices: int
) -> None:
    fake = make_fakecuda(devices=devices)
    probe = Kernel("launch_probe").launch_probe_5
    for params in (
        5,
        {"a", "b"},
        [None, None, None, 1, 10**400],
        [Malformed(), None, None, 1, 0.5],
    ):
        with pytest.raises(ParamsError):
            probe(1, 1, 0, None, params)
        with pytest.raises(ParamsError):
            probe.bind(1, 1, 0, None, params)
    assert fake.launch_count == 0
    probe(1, 1, 0, None, iter([None, None, None, 1, 0.5]))
    for stream in (True, type("S", (), {"__cuda_stream__": lambda self: 7})()):
        with pytest.raises(LaunchConfigError, match="no stream"):
            probe(1, 1, 0, stream, [None, None, None, 1, 0.5])
    for grid in (b"ab", {1: 2}, "1"):
        with pytest.raises(LaunchConfigError):
            probe(grid, 1, 0, None, [None, None, None, 1, 0.5])


def test_odd_names_paths_and_signatures() -> None:
    with pytest.raises(ParamsError, match=r"function_names=\[3\]"):
        Kernel("launch_probe", [3])  # type: ignore[list-item]
    with pytest.raises(CubinNotFoundError, match="null"):
        Kernel(Path("a\0b.cubin"))
    with pytest.raises(ParamsError, match="signatures is a str"):
        Kernel(PROBE_CUBIN, signatures="float*")  # type: ignore[arg-type]
    text = "void launch_probe_5(float* out, float* x, float* y, int n, float scale);"
    declared = Kernel(PROBE_CUBIN, signatures={"launch_probe_5": text}).launch_probe_5
    assert declared.signature == text[5:-1]


def test_a_mangled_name_is_an_attribute() -> None:
    image = PROBE_CUBIN.read_bytes().replace(b"launch_probe_5", b"_Zaunch_probe5")
    kernel = Kernel(image)
    assert "_Zaunch_probe5" in dir(kernel)
    assert kernel._Zaunch_probe5 is kernel["_Zaunch_probe5"]


def test_unload_waits_for_loads_of_other_functions(fakecuda: FakeCuda) -> None:
    """A function's first load and an unload take their locks in one order."""
    kernel = Kernel("launch_probe")
    fakecuda.set_latency("cuLibraryLoadData", 200_000)
    jobs = (kernel.launch_probe_12.load, kernel.unload, kernel.launch_probe_5.load)
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_bound_launch_is_refused_once_its_image_is_unloaded(fakecuda: FakeCuda) -> None:
    kernel = Kernel("launch_probe")
    params = [*arrays(), 5, 0.5]
    bound = kernel.launch_probe_5.bind(GRID, BLOCK, 0, 0, params)
    bound()
    kernel.unload()
    with pytest.raises(LaunchConfigError, match="bind it again"):
        bound()
    kernel.launch_probe_5.bind(GRID, BLOCK, 0, 0, params)()
    assert fakecuda.launch_count == 2


def test_a_kernel_that_died_holds_no_image(fakecuda: FakeCuda) -> None:
    first, second = Kernel("launch_probe"), Kernel("launch_probe")
    first.load()
    second.load()
    del first
    gc.collect()
    second.unload()
    assert fakecuda.live("libraries") == 0


ODD: list[tuple[Callable[[Kernel], object], str]] = [
    (lambda k: k.launch_probe_5.occupancy(1, 1.5), r"sharedMemBytes=1\.5 .*an int, not float"),
    (lambda k: k.launch_probe_5.occupancy("1"), "blockDim='1' .*not str"),
    (lambda k: k.launch_probe_5.occupancy(1, device=0.0), r"device=0\.0 .*an int, not float"),
    (lambda k: k.launch_probe_5.attributes("0"), "device='0' of launch_probe_5.*not str"),
    (lambda k: k.launch_probe_5.load("0"), "device='0' .*an int, not str"),
    (lambda k: k.load([0]), r"device=\[0\] .*an int, not list"),
    (lambda k: k.get_global("x", device="0"), "device='0' .*an int, not str"),
    (lambda k: k.get_global(3), "name=3 of get_global: a str, not int"),
    (lambda k: Kernel("launch_probe", package=3), "package=3: a package's name, .*not int"),
    (lambda k: Kernel(3), "filename=3 is a int"),
    (lambda k: Kernel("launch_probe", 5), "function_names=5: a list of names, or None"),
]  # fmt: skip


@pytest.mark.parametrize("call, text", ODD, ids=[text for _, text in ODD])
def test_arguments_of_the_wrong_kind_are_named(
    fakecuda: FakeCuda, call: Callable[[Kernel], object], text: str
) -> None:
    with pytest.raises(KernelHubError, match=text):
        call(Kernel("launch_probe"))


MISSPELT = [
    ("flaot*", "float"), ("flaot", "float"), ("in", "int"), ("unit32_t", "uint32_t"),
    ("__haf*", "__half"), ("float**x, inn n", "int"), ("const Float* x", "float"),
    ("bfloat16*", "nv_bfloat16"), ("void", ""),
]  # fmt: skip


@pytest.mark.parametrize("text, nearest", MISSPELT, ids=[text for text, _ in MISSPELT])
def test_a_misspelt_type_is_refused_with_the_nearest_names(text: str, nearest: str) -> None:
    first = text.split(",")[-1]
    given = ["float*", "float*", "float*", "int", first]
    for signature in (given, ", ".join(given), dict(zip("abcde", given, strict=True))):
        with pytest.raises(ParamsError, match="no such type") as caught:
            Kernel(PROBE_CUBIN, signatures={"launch_probe_5": signature})
        if not (isinstance(signature, dict) and " " in first):
            assert nearest in str(caught.value).partition("nearest:")[2].partition(";")[0]
        assert "`struct …`" in str(caught.value)


def test_types_of_cuda_and_of_the_callers_own_are_taken() -> None:
    for own in ("struct Params*", "enum Mode *mode", "ns::Params*", "vec<float>*", "float4* x",
                "const __half2 *x", "void* x", "float** x", "cudaTextureObject_t*"):  # fmt: skip
        types = [own, "float*", "float*", "int", "float"]
        Kernel(PROBE_CUBIN, signatures={"launch_probe_5": types})


def test_a_load_relaxes_capture_once(fakecuda: FakeCuda) -> None:
    before = fakecuda.calls("cuThreadExchangeStreamCaptureMode")
    Kernel("launch_probe").launch_probe_5.load()
    assert fakecuda.calls("cuThreadExchangeStreamCaptureMode") - before == 2  # in, and out


def test_unload_goes_on_past_a_library_that_fails(make_fakecuda: Callable[..., FakeCuda]) -> None:
    fake = make_fakecuda(devices=3)
    for device, capability in enumerate([(8, 0), (8, 9), (9, 0)]):
        fake.set_capability(device, *capability)
    kernel = Kernel("launch_probe")
    for device in range(3):
        kernel.load(device)
    assert fake.live("libraries") == 3
    fake.fail("cuLibraryUnload", 999, count=2)
    with pytest.raises(CudaDriverError, match=r"(?s)cuLibraryUnload.*cuLibraryUnload") as caught:
        kernel.unload()
    assert caught.value.code == 999
    assert fake.calls("cuLibraryUnload") == 3
    assert fake.live("libraries") == 2
    kernel.load(2)  # and the kernel can be used again


def test_copies_of_what_has_a_kernel_have_the_same_one(fakecuda: FakeCuda) -> None:
    """As copies of a model do, for an average of its weights, say."""
    kernel = Kernel("launch_probe")
    probe = kernel.launch_probe_5
    model = {"kernel": kernel, "function": probe, "weights": [1.0, 2.0]}
    for copied in (copy.copy(model), copy.deepcopy(model)):
        assert copied == model and copied["kernel"] is kernel and copied["function"] is probe
    assert copy.copy(kernel) is kernel and copy.copy(probe) is probe


def test_a_grid_in_brackets_is_told_how_to_launch(fakecuda: FakeCuda) -> None:
    """Triton's and Numba's way."""
    probe = Kernel("launch_probe").launch_probe_5
    for grid in ((1,), (1, 256), lambda meta: (1,)):
        with pytest.raises(TypeError, match=r"launch_probe_5\(gridDim, blockDim, params="):
            probe[grid]
    for go_through in (iter, list, lambda f: 1 in f):
        with pytest.raises(TypeError, match=r"not iterable|not a container"):
            go_through(probe)
    assert np.asarray(probe).shape == ()
