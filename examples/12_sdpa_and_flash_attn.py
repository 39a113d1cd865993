"""Two doors: torch's attention and flash-attn's names run the kernels of kernel_hub."""

import torch

from kernel_hub import flash_attn
from kernel_hub.integrations import sdpa

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    print("needs an NVIDIA GPU: without one torch keeps its own SDPA, and flash-attn's names run")
    print("their reference on the CPU")

q, k, v = (
    torch.randn(2, 4, 96, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3)
)
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

# Any model that calls torch's attention, forward and backward; dropout runs as before.
if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    sdpa.activate()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.float().square().sum().backward()
    torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    print(sdpa.report())
    sdpa.restore()
    assert (sdpa.report().taken != {}) == (device == "cuda")
else:
    print(f"the first door needs torch 2.10; this is {torch.__version__}")

# Programs that import flash_attn, unchanged, tokens before heads.
flash_attn.install()
from flash_attn import flash_attn_func, flash_attn_with_kvcache  # noqa: E402

tokens = [x.detach().transpose(1, 2) for x in (q, k, v)]
out = flash_attn_func(*tokens, 0.0, None, True)  # dropout_p, softmax_scale, causal
torch.testing.assert_close(out.transpose(1, 2), expected, rtol=2e-2, atol=2e-2)

# The last token alone, over a cache of those before it.
caches = [torch.zeros(2, 128, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(2)]
for cache, x in zip(caches, tokens[1:], strict=True):
    cache[:, :95] = x[:, :95]
last = [x[:, 95:] for x in tokens]
step = flash_attn_with_kvcache(last[0], *caches, *last[1:], cache_seqlens=95, causal=True)
torch.testing.assert_close(step, out[:, 95:], rtol=2e-2, atol=2e-2)
try:
    flash_attn_func(*tokens, dropout_p=0.1)
except ValueError as refused:
    print(refused)
flash_attn.uninstall()
print(f"flash_attn_func and a decode step on {out.device}: equal to torch's")
