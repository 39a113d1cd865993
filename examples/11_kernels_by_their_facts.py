"""Three shipped kernels launched through the registry by what they state of themselves.

`help(function)` and `kernel-hub inspect silu_and_mul linear batched_matmul` show the same facts.
"""

import sys

import torch

from kernel_hub import registry

gate = registry.silu_and_mul["silu_and_mul_bf16_flat"]
linear = registry.linear["linear_bf16_64x128"]
batched = registry.batched_matmul["batched_matmul_bf16_128x128"]
for function in (gate, linear, batched):
    print(function)

if not torch.cuda.is_available():
    print("needs an NVIDIA GPU: torch.cuda.is_available() is False, so nothing was launched")
    sys.exit(0)


def blocks(size: int, each: int) -> int:
    """How many blocks of `each` cover `size`."""
    return -(-size // each)


# Columns along x in steps of blockDim.x accesses of 16 bytes (8 elements), rows along y.
x = torch.randn(300, 2 * 1024, device="cuda", dtype=torch.bfloat16)
gated = torch.empty(300, 1024, device="cuda", dtype=torch.bfloat16)
gate((blocks(1024, 128 * 8), 300), 128, params=[gated, x, 1024])

# One share of k along y needs no room for sums: null pointers.
facts = linear.spec.launch
assert facts is not None
tile_m, tile_n = facts.sizes["block_m"], facts.sizes["block_n"]
b = torch.randn(768, 1024, device="cuda", dtype=torch.bfloat16)
out = torch.empty(300, 768, device="cuda", dtype=torch.bfloat16)
linear(
    blocks(300, tile_m) * blocks(768, tile_n), facts.block, facts.shared_bytes,
    params={
        "out": out, "partials": None, "tickets": None, "a": gated, "b": b, "bias": None,
        "residual": None, "out_stride": 768, "a_stride": 1024, "b_stride": 1024,
        "residual_stride": 0, "m": 300, "n": 768, "k": 1024, "activation": 0,
    },
)  # fmt: skip

# The same for each of four matrices.
facts = batched.spec.launch
assert facts is not None
tile_m, tile_n = facts.sizes["block_m"], facts.sizes["block_n"]
a4 = torch.randn(4, 200, 512, device="cuda", dtype=torch.bfloat16)
b4 = torch.randn(4, 256, 512, device="cuda", dtype=torch.bfloat16)
out4 = torch.empty(4, 200, 256, device="cuda", dtype=torch.bfloat16)
strides = [0, 200 * 256, 256, 0, 200 * 512, 512, 0, 256 * 512, 512]  # outer, inner, row of each
batched(
    4 * blocks(200, tile_m) * blocks(256, tile_n), facts.block, facts.shared_bytes,
    params=[out4, None, a4, b4, *strides, 4, 4, 200, 256, 512],
)  # fmt: skip

halves = x.float().chunk(2, dim=-1)
torch.testing.assert_close(
    gated, (torch.nn.functional.silu(halves[0]) * halves[1]).to(gated.dtype), rtol=2e-2, atol=2e-2
)
torch.testing.assert_close(out, gated @ b.T, rtol=2e-2, atol=0.5)
torch.testing.assert_close(out4, a4 @ b4.transpose(1, 2), rtol=2e-2, atol=0.5)
print(f"silu_and_mul, linear and batched_matmul on {torch.cuda.get_device_name()}: as torch")
