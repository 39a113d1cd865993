"""NumPy in, NumPy out: device memory from the driver's pool, no torch anywhere."""

import sys

import numpy as np

from kernel_hub import DeviceArray, Kernel, KernelHubError, driver, memory_stats

kernel = Kernel("launch_probe", ["launch_probe_5"])
print(kernel)

try:
    driver.get().primary_context(0)
except KernelHubError as error:
    print(f"needs an NVIDIA GPU: {error}")
    sys.exit(0)

random = np.random.default_rng(0)
x, y = random.standard_normal((2, 100_003), dtype=np.float32)
out = DeviceArray.empty(x.shape, "fp32")
kernel.launch_probe_5(
    gridDim=(x.size + 255) // 256,
    blockDim=256,
    params={
        "out": out,
        "x": DeviceArray.from_numpy(x),
        "y": DeviceArray.from_numpy(y),
        "num_elements": x.size,
        "scale": 0.5,
    },
)
np.testing.assert_allclose(out.to_numpy(), x + np.float32(0.5) * y, rtol=1e-5, atol=1e-6)
print(f"out = x + 0.5 * y on {driver.get().device_name(0)}: equal to NumPy's")
print(f"the pool holds {memory_stats().reserved_bytes >> 20} MiB for the next arrays")
