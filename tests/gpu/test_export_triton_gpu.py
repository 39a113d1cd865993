"""Triton's kernels, and images of one's own, as C on a GPU: results against torch."""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exported import COMPILERS, Dim3, cuda_include, shared_library
from test_export_gpu import libcuda
from test_triton_gpu import DATA, VERSIONS, TensorDescriptor, noise, of_this_gpu

from kernel_hub import Kernel
from kernel_hub.formats import c_export
from kernel_hub.formats import triton as formats_triton

torch = pytest.importorskip("torch", reason="compares with torch")
sys.path.append(str(Path(__file__).resolve().parents[1] / "formats"))

from c_launches import Tensor  # noqa: E402

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_NVRTC = all(map(importlib.util.find_spec, ("cuda", "cuda.core")))
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="the collection is built by Triton")


def in_c(values: Any) -> list[Any]:
    """Arguments as a C function takes them."""
    made: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            made.append(ctypes.c_uint64(value.data_ptr()))
        elif isinstance(value, TensorDescriptor):
            tensor = Tensor(value.base.data_ptr())
            tensor.shape[:2], tensor.strides[:2] = value.shape, value.strides
            made.append(ctypes.byref(tensor))
        elif value is None:
            made.append(ctypes.c_uint64(0))
        else:
            made.append(ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value))
    return made


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., None]:
    """`launch(function, grid, *values)`: exports it, and launches it from C on torch's stream."""
    made: dict[str, ctypes.CDLL] = {}

    def run(f: Any, grid: tuple[int, ...], *values: Any) -> None:
        name = f"{f.name}_{len(made)}"
        c_export.export({name: f}, tmp_path)
        made[name] = ctypes.CDLL(str(shared_library(tmp_path, name, "c", libcuda())))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = made[name][name](stream, Dim3(*(*grid, 1, 1)[:3]), *in_c(values))
        assert code == 0, code
        torch.cuda.synchronize()

    return run


@pytest.mark.parametrize("version", VERSIONS)
def test_kept_kernels(launch: Callable[..., None], version: str) -> None:
    x, y, out = noise(5008), noise(5008), torch.full((5008,), torch.nan, device="cuda")
    launch(of_this_gpu("add_kernel", version), (20,), x, y, out, 5008)
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("version", VERSIONS)
def test_clusters(launch: Callable[..., None], version: str) -> None:
    f = of_this_gpu("cluster_kernel", version)
    x, y, out = noise(5000), noise(5000), torch.full((5000,), torch.nan, device="cuda")
    launch(f, (10,), x, y, out, 5000)
    assert torch.equal(out, x * y)


@pytest.mark.parametrize("version", VERSIONS)
def test_scratch(launch: Callable[..., None], version: str) -> None:
    f = of_this_gpu("scratch_kernel", version)
    x, out = noise(160, 96), torch.full((160, 96), torch.nan, device="cuda")
    launch(f, (5, 3), x, out, 160, 96)
    assert torch.equal(out, 2 * x)


@pytest.mark.parametrize("version", VERSIONS)
def test_tensors(launch: Callable[..., None], version: str) -> None:
    f = of_this_gpu("desc_kernel", version)
    if not any(argument.is_descriptor for argument in f.arguments):
        pytest.skip(f"the files of Triton {version} do not say which parameters are a descriptor")
    x = noise(40, 256, dtype=torch.float16)
    out = torch.full_like(x, torch.nan)
    launch(f, (3, 2), TensorDescriptor(x, [16, 128]), out, 40, 256, 0.5)
    assert torch.equal(out, 0.5 * x)


def test_tuples_and_tlx(launch: Callable[..., None]) -> None:
    x, y, out = noise(64), noise(64), torch.full((64,), torch.nan, device="cuda")
    launch(of_this_gpu("tuple_kernel", "3.9.0"), (1,), x, y, 64, 2.0, out)
    torch.testing.assert_close(out, 2 * x + (y + 3))
    a, b = (noise(256, 192, dtype=torch.float16) for _ in range(2))
    tiles = [TensorDescriptor(each, [64, 64]) for each in (a, b)]
    launch(formats_triton.load(DATA / "fbtriton", "tlx_copy"), (4, 3), *tiles, 7)
    assert torch.equal(a, b)


@needs_triton
@pytest.mark.parametrize("language", COMPILERS)
def test_a_matmul_of_much_shared_memory(tmp_path: Path, device_arch: str, language: str) -> None:
    """96 KiB and more, opted in by the C code, on a grid kept with the kernel."""
    from triton_kernels import matmul_kernel

    constants = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
    formats_triton.compile(
        matmul_kernel, "*fp16:16,*fp16:16,*fp16:16,i32,i32:16,i32:16", constexprs=constants,
        num_warps=8, num_stages=4, name="mm", arch=device_arch, out=tmp_path / "collection",
        grid="cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)",
    )  # fmt: skip
    c_export.export(tmp_path / "collection", tmp_path)
    library = ctypes.CDLL(str(shared_library(tmp_path, "mm", language, libcuda())))
    assert formats_triton.collection(tmp_path / "collection")["mm"].metadata.shared_bytes > 65536
    for m, n, k in ((100, 256, 512), (1000, 1024, 4096)):
        a, b = noise(m, k, dtype=torch.float16), noise(k, n, dtype=torch.float16)
        out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.float16)
        assert library.mm(ctypes.c_void_p(0), *in_c([a, b, out, m, n, k])) == 0
        torch.cuda.synchronize()
        wanted = a.double() @ b.double()
        error = (out.double() - wanted).abs().max() / wanted.abs().max()
        assert error < 2e-3


