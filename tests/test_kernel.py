"""Kernel and its functions against the stand-in driver: what reaches it, and what never does."""

from __future__ import annotations

import ctypes
import gc
import inspect
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import BLOCK, GRID, PROBE_CUBIN, arrays, make_stream

import kernel_hub
from kernel_hub import DeviceArray, Kernel, KernelFunction, driver
from kernel_hub.errors import (
    CubinCorruptError,
    CubinNotFoundError,
    FunctionNotFoundError,
    LaunchConfigError,
    ParamsError,
)


def test_construction_touches_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(driver.LIBRARY_VARIABLE, "/nowhere/libcuda.so")
    kernel = Kernel("launch_probe", ["launch_probe_5"])
    assert kernel.function_names == ["launch_probe_5"]
    assert "launch_probe_5" in dir(kernel)
    text = repr(kernel.launch_probe_5)
    assert "float* out, float* x, float* y, int num_elements, float scale" in text
    assert "registers" in text
    assert "1024 threads" in text
    assert "num_elements" in str(kernel.launch_probe_5.__doc__)
    assert kernel["launch_probe_5"] is kernel.launch_probe_5
    assert kernel.launch_probe_5.signature.startswith("launch_probe_5(float* out")
    assert list(inspect.signature(kernel.launch_probe_5).parameters) == [
        *("gridDim", "blockDim", "sharedMemBytes", "stream", "params"),
        *("cluster", "cooperative", "programmatic", "priority", "carveout", "sharedMem"),
    ]


def test_a_wrong_function_name_lists_what_is_there_nearest_first() -> None:
    with pytest.raises(FunctionNotFoundError) as caught:
        Kernel("launch_probe", ["launch_prob_12"])
    text = str(caught.value)
    assert text.index("launch_probe_12") < text.index("launch_probe_5")
    kernel = Kernel("launch_probe")
    assert getattr(kernel, "nothing", None) is None
    with pytest.raises(AttributeError):
        _ = kernel.nothing
    with pytest.raises(FunctionNotFoundError):
        _ = Kernel("launch_probe", ["launch_probe_5"]).launch_probe_12


def test_missing_files_and_names() -> None:
    with pytest.raises(CubinNotFoundError, match="launch_probe"):
        Kernel("launch_prob")
    with pytest.raises(CubinNotFoundError, match="no file"):
        Kernel(Path("/nowhere/x.cubin"))
    with pytest.raises(CubinNotFoundError, match="no file"):
        Kernel("/nowhere/x.cubin")
    with pytest.raises(CubinNotFoundError, match="folder"):
        Kernel(Path("/tmp"))
    with pytest.raises(CubinNotFoundError, match=r"from_source\(Path\('rope.cu'\)\).* has 'rope'$"):
        Kernel("rope.cu")
    with pytest.raises(TypeError, match="filename"):
        Kernel(7)
    assert Kernel("launch_probe.cubin").function_names == Kernel("launch_probe").function_names


@pytest.mark.parametrize(
    "image",
    [b"", b"\x7fELF", b"not an image at all" * 10, PROBE_CUBIN.read_bytes()[:700],
     b"\x7fELF\x02\x01\x01" + bytes(200)],
)  # fmt: skip
def test_images_that_are_none_are_refused_before_any_driver(image: bytes) -> None:
    with pytest.raises(CubinCorruptError):
        Kernel(image)


