"""Attention of a prompt, then a token at a time over a KV cache; on the CPU by the references."""

import torch

from kernel_hub import ops

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    print("needs an NVIDIA GPU: without one the ops run their reference on the CPU")

batch_size, num_heads, num_kv_heads, head_dim, max_seqlen = 2, 8, 2, 64, 128
prompt, new_tokens = 60, 4


def randn(seqlen: int, heads: int) -> torch.Tensor:
    return torch.randn(batch_size, seqlen, heads, head_dim, device=device, dtype=torch.bfloat16)


q = randn(prompt + new_tokens, num_heads)
k, v = randn(prompt + new_tokens, num_kv_heads), randn(prompt + new_tokens, num_kv_heads)
# What both steps together must give: one attention over everything.
expected = torch.nn.functional.scaled_dot_product_attention(
    *(x.float().transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
).transpose(1, 2)

# Prefill: the prompt at once, with its log-sum-exp.
out, lse = ops.flash_attention(
    q[:, :prompt], k[:, :prompt], v[:, :prompt], causal=True, return_lse=True
)
torch.testing.assert_close(out.float(), expected[:, :prompt], rtol=2e-2, atol=2e-2)

# Decode: each step appends a token's k and v to the caches and attends over all there is.
caches = torch.zeros(2, batch_size, max_seqlen, num_kv_heads, head_dim, device=device).bfloat16()
caches[0, :, :prompt], caches[1, :, :prompt] = k[:, :prompt], v[:, :prompt]
cache_seqlens = torch.full((batch_size,), prompt, device=device, dtype=torch.int32)
for step in range(prompt, prompt + new_tokens):
    at = slice(step, step + 1)
    out = ops.decode_attention(
        q[:, at], *caches, k=k[:, at], v=v[:, at], cache_seqlens=cache_seqlens
    )
    torch.testing.assert_close(out.float(), expected[:, at], rtol=2e-2, atol=2e-2)
    cache_seqlens += 1

# Training: gradients through one packed tensor come back as one packed tensor.
qkv = torch.randn(batch_size, 32, 3, num_heads, head_dim, device=device, dtype=torch.bfloat16)
qkv.requires_grad_()
ops.flash_attention_qkvpacked(qkv, causal=True).square().sum().backward()
assert qkv.grad is not None and bool(qkv.grad.isfinite().all())

print(f"prefill of {prompt} tokens and {new_tokens} decode steps on {out.device}: equal to torch's")
