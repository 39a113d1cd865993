"""A decode step for tests: its arguments, its truth, and what it must leave alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from bits import same_bits
from ways import Way

from kernel_hub.ops import decode_attention
from kernel_hub.testing import reference
from kernel_hub.testing.compare import attention_parts_atol, check
from kernel_hub.testing.guard import Guarded
from kernel_hub.testing.reference_attention import reference_attention

E4M3 = torch.float8_e4m3fn


@dataclass
class Step:
    """One decode step: the arguments of the op, and the tokens each cache holds, in order."""

    way: Way
    lengths: list[int]
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 128
    seqlen_q: int = 1
    max_seqlen: int = 320
    page_size: int = 0
    append: bool = False
    rope: int = 0
    interleaved: bool = False
    table32: bool = True
    bias: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        way, batch = self.way, len(self.lengths)
        num_heads, num_kv_heads = self.heads
        kind = self.cache_dtype or self.dtype
        new = (batch, self.seqlen_q, num_kv_heads, self.head_dim)
        packed = way.randn(
            batch, self.seqlen_q, num_heads + 2 * num_kv_heads, self.head_dim, dtype=self.dtype,
            seed=self.seed,
        )  # fmt: skip
        self.q, k, v = packed.split([num_heads, num_kv_heads, num_kv_heads], 2)
        tokens = (batch, self.max_seqlen, num_kv_heads, self.head_dim)
        self.keys, self.values = (way.randn(*tokens, seed=self.seed + i).to(kind) for i in (1, 2))
        # What lies past the end of a sequence is nan, and must not be seen.
        for index, length in enumerate(self.lengths):
            self.keys[index, length:] = self.values[index, length:] = math.nan
        self.options: dict[str, Any] = {
            "cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32, device=way.device)
        }
        if self.page_size:
            self._make_pages(kind)
        else:
            self.caches = [Guarded(tokens, kind, way.device) for _ in "kv"]
            for guarded, tensor in zip(self.caches, (self.keys, self.values), strict=True):
                guarded.fill(tensor)
        if kind == E4M3:
            scales = 0.5 + torch.arange(num_kv_heads, device=way.device) / 4
            self.options |= {"k_scale": scales, "v_scale": scales + 0.125}
        if self.append:
            assert k.shape == v.shape == new
            self.options |= {"k": k, "v": v}
        if self.rope:
            angles = torch.arange(self.max_seqlen + 20, device=way.device)[:, None]
            angles = angles * 100.0 ** -torch.linspace(0, 1, self.rope // 2, device=way.device)
            table = torch.float32 if self.table32 else self.dtype
            self.options |= {
                "cos": angles.cos().to(table), "sin": angles.sin().to(table),
                "interleaved": self.interleaved,
            }  # fmt: skip
        if self.bias:
            size = (num_heads + 2 * num_kv_heads) * self.head_dim
            self.options["qkv_bias"] = way.randn(size, dtype=self.dtype, seed=self.seed + 3)

    def _make_pages(self, kind: torch.dtype) -> None:
        batch, _, num_kv_heads, head_dim = self.keys.shape
        per_sequence = -(-self.max_seqlen // self.page_size)
        total = batch * per_sequence + 3
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(total, generator=generator)[: batch * per_sequence]
        self.table = order.view(batch, per_sequence).int().to(self.way.device)
        shape = (total, self.page_size, num_kv_heads, head_dim)
        self.caches = [Guarded(shape, kind, self.way.device) for _ in "kv"]
        for guarded, tensor in zip(self.caches, (self.keys, self.values), strict=True):
            guarded.tensor.copy_(torch.full_like(guarded.tensor, math.nan))
            padded = torch.full_like(tensor, math.nan)[:, :1].repeat(
                1, per_sequence * self.page_size, 1, 1
            )
            padded[:, : self.max_seqlen] = tensor
            guarded.tensor[order.to(self.way.device)] = padded.view(
                -1, self.page_size, num_kv_heads, head_dim
            )
        self.options["block_table"] = self.table

    def cached(self, which: int) -> torch.Tensor:
        """The cache as (batch, tokens, num_kv_heads, head_dim)."""
        cache = self.caches[which].tensor
        if not self.page_size:
            return cache
        return cache[self.table.long()].flatten(1, 2)[:, : self.max_seqlen]

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse); what the op wrote is inside its bounds."""
        out = Guarded(self.q.shape, self.dtype, self.way.device)
        _, lse = decode_attention(
            self.q, *(cache.tensor for cache in self.caches), **self.options, **options,
            out=out.tensor, return_lse=True,
        )  # fmt: skip
        out.check()
        for cache, name in zip(self.caches, ("k_cache", "v_cache"), strict=True):
            cache.check(name)
        return out.tensor, lse

    def truth(self, dtype: torch.dtype, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by the reference, from the caches as they are after the run."""
        lengths = self.options["cache_seqlens"] + (self.seqlen_q if self.append else 0)
        query = self.rotated(self.q, 0, self.heads[0], dtype).to(self.dtype)
        scales = [self.options.get(name) for name in ("k_scale", "v_scale")]
        keys, values = (
            self.cached(i).to(dtype) * (1 if s is None else s.to(dtype)[:, None])
            for i, s in enumerate(scales)
        )
        alibi = options.pop("alibi_slopes", None)
        return reference_attention(
            query.to(dtype), keys, values, causal=True, cache_seqlens=lengths,
            alibi_slopes=alibi, dtype=dtype, **options,
        )  # fmt: skip

    def rotated(
        self, x: torch.Tensor, head: int, count: int, dtype: torch.dtype = torch.float64
    ) -> torch.Tensor:
        """x + bias of its heads, rotated."""
        x = x.to(dtype)
        if self.bias:
            x = x + self.options["qkv_bias"].view(-1, self.head_dim)[head : head + count].to(dtype)
        if not self.rope or head >= sum(self.heads):
            return x
        first = self.options["cache_seqlens"] - (0 if self.append else self.seqlen_q)
        positions = first[:, None] + torch.arange(self.seqlen_q, device=x.device)
        return reference.rope(
            x, self.options["cos"], self.options["sin"], positions,
            interleaved=self.interleaved, dtype=dtype,
        )  # fmt: skip

    def check(self, **options: Any) -> torch.Tensor:
        """Run, and hold everything against fp64."""
        splits = {"num_splits": options.pop("num_splits", 0)}
        out, lse = self.run(**options, **splits)
        if self.append:
            self.check_appended()
        truth, truth_lse = self.truth(torch.float64, **options)
        own, own_lse = self.truth(self.dtype, **options)
        atol = attention_parts_atol(truth, self.dtype, options.get("softcap", 0.0))
        check(out, truth, own, atol=atol, name="out")
        check(lse, truth_lse, own_lse, atol=1e-4, name="lse")
        return out

    def check_appended(self) -> None:
        """The new tokens in the caches, and that nothing else changed there."""
        num_heads, num_kv_heads = self.heads
        for which, (name, head) in enumerate((("k", num_heads), ("v", num_heads + num_kv_heads))):
            before, cached = (self.keys, self.values)[which], self.cached(which)
            new = self.rotated(self.options[name], head, num_kv_heads)
            own = self.rotated(self.options[name], head, num_kv_heads, self.dtype)
            if before.dtype == E4M3:
                scale = self.options[f"{name}_scale"].double()[:, None]
                new, own = new / scale, own / scale
            for index, length in enumerate(self.lengths):
                place = slice(length, min(length + self.seqlen_q, self.max_seqlen))
                count = place.stop - place.start
                found = cached[index, place].to(
                    torch.float64 if before.dtype == E4M3 else self.dtype
                )
                ulp = 2.0**-3 if before.dtype == E4M3 else 0.0
                limit = ulp * float(new.abs().max()) if ulp else None
                check(found, new[index, :count], own[index, :count], atol=limit, name=name)
                for rest in (slice(0, place.start), slice(place.stop, None)):
                    same_bits(cached[index, rest], before[index, rest], name=f"{name}, old tokens")


def check_replays(step: Step, times: int, more: int) -> None:
    """A captured call is right each time that it is replayed, on lengths that grow by `more`."""
    caches = [cache.tensor for cache in step.caches]
    lengths = step.options["cache_seqlens"]
    decode_attention(step.q, *caches, **step.options)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(step.q, *caches, **step.options)
    for _ in range(times):
        lengths += more
        graph.replay()
        check(out, step.truth(torch.float64)[0], step.truth(step.dtype)[0])


def check_nan_stays(step: Any) -> None:
    """A nan in a query stays in its row: of (2, 2 or more, 3 or more heads)."""
    expected, _ = step.run()
    step.q[0, 1, 2, 5] = math.nan
    out, _ = step.run()
    assert bool(out[0, 1, 2].isnan().all())
    out[0, 1, 2] = expected[0, 1, 2]
    same_bits(out, expected)
