"""cpm_kernels.library on a GPU: the driver's modules and launches, streams, events and memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kernel_hub import driver
from kernel_hub.collection.resolve import refusal
from kernel_hub.integrations import cpm_kernels

torch = pytest.importorskip("torch", reason="the memory is torch's")

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
from clients import HOPPER  # noqa: E402


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """cuda and cudart of the alias, whether the package is installed or not."""
    monkeypatch.setattr(cpm_kernels.finder._Finder, "_installed", lambda self, name, path: None)
    cpm_kernels.install()
    from cpm_kernels.library import cuda, cudart

    yield cuda, cudart
    cpm_kernels.uninstall()


def test_the_drivers_functions(library: Any) -> None:
    cuda, cudart = library
    capability = driver.get().compute_capability(torch.cuda.current_device())
    if all(refusal(capability, target) for target in ("sm_80", "sm_90")):
        pytest.skip("the client's image has code for 8.x and 9.0")
    cudart.cudaSetDevice(cudart.cudaGetDevice())
    out = torch.zeros(2, dtype=torch.int32, device="cuda")
    values = (ctypes.c_void_p(out.data_ptr()), (ctypes.c_int32 * 2)(3, -4), ctypes.c_void_p(0))
    module = cuda.cuModuleLoadData(HOPPER.read_bytes())
    function = cuda.cuModuleGetFunction(module, "writePair")
    stream, event = cudart.cudaStreamCreate(), cudart.cudaEventCreate()
    addresses = [ctypes.addressof(value) for value in values]
    cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, addresses)
    cudart.cudaEventRecord(event, stream)
    cudart.cudaStreamWaitEvent(ctypes.c_void_p(0), event)
    assert out.tolist() == [3, -4]
    cudart.cudaMemsetAsync(out.data_ptr(), 1, 4, stream)
    cudart.cudaStreamSynchronize(stream)
    assert out.tolist() == [0x01010101, -4]
    cudart.cudaEventDestroy(event)
    cudart.cudaStreamDestroy(stream)
    with pytest.raises(RuntimeError, match=r"^CUDA Error: named symbol not found"):
        cuda.cuModuleGetFunction(module, "noSuchFunction")
    cuda.cuModuleUnload(module)
    free, total = cudart.cudaMemGetInfo()
    assert 0 < free < total == torch.cuda.mem_get_info()[1]
    assert cuda.cuCtxGetCurrent().value