def test_what_reaches_the_driver(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    out, x, y = arrays()
    probe(gridDim=GRID, blockDim=256, sharedMemBytes=512, stream=0, params=[out, x, y, -7, 0.25])
    launch = fakecuda.launch()
    assert (launch.name, launch.gridDim, launch.blockDim) == ("launch_probe_5", GRID, BLOCK)
    assert (launch.sharedMemBytes, launch.stream, launch.device) == (512, 0, 0)
    assert launch.params == (
        *(struct.pack("<Q", array.ptr) for array in (out, x, y)),
        struct.pack("<i", -7),
        struct.pack("<f", 0.25),
    )
    assert launch.attributes == {}
    probe(1, 32, params={"scale": 1, "num_elements": np.int32(3), "out": out, "x": x, "y": None})
    assert fakecuda.launch().params == (
        struct.pack("<Q", out.ptr), struct.pack("<Q", x.ptr), bytes(8),
        struct.pack("<i", 3), struct.pack("<f", 1),
    )  # fmt: skip
    assert fakecuda.launch().gridDim == (1, 1, 1)


def test_geometry_follows_each_call_even_through_one_mutable_list(
    fakecuda: FakeCuda, probe: KernelFunction
) -> None:
    params = [*arrays(), 5, 0.5]
    grid = [1, 1, 1]
    for number in (1, 2, 3):
        grid[0] = number
        probe(grid, BLOCK, 0, 0, params)
        assert fakecuda.launch().gridDim == (number, 1, 1)
    for block in ((32, 1, 1), (64, 1, 1), 96):
        probe(GRID, block, 0, 0, params)
    assert [launch.blockDim[0] for launch in fakecuda.launches()][-3:] == [32, 64, 96]
    with pytest.raises(LaunchConfigError):
        probe((1.0, 1, 1), BLOCK, 0, 0, params)


def test_launch_attributes(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    params = [*arrays(), 5, 0.5]
    probe(4, 32, params=params, cluster=2, programmatic=True, priority=-1, carveout=50)
    launch = fakecuda.launch()
    assert [launch.attribute(4, i) for i in range(3)] == [2, 1, 1]
    assert launch.attribute(6) == 1
    assert launch.attribute(8) == 2**32 - 1
    assert launch.attribute(14) == 50
    probe(4, 32, params=params, cooperative=True)
    assert fakecuda.launch().attribute(2) == 1
    assert launch.params == fakecuda.launch().params
    probe(4, 32, params=params)
    assert fakecuda.launch().attributes == {}
    with pytest.raises(TypeError, match="colour"):
        probe(4, 32, params=params, colour=1)
    with pytest.raises(LaunchConfigError, match="fit on the GPU at once"):
        probe(10**6, 1024, params=params, cooperative=True)


def test_dynamic_shared_memory_is_opted_in_once_and_only_raised(
    fakecuda: FakeCuda, probe: KernelFunction
) -> None:
    params = [*arrays(), 5, 0.5]
    for shared in (49152, 65536, 50000, 100000, 65536):
        probe(GRID, BLOCK, shared, 0, params)
        assert fakecuda.launch().sharedMemBytes == shared
    assert fakecuda.calls("cuFuncSetAttribute") == 2
    with pytest.raises(LaunchConfigError, match="232448"):
        probe(GRID, BLOCK, 232449, 0, params)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p: p[:4], "too few params: got 4"),
        (lambda p: [*p, 1], "too many params: got 6"),
        (lambda p: [*p[:3], 2**31, 0.5], "range"),
        (lambda p: [*p[:3], 0.5, 0.5], "params[3] (num_elements)"),
        (lambda p: [*p[:3], 3, 1e300], "overflows"),
        (lambda p: [*p[:3], np.int64(3), 0.5], "8 bytes"),
        (lambda p: [0x7F00, *p[1:]], "c_void_p"),
        (lambda p: [np.zeros(4, np.float32), *p[1:]], "CPU"),
        (lambda p: [DeviceArray.zeros(4, "fp16"), *p[1:]], "fp16"),
        (lambda p: "abcde", "not a list"),
        (lambda p: 5, "not a list"),
        (lambda p: {"out": p[0]}, "missing x"),
    ],
)
def test_wrong_params_never_reach_the_driver(
    fakecuda: FakeCuda, probe: KernelFunction, change: Callable[[Any], Any], says: str
) -> None:
    params = [*arrays(), 5, 0.5]
    probe(GRID, BLOCK, 0, 0, params)
    probe(GRID, BLOCK, 0, 0, params)
    before = fakecuda.calls("cuLaunchKernelEx")
    with pytest.raises(ParamsError) as caught:
        probe(GRID, BLOCK, 0, 0, change(params))
    assert says in str(caught.value)
    assert fakecuda.calls("cuLaunchKernelEx") == before
    probe(GRID, BLOCK, 0, 0, params)
    assert fakecuda.launch_count == 3


