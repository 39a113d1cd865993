# ruff: noqa
"""On a GPU: caches of int8, and of int8 and e4m3 with scales of tokens, beside e4m3 with scales of heads
and bf16: errors against fp64 by lot, then us of CUDA graphs.

    .venv/bin/python -m pytest -q tests/ops/kv_cache/test_scaled_caches.py    # the lots of the tests, on the GPU too
    .venv/bin/python scratch/int8_gpu.py
"""

from __future__ import annotations

import random
import statistics

import torch

from kernel_hub.ops import append_kv, decode_attention

E4M3, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
FORMS = {"bf16": (BF16, ""), "e4m3 heads": (E4M3, "heads"), "int8 heads": (INT8, "heads"),
         "int8 tokens": (INT8, "tokens"), "e4m3 tokens": (E4M3, "tokens")}  # fmt: skip


def scales(form: str, k: torch.Tensor, v: torch.Tensor, pages: int, size: int) -> dict:
    kind, per = FORMS[form]
    if not per:
        return {}
    if per == "tokens":
        shape = (pages, size, k.shape[-2])
        return {f"{x}_scale_cache": torch.zeros(shape, device="cuda") for x in "kv"}
    most = 127.0 if kind == INT8 else 448.0
    found = [x.float().abs().amax((0, 1, 3)) / most for x in (k, v)]
    return {"k_scale": found[0], "v_scale": found[1]}


def graph_us(run, n: int = 20, rounds: int = 15) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n):
            run()
    times = []
    for _ in range(rounds):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3 / n)
    return statistics.median(times)


def case(form, lengths, heads, kv_heads, dim, size, seed=0, dtype=BF16):
    torch.manual_seed(seed)
    batch, most = len(lengths), max(lengths)
    columns = -(-most // size)
    pages = batch * columns
    table = torch.randperm(pages, device="cuda").view(batch, columns).int()
    k, v = (torch.randn(batch, most, kv_heads, dim, device="cuda", dtype=dtype) for _ in "kv")
    k *= torch.rand(batch, most, 1, 1, device="cuda").mul(3).exp().to(dtype)
    kind, _ = FORMS[form]
    kind = dtype if kind == BF16 else kind
    caches = [torch.zeros(pages, size, kv_heads, dim, device="cuda", dtype=torch.uint8 if kind in (E4M3, INT8)
                          else kind).view(kind) for _ in "kv"]  # fmt: skip
    more = scales(form, k, v, pages, size)
    start = torch.zeros(batch, dtype=torch.int32, device="cuda")
    append_kv(k, v, *caches, cache_seqlens=start, block_table=table, **more)
    q = torch.randn(batch, 1, heads, dim, device="cuda", dtype=dtype) / 4
    given = {
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        "block_table": table,
        **more,
    }
    return q, k, v, caches, given


def error(form, lot) -> float:
    kv_heads, dim = lot.choice((1, 2, 8)), lot.choice((64, 128, 256))
    lengths = [lot.randrange(1, 3000) for _ in range(lot.choice((1, 4, 17)))]
    heads = kv_heads * lot.choice((1, 4, 8))
    q, k, v, caches, given = case(
        form, lengths, heads, kv_heads, dim, lot.choice((1, 16, 64, 256)), lot.randrange(99)
    )
    out = decode_attention(q, *caches, **given)
    worst = 0.0
    for row, length in enumerate(lengths):
        keys, values = (
            x[row, :length].double().repeat_interleave(heads // kv_heads, 1) for x in (k, v)
        )
        p = torch.softmax(torch.einsum("hd,thd->ht", q[row, 0].double(), keys) / dim**0.5, -1)
        truth = torch.einsum("ht,thd->hd", p, values)
        worst = max(worst, ((out[row, 0].double() - truth).norm() / truth.norm()).item())
    return worst


def main() -> None:
    print(torch.cuda.get_device_name())
    for form in FORMS:
        lot = random.Random(form)
        found = [error(form, lot) for _ in range(30)]
        print(
            f"{form:12s} rms error of a step against fp64 of the tokens: median {statistics.median(found):.4f} worst {max(found):.4f}"
        )
    shapes = [
        (1, 8192, 32, 8, 128),
        (16, 4096, 32, 8, 128),
        (64, 2048, 32, 8, 128),
        (128, 1024, 64, 8, 64),
        (16, 4096, 16, 8, 256),
        (8, 32768, 64, 8, 128),
    ]
    for batch, length, heads, kv_heads, dim in shapes:
        line = []
        for form in FORMS:
            q, k, v, caches, given = case(form, [length] * batch, heads, kv_heads, dim, 16)
            out = torch.empty_like(q)
            line.append(
                f"{form} {graph_us(lambda: decode_attention(q, *caches, **given, out=out)):.1f}"
            )
        print(f"decode {batch} x {length} {heads}/{kv_heads} d {dim}:", ", ".join(line), flush=True)
    for tokens in (1, 64, 512, 1024, 3072, 8192):
        for dim, heads, kv_heads in ((128, 32, 8), (64, 64, 8)):
            q, k, v = (
                torch.randn(1, tokens, n, dim, device="cuda", dtype=BF16)
                for n in (heads, kv_heads, kv_heads)
            )
            weight = torch.rand(dim, device="cuda", dtype=BF16)
            angles = torch.rand(tokens, dim // 2, device="cuda")
            out_q, slots = torch.empty_like(q), torch.randperm(tokens, device="cuda")
            line = []
            for form, (kind, _) in FORMS.items():
                caches = [
                    torch.zeros(-(-tokens // 16), 16, kv_heads, dim, device="cuda").to(kind)
                    for _ in "kv"
                ]
                more = scales(form, k, v, -(-tokens // 16), 16)
                cos, sin = angles.cos(), angles.sin()
                run = lambda: append_kv(
                    k,
                    v,
                    *caches,
                    slot_mapping=slots,
                    positions=slots,
                    q=q,
                    out_q=out_q,
                    cos=cos,
                    sin=sin,
                    q_norm_weight=weight,
                    k_norm_weight=weight,
                    **more,
                )
                line.append(f"{form} {graph_us(run):.1f}")
            print(f"append {tokens} {heads}/{kv_heads} d {dim}:", ", ".join(line), flush=True)


if __name__ == "__main__":
    main()
