"""Ops of CPU tensors under torch.autocast: what they say, not products rounded to bf16 on the way.

Kernels know of no autocast, so neither may the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same_bits
from torch.utils._pytree import tree_leaves

from kernel_hub import ops

torch.manual_seed(0)
HALF = torch.float16
X, W = torch.randn(5, 64), torch.randn(96, 64)
Q = torch.randn(1, 3, 2, 32)
LENGTHS = torch.tensor([3], dtype=torch.int32)
E4M3 = torch.float8_e4m3fn
CALLS: dict[str, Callable[[], Any]] = {
    "linear": lambda: ops.linear(X, W),
    "linear, e4m3": lambda: ops.linear(X.to(E4M3), W.to(E4M3), out_dtype=torch.float32),
    "batched_matmul": lambda: ops.batched_matmul(X.to(HALF), W.to(HALF), out_dtype=torch.float32),
    "grouped_linear": lambda: ops.grouped_linear(
        X.to(HALF), W.to(HALF)[None], torch.tensor([0, 5], dtype=torch.int32),
        out_dtype=torch.float32,
    ),
    "swiglu_linear": lambda: ops.swiglu_linear(X.to(HALF), W.to(HALF)),
    "gated_linear": lambda: ops.gated_linear(X.to(HALF), W.to(HALF), "gelu"),
    "qkv_linear": lambda: ops.qkv_linear(
        X.to(HALF)[None], W.to(HALF), num_heads=1, num_kv_heads=1
    ),
    "flash_attention": lambda: ops.flash_attention(Q, Q, Q, causal=True, return_lse=True),
    "flash_attention, e4m3": lambda: ops.flash_attention(*[Q.to(E4M3)] * 3, return_lse=True),
    "decode_attention": lambda: ops.decode_attention(
        Q, Q, Q, cache_seqlens=LENGTHS, return_lse=True
    ),
    "mla_decode": lambda: ops.mla_decode(
        X.repeat(1, 9)[None, :, None].to(HALF), X.repeat(1, 9)[None].to(HALF),
        cache_seqlens=LENGTHS + 2, softmax_scale=0.1, return_lse=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CALLS))
def test_the_same_bits(name: str) -> None:
    expected = tree_leaves(CALLS[name]())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = tree_leaves(CALLS[name]())
    for each, other in zip(found, expected, strict=True):
        same_bits(each, other)


def test_the_same_gradients() -> None:
    def gradient() -> torch.Tensor:
        q = Q.bfloat16().requires_grad_()
        ops.flash_attention(q, q, q, causal=True).float().square().sum().backward()
        assert q.grad is not None
        return q.grad

    expected = gradient()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same_bits(gradient(), expected)
