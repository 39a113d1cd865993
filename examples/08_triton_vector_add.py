"""A Triton kernel built ahead of time for several architectures, and launched without Triton.

`kernel-hub build-triton` does the first half from the shell; a package ships the folder as cubins/.
"""

import sys
import tempfile

import torch

from kernel_hub import KernelHubError, driver
from kernel_hub.formats.triton import collection, compile

try:
    import triton
    import triton.language as tl
except ImportError:
    print("needs Triton to build: pip install triton")
    sys.exit(0)


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, num_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    x, y = tl.load(x_ptr + offsets, mask=mask), tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


with tempfile.TemporaryDirectory() as folder:
    # No GPU is asked: ':16' promises that 16 divides the address, and each launch checks it.
    name = compile(
        add_kernel,
        {"x_ptr": "*fp32:16", "y_ptr": "*fp32:16", "out_ptr": "*fp32:16", "num_elements": "i32"},
        constexprs={"BLOCK": 1024},
        num_warps=4,
        arch=["sm80", "sm89", "sm90"],
        out=folder,
    )
    kernels = collection(folder)  # from here on Triton is not needed
    for arch in kernels.entries(name):
        print(arch, kernels.function(name, arch=arch))

    try:
        driver.get().primary_context(0)
    except KernelHubError as error:
        print(f"needs an NVIDIA GPU to launch: {error}")
        sys.exit(0)

    add = kernels[name]  # as built for this GPU
    x, y = torch.randn(2, 98432, device="cuda")
    out = torch.empty_like(x)
    add[(triton.cdiv(x.numel(), add.constexprs["BLOCK"]),)](x, y, out, x.numel())
    torch.testing.assert_close(out, x + y, rtol=0, atol=0)
    print(f"{x.numel()} sums on {driver.get().device_name(0)}: equal to torch's")