@needs_triton
def test_configurations_as_one_function(tmp_path: Path, device_arch: str) -> None:
    """Aligned and not, strided and not, with and without bias: right from C and from Python."""
    import triton_variants as variants

    folder = tmp_path / "collection"
    variants.build(folder, device_arch)
    c_export.export("scale_kernel", tmp_path, package=folder)
    library_file = tmp_path / "libscale.so"
    sources = map(str, tmp_path.glob("*.c"))
    command = ["gcc", "-std=c11", "-O1", "-fPIC", "-shared", f"-I{cuda_include()}", "-o"]
    subprocess.run([*command, str(library_file), *sources, "-xnone", libcuda()], check=True)
    library = ctypes.CDLL(str(library_file))
    kernel = formats_triton.collection(folder).kernel("scale_kernel")
    seen = set()
    for start in (0, 1):
        for stride in (1, 3):
            for n in (1000, 1024):
                for has_bias in (False, True):
                    x, bias = noise(4 + n * stride)[start:], noise(4 + n)[start:]
                    given = bias if has_bias else None
                    wanted = 2.5 * x[: n * stride : stride] + (bias[:n] if has_bias else 0)
                    for algo in (0, 1, None):
                        outs = [torch.full((4 + n * stride,), torch.nan, device="cuda")[start:]
                                for _ in range(2)]  # fmt: skip
                        values = [x, given, outs[0], n, stride, 2.5]
                        kernel(*values, algo=algo)
                        seen.add(kernel.select(*values, algo=algo))
                        values[2] = outs[1]
                        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                        if algo is None:
                            code = library.scale_kernel_default(stream, *in_c(values))
                        else:
                            code = library.scale_kernel(stream, *in_c(values), ctypes.c_int(algo))
                        assert code == 0
                        torch.cuda.synchronize()
                        for out in outs:
                            torch.testing.assert_close(out[: n * stride : stride], wanted)
    assert len(seen) == len(variants.ASSUMED) * len(variants.BLOCKS)
    assert library.scale_kernel_unload() == 0


@pytest.mark.skipif(not HAS_NVRTC, reason="cuda-core is not installed")
def test_cpp_compiled_at_run_time_and_its_ptx(tmp_path: Path) -> None:
    code = """template <typename T> __global__ void scale(T* out, const T* x, float factor, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) out[i] = x[i] * factor; }"""
    kernel = Kernel.from_source(code, ["scale<float>"])
    c_export.export({"made": kernel}, tmp_path)
    library = ctypes.CDLL(str(shared_library(tmp_path, "made", "c", libcuda())))
    x, out = noise(1000), torch.full((1000,), torch.nan, device="cuda")
    shape = (Dim3(4, 1, 1), Dim3(256, 1, 1), ctypes.c_uint(0))
    assert library.scale_float(ctypes.c_void_p(0), *shape, *in_c([out, x, 2.5, 1000])) == 0
    torch.cuda.synchronize()
    assert torch.equal(out, x * 2.5)


def test_ptx_and_a_cubin_of_one_s_own(tmp_path: Path, compile_cuda: Any, device_arch: str) -> None:
    """The driver compiles the PTX in an exported source; the cubin it takes as it is."""
    source = tmp_path / "twice.cu"
    source.write_text(
        'extern "C" __global__ void twice(float* out, const float* x, int n) {\n'
        "    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < n) out[i] = 2 * x[i];\n}\n"
    )
    types = {"twice": "float* out, float* x, int n"}
    for flag, suffix, arch in (("-cubin", ".cubin", device_arch), ("-ptx", ".ptx", "compute_80")):
        image = compile_cuda(source, flag, f"-arch={arch}", suffix=suffix)
        name = f"own_{suffix[1:]}"
        c_export.export({name: image}, tmp_path / name, signatures=types)
        library = ctypes.CDLL(str(shared_library(tmp_path / name, name, "c", libcuda())))
        x, out = noise(1000), torch.full((1000,), torch.nan, device="cuda")
        shape = (Dim3(4, 1, 1), Dim3(256, 1, 1), ctypes.c_uint(0))
        assert library.twice(ctypes.c_void_p(0), *shape, *in_c([out, x, 1000])) == 0
        torch.cuda.synchronize()
        assert torch.equal(out, x * 2)