def test_a_freed_array_is_refused(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    out, x, y = arrays()
    y.free()
    with pytest.raises(ParamsError, match="freed"):
        probe(GRID, BLOCK, 0, 0, [out, x, y, 1, 0.5])
    assert fakecuda.launch_count == 0


@pytest.mark.parametrize("stream", ["abc", -1, 1.5, object(), 2**64])
def test_what_is_no_stream(fakecuda: FakeCuda, probe: KernelFunction, stream: Any) -> None:
    with pytest.raises(LaunchConfigError, match="stream"):
        probe(GRID, BLOCK, 0, stream, [*arrays(), 1, 0.5])
    assert fakecuda.launch_count == 0


def test_every_kind_of_stream_object(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    number = make_stream()

    class Torch:
        cuda_stream, device_index = number, 0

    class Protocol:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, number)

    class Ctypes:
        _as_parameter_ = ctypes.c_void_p(number)

    class CuPy:
        ptr = number

    streams: list[Any] = [number, Torch(), Protocol(), Ctypes(), CuPy(), ctypes.c_void_p(number)]
    for stream in streams:
        probe(GRID, BLOCK, 0, stream, [*arrays(), 1, 0.5])
        assert fakecuda.launch().stream == number


def test_streams_of_another_device_and_params_of_two(
    make_fakecuda: Callable[..., FakeCuda],
) -> None:
    fake = make_fakecuda(devices=2)
    probe = Kernel("launch_probe").launch_probe_5
    on = [[DeviceArray.zeros(1024, "fp32", device=d) for _ in range(3)] for d in (0, 1)]
    for device in (1, 0, 1):
        probe(GRID, BLOCK, 0, 0, [*on[device], 1, 0.5])
        assert fake.launch().device == device
    assert fake.calls("cuLibraryLoadData") == 1

    class Stream:
        cuda_stream, device_index = 0x5000, 0

    with pytest.raises(LaunchConfigError, match="device 0, the params are on device 1"):
        probe(GRID, BLOCK, 0, Stream(), [*on[1], 1, 0.5])
    with pytest.raises(ParamsError, match=r"params\[1\].*device 1"):
        probe(GRID, BLOCK, 0, 0, [on[0][0], on[1][1], on[0][2], 1, 0.5])
    bound = probe.bind(GRID, BLOCK, 0, 0, [*on[1], 1, 0.5])
    bound()
    assert fake.launch().device == 1
    assert fake.context_depth == 0


def test_each_gpu_takes_its_own_cubin(make_fakecuda: Callable[..., FakeCuda]) -> None:
    fake = make_fakecuda(devices=2)
    fake.set_capability(0, 8, 6)
    probe = Kernel("launch_probe").launch_probe_5
    for device in (0, 1):
        params = [DeviceArray.zeros(1024, "fp32", device=device) for _ in range(3)]
        probe(GRID, BLOCK, 0, 0, [*params, 1, 0.5])
    assert fake.calls("cuLibraryLoadData") == 2
    assert fake.launch_count == 2


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (12, 0)])
def test_a_gpu_we_ship_nothing_for(
    make_fakecuda: Callable[..., FakeCuda], capability: tuple[int, int]
) -> None:
    fake = make_fakecuda(capability=capability)
    with pytest.raises(CubinNotFoundError) as caught:
        Kernel("launch_probe").launch_probe_5(GRID, BLOCK, 0, 0, [None, None, None, 1, 0.5])
    assert "sm80" in str(caught.value)
    assert "./build_cubins.sh --arch" in str(caught.value)
    assert fake.calls("cuLibraryLoadData") == 0


def test_a_foreign_cubin_of_another_arch(make_fakecuda: Callable[..., FakeCuda]) -> None:
    fake = make_fakecuda(capability=(8, 0))
    with pytest.raises(CubinNotFoundError, match="sm_90"):
        Kernel(PROBE_CUBIN).launch_probe_5.load()
    assert fake.calls("cuLibraryLoadData") == 0


