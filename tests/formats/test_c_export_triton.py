"""Triton's kernels as C: a launch from C is the launch from Python, with what Triton settled."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from exported import COMPILERS, Dim3, run_compiler, shared_library
from fakecuda import FakeCuda, Launch
from fakecuda.helpers import make_stream
from triton_data import DATA, TLX, VERSIONS, TensorDescriptor, copy, edit, hidden, numbers

from kernel_hub import DeviceArray, driver
from kernel_hub.errors import CubinNotFoundError, FunctionNotFoundError, ParamsError
from kernel_hub.formats import c_export, triton

INVALID, NO_BINARY, MISALIGNED = 1, 209, 716
CLUSTER, COOPERATIVE, PROGRAMMATIC = 4, 2, 6  # launch attributes


class Tensor(ctypes.Structure):
    """kernel_hub_tensor."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("shape", ctypes.c_int64 * 5),
        ("strides", ctypes.c_int64 * 5),
        ("nan_outside", ctypes.c_int),
    )

    @classmethod
    def of(cls, given: TensorDescriptor) -> Tensor:
        made = cls(given.base.ptr, nan_outside=given.padding == "nan")
        made.shape[: len(given.shape)] = given.shape
        made.strides[: len(given.shape)] = given.strides
        return made


def in_c(values: Sequence[Any]) -> list[Any]:
    """Arguments of a Python launch as a C function takes them."""
    made: list[Any] = []
    for value in values:
        if isinstance(value, TensorDescriptor):
            made.append(ctypes.byref(Tensor.of(value)))
        elif isinstance(value, DeviceArray):
            made.append(ctypes.c_uint64(value.ptr))
        else:
            made.append(ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value))
    return made


@pytest.fixture
def context(fakecuda: FakeCuda) -> Iterator[FakeCuda]:
    with driver.get().on_device(0):
        yield fakecuda


def compiled(
    folder: Path, fake: FakeCuda, name: str, source: Any, language: str = "c", **options: Any
) -> ctypes.CDLL:
    c_export.export({name: source}, folder, **options)
    return ctypes.CDLL(str(shared_library(folder, name, language, fake.path)))


def same(first: Launch, second: Launch) -> None:
    for field in (
        "name",
        "gridDim",
        "blockDim",
        "sharedMemBytes",
        "attributes",
        "params",
        "stream",
    ):
        assert getattr(first, field) == getattr(second, field), field


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


# -- built ahead of time


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("triton", reason="the collection is built by Triton")
    from triton_kernels import copy_kernel, matmul_kernel, scale_kernel

    out = tmp_path_factory.mktemp("collection")
    signature = "*fp32:16,*fp32:16,*fp32:16,i32,i32:1,fp32,256"
    both = {"arch": "sm80,sm90", "out": out}
    triton.compile(scale_kernel, signature, name="scale", grid="cdiv(n, BLOCK), stride", **both)
    block = dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_K"), 128)
    triton.compile(
        matmul_kernel, "*fp16:16,*fp16:16,*fp16:16,i32,i32,i32", constexprs=block, num_warps=8,
        name="matmul", **both,
    )  # fmt: skip
    tile = "tensordesc<fp16[64,64]>"
    triton.compile(copy_kernel, f"{tile},{tile}", constexprs={"BLOCK": 64}, name="copy", **both)
    return out


