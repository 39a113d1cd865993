"""Exported kernels on a GPU: from C, through ctypes on torch's tensors, as TVM-FFI functions.

The launches that kernel_hub's own ops make are recorded and made again by the exported functions.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from exported import Dim3, run_compiler, shared_library
from in_threads import in_threads

import kernel_hub
from kernel_hub import build, driver
from kernel_hub.arrays import dlpack, dtypes
from kernel_hub.collection.manifest import Collection, Manifest
from kernel_hub.errors import KernelHubError
from kernel_hub.formats import c_export

torch = pytest.importorskip("torch")
HERE = Path(__file__).parent
HAS_TVM_FFI = importlib.util.find_spec("tvm_ffi") is not None
needs_tvm_ffi = pytest.mark.skipif(not HAS_TVM_FFI, reason="apache-tvm-ffi is not installed")


@dataclass
class Recorded:
    """A launch of a shipped function as an op made it."""

    cubin: str
    function: Any
    gridDim: Any  # noqa: N815
    blockDim: Any  # noqa: N815
    sharedMemBytes: int  # noqa: N815
    params: tuple[Any, ...]

    def outputs(self) -> list[Any]:
        """The tensors that the kernel writes: by the house's rule the first parameters."""
        named = zip(self.function.params, self.params, strict=True)
        return [v for p, v in named if "out" in p.name and isinstance(v, torch.Tensor)]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Recorded]]:
    """`record(op, …)`: runs the op and gives its launches."""
    from kernel_hub.ops.core import common

    seen: list[Recorded] = []
    shipped = common.shipped

    def recording(cubin: str, name: str) -> Any:
        function = shipped(cubin, name)

        def launch(*args: Any, **options: Any) -> None:
            grid, block, shared, _, params = args
            seen.append(Recorded(cubin, function, grid, block, shared, tuple(params)))
            function(*args, **options)

        return launch

    monkeypatch.setattr(common, "shipped", recording)

    def run(op: Callable[..., Any], *args: Any, **options: Any) -> list[Recorded]:
        seen.clear()
        op(*args, **options)
        assert seen, "the op launched nothing new: its plan was cached before"
        return list(seen)

    return run


