"""qkv_linear against cuBLAS, then our rope, then our append_kv, on the shapes of Llama 8B and 70B.

Keys and values go to a paged cache by slot_mapping; half-split rotation of whole heads. Peers: the
three launches, or two (append_kv rotates q and k too), and cuBLAS alone, which is the floor. Timed
as bench_linear.py does.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Sequence

import torch
from bench_linear import QUICK
from harness import OURS, Inputs, Launch, Report, plan_of, product_arguments, replays

from kernel_hub.ops import append_kv, qkv_linear, rope
from kernel_hub.testing.compare import compare

OP = "qkv_linear"
PEER = "cuBLAS + rope + append_kv"
# name -> num_heads, num_kv_heads, hidden_size
SHAPES = {"8B": (32, 8, 4096), "70B": (64, 8, 8192), "70B TP8": (8, 1, 8192)}
HEAD_DIM, PAGE_SIZE = 128, 16
Set = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Step:
    """One projection: its heads, its cache, where its tokens go."""

    def __init__(self, m: int, num_heads: int, num_kv_heads: int, like: torch.Tensor) -> None:
        self.heads = (num_heads, num_kv_heads)
        pages = -(-m // PAGE_SIZE) + 1
        shape = (pages, PAGE_SIZE, num_kv_heads, HEAD_DIM)
        self.caches = [torch.zeros(shape, device="cuda", dtype=like.dtype) for _ in range(2)]
        self.slots = torch.randperm(pages * PAGE_SIZE, device="cuda")[:m]
        self.positions = torch.randint(0, 8192, (m,), device="cuda")
        angles = torch.rand(8192, HEAD_DIM // 2, device="cuda") * 6
        self.tables = angles.cos(), angles.sin()
        self.out_q = torch.empty(m, num_heads, HEAD_DIM, device="cuda", dtype=like.dtype)

    def fused(self, x: torch.Tensor, w: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        num_heads, num_kv_heads = self.heads
        q: torch.Tensor = qkv_linear(
            x, w, None, *self.tables, self.positions, num_heads=num_heads,
            num_kv_heads=num_kv_heads, k_cache=self.caches[0], v_cache=self.caches[1],
            slot_mapping=self.slots, out_q=self.out_q,
        )[0]  # fmt: skip
        return q

    def heads_of(self, product: torch.Tensor) -> Sequence[torch.Tensor]:
        num_heads, num_kv_heads = self.heads
        sizes = [num_heads, num_kv_heads, num_kv_heads]
        return product.view(len(product), -1, HEAD_DIM).split(sizes, dim=1)

    def three(self, x: torch.Tensor, w: torch.Tensor, product: torch.Tensor) -> None:
        q, k, v = self.heads_of(torch.matmul(x, w.T, out=product))
        rope(q, k, *self.tables, self.positions, out_q=q, out_k=k)
        append_kv(k, v, *self.caches, slot_mapping=self.slots)

    def two(self, x: torch.Tensor, w: torch.Tensor, product: torch.Tensor) -> None:
        q, k, v = self.heads_of(torch.matmul(x, w.T, out=product))
        cos, sin = self.tables
        append_kv(
            k, v, *self.caches, slot_mapping=self.slots, q=q, out_q=q, cos=cos, sin=sin,
            positions=self.positions,
        )  # fmt: skip

    def wrong(self, x: torch.Tensor, w: torch.Tensor) -> str:
        """'' or what is wrong, on up to 256 tokens: the last query head, keys and values."""
        rows, (num_heads, _) = slice(0, 256), self.heads
        q = self.fused(x, w, x)[rows, -1]
        kept = self.slots[rows]
        found = [q, *(cache.flatten(0, 1)[kept, 0] for cache in self.caches)]
        starts = [num_heads - 1, num_heads, num_heads + self.heads[1]]
        for i, (got, head) in enumerate(zip(found, starts, strict=True)):
            part = w[head * HEAD_DIM : (head + 1) * HEAD_DIM]
            both = []
            for dtype in (torch.float64, x.dtype):
                values = x[rows].to(dtype) @ part.to(dtype).T
                if i < 2:
                    c, s = (table.to(dtype)[self.positions[rows]] for table in self.tables)
                    a, b = values.chunk(2, dim=-1)
                    values = torch.cat((a * c - b * s, b * c + a * s), dim=-1)
                both.append(values)
            result = compare(got, *both, name="qkv"[i])
            if not result.ok:
                return result.message
        return ""


def run(options: argparse.Namespace, inputs: Inputs) -> int:
    report = Report(OP, options)
    for name, m in itertools.product(options.shapes, options.tokens):
        num_heads, num_kv_heads, k = SHAPES[name]
        n = (num_heads + 2 * num_kv_heads) * HEAD_DIM
        ss: list[Set] = inputs.sets(m, n, k)
        step = Step(m, num_heads, num_kv_heads, ss[0][0])
        if message := step.wrong(*ss[0][:2]):
            report.failures.append(f"{name} {m}: {message}")
            continue
        found: dict[str, list[Launch]] = {
            OURS: [functools.partial(step.fused, *s) for s in ss],
            PEER: [functools.partial(step.three, *s) for s in ss],
            "cuBLAS + append_kv": [functools.partial(step.two, *s) for s in ss],
            "cuBLAS, product alone": [
                functools.partial(torch.matmul, a, b.T, out=out) for a, b, out in ss
            ],
        }
        samples = replays(found, *plan_of(m, n, k, options.rounds))
        case = f"{name} qkv {n}x{k} m{m}"
        report.product(case, samples, PEER, m, 2 * m * n * k)
    return report.done()


def main() -> int:
    """Measure, write, print."""
    options = product_arguments(__doc__, QUICK, SHAPES)
    return run(options, Inputs(options.torch_dtype))


if __name__ == "__main__":
    sys.exit(main())
