"""append_kv (rotate q and k, write k and v to a cache) beside torch, torch.compile and FlashInfer.

Kernel time by CUDA-graph replays over inputs rotated past the L2; each contender's queries and
cache rows are held against fp64 first. Everybody rotates q in place and writes the same caches:
sequences of up to 1024 new tokens behind 512 old ones, pages of 16 tokens in shuffled order.
Of kind 'normed' q and k are normed a head first, pages as of 'paged', which is the append alone.
FlashInfer takes two launches (its rope in place, then append_paged_kv_cache) and has its batch
indices and positions worked out beforehand; torch gets page and row of each token so.
Writes benchmarks/results/<gpu>_append_kv.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from harness import CHECKED_TOKENS, Case, Contender, compiled, row_arguments, run_cases

from kernel_hub import ops
from kernel_hub.measure import timing
from kernel_hub.testing import reference

HEAD_DIM, PAGE_SIZE, PAST, MAX_NEW = 128, 16, 512, 1024
E4M3 = torch.float8_e4m3fn
BASE = 500_000.0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One of q and k in torch."""
    a, b = x.float().chunk(2, -1)
    c, s = cos.float()[:, None], sin.float()[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def torch_append(
    q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, cos: Any, sin: Any, positions: Any,
    page: Any, row: Any, k_scale: Any, v_scale: Any, q_weight: Any, k_weight: Any,
) -> None:  # fmt: skip
    """What torch and torch.compile are given."""
    c, s = cos[positions], sin[positions]
    if q_weight is not None:
        q_normed, k = (
            torch.nn.functional.rms_norm(x, (HEAD_DIM,), weight, 1e-6)
            for x, weight in ((q, q_weight), (k, k_weight))
        )
        q.copy_(q_normed)
    q.copy_(rotate(q, c, s))
    for cache, new, scale in ((k_cache, rotate(k, c, s), k_scale), (v_cache, v, v_scale)):
        if cache.dtype == E4M3:
            new = (new.float() / scale[:, None]).clamp(-448, 448).to(E4M3).view(torch.uint8)
            cache = cache.view(torch.uint8)
        cache[page, row] = new.to(cache.dtype)


def append(
    dtype: torch.dtype, tokens: int, num_heads: int, num_kv_heads: int, kind: str, cache: str
) -> Case:
    """kind: 'paged' or 'normed' (block_table), 'slots' (slot_mapping) or 'contiguous'."""
    cache_dtype = E4M3 if cache == "e4m3" else dtype
    batch = -(-tokens // MAX_NEW)
    seqlen = tokens // batch
    new = tokens * HEAD_DIM
    table_bytes = seqlen * HEAD_DIM * dtype.itemsize  # one for all sequences
    num_bytes = table_bytes + 2 * new * num_heads * dtype.itemsize
    num_bytes += 2 * new * num_kv_heads * (dtype.itemsize + cache_dtype.itemsize)
    sets = range(timing.num_sets(num_bytes * 3 // 4))

    def randn(heads: int) -> torch.Tensor:
        return torch.randn(len(sets), tokens, heads, HEAD_DIM, device="cuda", dtype=dtype)

    q, k, v = randn(num_heads), randn(num_kv_heads), randn(num_kv_heads)
    qs, ks = q.clone(), k.clone()  # what is worked on in place
    pages = -(-(seqlen + PAST) // PAGE_SIZE)
    shape: tuple[int, ...] = (batch * pages, PAGE_SIZE)
    if kind == "contiguous":
        shape = (batch, pages * PAGE_SIZE)
    caches = torch.zeros(
        2, len(sets), *shape, num_kv_heads, HEAD_DIM, device="cuda", dtype=torch.uint8
    ) if cache_dtype == E4M3 else torch.zeros(
        2, len(sets), *shape, num_kv_heads, HEAD_DIM, device="cuda", dtype=dtype
    )  # fmt: skip
    k_caches, v_caches = caches.view(cache_dtype)
    table = torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)
    past = torch.full((batch,), PAST, device="cuda", dtype=torch.int32)
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * seqlen
    angles = torch.arange(2048, device="cuda")[:, None] * BASE ** (
        -torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM
    )
    cos32, sin32 = angles.cos(), angles.sin()
    cos, sin = cos32.to(dtype), sin32.to(dtype)
    sequence = torch.arange(tokens, device="cuda") // seqlen
    positions = torch.arange(tokens, device="cuda") % seqlen + PAST
    if kind == "contiguous":
        page, row = sequence, positions
    else:
        page = table[sequence, positions // PAGE_SIZE].long()
        row = positions % PAGE_SIZE
    slots = page * PAGE_SIZE + row
    scales: Any = (None, None)
    if cache_dtype == E4M3:
        scales = torch.rand(2, num_kv_heads, device="cuda").add_(0.5).unbind()

    weights: Any = (None, None)
    if kind == "normed":
        weights = torch.rand(2, HEAD_DIM, device="cuda").add_(0.5).to(dtype).unbind()
    norm = {"q_norm_weight": weights[0], "k_norm_weight": weights[1]}

    def outputs(_: Any) -> tuple[torch.Tensor, ...]:
        first = slice(0, CHECKED_TOKENS)
        rows = [
            c[0].view(torch.uint8 if cache_dtype == E4M3 else dtype)[page[first], row[first]]
            for c in (k_caches, v_caches)
        ]
        return qs[0][first].clone(), *(part.view(cache_dtype) for part in rows)

    def contender(launch: Callable[[int], Any]) -> Contender:
        qs.copy_(q)
        ks.copy_(k)
        caches.zero_()
        return Contender([partial(launch, i) for i in sets], outputs)

    def ours() -> Contender:
        how: dict[str, Any] = {"cache_seqlens": past, "cu_seqlens": starts, "block_table": table}
        if kind == "slots":
            how = {"slot_mapping": slots, "positions": positions}

        def launch(i: int) -> Any:
            if kind == "contiguous":
                dense = [x[i].unflatten(0, (batch, seqlen)) for x in (ks, v, qs)]
                return ops.append_kv(
                    dense[0], dense[1], k_caches[i], v_caches[i], cache_seqlens=past, q=dense[2],
                    out_q=dense[2], cos=cos, sin=sin, k_scale=scales[0], v_scale=scales[1],
                )  # fmt: skip
            return ops.append_kv(
                ks[i], v[i], k_caches[i], v_caches[i], **how, q=qs[i], out_q=qs[i], cos=cos,
                sin=sin, k_scale=scales[0], v_scale=scales[1], **norm,
            )  # fmt: skip

        return contender(launch)

    def torch_way(function: Callable[..., Any]) -> Contender:
        return contender(
            lambda i: function(
                qs[i],
                ks[i],
                v[i],
                k_caches[i],
                v_caches[i],
                cos,
                sin,
                positions,
                page,
                row,
                *scales,
                *weights,
            )
        )

    def flashinfer() -> Contender:
        from flashinfer.page import append_paged_kv_cache
        from flashinfer.rope import apply_rope_with_cos_sin_cache_inplace

        if cache_dtype == E4M3 or kind in ("contiguous", "normed"):
            raise ValueError(
                "FlashInfer appends what is of the cache's dtype, to pages, not normed"
            )
        cache32 = torch.cat((cos32, sin32), -1).contiguous()
        indptr = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * pages
        last = torch.full((batch,), (seqlen + PAST - 1) % PAGE_SIZE + 1, device="cuda").int()
        batch_indices, at = sequence.int(), positions.int()

        def launch(i: int) -> Any:
            apply_rope_with_cos_sin_cache_inplace(
                positions, qs[i].view(tokens, -1), ks[i].view(tokens, -1), HEAD_DIM, cache32, True
            )
            append_paged_kv_cache(
                ks[i], v[i], batch_indices, at, (k_caches[i], v_caches[i]), table.flatten(),
                indptr, last,
            )  # fmt: skip

        return contender(launch)

    first = slice(0, CHECKED_TOKENS)
    truth: list[torch.Tensor] = []
    own: list[torch.Tensor] = []
    for out, wide in ((truth, torch.float64), (own, dtype)):
        turned = [
            reference.rope(
                x if weight is None else reference.rms_norm(x, weight, dtype=wide), cos, sin,
                positions[first], dtype=wide,
            )
            for x, weight in zip((q[0][first], k[0][first]), weights, strict=True)
        ]  # fmt: skip
        out.append(turned[0])
        key = turned[1]
        for part, scale in ((key, scales[0]), (v[0][first].to(wide), scales[1])):
            if scale is not None:
                part = (part / scale.to(wide)[:, None]).clamp(-448, 448)
            out.append(part)
    return Case(
        f"{kind} {cache} {tokens} x {num_heads}/{num_kv_heads}",
        num_bytes,
        ours(),
        truth,
        own,
        {
            "torch": lambda: torch_way(torch_append),
            "torch.compile": lambda: torch_way(compiled(torch_append)),
            "flashinfer (2 launches)": flashinfer,
        },
    )


def main() -> int:
    """Measure, write, print."""
    options = row_arguments(
        __doc__, heads="32/8,64/8", kinds="paged,slots,contiguous,normed", caches="own,e4m3"
    )

    def cases() -> Iterator[Callable[[], Case]]:
        for kind in options.kinds:
            # Every size of the paged cache, and the large ones of the others.
            for cache in options.caches if kind in ("paged", "normed") else ("own",):
                for heads in options.heads:
                    sizes = options.tokens
                    if kind not in ("paged", "normed") or cache != "own":
                        sizes = [n for n in sizes if n >= 8192 and heads == options.heads[0]]
                    for tokens in sizes:
                        num_heads, num_kv_heads = map(int, heads.split("/"))
                        yield partial(
                            append,
                            options.torch_dtype,
                            tokens,
                            num_heads,
                            num_kv_heads,
                            kind,
                            cache,
                        )

    with torch.no_grad():
        return run_cases("append_kv", cases(), options)


if __name__ == "__main__":
    sys.exit(main())