def libcuda() -> str:
    """The driver of this process, to link with."""
    assert driver.get().device_count
    maps = Path("/proc/self/maps").read_text().split()
    return next(path for path in maps if Path(path).name.startswith("libcuda.so"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`built(cubin)`: the exported cubin as a shared library, with everything that can be."""
    made: dict[str, Path] = {}

    def make(cubin: str) -> Path:
        if cubin not in made:
            flags: list[str] = []
            if HAS_TVM_FFI:
                from tvm_ffi import libinfo

                flags = [f"-I{path}" for path in libinfo.include_paths()]
                flags += [libinfo.find_libtvm_ffi()]
            folder = tmp_path_factory.mktemp(cubin)
            c_export.export([cubin], folder, dlpack=True, tvm_ffi=HAS_TVM_FFI)
            made[cubin] = shared_library(folder, cubin, "c", libcuda(), flags)
        return made[cubin]

    return make


def triple(sizes: Any) -> tuple[int, int, int]:
    given = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return (*given, 1, 1)[:3]  # type: ignore[return-value]


def dl_tensor(tensor: Any) -> dlpack.DLTensor:
    given = dlpack.DLTensor()
    numbers = (ctypes.c_int64 * (2 * tensor.dim()))(*tensor.shape, *tensor.stride())
    pointer = ctypes.POINTER(ctypes.c_int64)
    dtype = dtypes.of(tensor.dtype)
    given.data = tensor.data_ptr()
    given.device_type, given.device_id = dlpack.CUDA, tensor.device.index
    given.ndim = tensor.dim()
    given.code, given.lanes = dtype.dlpack_code, 1
    given.bits = 8 * dtype.size_bytes
    given.shape = ctypes.cast(numbers, pointer)
    given.strides = ctypes.cast(ctypes.addressof(numbers) + 8 * tensor.dim(), pointer)
    given._numbers = numbers
    return given


def c_values(launch: Recorded, *, tensors: bool, keep: list[Any]) -> list[Any]:
    """The launch's parameters for C: addresses, or DLTensors."""
    values: list[Any] = []
    for param, value in zip(launch.function.params, launch.params, strict=True):
        if param.type == "CUtensorMap":
            raw = value if isinstance(value, bytes) else value._as_bytes()
            buffer = ctypes.create_string_buffer(raw, 128)
            keep.append(buffer)
            values.append(ctypes.c_void_p(ctypes.addressof(buffer)))
        elif param.is_pointer and tensors:
            given = None if value is None else dl_tensor(value)
            keep.append(given)
            values.append(ctypes.c_void_p(0) if given is None else ctypes.byref(given))
        elif param.is_pointer:
            values.append(ctypes.c_uint64(0 if value is None else value.data_ptr()))
        elif param.type == "float":
            values.append(ctypes.c_float(value))
        else:
            values.append({4: ctypes.c_int, 8: ctypes.c_int64}[param.size_bytes](value))
    return values


def through_ctypes(library: Path, launch: Recorded, *, tensors: bool) -> None:
    loaded = ctypes.CDLL(str(library))
    keep: list[Any] = []
    function = loaded[launch.function.name + ("_dlpack" if tensors else "")]
    code = function(
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        Dim3(*triple(launch.gridDim)), Dim3(*triple(launch.blockDim)),
        ctypes.c_uint(launch.sharedMemBytes),
        *c_values(launch, tensors=tensors, keep=keep),
    )  # fmt: skip
    assert code == 0


def through_tvm_ffi(library: Path, launch: Recorded) -> None:
    import tvm_ffi

    function = tvm_ffi.load_module(str(library))[launch.function.name]
    keep: list[Any] = []
    values = [
        given if param.type == "CUtensorMap" else value
        for param, value, given in zip(
            launch.function.params,
            launch.params,
            c_values(launch, tensors=False, keep=keep),
            strict=True,
        )
    ]
    function(triple(launch.gridDim), triple(launch.blockDim), launch.sharedMemBytes, *values)


WAYS: dict[str, Callable[[Path, Recorded], None]] = {
    "addresses": lambda library, launch: through_ctypes(library, launch, tensors=False),
    "dlpack": lambda library, launch: through_ctypes(library, launch, tensors=True),
    "tvm_ffi": through_tvm_ffi,
}


def op_rms_norm() -> tuple[Any, ...]:
    x = torch.randn(37, 1528, device="cuda", dtype=torch.bfloat16)
    return kernel_hub.ops.rms_norm, x, torch.randn_like(x[0])


def op_silu_and_mul() -> tuple[Any, ...]:
    return kernel_hub.ops.silu_and_mul, torch.randn(61, 2 * 776, device="cuda", dtype=torch.float16)


def op_rope() -> tuple[Any, ...]:
    q = torch.randn(1, 53, 6, 128, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(53, 64, device="cuda")
    return kernel_hub.ops.rope, q, q[:, :, :2].contiguous(), angles.cos(), angles.sin()


def op_linear() -> tuple[Any, ...]:
    a = torch.randn(392, 520, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(648, 520, device="cuda", dtype=torch.bfloat16)
    return kernel_hub.ops.linear, a, b, torch.randn_like(b[:, 0])


OPS = {op.__name__[3:]: op for op in (op_rms_norm, op_silu_and_mul, op_rope, op_linear)}


@pytest.mark.parametrize("name", OPS)
def test_exported_functions_do_what_the_ops_do(
    name: str, record: Callable[..., list[Recorded]], built: Callable[[str], Path]
) -> None:
    op, *arguments = OPS[name]()  # tensor maps do not keep what they map
    launches = record(op, *arguments)
    if name == "linear" and torch.cuda.get_device_capability() == (9, 0):
        assert launches[0].cubin == "linear_sm90"
        assert any(p.type == "CUtensorMap" for p in launches[0].function.params)
    for launch in launches:
        expected = [out.clone() for out in launch.outputs()]
        assert expected
        for way, make in WAYS.items():
            if way == "tvm_ffi" and not HAS_TVM_FFI:
                continue
            for out in launch.outputs():
                out.fill_(float("nan"))
            make(built(launch.cubin), launch)
            torch.cuda.synchronize()
            for out, right in zip(launch.outputs(), expected, strict=True):
                assert torch.equal(out, right), way
    assert all(ctypes.CDLL(str(built(x.cubin)))[f"{x.cubin}_unload"]() == 0 for x in launches)


@pytest.mark.parametrize("language", ["c", "c++"])
def test_a_program_in_c(tmp_path: Path, language: str) -> None:
    c_export.export(["launch_probe"], tmp_path)
    program = tmp_path / "client"
    sources = [HERE / "export_client.c", tmp_path / "launch_probe.c", "-xnone", libcuda()]
    run_compiler(language, f"-I{tmp_path}", "-O1", "-pthread", "-o", program, *sources)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "all right\n", "")


class Values(ctypes.Structure):
    """The struct that take_struct takes by value."""

    _fields_ = (
        ("a", ctypes.c_double), ("b", ctypes.c_float), ("c", ctypes.c_int), ("d", ctypes.c_int64),
    )  # fmt: skip


def test_kernels_of_another_package(tmp_path: Path, device_arch: str) -> None:
    """Clusters, a cooperative grid, much shared memory, a struct by value, constant memory."""
    cubins = tmp_path / "cubins"
    (tmp_path / "csrc").mkdir()
    shutil.copy(HERE / "gpu_kernels.cu", tmp_path / "csrc")
    arch = device_arch.replace("_", "")
    try:
        given = ["--csrc", str(tmp_path / "csrc"), "--out", str(cubins), "--arch", arch]
        assert build.main(given) == 0
    except KernelHubError as missing:
        pytest.skip(f"gpu_kernels.cu must be compiled: {missing}")
    manifest = Manifest.from_json((cubins / "manifest.json").read_text(), where="manifest.json")
    for path, text in c_export.render(Collection("x", cubins, manifest), "gpu_kernels").items():
        (tmp_path / path).write_text(text)
    library = ctypes.CDLL(str(shared_library(tmp_path, "gpu_kernels", "c", libcuda())))

    def call(name: str, blocks: int, *values: Any, shared_bytes: int = 0) -> int:
        code = library[name](
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
            Dim3(blocks, 1, 1), Dim3(4, 1, 1), ctypes.c_uint(shared_bytes),
            *[ctypes.c_uint64(v.data_ptr()) if isinstance(v, torch.Tensor) else v for v in values],
        )  # fmt: skip
        torch.cuda.synchronize()
        return int(code)

    out, scratch = (torch.zeros(64, dtype=torch.int32, device="cuda") for _ in range(2))
    assert call("grid_sum", 64, out, scratch) == 0
    assert (out == 63 * 32).all()
    assert call("grid_sum", 10**6, out, scratch) == 720  # COOPERATIVE_LAUNCH_TOO_LARGE
    assert call("use_shared", 1, out, ctypes.c_int(25_000), shared_bytes=100_000) == 0
    assert out[0] == 77
    if "needs_cluster" in manifest.cubins["gpu_kernels"][arch].functions:
        assert call("needs_cluster", 64, out) == 0
        assert (out == 2).all()
        assert call("needs_cluster", 63, out) != 0
    values, doubles = (
        Values(1.5, 2.5, -3, 2**40),
        torch.zeros(4, dtype=torch.float64, device="cuda"),
    )
    assert call("take_struct", 1, doubles, ctypes.byref(values)) == 0
    assert doubles.tolist() == [1.5, 2.5, -3, 2**40]
    floats = torch.zeros(4, device="cuda")
    assert call("add_table", 1, floats) == 0
    assert floats.tolist() == [1, 2, 3, 4]
    assert library.gpu_kernels_unload() == 0


def test_threads_of_python(built: Callable[[str], Path]) -> None:
    """Threads without a context get the driver's own refusal; with one they launch."""
    library = ctypes.CDLL(str(built("launch_probe")))
    codes: list[int] = []
    results: list[bool] = []

    def work(make_current: bool) -> None:
        if make_current:
            torch.cuda.set_device(0)
            x = torch.randn(1000, device="cuda")
            out = torch.zeros_like(x)
            torch.cuda.synchronize()
        for _ in range(50):
            if make_current:
                out.zero_()
            addresses = (out, x, x) if make_current else (None, None, None)
            code = library.launch_probe_5(
                ctypes.c_void_p(0), Dim3(4, 1, 1), Dim3(256, 1, 1), ctypes.c_uint(0),
                *[ctypes.c_uint64(0 if t is None else t.data_ptr()) for t in addresses],
                ctypes.c_int(1000), ctypes.c_float(1.0),
            )  # fmt: skip
            codes.append(code)
            if make_current:
                torch.cuda.synchronize()
                results.append(torch.equal(out, x + x))

    for make_current, expected in ((False, {201}), (True, {0})):
        codes.clear()
        in_threads(*[partial(work, make_current) for _ in range(6)])
        assert set(codes) == expected
    assert len(results) == 300
    assert all(results)


@needs_tvm_ffi
def test_tvm_ffi_follows_torch(built: Callable[[str], Path]) -> None:
    import tvm_ffi

    probe = tvm_ffi.load_module(str(built("launch_probe")))["launch_probe_5"]
    x = torch.randn(1000, device="cuda")
    out = torch.zeros_like(x)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # Only a launch on torch's current stream is captured.
    with torch.cuda.graph(graph, stream=side):
        probe(4, 256, 0, out, x, x, 1000, 2)
    torch.cuda.synchronize()
    assert not out.any()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, x + 2 * x)
    for value, says in ((x.cpu(), "CPU"), (x.half(), "must be float32, found float16")):
        with pytest.raises(ValueError, match=says):
            probe(4, 256, 0, out, value, x, 1000, 1.0)
    with pytest.raises(ValueError, match="contiguous"):
        probe(4, 256, 0, out, x, torch.randn(2000, device="cuda")[::2], 1000, 1.0)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        probe(4, 2048, 0, out, x, x, 1000, 1.0)

    done: list[bool] = []

    def work() -> None:  # a thread without a context of its own
        result = torch.zeros_like(x)
        torch.cuda.synchronize()
        probe((4,), (256, 1), 0, result, x, x, 1000, 1.0)
        torch.cuda.synchronize()
        done.append(torch.equal(result, x + x))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
