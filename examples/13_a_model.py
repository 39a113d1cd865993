"""A model of transformers by kernel_hub's ops: accelerate, the table, the same tokens, restore.

The model is tiny and its weights are random; `AutoModelForCausalLM.from_pretrained(...)` is used
in the same way.
"""

import sys

import torch

from kernel_hub import KernelHubError, driver

try:
    driver.get().primary_context(0)
    device = "cuda"
except KernelHubError as error:
    print(f"needs an NVIDIA GPU to be quick, goes on by the CPU: {error}")
    device = "cpu"

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    print("needs transformers: pip install 'transformers>=4.53'")
    sys.exit(0)

from kernel_hub.integrations.transformers import accelerate, report, restore

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0,
)  # fmt: skip
model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
tokens = torch.randint(1, 512, (2, 12), device=device)
mask = torch.ones_like(tokens)
mask[0, :5] = 0  # a shorter prompt, padded on its left


def logits() -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=mask).logits[mask.bool()]


before = logits()
print(accelerate(model))  # what each module runs by now, and why the others were left alone
after = logits()
print(f"logits to {before.abs().max():.2f} differ by at most {(after - before).abs().max():.4f}")
torch.testing.assert_close(after, before, rtol=0.05, atol=0.05)

generated = model.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)
print("generated", generated[:, 12:].tolist())
print("calls", report()["taken"])

restore(model)
assert torch.equal(logits(), before), "restored to the bit"
print("restored to the bit")
