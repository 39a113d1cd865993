"""The snippet that this library was asked for: a kernel by file and function name, launched."""

import sys

import torch

from kernel_hub import Kernel

k = Kernel(filename="matmul_cache_kernel", function_names=["matmul_cache_kernel_0d1d2d"])
print(k.matmul_cache_kernel_0d1d2d.signature)

if not torch.cuda.is_available():
    print("needs an NVIDIA GPU: torch.cuda.is_available() is False, so nothing was launched")
    sys.exit(0)

arg1 = torch.randn(512, 512, device="cuda", dtype=torch.float16)
arg2 = torch.randn(512, 512, device="cuda", dtype=torch.float16)
arg3 = torch.empty(512, 512, device="cuda", dtype=torch.float32)
k.matmul_cache_kernel_0d1d2d(
    gridDim=(8, 8, 1),
    blockDim=(32, 32, 1),
    sharedMemBytes=16384,
    stream=0,
    params=[arg1, arg2, arg3],
)
expected = arg1.double() @ arg2.double()
error = (arg3 - expected).abs().max().item()
assert error < 1e-3, f"largest error {error}"
print(f"arg3 = arg1 @ arg2 on {torch.cuda.get_device_name()}: largest error {error:.1e}")
