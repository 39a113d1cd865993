"""Clients that import cpm_kernels.library, or pkg_resources, where neither is installed."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from clients import HOPPER, OLDER, SIZES, client_text, prepared
from fakecuda import FakeCuda

from kernel_hub.arrays import interop
from kernel_hub.errors import CubinNotFoundError, LaunchConfigError
from kernel_hub.integrations import cpm_kernels

HALF = "int4WeightExtractionHalf"
VALUES = [*map(ctypes.c_void_p, (0x1000, 0x2000, 0x3000)), ctypes.c_int32(3), ctypes.c_int32(64)]

# The preamble of a published client: it adds torch's folder to where DLLs are looked for.
FINDS_DLLS = """
import cpm_kernels.library.base

original = cpm_kernels.library.base.windows_find_lib


def windows_find_lib(name):
    return original(name) or 'torch/lib/%s.dll' % name


cpm_kernels.library.base.windows_find_lib = windows_find_lib
"""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The alias, and no cpm_kernels and no pkg_resources behind it, whatever this machine has."""
    gone = ("cpm_kernels", "pkg_resources")
    monkeypatch.setattr(
        cpm_kernels.finder._Finder, "_installed", lambda self, name, path: None, raising=True
    )
    for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
        monkeypatch.delitem(sys.modules, name)
    cpm_kernels.install()
    yield
    cpm_kernels.uninstall()


@pytest.fixture
def fake(make_fakecuda: Callable[..., FakeCuda]) -> FakeCuda:
    return prepared(make_fakecuda())


