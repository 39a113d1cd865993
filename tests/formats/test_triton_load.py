"""Kernels as Triton 2.1 to 3.9 keeps them, launched on the stand-in: what reaches the driver."""

from __future__ import annotations

import ctypes
import gc
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import make_stream
from triton_data import DATA, NEWEST, VERSIONS, TensorDescriptor, hidden, numbers, words

from kernel_hub import DeviceArray, Kernel, KernelFunction
from kernel_hub.errors import CubinNotFoundError, LaunchConfigError, ParamsError
from kernel_hub.formats import triton
from kernel_hub.formats.triton.ttir import read_ttir

CLUSTER, PROGRAMMATIC, COOPERATIVE = 4, 6, 2  # launch attributes


@pytest.fixture
def arrays(fakecuda: FakeCuda) -> list[DeviceArray]:
    return [DeviceArray.zeros(1024, "fp32") for _ in range(3)]


@pytest.mark.parametrize("version", VERSIONS)
def test_declared_arguments_reach_the_driver_with_hidden_pointers(
    fakecuda: FakeCuda, arrays: list[DeviceArray], version: str
) -> None:
    f = triton.load(DATA / version, "add_kernel")
    assert isinstance(f, KernelFunction)
    assert f.metadata.triton_version in (None, version)
    f((4, 1, 1), params=[*arrays, 1008])
    f[(4,)](*arrays, 1008)
    f[4](*arrays, 1008, stream=0)
    for launch in fakecuda.launches():
        # Before 3.0 the name says which arguments are taken to be divisible.
        name = "add_kernel_0d1d2d3d" if numbers(version) < (3,) else "add_kernel"
        assert (launch.name, launch.gridDim) == (name, (4, 1, 1))
        assert (launch.blockDim, launch.sharedMemBytes) == ((128, 1, 1), 0)
        assert launch.params == (
            *words(*(array.ptr for array in arrays)),
            struct.pack("<i", 1008),
            *words(0, 0)[: hidden(version)],
        )
        assert launch.attributes == {}
    assert fakecuda.launch_count == 3
    names = [param.name for param in f.params or ()]
    known = numbers(version) >= (3, 5)
    assert names == (["x_ptr", "y_ptr", "out_ptr", "n"] if known else [f"arg{i}" for i in range(4)])
    assert f.signature.startswith(f"{f.metadata.name}(float* {names[0]}, ")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_same_for_an_older_gpu(make_fakecuda: Callable[..., FakeCuda], version: str) -> None:
    fake = make_fakecuda(capability=(8, 0))
    x = DeviceArray.zeros(64, "fp32")
    f = triton.load(DATA / version / "sm80/add_kernel.cubin")
    f[1](x, x, x, 7)  # n is compiled without the hint here
    assert fake.launch().blockDim == (64, 1, 1)
    with pytest.raises(CubinNotFoundError, match="sm_90"):
        triton.load(DATA / version / "add_kernel.json")[1](x, x, x, 16)
    assert fake.launch_count == 1


def test_shared_memory_clusters_and_programs(fakecuda: FakeCuda, arrays: list[DeviceArray]) -> None:
    half = DeviceArray.zeros(1 << 14, "fp16")
    cluster = (2, 1, 1)
    for version in ("2.2.0", "3.0.0", "3.3.1", "3.9.0"):
        f = triton.load(DATA / version, "matmul_kernel")
        f[(2, 3)](half, half, half, 60, 90, 64, 64, 96, 96, 0.5)
        launch = fakecuda.launch()
        assert launch.gridDim == (2, 3, 1)
        assert launch.sharedMemBytes == f.metadata.shared_bytes > 4096
        assert launch.params is not None and launch.params[9] == struct.pack("<f", 0.5)
        f = triton.load(DATA / version, "cluster_kernel")
        assert (f.metadata.cluster, f.metadata.num_ctas) == (cluster, 2)
        f[(3,)](*arrays, 1000)
        launch = fakecuda.launch()
        assert launch.gridDim == (6, 1, 1)
        compiled_in = f.spec.cluster is not None  # from 3.6 on: then no attribute is needed
        assert compiled_in == (numbers(version) >= (3, 6))
        assert (CLUSTER in launch.attributes) != compiled_in
        if not compiled_in:
            assert tuple(launch.attribute(CLUSTER, i) for i in range(3)) == cluster
        f(launch.gridDim, (128, 1, 1), f.metadata.shared_bytes, 0, [*arrays, 5], cluster=cluster)
        assert fakecuda.launch().gridDim == launch.gridDim
        with pytest.raises(LaunchConfigError, match="not a multiple of cluster"):
            f((3, 1, 1), params=[*arrays, 5])