def test_a_foreign_cubin_refuses_bare_numbers_until_they_are_declared(fakecuda: FakeCuda) -> None:
    data = PROBE_CUBIN.read_bytes()
    params = [*arrays(), 5, 0.5]
    with pytest.raises(ParamsError, match="signatures"):
        Kernel(data).launch_probe_5(GRID, BLOCK, 0, 0, params)
    exact = [*params[:3], ctypes.c_int(5), np.float32(0.5)]
    Kernel(data).launch_probe_5(GRID, BLOCK, 0, 0, exact)
    by_hand = fakecuda.launch().params
    for signature in (
        ["float*", "const float*", "float*", "int", "float"],
        "float* out, const float* x, const float* y, int n, float scale",
        {"out": "float*", "x": "float*", "y": "float*", "n": "int", "scale": "float"},
    ):
        kernel = Kernel(data, signatures={"launch_probe_5": signature})
        kernel.launch_probe_5(GRID, BLOCK, 0, 0, params)
        assert fakecuda.launch().params == by_hand
    kernel.launch_probe_5(
        GRID, BLOCK, 0, 0, dict(zip(("out", "x", "y", "n", "scale"), params, strict=True))
    )
    with pytest.raises(ParamsError, match="declares 1"):
        Kernel(data, signatures={"launch_probe_5": ["int"]})
    with pytest.raises(ParamsError, match="8 bytes"):
        Kernel(data, signatures={"launch_probe_5": ["int"] * 5})
    with pytest.raises(FunctionNotFoundError):
        Kernel(data, signatures={"nothing": ["int"]})


def test_bound_launches(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    params = [*arrays(), 5, 0.5]
    bound = probe.bind(GRID, BLOCK, 64, 0, params)
    bound()  # this thread's first launch also sets its context
    calls = fakecuda.all_calls
    bound()
    bound()
    assert fakecuda.all_calls == calls + 2
    assert fakecuda.launch().params[3] == struct.pack("<i", 5)
    bound([*params[:3], 6, 0.5])
    assert fakecuda.launch().params[3] == struct.pack("<i", 6)
    assert fakecuda.launch().sharedMemBytes == 64
    bound(params={"out": None, "x": None, "y": None, "num_elements": 7, "scale": 1.0})
    bound()
    assert fakecuda.launch().params[3] == struct.pack("<i", 5)
    later = probe.bind(GRID, BLOCK)
    with pytest.raises(ParamsError, match="bound without params"):
        later()
    later(params)
    assert fakecuda.launch().gridDim == GRID
    clustered = probe.bind(GRID, BLOCK, 0, 0, params, cluster=2)
    clustered()
    assert fakecuda.launch().attribute(4) == 2
    for wrong in (params[:2], [*params[:3], 2**31, 0.5]):
        with pytest.raises(ParamsError):
            probe.bind(GRID, BLOCK, 0, 0, wrong)
    with pytest.raises(LaunchConfigError):
        probe.bind(0, BLOCK, 0, 0, params)
    with pytest.raises(TypeError, match="colour"):
        probe.bind(GRID, BLOCK, 0, 0, params, colour=1)


def test_a_bound_launch_keeps_its_arrays_alive(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    bound = probe.bind(GRID, BLOCK, 0, 0, [*arrays(), 5, 0.5])
    gc.collect()
    assert fakecuda.live_allocations == 3
    bound()
    del bound
    gc.collect()
    assert fakecuda.live_allocations == 0


def test_attributes_and_occupancy(fakecuda: FakeCuda, probe: KernelFunction) -> None:
    found = probe.attributes()
    assert found["max_threads"] == 1024
    assert found["max_dynamic_shared_bytes"] == 232448
    assert probe.occupancy(256) >= 1
    with pytest.raises(LaunchConfigError):
        probe.occupancy(2048)
    with pytest.raises(LaunchConfigError):
        probe.occupancy(256, 10**6)


def test_pickling_is_refused_with_advice(probe: KernelFunction) -> None:
    import pickle

    for handle in (probe, Kernel("launch_probe")):
        with pytest.raises(TypeError, match="make the Kernel in each process"):
            pickle.dumps(handle)


def test_globals(fakecuda: FakeCuda) -> None:
    kernel = Kernel("launch_probe")
    with pytest.raises(FunctionNotFoundError, match="no variable"):
        kernel.get_global("nothing_of_that_name")


def test_the_package_exports_what_it_says() -> None:
    for name in kernel_hub.__all__:
        if name != "ops":  # needs torch
            assert getattr(kernel_hub, name) is not None
    with pytest.raises(AttributeError):
        _ = kernel_hub.nothing
    assert "libcuda" not in sys.modules


def test_documented(probe: KernelFunction) -> None:
    """A function with what it takes, a class of functions without."""
    text = KernelFunction.__doc__
    assert text and text.startswith("One function of a Kernel")
    assert probe.__doc__ == f"{probe.spec.describe()}\n\n{text}"

    class Other(KernelFunction):
        """Another."""

    assert Other.__doc__ == "Another."
