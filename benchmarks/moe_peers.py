"""Slots of tokens and experts as models have them, and Triton kernels that do the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from harness import Case, row_arguments, run_cases

# Experts, and how many of them a token has: Mixtral, Qwen 3, DeepSeek V3.
MODELS = {"mixtral": (8, 2), "qwen3": (128, 8), "deepseek": (256, 8)}


def run_models(name: str, make: Callable[..., Case], about: str | None) -> int:
    """Measure, write, print: make(dtype, model, tokens, hidden) of every one that is asked for."""
    options = row_arguments(about, models="mixtral,qwen3", sizes="4096")
    options.peers.append("triton")
    cases = [
        partial(make, options.torch_dtype, model, tokens, int(hidden))
        for model, hidden, tokens in itertools.product(
            options.models, options.sizes, options.tokens
        )
    ]
    with torch.no_grad():
        return run_cases(name, cases, options)


def draw_experts(tokens: int, num_experts: int, k: int) -> torch.Tensor:
    """Different ones for each token."""
    scores = torch.rand(tokens, num_experts, device="cuda")
    return scores.topk(k, -1)[1].int().contiguous()


@triton.jit
def _route(logits, weights, experts, E: tl.constexpr, K: tl.constexpr, P: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, P)
    x = tl.load(logits + row * E + at, mask=at < E, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 0)
    total = 0.0
    for j in range(K):
        best, place = tl.max(x, 0, return_indices=True)
        total += tl.exp(best - top)
        tl.store(weights + row * K + j, tl.exp(best - top))
        tl.store(experts + row * K + j, place)
        x = tl.where(at == place, -float("inf"), x)
    tl.debug_barrier()
    for j in range(K):
        tl.store(weights + row * K + j, tl.load(weights + row * K + j) / total)


def triton_route(logits: torch.Tensor, k: int) -> Any:
    """Softmax over the chosen logits, a program a token."""
    tokens, num_experts = logits.shape
    weights = torch.empty(tokens, k, device="cuda")
    experts = torch.empty(tokens, k, device="cuda", dtype=torch.int32)
    padded = triton.next_power_of_2(num_experts)
    _route[(tokens,)](logits, weights, experts, num_experts, k, padded, num_warps=1)
    return weights, experts


@triton.jit
def _spread(x, out, places, H, K: tl.constexpr, B: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    row = tl.load(x + token * H + at, mask=at < H)
    for j in range(K):
        place = tl.load(places + token * K + j).to(tl.int64)
        tl.store(out + place * H + at, row, mask=at < H)


def triton_permute(x: torch.Tensor, experts: torch.Tensor, num_experts: int) -> Any:
    """torch's sort says where to, a program a token spreads its row."""
    k, hidden = experts.shape[1], x.shape[1]
    found, order = experts.flatten().sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device="cuda")
    ends = torch.searchsorted(found, torch.arange(num_experts, device="cuda"), right=True)
    out = x.new_empty(len(order), hidden)
    block = min(2048, triton.next_power_of_2(hidden))
    _spread[(x.shape[0], triton.cdiv(hidden, block))](x, out, places, hidden, k, block)
    return out, ends, places


@triton.jit
def _sum(rows, places, weights, out, H, K: tl.constexpr, B: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places + token * K + j).to(tl.int64)
        row = tl.load(rows + place * H + at, mask=at < H, other=0.0).to(tl.float32)
        total += tl.load(weights + token * K + j) * row
    tl.store(out + token * H + at, total.to(out.dtype.element_ty), mask=at < H)


def triton_combine(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A program 1,024 columns of a token."""
    (tokens, k), hidden = places.shape, rows.shape[1]
    out = rows.new_empty(tokens, hidden)
    block = min(1024, triton.next_power_of_2(hidden))
    _sum[(tokens, triton.cdiv(hidden, block))](rows, places, weights, out, hidden, k, block)
    return out
