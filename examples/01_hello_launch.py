"""The shortest whole launch: a shipped cubin, three torch tensors, an int and a float."""

import sys

import torch

from kernel_hub import Kernel

kernel = Kernel("launch_probe")  # no GPU, no driver and no compiler needed up to here
print(kernel.launch_probe_5.signature)

if not torch.cuda.is_available():
    print("needs an NVIDIA GPU: torch.cuda.is_available() is False, so nothing was launched")
    sys.exit(0)

x, y = torch.randn(2, 100_003, device="cuda")
out = torch.empty_like(x)
kernel.launch_probe_5(
    gridDim=(x.numel() + 255) // 256, blockDim=256, params=[out, x, y, x.numel(), 0.5]
)
torch.testing.assert_close(out, x + 0.5 * y)
print(f"out = x + 0.5 * y on {torch.cuda.get_device_name()}: equal to torch's")
