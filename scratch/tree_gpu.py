"""Trees of drafts in decode_attention on a GPU: against fp64 by lot (each token's own sequence), a
chain's mask against none (same bits), times with a mask, with none, and of another tree ($BASE).

    python scratch/tree_gpu.py [seed]            correctness, then times
    BASE=/path/to/tree/before python scratch/tree_gpu.py times-only   in both trees, same run
"""

from __future__ import annotations

import random
import statistics
import sys

import torch

from kernel_hub.ops import decode_attention

DEVICE = "cuda"


def reference(q, k, v, cache_seqlens, words):
    """fp64: q (b, n, h, d), caches contiguous (b, t, hk, d), the new tokens the last of each."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    n, group = q.shape[1], q.shape[2] // k.shape[2]
    for b, length in enumerate(cache_seqlens.tolist()):
        if length < 0:
            continue
        first = length - n
        seen = torch.zeros(n, length, dtype=torch.bool, device=q.device)
        seen[:, :first] = True
        for i in range(n):
            for j in range(n):
                seen[i, first + j] = bool(words[b][i] >> j & 1)
        keys, values = (x[b, :length].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("nhd,thd->hnt", q[b].double(), keys) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen, -float("inf"))
        weights = torch.nan_to_num(torch.softmax(scores, -1))
        out[b] = torch.einsum("hnt,thd->nhd", weights, values)
    return out


def tree(lot, n):
    words = []
    for i in range(n):
        parent = lot.randrange(-1, i)
        words.append(1 << i | (words[parent] if parent >= 0 else 0))
    return words


def correct(seed: int) -> None:
    worst = 0.0
    for number in range(200):
        lot = random.Random(f"{seed} {number}")
        n, hk = lot.choice((2, 3, 4, 8, 12, 16)), lot.choice((1, 2, 8))
        heads, dim = hk * lot.choice((1, 2, 4, 8)), lot.choice((64, 128, 192, 256, 80))
        dtype = lot.choice((torch.float16, torch.bfloat16))
        room = lot.choice((128, 1000, 9000))
        lengths = [lot.randrange(n, room + 1) for _ in range(lot.choice((1, 2, 7, 33)))]
        if lot.random() < 0.2:
            lengths[0] = -1
        make = lambda *shape, dtype=dtype: torch.randn(*shape, device=DEVICE).to(dtype)  # noqa: E731
        q, k, v = (make(len(lengths), n, heads, dim), make(len(lengths), room, hk, dim),
                   make(len(lengths), room, hk, dim))  # fmt: skip
        seqlens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        words = [tree(lot, n) for _ in lengths]
        mask = torch.tensor(words, dtype=lot.choice((torch.int32, torch.int64)), device=DEVICE)
        out = torch.full_like(q, float("nan"))
        decode_attention(q, k, v, cache_seqlens=seqlens, tree_mask=mask, out=out)
        error = (out.double() - reference(q, k, v, seqlens, words)).abs().max().item()
        worst = max(worst, error)
        limit = 4e-3 if dtype == torch.float16 else 3e-2
        if not error <= limit:
            print("WRONG", seed, number, error)
        chain = torch.tensor([(2 << i) - 1 for i in range(n)], dtype=mask.dtype, device=DEVICE)
        # num_splits keeps both in the kernel of parts, which alone takes masks.
        same = [decode_attention(q, k, v, cache_seqlens=seqlens, num_splits=s, **more)
                for s in (1, 3) for more in ({}, {"tree_mask": chain})]  # fmt: skip
        for plain, masked in (same[:2], same[2:]):
            if not torch.equal(plain, masked):
                print("A CHAIN DIFFERS", seed, number)
    print(f"200 cases, seed {seed}: largest error {worst:.2e}", flush=True)


def graph_us(run, rounds: int = 7) -> float:
    for _ in range(3):
        run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(20):
            run(i)
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / 20)
    return statistics.median(times)


def times() -> None:
    print("batch tokens n heads d e4m3 window: us plain, plain by parts, tree")
    for batch, tokens, n, heads, hk, dim, window, e4m3 in (
        (1, 1024, 8, 32, 8, 128, -1, False), (1, 8192, 8, 32, 8, 128, -1, False),
        (16, 1024, 4, 32, 8, 128, -1, False), (16, 8192, 4, 32, 8, 128, -1, False),
        (16, 4096, 16, 32, 8, 128, -1, False), (64, 4096, 8, 64, 8, 64, 127, False),
        (64, 2048, 1, 32, 8, 128, 1023, False), (64, 2048, 1, 64, 8, 64, 127, False),
        (16, 8192, 1, 32, 8, 128, -1, True), (16, 8192, 4, 32, 8, 256, -1, True),
        (16, 8192, 4, 32, 8, 256, -1, False), (16, 8192, 4, 32, 8, 64, -1, True),
    ):  # fmt: skip
        copies = max(2, (256 << 20) // (batch * tokens * hk * dim * 4) + 1)
        kind = torch.float8_e4m3fn if e4m3 else torch.bfloat16
        make = lambda *s: torch.randn(*s, device=DEVICE).to(torch.bfloat16)  # noqa: E731
        caches = [[make(batch, tokens, hk, dim).to(kind) for _ in "kv"] for _ in range(copies)]
        q, out = make(batch, n, heads, dim), make(batch, n, heads, dim)
        seqlens = torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE)
        lot = random.Random(1)
        mask = torch.tensor([tree(lot, n) for _ in range(batch)], dtype=torch.int32, device=DEVICE)

        def run(i, caches=caches, q=q, out=out, seqlens=seqlens, window=window, **more):
            decode_attention(q, *caches[i % len(caches)], cache_seqlens=seqlens, out=out,
                             window_size=(window, -1), **more)  # fmt: skip

        found = [graph_us(run), graph_us(lambda i, run=run: run(i, num_splits=2))]
        if "times-only" not in sys.argv:
            found.append(graph_us(lambda i, run=run, mask=mask: run(i, tree_mask=mask)))
        print(batch, tokens, n, f"{heads}/{hk}", dim, e4m3, window, *[f"{x:.2f}" for x in found],
              flush=True)  # fmt: skip


if __name__ == "__main__":
    if "times-only" not in sys.argv:
        correct(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    times()