def test_an_empty_grid_launches_nothing_as_with_triton(
    fakecuda: FakeCuda, arrays: list[DeviceArray]
) -> None:
    f = triton.load(NEWEST, "add_kernel")
    f[(0,)](*arrays, 16)
    f[(4, 0)](*arrays, 16)
    assert fakecuda.launch_count == 0
    with pytest.raises(ParamsError, match="too few"):
        f[(0,)](*arrays)
    with pytest.raises(LaunchConfigError, match="gridDim"):
        f(0, params=[*arrays, 16])


def test_by_name_and_other_kinds_of_values(fakecuda: FakeCuda, arrays: list[DeviceArray]) -> None:
    f = triton.load(NEWEST, "add_kernel")
    x, y, out = arrays
    wanted = (*words(x.ptr, y.ptr, out.ptr), struct.pack("<i", 32), *words(0, 0))
    f(1, params={"n": 32, "out_ptr": out, "x_ptr": x, "y_ptr": y})
    f[1](x, y, n=np.int32(32), out_ptr=ctypes.c_void_p(out.ptr))
    f[1](x, y, out, ctypes.c_int(32))
    assert [launch.params for launch in fakecuda.launches()] == [wanted] * 3
    f[1](None, None, None, 0)
    assert fakecuda.launch().params == (*words(0, 0, 0), bytes(4), *words(0, 0))
    with pytest.raises(ParamsError, match="x_ptr given by position and by name"):
        f[1](x, y, out, x_ptr=x)
    with pytest.raises(ParamsError, match="unknown BLOCK"):
        f[1](x, y, out, 32, BLOCK=256)
    assert fakecuda.launch_count == 4


def test_pdl_and_cooperative_come_from_the_metadata(
    fakecuda: FakeCuda, arrays: list[DeviceArray], tmp_path: Path
) -> None:
    for suffix in (".cubin", ".json", ".ttir"):
        shutil.copy((NEWEST / "add_kernel").with_suffix(suffix), tmp_path)
    json = tmp_path / "add_kernel.json"
    text = json.read_text()
    for field, attribute in (
        ("launch_pdl", PROGRAMMATIC),
        ("launch_cooperative_grid", COOPERATIVE),
    ):
        json.write_text(text.replace(f'"{field}": false', f'"{field}": true'))
        f = triton.load(tmp_path)
        f[1](*arrays, 16)
        f(1, params=[*arrays, 16], priority=0)
        f.bind(1, params=[*arrays, 16])()
        launches = list(fakecuda.launches())[-3:]
        assert [launch.attribute(attribute) for launch in launches] == [1, 1, 1]
        assert [len(launch.attributes) for launch in launches] == [1, 2, 1]


# -- scratch


