"""A mixture-of-experts layer: six launches behind the router, no step of the host, beside torch."""

import torch

from kernel_hub import ops

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    print("needs an NVIDIA GPU: without one the ops run their reference on the CPU")

# A layer of Qwen 3's kind, smaller: softmax over all experts, the weights of the best k sum to 1.
num_tokens, hidden_size, intermediate_size, num_experts, k = 64, 256, 128, 16, 4
dtype = torch.bfloat16
torch.manual_seed(0)
x = torch.randn(num_tokens, hidden_size, device=device, dtype=dtype)
router = torch.randn(num_experts, hidden_size, device=device, dtype=dtype) / hidden_size**0.5
gate_up = torch.randn(num_experts, 2 * intermediate_size, hidden_size, device=device, dtype=dtype)
down = torch.randn(num_experts, hidden_size, intermediate_size, device=device, dtype=dtype)
gate_up, down = gate_up / hidden_size**0.5, down / intermediate_size**0.5

logits = x @ router.T
weights, experts = ops.moe_route(logits, k, renormalise=True)
rows, offsets, row_id_map = ops.moe_permute(x, experts, num_experts)
inner = ops.silu_and_mul(ops.grouped_linear(rows, gate_up, offsets))
out = ops.moe_combine(ops.grouped_linear(inner, down, offsets), row_id_map, weights)

# The same expert by expert, in fp32.
best, chosen = logits.float().softmax(-1).topk(k, -1)
best = best / best.sum(-1, keepdim=True)
expected = torch.zeros(num_tokens, hidden_size, device=device)
for expert in range(num_experts):
    tokens, slots = (chosen == expert).nonzero(as_tuple=True)
    gate, up = (x[tokens].float() @ gate_up[expert].float().T).chunk(2, -1)
    each = (torch.nn.functional.silu(gate) * up) @ down[expert].float().T
    expected.index_add_(0, tokens, best[tokens, slots, None] * each)
error = float((out.float() - expected).norm() / expected.norm())
assert error < 0.02, error

busiest = int(offsets.diff().max())
print(f"{num_tokens} tokens, {k} of {num_experts} experts each, at most {busiest} rows an expert:")
print(f"as in torch, expert by expert, within {error:.1%} (products of {dtype})")
