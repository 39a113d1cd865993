"""Your own .cu: compiled with nvcc to a cubin file, its parameter types declared, launched.

A package that ships such a kernel for several architectures: `kernel-hub new NAME`, and scale_add/.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from kernel_hub import DeviceArray, Kernel, KernelHubError, driver
from kernel_hub.build import find_nvcc

SOURCE = """
extern "C" __global__ void saxpy(float* y, const float* x, float a, int num_elements) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < num_elements) y[i] += a * x[i];
}
"""

try:
    gpu = driver.get()
    gpu.primary_context(0)
    major, minor = gpu.compute_capability(0)
    arch = f"sm_{major}{minor}"
except KernelHubError as error:
    print(f"needs an NVIDIA GPU to launch: {error}")
    gpu, arch = None, "sm_90"
try:
    nvcc = find_nvcc()
except KernelHubError as error:
    print(f"needs nvcc to compile: {error}")
    sys.exit(0)

with tempfile.TemporaryDirectory() as folder:
    source, cubin = Path(folder, "saxpy.cu"), Path(folder, "saxpy.cubin")
    source.write_text(SOURCE)
    subprocess.run([nvcc.path, "-cubin", f"-arch={arch}", "-o", cubin, source], check=True)
    # A cubin knows the size of each parameter but not its type: Python numbers need the types.
    kernel = Kernel(cubin, signatures={"saxpy": "float* y, float* x, float a, int num_elements"})
print(kernel)

if gpu is not None:
    x, y = np.random.default_rng(0).standard_normal((2, 1000), dtype=np.float32)
    result = DeviceArray.from_numpy(y)
    kernel.saxpy(4, 256, params=[result, DeviceArray.from_numpy(x), 3.0, x.size])
    np.testing.assert_allclose(result.to_numpy(), y + 3 * x, rtol=1e-5, atol=1e-6)
    print(f"y += 3 * x on {gpu.device_name(0)}: equal to NumPy's")