@pytest.mark.parametrize("version", ["3.4.0", "3.6.0", "3.9.0"])
def test_scratch_is_allocated_for_each_launch_in_stream_order(
    fakecuda: FakeCuda, version: str
) -> None:
    f = triton.load(DATA / version, "scratch_kernel")
    assert f.metadata.global_scratch_bytes == 256
    x, out = (DeviceArray.zeros((64, 64), "fp32") for _ in range(2))
    before = fakecuda.live_allocations
    seen = []
    fakecuda.set_callback("scratch_kernel", lambda *_: seen.append(fakecuda.live_allocations))
    streams = [make_stream(), make_stream()]
    for stream in streams:
        f[(2, 2)](x, out, 64, 64, stream=stream)
        launch = fakecuda.launch()
        assert launch.stream == stream == fakecuda.last_free_stream
        assert launch.params is not None and len(launch.params) == 4 + hidden(version)
        scratch = struct.unpack("<Q", launch.params[4])[0]
        assert scratch and scratch % 128 == 0
        assert launch.params[5:] == words(0)[: hidden(version) - 1]
    assert seen == [before + 1] * 2
    assert fakecuda.live_allocations == before
    with pytest.raises(LaunchConfigError):
        f((1 << 31, 1, 1), params=[x, out, 64, 64])
    fakecuda.fail("cuLaunchKernelEx", 1)
    with pytest.raises(RuntimeError, match="scratch_kernel"):
        f[(2, 2)](x, out, 64, 64)
    gc.collect()
    assert (fakecuda.live_allocations, fakecuda.launch_count) == (before, 2)


def test_scratch_of_a_bound_launch_lives_with_it(fakecuda: FakeCuda) -> None:
    f = triton.load(NEWEST, "scratch_kernel")
    x, out = (DeviceArray.zeros((64, 64), "fp32") for _ in range(2))
    before = fakecuda.live_allocations
    stream = make_stream()
    with pytest.raises(LaunchConfigError, match="give the stream"):
        f.bind((2, 2), params=[x, out, 64, 64])
    bound = f.bind((2, 2), stream=stream, params=[x, out, 64, 64])
    assert fakecuda.live_allocations == before + 1
    fakecuda.set_capture(stream)
    with pytest.raises(RuntimeError, match="bind the launch to the stream before"):
        f[(2, 2)](x, out, 64, 64, stream=stream)
    bound()
    bound()
    fakecuda.set_capture(stream, 0)
    first, second = fakecuda.launches()
    assert first.params == second.params and first.params and first.params[4] != bytes(8)
    bound([x, out, 64, 64])  # other values: with scratch of its own
    assert fakecuda.launch().params[4] not in (bytes(8), first.params[4])  # type: ignore[index]
    del bound
    gc.collect()
    assert fakecuda.live_allocations == before


# -- what a KernelFunction offers besides


def test_bind_load_attributes_occupancy(fakecuda: FakeCuda, arrays: list[DeviceArray]) -> None:
    f = triton.load(NEWEST, "add_kernel")
    assert f.load() is f
    assert f.attributes()["binary_version"] == f.attributes(0)["binary_version"]
    assert f.occupancy() == f.occupancy((128, 1, 1), 0) > 0
    bound = f.bind((4, 1, 1), params=[*arrays, 16])
    bound()
    bound([*arrays, 32])
    assert [launch.params[3] for launch in fakecuda.launches()] == [  # type: ignore[index]
        struct.pack("<i", n) for n in (16, 32)
    ]
    assert f.bind(4)([*arrays, 48]) is None
    with pytest.raises(ParamsError, match="divisible by 16"):
        bound([*arrays, 33])
    with pytest.raises(ParamsError, match="divisible by 16"):
        f.bind(4, params=[*arrays, 33])
    with pytest.raises(LaunchConfigError, match="leave it out"):
        f.bind(4, 256, params=[*arrays, 16])
    with pytest.raises(LaunchConfigError, match="leave it out"):
        f.occupancy(64)
    assert fakecuda.launch_count == 3


def test_types_from_ptx_or_sizes_alone(
    fakecuda: FakeCuda, arrays: list[DeviceArray], tmp_path: Path
) -> None:
    for version in ("3.0.0", "3.6.0"):
        folder = tmp_path / version
        folder.mkdir()
        for suffix in (".cubin", ".json", ".ptx"):
            shutil.copy((DATA / version / "add_kernel").with_suffix(suffix), folder)
        f = triton.load(folder)
        f[4](*arrays, 1001)  # PTX has no hint: nothing is checked
        assert fakecuda.launch().params[3] == struct.pack("<i", 1001)  # type: ignore[index]
        (folder / "add_kernel.ptx").unlink()
        f = triton.load(folder)
        with pytest.raises(ParamsError, match="give its width"):
            f[4](*arrays, 1001)
        f[4](*arrays, ctypes.c_int(1001))
        assert len(fakecuda.launch().params or ()) == 4 + hidden(version)
        signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "B": "constexpr"}
        f = triton.load(folder, signature=signature)
        f(4, params={"x": arrays[0], "y": arrays[1], "out": arrays[2], "n": 3})
    assert fakecuda.launch_count == 6