def test_each_gpu_gets_what_its_own_build_needs(
    make_fakecuda: Callable[..., FakeCuda], tmp_path: Path, built: Path
) -> None:
    """Shared memory differs, and the parameters of a tensor; one C function serves both."""
    fake = make_fakecuda(devices=2)
    fake.set_capability(0, 8, 0)
    found = triton.collection(built)
    names = ["scale", "matmul", "copy"]
    c_export.export(names, tmp_path, package=built)
    libraries = {n: ctypes.CDLL(str(shared_library(tmp_path, n, "c", fake.path))) for n in names}
    seen = set()
    for device in (0, 1):
        with driver.get().on_device(device):
            x, y = (DeviceArray.zeros((256, 256), "fp16", device=device) for _ in range(2))
            flat = DeviceArray.zeros(4096, "fp32", device=device)
            tiles = [TensorDescriptor(each, (256, 256), (64, 64)) for each in (x, y)]
            for name, grid, values in (
                ("matmul", (2, 2, 1), [x, y, x, 256, 256, 256]),
                ("copy", (4, 4, 1), tiles),
                ("scale", None, [flat, flat, flat, 4000, 2.0]),
            ):
                arch = f"sm{(80, 90)[device]}"
                f = found.function(name, arch=arch)
                stream = make_stream(device)
                f.run(*values, stream=stream) if grid is None else f[grid](*values, stream=stream)
                wanted = fake.launch()
                given = [] if grid is None else [Dim3(*grid)]
                code = libraries[name][name](ctypes.c_void_p(stream), *given, *in_c(values))
                assert code == 0, (name, arch)
                same(fake.launch(), wanted)
                assert fake.launch().device == device
                seen.add((name, wanted.sharedMemBytes, len(wanted.params or ())))
    assert len(seen) == 4  # copy differs: with TMA, and without
    with driver.get().on_device(0):
        flat = DeviceArray.zeros(4096, "fp32", device=0)
        scale = libraries["scale"].scale
        assert scale(ctypes.c_void_p(0), *in_c([flat, flat, flat, -600, 2.0])) == INVALID
        assert scale(ctypes.c_void_p(0), *in_c([flat, flat, flat, 0, 2.0])) == 0


def test_what_the_headers_say(tmp_path: Path, built: Path) -> None:
    c_export.export(["scale", "copy"], tmp_path, package=built, archs=["sm90"])
    header = (tmp_path / "scale.h").read_text()
    assert (
        "/* 4 warps a block; compiled for stride = 1, BLOCK = 256; 16 must divide x_ptr, bias_ptr, "
        "out_ptr.\n   Programs: cdiv(n, BLOCK), stride. */\nCUresult scale(\n    CUstream stream,\n"
        "    CUdeviceptr x_ptr /* float* */,"
    ) in header
    assert "Triton kernel scale for sm90 (sm_90a)" in header
    assert "kernel_hub_tensor" not in header
    assert "const kernel_hub_tensor* source," in (tmp_path / "copy.h").read_text()


def test_on_dlpack_tensors(context: FakeCuda, tmp_path: Path, built: Path) -> None:
    from test_c_export_tensors import dl_tensor

    c_export.export(["scale", "matmul"], tmp_path, package=built, dlpack=True)
    for language in COMPILERS:
        library = ctypes.CDLL(str(shared_library(tmp_path, "scale", language, context.path)))
        library.scale_error.restype = ctypes.c_char_p
        good = dl_tensor(data=0x4000)
        tail = [ctypes.c_int(512), ctypes.c_float(2.0)]
        given = [ctypes.byref(good)] * 3
        assert library.scale_dlpack(ctypes.c_void_p(0), *given, *tail) == 0
        assert context.launch().gridDim == (2, 1, 1)
        assert context.launch().params[0] == struct.pack("<Q", 0x4000)  # type: ignore[index]
        for wrong, words in (
            (dl_tensor("fp16"), "x_ptr must be float32, found float16"),
            (dl_tensor(device_type=1), "x_ptr must be in CUDA memory"),
            (dl_tensor(data=0x1004), "(716): the kernel is compiled for addresses that 16"),
        ):
            code = library.scale_dlpack(ctypes.c_void_p(0), ctypes.byref(wrong), *given[1:], *tail)
            assert code != 0 and words in library.scale_error().decode()
    library = ctypes.CDLL(str(shared_library(tmp_path, "matmul", "c", context.path)))
    half = ctypes.byref(dl_tensor("fp16", data=0x4000))
    sizes = [ctypes.c_int(128)] * 3
    assert library.matmul_dlpack(ctypes.c_void_p(0), Dim3(1, 1, 1), half, half, half, *sizes) == 0


