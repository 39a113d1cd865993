"""Source compiled at run time on a real GPU: templates, the card's own instructions, ObjectCode."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernel_hub import DeviceArray, Kernel, cache_folder, driver
from kernel_hub.errors import CompileError

core = pytest.importorskip("cuda.core", reason="the extra `jit` (cuda-core) is not installed")
SOURCE = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
struct Shift { float by; int times; };
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) scale(T* out, const T* x, float factor, int n,
                                                  Shift shift) {
    int i = blockIdx.x * kThreads + threadIdx.x;
    if (i < n) out[i] = T(float(x[i]) * factor + shift.by * shift.times);
}
"""
NAMES = ["scale<float, 128>", "scale<__half, 256>", "scale<__nv_bfloat16, 64>"]


class Shift(ctypes.Structure):
    _fields_ = (("by", ctypes.c_float), ("times", ctypes.c_int))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    return tmp_path


def check(kernel: Kernel) -> None:
    for name, token in zip(NAMES, ("fp32", "fp16", "bf16"), strict=True):
        threads = int(name.split(", ")[1].rstrip(">"))
        x = (np.arange(1000, dtype=np.float32) % 61 - 30) / 2  # exact in bf16, and so is 2 x + 1.5
        values = DeviceArray.from_numpy(x)
        if token != "fp32":
            values = narrowed(values, token)
        out = DeviceArray.zeros(x.shape, token)
        kernel[name](-(-x.size // threads), threads, 0, None, [out, values, 2, 1000, Shift(0.5, 3)])
        np.testing.assert_array_equal(widened(out), x * 2 + 1.5)


def narrowed(values: DeviceArray, token: str) -> DeviceArray:
    host = values.to_numpy()
    if token == "fp16":
        return DeviceArray.from_numpy(host.astype(np.float16))
    bits = (host.view(np.uint32) >> 16).astype(np.uint16)
    return DeviceArray.from_numpy(bits).view("bf16")


def widened(values: DeviceArray) -> Any:
    if values.dtype_token == "bf16":
        bits = values.view("uint16").to_numpy().astype(np.uint32) << 16
        return bits.view(np.float32)
    return values.to_numpy().astype(np.float32)


def test_templates_on_this_gpu_and_from_the_cache(folder: Path) -> None:
    kernel = Kernel.from_source(SOURCE, NAMES)
    check(kernel)
    entries = {path: path.stat().st_mtime_ns for path in (folder / "source").iterdir()}
    again = Kernel.from_source(SOURCE, NAMES)
    assert again is not kernel
    check(again)
    assert entries == {path: path.stat().st_mtime_ns for path in (folder / "source").iterdir()}


def test_instructions_of_this_very_architecture() -> None:
    if driver.get().compute_capability(0)[0] != 9:
        pytest.skip("wgmma is compute capability 9.0's")
    code = """
        extern "C" __global__ void fence(int* out) {
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            if (threadIdx.x == 0) *out = 7;
        }
    """
    out = DeviceArray.zeros(1, "int32")
    Kernel.from_source(code).fence(1, 128, 0, None, [out])
    assert out.to_numpy()[0] == 7
    with pytest.raises(CompileError, match="wgmma") as caught:
        Kernel.from_source(code, arch="sm90")
    assert "not supported on .target 'sm_90'" in caught.value.log


def test_the_error_has_the_compilers_log() -> None:
    with pytest.raises(CompileError, match="factr") as caught:
        Kernel.from_source(SOURCE.replace("* factor", "* factr"), NAMES)
    assert 'identifier "factr" is undefined' in caught.value.log


def test_object_code_of_cuda_core() -> None:
    major, minor = driver.get().compute_capability(0)
    code = 'extern "C" __global__ void f(int* x, int n) { *x = n; }'
    program = core.Program(code, "c++", core.ProgramOptions(arch=f"sm_{major}{minor}"))
    out = DeviceArray.zeros(1, "int32")
    kernel = Kernel(program.compile("cubin"), signatures={"f": "int* x, int n"})
    kernel.f(1, 1, 0, None, [out, 41])
    assert out.to_numpy()[0] == 41
    program = core.Program(code, "c++", core.ProgramOptions(arch=f"compute_{major}{minor}"))
    kernel = Kernel(program.compile("ptx"), signatures={"f": "int* x, int n"})
    kernel.f(1, 1, 0, None, [out, 42])
    assert out.to_numpy()[0] == 42
