"""C++ source compiled at run time: a template, two instances, kept on disk for the next time.

Needs the extra: pip install 'kernel_hub[jit]'.
"""

import sys
import time

import numpy as np

from kernel_hub import DeviceArray, Kernel, KernelHubError, driver

SOURCE = """
#include <cuda_fp16.h>

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) scale(T* out, const T* x, float factor, int n) {
    int i = blockIdx.x * kThreads + threadIdx.x;
    if (i < n) out[i] = T(float(x[i]) * factor);
}
"""
NAMES = ["scale<float, 128>", "scale<__half, 256>"]

try:
    gpu = driver.get()
    gpu.primary_context(0)
except KernelHubError as error:
    print(f"needs an NVIDIA GPU to launch: {error}")
    gpu = None

try:
    started = time.perf_counter()
    kernel = Kernel.from_source(SOURCE, NAMES, arch=None if gpu else "sm90")
    print(f"compiled, or found in the cache, in {time.perf_counter() - started:.2f} s: {kernel}")
except KernelHubError as error:
    print(error)
    sys.exit(0)

try:
    Kernel.from_source(SOURCE.replace("kThreads +", "threads +"), NAMES, arch="sm90")
except KernelHubError as error:
    print("a mistake is shown as the compiler saw it:", *str(error).splitlines()[1:4], sep="\n")

if gpu is not None:
    for name, dtype, threads in zip(NAMES, (np.float32, np.float16), (128, 256), strict=True):
        x = np.random.default_rng(0).standard_normal(1000).astype(dtype)
        out = DeviceArray.empty(x.shape, x.dtype)
        blocks = -(-x.size // threads)
        kernel[name](blocks, threads, params=[out, DeviceArray.from_numpy(x), 2.0, x.size])
        np.testing.assert_array_equal(out.to_numpy(), x * dtype(2))
        print(f"{name} on {gpu.device_name(0)}: equal to NumPy's")