def test_what_cannot_go_out(context: FakeCuda, tmp_path: Path, built: Path) -> None:
    f = triton.load(DATA / "3.9.0", "add_kernel")
    out = tmp_path / "out"
    for names, options, error, words in (
        (f, {}, ParamsError, "names is a TritonFunction: give it a name"),
        ({"two words": f}, {}, FunctionNotFoundError, "'two words' cannot be exported"),
        ({"add": f}, {"archs": "sm80"}, CubinNotFoundError, "add is not built for sm80; it is for"),
        ({"add": 7}, {}, ParamsError, r"names\['add'\] is a int"),
        ({7: f}, {}, ParamsError, "names has the key 7"),
        (
            ["scale", "nothing"],
            {"package": built},
            CubinNotFoundError,
            "no cubin 'nothing'",
        ),
        (["scale"], {"package": built, "archs": ["sm70"]}, CubinNotFoundError, "built for sm70"),
    ):
        with pytest.raises(error, match=words):
            c_export.export(names, out, **options)  # type: ignore[arg-type]
    assert not out.exists()


@pytest.mark.parametrize("language", COMPILERS)
def test_the_stack_of_what_triton_makes_compiles_whole(
    context: FakeCuda, tmp_path: Path, built: Path, language: str
) -> None:
    """Everything of a collection, with every kind of function that can be asked for."""
    flags = []
    tvm = False
    try:
        from tvm_ffi import libinfo

        flags, tvm = [f"-I{path}" for path in libinfo.include_paths()], True
    except ImportError:
        pass
    c_export.export(built, tmp_path, dlpack=True, tvm_ffi=tvm)
    sources = sorted(tmp_path.glob("*.c"))
    assert [path.stem for path in sources] == [
        *("copy", "copy_kernel", "matmul", "matmul_kernel", "scale", "scale_kernel"),
    ]
    run_compiler(language, "-fsyntax-only", *sources, *flags)


def test_numbers_of_every_width_are_checked_and_counted(tmp_path: Path, context: FakeCuda) -> None:
    """`:16` of 8 to 64 bits, drawn by lot, against Python's own check."""
    pytest.importorskip("triton", reason="the kernel is built by Triton")
    from triton_kernels import widths_kernel

    kinds = ["i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64"]
    signature = ["*i64", *(f"{kind}:16" for kind in kinds), "64"]
    grid = "(a8 + b16 + c32 + d64 + e8 + f16 + g32 + h64) / 16"
    folder = tmp_path / "collection"
    triton.compile(
        widths_kernel, ",".join(signature), arch="sm90", out=folder, name="widths", grid=grid
    )
    f = triton.collection(folder)["widths"]
    c_export.export("widths", tmp_path, package=folder)
    library = ctypes.CDLL(str(shared_library(tmp_path, "widths", "c", context.path)))
    out = DeviceArray.zeros(8, "int64")
    types: dict[str, Any] = {
        k: getattr(ctypes, f"c_{'u' * (k[0] == 'u')}int{k[1:]}") for k in kinds
    }
    rng = random.Random(5)
    outcomes = set()
    for _ in range(200):
        values = []
        for kind in kinds:
            bits = int(kind[1:])
            low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if kind[0] == "i" else (0, 1 << bits)
            value = rng.randrange(max(low, -(1 << 20)), min(high, 1 << 26)) // 16 * 16
            values.append(value + (rng.random() < 0.03))
        count = context.launch_count
        try:
            f.run(out, *values, stream=0)
            wanted = 0
        except (ParamsError, ValueError):
            wanted = INVALID
        launched = context.launch_count - count
        given = [types[kind](value) for kind, value in zip(kinds, values, strict=True)]
        code = library.widths(ctypes.c_void_p(0), ctypes.c_uint64(out.ptr), *given)
        assert (code, context.launch_count - count) == (wanted, 2 * launched), values
        if launched:
            first, second = list(context.launches())[-2:]
            same(first, second)
        outcomes.add((wanted, launched))
    assert outcomes == {(0, 1), (INVALID, 0)}
