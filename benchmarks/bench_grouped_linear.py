"""grouped_linear against torch._grouped_mm and a loop of cuBLAS products, on mixtures of experts.

Mixtral 8x7B, Qwen3-30B-A3B and the layers of DeepSeek-V3; tokens choose experts unevenly. Products
of many rows run in bursts of work after idleness, as clocks fall under longer load; few rows as
CUDA-graph replays over several routings. Contenders alternate on the same buffers.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from harness import BURST_US, IDLE_SECONDS, OURS, Launch, Report, arguments, replays

from kernel_hub.ops import grouped_linear
from kernel_hub.testing.compare import compare

# Spread of the experts' popularity: the busiest of 128 gets about six times its share.
SPREAD = 0.7
PEERS = ("torch._grouped_mm", "cuBLAS loop")


class Model(NamedTuple):
    """Experts, how many of them a token takes, and the (n, k) of their layers."""

    num_experts: int
    num_chosen: int
    layers: dict[str, tuple[int, int]]


MODELS = {
    "Qwen3-30B-A3B": Model(128, 8, {"gate_up": (1536, 2048), "down": (2048, 768)}),
    "Mixtral 8x7B": Model(8, 2, {"gate_up": (28672, 4096), "down": (4096, 14336)}),
    "DeepSeek-V3": Model(256, 8, {"gate_up": (4096, 7168), "down": (7168, 2048)}),
}


class Routed(NamedTuple):
    """Inputs of one routing; counts: rows of each expert, for the loop alone."""

    a: torch.Tensor
    offsets: torch.Tensor
    out: torch.Tensor
    counts: list[int]


def counts_of(tokens: int, model: Model, seed: int) -> torch.Tensor:
    """Rows of each expert when every token takes its num_chosen likeliest ones."""
    popularity = SPREAD * torch.randn(
        model.num_experts, generator=torch.Generator().manual_seed(99)
    )
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(tokens, model.num_experts, generator=generator).clamp(1e-9, 1 - 1e-9)
    chosen = (popularity - (-chance.log()).log()).topk(model.num_chosen, dim=1).indices
    return torch.bincount(chosen.flatten(), minlength=model.num_experts)


def routed(pool: torch.Tensor, tokens: int, model: Model, n: int, k: int, seed: int) -> Routed:
    counts = counts_of(tokens, model, seed)
    total = tokens * model.num_chosen
    start = seed * total * k if (seed + 1) * total * k <= pool.numel() else 0
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return Routed(
        pool[start : start + total * k].view(total, k),
        ends.to(torch.int32).cuda(),
        torch.empty(total, n, device="cuda", dtype=pool.dtype),
        counts.tolist(),
    )


def loop(weights: torch.Tensor, given: Routed) -> None:
    """One product an expert: the host must know how many rows each has."""
    first = 0
    for expert, count in enumerate(given.counts):
        if count:
            rows = slice(first, first + count)
            torch.matmul(given.a[rows], weights[expert].T, out=given.out[rows])
        first += count


def contenders(weights: torch.Tensor, given: Sequence[Routed]) -> dict[str, list[Launch]]:
    """All that run here; torch._grouped_mm is for bf16."""
    made: dict[str, list[Launch]] = {
        OURS: [functools.partial(grouped_linear, x.a, weights, x.offsets, out=x.out) for x in given]
    }
    grouped_mm: Callable[..., torch.Tensor] | None = getattr(torch, "_grouped_mm", None)
    if grouped_mm is not None and weights.dtype == torch.bfloat16:
        turned = weights.transpose(1, 2)
        made[PEERS[0]] = [
            functools.partial(grouped_mm, x.a, turned, offs=x.offsets[1:]) for x in given
        ]
    made[PEERS[1]] = [functools.partial(loop, weights, x) for x in given]
    return made


def wrong(weights: torch.Tensor, given: Routed) -> str:
    """'' or what is wrong with our output: the rows of three experts, up to 256 columns."""
    grouped_linear(given.a, weights, given.offsets, out=given.out)
    ends = list(itertools.accumulate(given.counts, initial=0))
    busy = [expert for expert, count in enumerate(given.counts) if count]
    for expert in {busy[0], busy[len(busy) // 2], busy[-1]}:
        rows = slice(ends[expert], ends[expert + 1])
        a, b = given.a[rows][:256], weights[expert][:256]
        found = compare(given.out[rows][:256, :256], a.double() @ b.double().T, a @ b.T)
        if not found.ok:
            return f"expert {expert}: {found.message}"
    return ""


def make_weights(pool: torch.Tensor, num_experts: int, n: int, k: int) -> torch.Tensor:
    """Random numbers, repeated where the pool is smaller."""
    weights = torch.empty(num_experts, n, k, device="cuda", dtype=pool.dtype)
    flat = weights.view(-1)
    for start in range(0, flat.numel(), pool.numel()):
        part = flat[start : start + pool.numel()]
        part.copy_(pool[: part.numel()])
    return weights


def run(options: argparse.Namespace) -> int:
    pool = torch.randn(1 << 29, device="cuda", dtype=options.torch_dtype)
    report = Report("grouped_linear", options)
    for model_name in options.models:
        model = MODELS[model_name]
        for layer, (n, k) in model.layers.items():
            weights = make_weights(pool, model.num_experts, n, k)
            for tokens in options.tokens:
                given = [
                    routed(pool, tokens, model, n, k, seed)
                    for seed in range(6 if tokens <= 64 else 2)
                ]
                case = f"{model_name} {layer} {tokens} tokens"
                if message := wrong(weights, given[0]):
                    report.failures.append(f"{case}: {message}")
                    continue
                total = tokens * model.num_chosen
                active = statistics.fmean(sum(map(bool, x.counts)) for x in given)
                expected = max(2 * total * n * k / 700e6, active * n * k / 2.1e6)
                is_bound = total > 48 * active
                samples = replays(
                    contenders(weights, given),
                    max(6, min(48, int(BURST_US / expected))),
                    IDLE_SECONDS if is_bound else 0.0,
                    options.rounds * (1 if is_bound else 3),
                )
                medians = report.case(case, samples, "us", ratio_to=PEERS[0])
                best = min((us, name) for name, us in medians.items() if name in PEERS)
                ours = medians[OURS]
                ratio = best[0] / ours
                report.ahead("the best peer of a case", ratio)
                moved = 2 * (active * n * k + total * (n + k))
                print(
                    f"{case:38} {ours:9.2f} us {2 * total * n * k / ours / 1e6:6.1f} TFLOP/s "
                    f"{moved / ours / 1e6:5.2f} TB/s  {best[1]} {best[0]:9.2f}  x {ratio:.3f}",
                    flush=True,
                )
            del weights
            torch.cuda.empty_cache()
    return report.done()


def main() -> int:
    """Measure, write, print."""
    options = arguments(
        __doc__,
        rounds=3,
        quick={"tokens": "1,64,1024,8192", "rounds": 2},
        dtypes=("bf16", "fp16"),
        models=",".join(MODELS),
        tokens="1,8,64,256,1024,4096,8192",
    )
    with torch.no_grad():
        return run(options)


if __name__ == "__main__":
    sys.exit(main())
