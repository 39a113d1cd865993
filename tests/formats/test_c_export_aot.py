"""Triton's kernels of a collection as C: several architectures, kept grids, tensors of DLPack."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from c_launches import (
    INVALID,
    Tensor,
    in_c,
    same,
)
from exported import COMPILERS, Dim3, run_compiler, shared_library
from fakecuda import FakeCuda
from fakecuda.helpers import make_stream
from triton_data import DATA, TensorDescriptor

from kernel_hub import DeviceArray, driver
from kernel_hub.errors import CubinNotFoundError, FunctionNotFoundError, ParamsError
from kernel_hub.formats import c_export, triton


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


@pytest.mark.parametrize("language", COMPILERS)
def test_as_tvm_ffi_functions(
    context: FakeCuda, tmp_path: Path, built: Path, language: str
) -> None:
    """With a kept grid the arguments alone, else programs first."""
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    c_export.export(["scale", "matmul", "copy"], tmp_path, package=built, tvm_ffi=True)
    flags = [f"-I{path}" for path in tvm_ffi.libinfo.include_paths()]
    flags.append(tvm_ffi.libinfo.find_libtvm_ffi())

    def module(name: str) -> Any:
        return tvm_ffi.load_module(
            str(shared_library(tmp_path, name, language, context.path, flags))
        )

    x, half = DeviceArray.zeros(4096, "fp32"), DeviceArray.zeros((256, 256), "fp16")
    scale, found = module("scale"), triton.collection(built)
    scale.scale(x, None, x, 4000, 2.0)
    launch = context.launch()
    found["scale"].run(x, None, x, 4000, 2.0, stream=0)
    same(launch, context.launch())
    module("matmul").matmul((2, 2), half, half, half, 256, 256, 256)
    launch = context.launch()
    found["matmul"][(2, 2)](half, half, half, 256, 256, 256, stream=0)
    same(launch, context.launch())
    tiles = [TensorDescriptor(half, (256, 256), (64, 64)) for _ in range(2)]
    given = [Tensor.of(tile) for tile in tiles]
    module("copy").copy(4, *(ctypes.c_void_p(ctypes.addressof(each)) for each in given))
    launch = context.launch()
    found["copy"][4](*tiles, stream=0)
    same(launch, context.launch())
    for arguments, error, words in (
        (
            (x, x, x, 4000),
            TypeError,
            "4 arguments given, it takes x_ptr, bias_ptr, out_pt",
        ),
        ((x, x, half, 4000, 2.0), ValueError, "out_ptr must be float32"),
        ((x, x, x, 4000.5, 2.0), TypeError, "n takes an int"),
        ((x[1:], x, x, 4000, 2.0), RuntimeError, "compiled for addresses that 16 divides"),
    ):
        with pytest.raises(error, match=words):
            scale.scale(*arguments)
