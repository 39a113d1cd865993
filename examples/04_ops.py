"""The ready-made ops: one call on torch tensors. On CPU tensors they run a reference instead."""

import torch

from kernel_hub import ops

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    print("needs an NVIDIA GPU: without one the ops run their reference on the CPU")

num_tokens, hidden_size, num_heads, num_kv_heads, head_dim = 128, 4096, 32, 8, 128
dtype = torch.bfloat16
x = torch.randn(num_tokens, hidden_size, device=device, dtype=dtype)
residual = torch.randn_like(x)
weight = torch.randn(hidden_size, device=device, dtype=dtype)

# In place: x becomes the norm, residual the sum.
expected_sum = x + residual
expected = torch.nn.functional.rms_norm(expected_sum.float(), (hidden_size,), weight.float(), 1e-6)
ops.rms_norm(x, weight, 1e-6, residual=residual, out=x, residual_out=residual)
torch.testing.assert_close(residual, expected_sum)
torch.testing.assert_close(x, expected.to(dtype))

# The q and k of a layer in one launch, half-split as in Llama.
q = torch.randn(num_tokens, num_heads, head_dim, device=device, dtype=dtype)
k = torch.randn(num_tokens, num_kv_heads, head_dim, device=device, dtype=dtype)
frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
angles = torch.arange(num_tokens, device=device)[:, None] * frequencies
q_out, k_out = ops.rope(q, k, angles.cos(), angles.sin())
# A rotation keeps the length of every pair.
for before, after in ((q, q_out), (k, k_out)):
    lengths = [t.float().unflatten(-1, (2, head_dim // 2)).norm(dim=-2) for t in (before, after)]
    torch.testing.assert_close(*lengths, rtol=2e-2, atol=2e-2)

gate_and_up = torch.randn(num_tokens, 2 * 14336, device=device, dtype=dtype)
gate, up = gate_and_up.float().chunk(2, dim=-1)
activated = ops.silu_and_mul(gate_and_up)
torch.testing.assert_close(activated, (torch.nn.functional.silu(gate) * up).to(dtype))

print(f"rms_norm with residual, rope and silu_and_mul on {x.device}: equal to torch's")
