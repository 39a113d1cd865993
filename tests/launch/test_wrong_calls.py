"""Launches, arrays and images as people who come from elsewhere write them first: what was asked,
what was found, what to do."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda

from kernel_hub import DeviceArray, Event, Kernel, KernelFunction, Stream
from kernel_hub.errors import (
    CubinCorruptError,
    CubinNotFoundError,
    CudaDriverError,
    LaunchConfigError,
    ParamsError,
    TensorError,
)

CUDA = 'extern "C" __global__ void f(float* x) { x[0] = 1; }'


@pytest.fixture
def f(fakecuda: FakeCuda) -> KernelFunction:
    return Kernel("launch_probe").launch_probe_5


@pytest.fixture
def out(f: KernelFunction) -> tuple[Any, ...]:
    return (*(DeviceArray.zeros(1024) for _ in range(3)), 1024, 2.0)


@pytest.mark.parametrize("launched", [False, True], ids=["first", "later"])
def test_arguments_in_the_order_of_cupy(
    f: KernelFunction, out: tuple[Any, ...], launched: bool
) -> None:
    if launched:
        f(4, 256, 0, None, out)
    ways: tuple[Callable[[], object], ...] = (
        lambda: f((4,), (256,), out),
        lambda: f((4,), (256,), list(out)),
        lambda: f.bind((4,), (256,), out),
    )
    for way in ways:
        with pytest.raises(ParamsError) as caught:
            way()
        said = str(caught.value)
        assert "the third argument of launch_probe_5 is sharedMemBytes" in said
        assert " of 5 there. params come fifth: f(gridDim, blockDim, 0, None, params)" in said


def test_params_one_by_one(f: KernelFunction, out: tuple[Any, ...]) -> None:
    for _ in range(2):
        with pytest.raises(ParamsError, match="got 9 arguments by position, it takes 5: gridDim, "):
            f(4, 256, 0, None, *out)
        f(4, 256, 0, None, out)


def test_grid_and_block_by_other_names(f: KernelFunction, out: tuple[Any, ...]) -> None:
    ways: tuple[Callable[..., object], ...] = (f, f.bind)
    for _ in range(2):
        for way in ways:
            with pytest.raises(ParamsError, match="grid is gridDim= here; block is blockDim= here"):
                way(grid=4, block=256, params=out)
            with pytest.raises(ParamsError, match=r"gridDim of launch_probe_5 .*is missing: an"):
                way(params=out)
        f(4, 256, 0, None, out)


@pytest.mark.parametrize(
    ("place", "value", "number"), [(3, np.int64(3), "int"), (4, np.float64(2), "float")]
)
def test_a_scalar_of_another_width(
    f: KernelFunction, out: tuple[Any, ...], place: int, value: Any, number: str
) -> None:
    given = [*out]
    given[place] = value
    with pytest.raises(ParamsError, match=rf"; {number}\(value\) goes in, or a scalar of 4 bytes"):
        f(4, 256, 0, None, given)


def test_a_stream_of_a_gpu_that_is_not_there(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    for make in (Stream, Event):
        with pytest.raises(CudaDriverError, match="asked for device 9; there are 1"):
            make(device=9)
    gc.collect()
    assert not seen, "what was never made was given back"


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        *(("shared_mem", "sharedMemBytes"), ("sharedMemByte", "sharedMemBytes")),
        *(("smem", "sharedMemBytes"), ("args", "params"), ("cooperate", "cooperative")),
        *(("clusters", "cluster"), ("pdl", "programmatic"), ("streams", "stream")),
    ],
)
def test_keywords_of_others(
    f: KernelFunction, out: tuple[Any, ...], keyword: str, meant: str
) -> None:
    for call in (f, f.bind):
        with pytest.raises(ParamsError, match=f"{keyword} is {meant}= here; it takes gridDim, "):
            call(4, 256, params=out, **{keyword: 0})
    with pytest.raises(ParamsError, match="unexpected keywords zzz; it takes gridDim"):
        f(4, 256, zzz=1)
    f(4, 256, params=out, sharedMem=0)  # CUDA's own name for it


def test_an_array_on_the_cpu_for_a_number(f: KernelFunction, out: tuple[Any, ...]) -> None:
    number: Any = np.array(5)
    with pytest.raises(ParamsError, match=r"takes int .*pass its value: \.item\(\) gives it"):
        f(4, 256, 0, None, (*out[:3], number, 2.0))
    torch = pytest.importorskip("torch")
    with pytest.raises(ParamsError, match=r"takes int .*pass its value: \.item\(\) gives it"):
        f(4, 256, 0, None, (*out[:3], torch.tensor(5), 2.0))


def test_a_numpy_array_for_a_pointer(f: KernelFunction, out: tuple[Any, ...]) -> None:
    host: Any = np.zeros(4, np.float32)
    with pytest.raises(ParamsError, match=r"ndarray is on the CPU.*DeviceArray\.from_numpy"):
        f(4, 256, 0, None, (host, *out[1:]))


def test_an_array_is_no_stream(f: KernelFunction, out: tuple[Any, ...]) -> None:
    with pytest.raises(LaunchConfigError, match=r"DeviceArray.* is no stream"):
        f(4, 256, 0, out[0], out)


@pytest.mark.parametrize("first", [0, 1])
def test_neither_of_two_devices_is_blamed(
    make_fakecuda: Callable[..., FakeCuda], first: int
) -> None:
    make_fakecuda(devices=2)
    f = Kernel("launch_probe").launch_probe_5
    out = DeviceArray.zeros(1024, device=first)
    x, y = (DeviceArray.zeros(1024, device=1 - first) for _ in range(2))
    for way in (f, lambda *args: f.bind(*args)):
        with pytest.raises(ParamsError) as caught:
            way(4, 256, 0, None, (out, x, y, 5, 2.0))
        there = sorted([(first, "out"), (1 - first, "x, y")])
        said = "; ".join(f"{names} on {device}" for device, names in there)
        assert f"All arrays of a launch lie on one device, here: {said}" in str(caught.value)


def test_devices_by_name(make_fakecuda: Callable[..., FakeCuda]) -> None:
    make_fakecuda(devices=2)
    assert DeviceArray.zeros(4, device="cuda:1").device == 1
    assert DeviceArray.zeros(4, device="cuda").device == 0
    with pytest.raises(CudaDriverError, match="asked for device 7; there are 2"):
        DeviceArray.zeros(4, device="cuda:7")
    for wrong in ("cpu", "cuda:", "cuda:x", "1"):
        with pytest.raises(TensorError, match="a number, 'cuda:0', or a device of torch"):
            DeviceArray.zeros(4, device=wrong)


@pytest.mark.parametrize("name", ["rope.cu", "./rope.cu", Path("rope.cu")])
def test_a_source_is_no_image(
    name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rope.cu").write_text(CUDA)
    with pytest.raises(CubinCorruptError) as caught:
        Kernel(name)
    assert "Kernel.from_source(Path('rope.cu')) compiles it now, nvcc -cubin" in str(caught.value)
    with pytest.raises(CubinNotFoundError, match=r"no file 'ropes\.cu'.* holds: rope\.cu"):
        Kernel("ropes.cu")


@pytest.mark.parametrize("text", [CUDA, CUDA.replace("{", "{\n")])
def test_cuda_text_is_no_image(text: str) -> None:
    with pytest.raises(
        CubinCorruptError, match=r"but CUDA C\+\+: Kernel.from_source\(code\) compiles it"
    ):
        Kernel(text)


@pytest.mark.parametrize("name", ["kernel.cu", "my/kernel.cuh", "kernel"])
@pytest.mark.parametrize("arch", ["sm90", None])
def test_a_files_name_is_no_code(name: str, arch: str | None) -> None:
    with pytest.raises(ParamsError, match=rf"looks like a file's name: pass Path\('{name}'\)"):
        Kernel.from_source(name, arch=arch)


def test_a_missing_file_names_what_lies_there(tmp_path: Path) -> None:
    for name in ("rope.cubin", "other.txt"):
        (tmp_path / name).write_text("")
    for asked in ("ropes.cubin", "cubins/ropes.cubin"):
        with pytest.raises(CubinNotFoundError) as caught:
            Kernel(tmp_path / asked)
        assert f"{tmp_path} holds: rope.cubin, other.txt" in str(caught.value)
