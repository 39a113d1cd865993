"""What torch, Liger and FlashInfer have for the calls of host_time.py, on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Makers = dict[str, Callable[[], Callable[[], Any]]]


def makers() -> Makers:
    """By name: `torch: softmax`."""
    import torch
    from torch.nn import functional

    def half(*shape: int) -> Any:
        return torch.randn(*shape).to(torch.bfloat16)

    def attention(grad: bool = False) -> Any:
        q, k, v = (half(1, 248, 4, 64).requires_grad_(grad) for _ in range(3))
        dout = half(1, 248, 4, 64)

        def call() -> None:
            turned = [x.transpose(1, 2) for x in (q, k, v)]
            out = functional.scaled_dot_product_attention(*turned, is_causal=True).transpose(1, 2)
            if grad:
                torch.autograd.grad(out, (q, k, v), dout)

        return call

    def trivial() -> Any:
        q, k, v = (half(1, 248, 4, 64).requires_grad_() for _ in range(3))
        dout = half(1, 248, 4, 64)

        class Trivial(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
                ctx.save_for_backward(q, k, v)
                return torch.empty_like(q)

            @staticmethod
            def backward(ctx: Any, dout: Any) -> Any:
                return tuple(torch.empty_like(x) for x in ctx.saved_tensors)

        return lambda: torch.autograd.grad(Trivial.apply(q, k, v), (q, k, v), dout)

    def linear() -> Any:
        a, b = half(16, 512), half(256, 512)
        return lambda: functional.linear(a, b)

    def linear_e4m3() -> Any:
        a, b = (half(*shape).to(torch.float8_e4m3fn) for shape in ((16, 512), (256, 512)))
        scales = {"scale_a": torch.ones(16, 1), "scale_b": torch.ones(1, 256)}
        return lambda: torch._scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16)

    def batched() -> Any:
        a, b = half(4, 32, 128), half(4, 64, 128)
        return lambda: torch.bmm(a, b.transpose(1, 2))

    def grouped() -> Any:
        ends = torch.tensor([8, 16, 32, 64], dtype=torch.int32)
        a, b = half(64, 128), half(4, 256, 128)
        return lambda: torch._grouped_mm(a, b.transpose(1, 2), offs=ends)

    def rms_norm() -> Any:
        x, weight = half(4, 512), half(512)
        return lambda: functional.rms_norm(x, (512,), weight)

    def softmax() -> Any:
        x = half(4, 512)
        return lambda: torch.softmax(x, -1)

    def of_rows(op: Any, *rest: Any, **how: Any) -> Any:
        x = half(4, 512)
        return lambda: op(x, *rest, **how)

    def layer_norm() -> Any:
        x, weight, bias = half(4, 512), half(512), half(512)
        return lambda: functional.layer_norm(x, (512,), weight, bias)

    def silu_and_mul() -> Any:
        x = half(4, 1024)

        def call() -> None:
            gate, up = x.chunk(2, -1)
            functional.silu(gate) * up

        return call

    def relu_squared() -> Any:
        x = half(4, 512)
        return lambda: functional.relu(x).square()

    def embedding() -> Any:
        ids, weight = torch.arange(4), half(64, 512)
        return lambda: functional.embedding(ids, weight)

    def moe_route() -> Any:
        logits = half(4, 8)
        return lambda: torch.softmax(logits.float().topk(2, -1)[0], -1)

    def cu_seqlens() -> Any:
        lengths = torch.tensor([3, 5, 1, 9], dtype=torch.int32)
        return lambda: functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))

    def liger(name: str) -> Any:
        module = importlib.import_module(f"liger_kernel.ops.{name}")
        x, weight, bias = half(4, 512), half(512), half(512)
        if name == "rms_norm":
            return lambda: module.rms_norm_forward(x, weight, 1e-6, 0.0, "llama", True)
        return lambda: module.layer_norm_forward(x, weight, bias, 1e-5)

    def flashinfer(name: str) -> Any:
        found = importlib.import_module("flashinfer")
        if name == "rmsnorm":
            x, weight = half(4, 512), half(512)
            return lambda: found.rmsnorm(x, weight)
        x = half(4, 1024)
        return lambda: found.silu_and_mul(x)

    made: Makers = {
        "attention": attention, "attention + backward": lambda: attention(True),
        "a Function of nothing": trivial, "linear": linear, "linear e4m3": linear_e4m3,
        "batched": batched, "grouped": grouped, "rms_norm": rms_norm, "softmax": softmax,
        "log_softmax": lambda: of_rows(torch.log_softmax, -1), "layer_norm": layer_norm,
        "silu_and_mul": silu_and_mul, "gelu": lambda: of_rows(functional.gelu),
        "relu_squared": relu_squared, "embedding": embedding, "moe_route": moe_route,
        "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    others: Makers = {
        "liger: rms_norm": lambda: liger("rms_norm"),
        "liger: layer_norm": lambda: liger("layer_norm"),
        "flashinfer: rms_norm": lambda: flashinfer("rmsnorm"),
        "flashinfer: silu_and_mul": lambda: flashinfer("silu_and_mul"),
    }
    return {**{f"torch: {name}": maker for name, maker in made.items()}, **others}
