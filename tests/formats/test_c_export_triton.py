"""Triton's kernels as C: a launch from C is the launch from Python, with what Triton settled."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from c_launches import (
    COOPERATIVE,
    INVALID,
    MISALIGNED,
    NO_BINARY,
    PROGRAMMATIC,
    Tensor,
    compiled,
    in_c,
    same,
)
from exported import COMPILERS, Dim3, shared_library
from fakecuda import FakeCuda
from fakecuda.helpers import make_stream
from triton_data import DATA, TLX, VERSIONS, TensorDescriptor, copy, edit, hidden, numbers

from kernel_hub import DeviceArray, driver
from kernel_hub.formats import c_export, triton


@pytest.mark.parametrize("version", VERSIONS)
def test_a_launch_from_c_is_that_from_python(
    context: FakeCuda, tmp_path: Path, version: str
) -> None:
    f = triton.load(DATA / version, "add_kernel")
    library = compiled(tmp_path, context, "add", f)
    x, y, out = (DeviceArray.zeros(1024, "fp32") for _ in range(3))
    f[(4, 3)](x, y, out, 1008, stream=0)
    wanted = context.launch()
    assert library.add(ctypes.c_void_p(0), Dim3(4, 3, 1), *in_c([x, y, out, 1008])) == 0
    same(context.launch(), wanted)
    assert len(wanted.params or ()) == 4 + hidden(version)
    count = context.launch_count
    assert library.add(ctypes.c_void_p(0), Dim3(4, 0, 1), *in_c([x, y, out, 1008])) == 0
    for values, code in (
        ([x[1:], y, out, 16], MISALIGNED),
        ([x, y, out[3:], 16], MISALIGNED),
        ([x, y, out, 17], INVALID),
    ):
        assert library.add(ctypes.c_void_p(0), Dim3(1, 1, 1), *in_c(values)) == code
    assert context.launch_count == count


@pytest.mark.parametrize("language", COMPILERS)
def test_shared_memory_clusters_and_attributes(
    context: FakeCuda, tmp_path: Path, language: str
) -> None:
    half = DeviceArray.zeros(1 << 14, "fp16")
    x = DeviceArray.zeros(1024, "fp32")
    stream = make_stream()
    cases = [(version, "matmul_kernel") for version in ("2.2.0", "3.0.0", "3.9.0")]
    cases += [(version, "cluster_kernel") for version in ("2.2.0", "3.0.0", "3.9.0")]
    for version, kernel in cases:
        f = triton.load(DATA / version, kernel)
        name = f"{kernel}_{version.replace('.', '')}"
        library = compiled(tmp_path, context, name, f, language)
        values: list[Any] = [x, x, x, 1000]
        if kernel == "matmul_kernel":
            values = [half, half, half, 60, 90, 64, 64, 96, 96, 0.5]
        f[(2, 3)](*values, stream=stream)
        wanted = context.launch()
        assert (wanted.gridDim[0], wanted.sharedMemBytes > 0) in ((2, True), (4, False))
        code = library[name](ctypes.c_void_p(stream), Dim3(2, 3, 1), *in_c(values))
        assert code == 0
        same(context.launch(), wanted)
        if kernel == "cluster_kernel":
            assert library[name](ctypes.c_void_p(0), Dim3(1 << 30, 1, 1), *in_c(values)) == INVALID


def test_pdl_cooperative_big_clusters_and_much_shared_memory(
    context: FakeCuda, tmp_path: Path
) -> None:
    path = copy("add_kernel", tmp_path)
    edit(path, launch_pdl=True, launch_cooperative_grid=True, shared=200_000)
    f = triton.load(path)
    x = DeviceArray.zeros(1024, "fp32")
    library = compiled(tmp_path / "out", context, "add", f)
    before = context.calls("cuKernelSetAttribute")
    for _ in range(2):
        assert library.add(ctypes.c_void_p(0), Dim3(4, 1, 1), *in_c([x, x, x, 16])) == 0
    launch = context.launch()
    assert launch.attributes.keys() == {PROGRAMMATIC, COOPERATIVE}
    assert launch.attribute(PROGRAMMATIC) == launch.attribute(COOPERATIVE) == 1
    assert launch.sharedMemBytes == 200_000
    assert context.calls("cuKernelSetAttribute") == before + 1


@pytest.mark.parametrize("version", ["3.4.0", "3.6.0", "3.9.0"])
def test_scratch_of_a_launch_comes_and_goes_in_stream_order(
    context: FakeCuda, tmp_path: Path, version: str
) -> None:
    f = triton.load(DATA / version, "scratch_kernel")
    library = compiled(tmp_path, context, "scratch", f)
    stream = make_stream()
    x, out = (DeviceArray.zeros((64, 64), "fp32") for _ in range(2))
    live = context.live_allocations
    values = [x, out, 64, 64]
    sizes = [ctypes.c_uint64(x.ptr), ctypes.c_uint64(out.ptr), *map(ctypes.c_int, values[2:])]
    assert library.scratch(ctypes.c_void_p(stream), Dim3(2, 2, 1), *sizes) == 0
    launch = context.launch()
    assert launch.params is not None
    (address,) = struct.unpack("<Q", launch.params[4])
    assert address and address % f.metadata.global_scratch_align == 0
    assert launch.params[5:] == (bytes(8),) * (hidden(version) - 1)
    assert context.live_allocations == live
    assert context.last_free_stream == stream
    f[(2, 2)](*values, stream=stream)
    same_but_address = context.launch()
    assert same_but_address.params[:4] == launch.params[:4]  # type: ignore[index]
    context.fail("cuMemAllocFromPoolAsync", 2)
    count = context.launch_count
    assert library.scratch(ctypes.c_void_p(stream), Dim3(2, 2, 1), *sizes) == 2
    assert (context.launch_count, context.live_allocations) == (count, live)
    context.fail("cuLaunchKernelEx", 700)
    assert library.scratch(ctypes.c_void_p(stream), Dim3(2, 2, 1), *sizes) == 700
    assert context.live_allocations == live


@pytest.mark.parametrize("language", COMPILERS)
@pytest.mark.parametrize("padding", ["zero", "nan"])
def test_tensors_become_descriptors(
    context: FakeCuda, tmp_path: Path, language: str, padding: str
) -> None:
    """With the same bytes as from Python, which an H200 took."""
    x, out = (DeviceArray.zeros((48, 256), "fp16") for _ in range(2))
    for version in ("3.4.0", "3.6.0", "3.9.0"):
        f = triton.load(DATA / version, "desc_kernel")
        name = f"desc_{version.replace('.', '')}"
        library = compiled(tmp_path, context, name, f, language)
        values = [TensorDescriptor(x, (48, 256), (16, 128), padding), out, 48, 256, 0.5]
        f[(3, 2)](*values, stream=0)
        wanted = context.launch()
        assert library[name](ctypes.c_void_p(0), Dim3(3, 2, 1), *in_c(values)) == 0
        same(context.launch(), wanted)
        bad = Tensor.of(values[0])  # type: ignore[arg-type]
        bad.strides[1] = 2
        given = [ctypes.byref(bad), *in_c(values[1:])]
        assert library[name](ctypes.c_void_p(0), Dim3(3, 2, 1), *given) == INVALID
    f = triton.load(TLX, "tlx_copy")
    library = compiled(tmp_path, context, "tlx", f, language)
    wide = [DeviceArray.zeros((128, 128), "fp16") for _ in range(2)]
    given_ = [TensorDescriptor(each, (100, 128), (64, 64), padding) for each in wide]
    f[(2, 2)](*given_, 7, stream=0)
    wanted = context.launch()
    assert library.tlx(ctypes.c_void_p(0), Dim3(2, 2, 1), *in_c([*given_, 7])) == 0
    same(context.launch(), wanted)


def test_without_tma_a_tensor_becomes_an_address_and_numbers(
    make_fakecuda: Callable[..., FakeCuda], tmp_path: Path
) -> None:
    fake = make_fakecuda(capability=(8, 0))
    x, out = (DeviceArray.zeros((48, 256), "fp16") for _ in range(2))
    with driver.get().on_device(0):
        for version in [v for v in VERSIONS if numbers(v) >= (3, 5)]:
            f = triton.load(DATA / version / "sm80/desc_kernel.cubin")
            name = f"desc_{version.replace('.', '')}"
            library = compiled(tmp_path, fake, name, f)
            for padding in ("zero", "nan"):
                values = [TensorDescriptor(x, (48, 256), (16, 128), padding), out, 48, 256, 0.5]
                f[(3, 2)](*values, stream=0)
                wanted = fake.launch()
                assert library[name](ctypes.c_void_p(0), Dim3(3, 2, 1), *in_c(values)) == 0
                same(fake.launch(), wanted)


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])
def test_elements_of_tuples_are_arguments(context: FakeCuda, tmp_path: Path, version: str) -> None:
    f = triton.load(DATA / version, "tuple_kernel")
    library = compiled(tmp_path, context, "pairs", f)
    x, y, out = (DeviceArray.zeros(64, "fp32") for _ in range(3))
    f[1]((x, y), (60, (2.5,)), out, stream=0)
    wanted = context.launch()
    assert library.pairs(ctypes.c_void_p(0), Dim3(1, 1, 1), *in_c([x, y, 60, 2.5, out])) == 0
    same(context.launch(), wanted)
    assert "CUdeviceptr pair_0 /* float* */" in (tmp_path / "pairs.h").read_text()


def test_another_gpu_load_unload_and_the_handle(context: FakeCuda, tmp_path: Path) -> None:
    library = compiled(tmp_path, context, "add", triton.load(DATA / "3.9.0", "add_kernel"))
    x = DeviceArray.zeros(64, "fp32")
    kernel = ctypes.c_void_p()
    assert library.add_load() == 0
    assert library.add_get(b"add_kernel", ctypes.byref(kernel)) == 0
    assert library.add_get(b"add", ctypes.byref(kernel)) == 500
    assert library.add_unload() == 0
    context.set_capability(0, 8, 0)
    assert library.add(ctypes.c_void_p(0), Dim3(1, 1, 1), *in_c([x, x, x, 16])) == NO_BINARY
    assert library.add_load() == NO_BINARY


def test_a_file_of_tritons_cache_goes_out_as_it_is(context: FakeCuda, tmp_path: Path) -> None:
    """A path to the cubin with the json beside it is enough, and so is nothing but sizes."""
    copy("add_kernel", tmp_path)
    c_export.export(tmp_path / "add_kernel.cubin", tmp_path / "out", prefix="my_")
    library = ctypes.CDLL(str(shared_library(tmp_path / "out", "my_add_kernel", "c", context.path)))
    x = DeviceArray.zeros(64, "fp32")
    assert library.my_add_kernel(ctypes.c_void_p(0), Dim3(1, 1, 1), *in_c([x, x, x, 16])) == 0
    wanted = context.launch().params
    (tmp_path / "add_kernel.ttir").unlink()
    c_export.export(str(tmp_path / "add_kernel.json").replace(".json", ".cubin"), tmp_path / "two")
    header = (tmp_path / "two/add_kernel.h").read_text()
    assert "const void* arg3 /* unknown, 4 bytes */" in header
    library = ctypes.CDLL(str(shared_library(tmp_path / "two", "add_kernel", "c", context.path)))
    number, address = ctypes.c_int(16), ctypes.c_uint64(x.ptr)
    given = [ctypes.byref(each) for each in (address, address, address, number)]
    assert library.add_kernel(ctypes.c_void_p(0), Dim3(1, 1, 1), *given) == 0
    assert context.launch().params == wanted