def test_a_client_that_looks_for_dlls_itself(
    alone: None, fake: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = client_text(HOPPER.read_bytes(), list(SIZES))
    before, _, rest = text.partition("    from cpm_kernels")
    inside = "".join(f"    {line}\n" if line else "\n" for line in FINDS_DLLS.splitlines())
    (tmp_path / "finds_dlls.py").write_text(f"{before}{inside}    from cpm_kernels{rest}")
    monkeypatch.syspath_prepend(tmp_path)
    client = importlib.import_module("finds_dlls")
    assert client.failure is None and fake.all_calls == 0
    client.kernels.int4WeightExtractionHalf((3, 1, 1), (64, 1, 1), 0, 0, VALUES)
    assert fake.launch().name == HALF
    base = sys.modules["cpm_kernels.library.base"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert base.windows_find_lib("cudart") == "torch/lib/cudart.dll"
    (tmp_path / "cudart64_12.dll").touch()
    assert base.windows_find_lib("cudart") == str(tmp_path / "cudart64_12.dll")
    assert base.lookup_dll("nowhere") is None
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libcudart.so").touch()
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert base.unix_find_lib("cudart") == str(tmp_path / "lib64/libcudart.so")


def test_bound_functions(alone: None) -> None:
    from cpm_kernels.library.base import Lib

    unopened = Lib("nvrtc")
    opened = Lib.from_lib("c", SimpleNamespace(abs=lambda number: abs(number)))

    @unopened.bind("nvrtcVersion", [], ctypes.c_int)
    def version() -> int:
        return int(unopened.nvrtcVersion())

    @opened.bind("abs", [ctypes.c_int], ctypes.c_int)
    def absolute(number: int) -> int:
        """Of a number."""
        return int(opened.abs(number))

    assert (absolute(-3), absolute.__doc__) == (3, "Of a number.")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^Library nvrtc is not initialized: .*pip install"):
            version()


def test_a_launch_by_the_drivers_functions(alone: None, fake: FakeCuda) -> None:
    from cpm_kernels.library import cuda

    assert fake.all_calls == 0
    module = cuda.cuModuleLoadData(HOPPER.read_bytes())
    assert fake.live("libraries") == 1
    function = cuda.cuModuleGetFunction(module, HALF)
    addresses = [ctypes.addressof(value) for value in VALUES]
    for stream in (None, 0, ctypes.c_void_p(), ctypes.c_void_p(0)):
        cuda.cuLaunchKernel(function, 3, 1, 1, 64, 2, 1, 128, stream, addresses)
        launch = fake.launch()
        assert (launch.name, launch.gridDim, launch.blockDim) == (HALF, (3, 1, 1), (64, 2, 1))
        assert (launch.sharedMemBytes, launch.stream) == (128, 0)
        assert launch.params == tuple(map(bytes, VALUES))  # type: ignore[arg-type]
    for wrong in (addresses[:4], [*addresses, addresses[0]]):
        with pytest.raises(RuntimeError, match=r"^CUDA Error: invalid argument\n.*too (few|many)"):
            cuda.cuLaunchKernel(function, 3, 1, 1, 64, 1, 1, 0, None, wrong)
    with pytest.raises(RuntimeError, match=r"^CUDA Error: named symbol not found"):
        cuda.cuModuleGetFunction(module, "int4WeightExtractionHafl")
    cuda.cuModuleUnload(module)
    assert fake.live("libraries") == 0
    cuda.cuLaunchKernel(function, 3, 1, 1, 64, 1, 1, 0, None, addresses)
    assert fake.live("libraries") == 1


def test_functions_of_a_lazy_modules_module(alone: None, fake: FakeCuda) -> None:
    from cpm_kernels.kernels.base import LazyKernelCModule
    from cpm_kernels.library import cuda

    function = cuda.cuModuleGetFunction(LazyKernelCModule(HOPPER.read_bytes()).get_module(), HALF)
    addresses = [ctypes.addressof(value) for value in VALUES]
    cuda.cuLaunchKernel(function, 3, 1, 1, 64, 1, 1, 0, None, addresses)
    assert fake.launch().params == tuple(map(bytes, VALUES))  # type: ignore[arg-type]


def test_no_code_for_the_gpu(alone: None, fake: FakeCuda) -> None:
    from cpm_kernels.library import cuda

    with pytest.raises(CubinNotFoundError, match=r"^CUDA Error: no kernel image"):
        cuda.cuModuleLoadData(OLDER.read_bytes())
    cpm_kernels.install(substitute=True)
    function = cuda.cuModuleGetFunction(cuda.cuModuleLoadData(OLDER.read_bytes()), HALF)
    addresses = [ctypes.addressof(value) for value in VALUES]
    with pytest.warns(RuntimeWarning, match=HALF):
        cuda.cuLaunchKernel(function, 3, 1, 1, 64, 1, 1, 0, None, addresses)
    assert fake.launch().name == HALF


def test_errors_and_versions(alone: None, fake: FakeCuda) -> None:
    from cpm_kernels.library import cuda, cudart

    assert (cuda.CUDA_SUCCESS, cuda.CUDA_ERROR_NO_BINARY_FOR_GPU) == (0, 209)
    assert cuda.cuGetErrorName(209) == "CUDA_ERROR_NO_BINARY_FOR_GPU"
    assert cuda.cuGetErrorName(0) == "CUDA_SUCCESS"
    assert cuda.cuGetErrorString(1) == cudart.cudaGetErrorString(1) == "invalid argument"
    cuda.checkCUStatus(0)
    cudart.checkCUDAStatus(cudart.cudaSuccess)
    with pytest.raises(RuntimeError, match=r"^CUDA Error: invalid argument$"):
        cuda.checkCUStatus(1)
    with pytest.raises(RuntimeError, match=r"^CUDA Runtime Error: invalid argument$"):
        cudart.checkCUDAStatus(1)
    for ask in (cuda.cuGetErrorName, cuda.cuGetErrorString):
        with pytest.raises(RuntimeError, match="Invalid error value: 123456"):
            ask(123456)
    assert cuda.version == cuda.cuDriverGetVersion() == cudart.cudaDriverGetVersion() == 13000
    for module, missing in ((cuda, "cuMemAlloc"), (cudart, "cudaMalloc")):
        with pytest.raises(AttributeError, match=f"has no {missing}; .*pip install --no-deps"):
            getattr(module, missing)
        assert not hasattr(module, missing)


def test_devices_streams_and_events(
    alone: None, make_fakecuda: Callable[..., FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = make_fakecuda(devices=2)
    from cpm_kernels.library import cuda, cudart

    assert (cudart.cudaGetDeviceCount(), cudart.cudaGetDevice()) == (2, 0)
    cudart.cudaSetDevice(0)
    assert cuda.cuCtxGetCurrent().value
    with pytest.raises(LaunchConfigError, match=r"cudaSetDevice\(1\): without torch"):
        cudart.cudaSetDevice(1)
    with pytest.raises(RuntimeError, match="there are 2"):
        cudart.cudaSetDevice(2)
    current = [0]
    torch = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: True, set_device=lambda d: current.append(d))
    )
    monkeypatch.setattr(interop, "loaded_torch", lambda: torch)
    monkeypatch.setattr(interop, "current_device", lambda: current[-1])
    cudart.cudaSetDevice(1)
    assert cudart.cudaGetDevice() == 1 == current[-1]
    assert cudart.cudaDeviceGetAttribute(75, 1) == 9
    free, total = cudart.cudaMemGetInfo()
    assert 0 < free <= total
    stream, event = cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking), None
    try:
        event = cudart.cudaEventCreate()
        cudart.cudaEventRecord(event, stream)
        cudart.cudaStreamWaitEvent(cudart.cudaStream_t(0), event)
        buffer = ctypes.create_string_buffer(b"\1" * 8, 8)  # device memory of the stand-in is ours
        for address in (ctypes.addressof(buffer), ctypes.c_void_p(ctypes.addressof(buffer) + 4)):
            cudart.cudaMemsetAsync(address, 7, 2, stream)
        cudart.cudaStreamSynchronize(stream)
        assert buffer.raw == b"\7\7\1\1" * 2
    finally:
        cudart.cudaEventDestroy(event)
        cudart.cudaStreamDestroy(stream)
    assert fake.live("streams") == fake.live("events") == 0


# -- package resources


@pytest.fixture
def client_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client that keeps its image beside it, and asks pkg_resources for it."""
    folder = tmp_path / "client_with_resources"
    (folder / "kernels").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "kernels/client.fatbin").write_bytes(HOPPER.read_bytes())
    (folder / "kernels/__init__.py").write_text(
        "import pkg_resources\n"
        "from cpm_kernels.kernels.base import KernelFunction, LazyKernelCModule\n\n"
        "name = 'client.fatbin'\n"
        "assert pkg_resources.resource_exists(__name__, name)\n"
        "assert not pkg_resources.resource_exists(__name__, 'other.fatbin')\n"
        "module = LazyKernelCModule(pkg_resources.resource_string(__name__, name))\n"
        f"half = KernelFunction(module, '{HALF}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda: importlib.import_module("client_with_resources.kernels")
    for name in [name for name in sys.modules if name.startswith("client_with_resources")]:
        del sys.modules[name]


def test_pkg_resources(alone: None, fake: FakeCuda, client_package: Callable[[], Any]) -> None:
    client = client_package()
    client.half((3, 1, 1), (64, 1, 1), 0, 0, VALUES)
    assert fake.launch().name == HALF
    found = client.pkg_resources
    assert found.resource_stream(client, "client.fatbin").read() == HOPPER.read_bytes()
    path = found.resource_filename("client_with_resources", "kernels/client.fatbin")
    assert Path(path).read_bytes() == HOPPER.read_bytes()
    # What other programs, that would do without it, ask of it.
    assert found.get_distribution("pytest").version == pytest.__version__
    with pytest.raises(found.DistributionNotFound):
        found.get_distribution("no-such-distribution")
    with pytest.raises(ImportError):
        exec("from pkg_resources import parse_version")
    with pytest.raises(AttributeError, match=r"has no parse_version.*setuptools<82"):
        found.parse_version  # noqa: B018
    cpm_kernels.uninstall()
    assert "pkg_resources" not in sys.modules


def test_an_installed_pkg_resources_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alias: None
) -> None:
    monkeypatch.delitem(sys.modules, "pkg_resources", raising=False)
    (tmp_path / "pkg_resources.py").write_text("theirs = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("pkg_resources").theirs
    cpm_kernels.uninstall()
    assert sys.modules.pop("pkg_resources").theirs


# -- kernel_hub's own cubins


def test_kernel_finds_the_cubins_that_kernel_hub_ships(alone: None, fake: FakeCuda) -> None:
    from cpm_kernels.kernels.base import Kernel

    kernel = Kernel("weight_extraction", [HALF, "noSuchFunction"])
    assert kernel.filename == "cuda/weight_extraction.fatbin"
    kernel.int4WeightExtractionHalf((3, 1, 1), (64, 1, 1), 0, 0, VALUES)
    assert (fake.launch().name, fake.calls("cuLibraryLoadData")) == (HALF, 1)
    shipped = Path(__file__).parents[2] / "cubins/sm90/weight_extraction.cubin"
    assert kernel.code == shipped.read_bytes()
    with pytest.raises(RuntimeError, match=r"(?s)named symbol.*kernel_hub's cubin 'weight_ex"):
        kernel.noSuchFunction((1, 1, 1), (1, 1, 1), 0, 0, [])
    with pytest.raises(RuntimeError, match=r"no cpm_kernels is installed"):
        Kernel("weight_extrection", [HALF])