def test_by_hash_and_by_name_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    digest = bytes(range(32))
    keys = ("AAAQEAYEAUDAOCAJBIFQYDIOB4IBCEQTCQKRMFYYDENBWHA5DYPQ", digest.hex())
    for key, version in zip(keys, ("3.9.0", "3.0.0"), strict=True):
        (tmp_path / key).mkdir()
        (tmp_path / key / "__grp__add_kernel.json").write_text('{"child_paths": {}}')
        for path in (DATA / version).glob("add_kernel.*"):
            shutil.copy(path, tmp_path / key)
    assert triton.load(keys[0]).metadata.triton_version == "3.9.0"
    assert triton.load(keys[1]).metadata.num_hidden == 0
    with pytest.raises(CubinNotFoundError, match="holds 2 kernels 'add_kernel'"):
        triton.load("add_kernel")
    shutil.rmtree(tmp_path / keys[1])
    assert triton.load(digest.hex()).metadata.triton_version == "3.9.0"
    assert triton.load("add_kernel").metadata.triton_version == "3.9.0"
    with pytest.raises(CubinNotFoundError, match="no hash or kernel in Triton's cache"):
        triton.load("add_kernel_2")


def test_a_loaded_kernel_outlives_nothing(fakecuda: FakeCuda, arrays: list[DeviceArray]) -> None:
    f = triton.load(NEWEST, "add_kernel")
    f[1](*arrays, 16)
    inner = f._inner
    del f
    gc.collect()
    live = [other for other in gc.get_objects() if type(other) is triton.TritonFunction]
    assert not [other for other in live if other._inner is inner]


def test_two_devices(make_fakecuda: Callable[..., FakeCuda]) -> None:
    fake = make_fakecuda(devices=2)
    add, desc = (triton.load(NEWEST, name) for name in ("add_kernel", "desc_kernel"))
    scratch = triton.load(NEWEST, "scratch_kernel")
    for device in (1, 0):
        x = DeviceArray.zeros((64, 64), "fp32", device=device)
        add[1](x, x, x, 16)
        assert fake.launch().device == device
        scratch[(2, 2)](x, x, 64, 64)
        assert fake.launch().device == device
        half = DeviceArray.zeros((48, 256), "fp16", device=device)
        desc[1](TensorDescriptor(half, (48, 256), (16, 128)), half, 48, 256, 1.0)
        assert fake.launch().device == device
    other = DeviceArray.zeros((48, 256), "fp16", device=1)
    with pytest.raises((ParamsError, ValueError), match="device 1"):
        desc[1](TensorDescriptor(half, (48, 256), (16, 128)), other, 48, 256, 1.0)
    assert fake.launch_count == 6


def test_wrap_takes_any_kernel_with_the_right_parameters(
    fakecuda: FakeCuda, arrays: list[DeviceArray]
) -> None:
    metadata = triton.Metadata.from_json((NEWEST / "add_kernel.json").read_bytes(), "add.json")
    text = (NEWEST / "add_kernel.ttir").read_text()
    arguments = read_ttir(text, "add_kernel", "add.ttir")
    kernel = Kernel((NEWEST / "add_kernel.cubin").read_bytes())
    f = triton.TritonFunction.wrap(kernel.add_kernel, metadata, arguments)
    f[1](*arrays, ctypes.c_int(16))  # the kernel was not told its types
    f[1](*arrays[:2], arrays[2], np.int32(16))
    assert fakecuda.launch_count == 2
    with pytest.raises(ParamsError, match=r"add\.json: add_kernel is no plain"):
        triton.TritonFunction.wrap(f, metadata, arguments)
