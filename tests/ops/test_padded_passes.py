"""A pass with the shape of a graph: what stands behind its decodes and chunks changes nothing.

Rows of length -1 between the sequences with one token and those with several, tokens of no
sequence and sequences of no token behind them, and a max_seqlen_q that none of them has.
"""

from __future__ import annotations

import random
from typing import Any

import drawn
import pytest
import torch
from ways import Way

from kernel_hub.ops import flash_attention, qkv_linear

SIZE, HEADS, KV_HEADS, DIM, HIDDEN, PAGES = 16, 4, 2, 64, 128, 12


@pytest.mark.parametrize("seed", drawn.some([1, 2, 3], 2, "padded passes"))
def test_padding_changes_nothing(seed: int, hopper_way: Way) -> None:
    lot, way, dtype = random.Random(seed), hopper_way, torch.bfloat16
    decodes, chunks = lot.randint(1, 3), [lot.randint(2, 40) for _ in range(lot.randint(1, 2))]
    counts = [1] * decodes + chunks
    before = [lot.randint(0, 2 * SIZE) for _ in counts]
    table = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    table = table[: len(counts) * PAGES].view(-1, PAGES)
    x = way.randn(sum(counts), HIDDEN, dtype=dtype, seed=seed)
    weight = way.randn((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, dtype=dtype, seed=9) / 8
    angles = torch.outer(torch.arange(200.0), torch.arange(1, DIM // 2 + 1) / DIM)
    cos, sin = angles.cos().to(way.device), angles.sin().to(way.device)

    def int32(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=way.device)

    def starts(lengths: list[int]) -> torch.Tensor:
        return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)])

    def passed(num_rows: int, num_chunks: int, num_behind: int) -> list[torch.Tensor]:
        """Queries, attention of the chunks, keys and values, with so much of each as padding."""
        blank = num_rows - decodes
        place = [*range(decodes), *range(num_rows, num_rows + sum(chunks))]
        rows = torch.full((num_rows + sum(chunks) + num_behind, HIDDEN), 3.0, dtype=dtype)
        rows = rows.to(way.device)
        rows[place] = x
        none = num_chunks - len(chunks)
        lengths = [1] * num_rows + chunks + [0] * none
        own = before[:decodes] + [-1] * blank + before[decodes:] + [0] * none
        ends = [a + b for a, b in zip(before[decodes:], chunks, strict=True)] + [0] * none
        pages = torch.zeros(len(lengths), PAGES, dtype=torch.int32)
        pages[:decodes], pages[num_rows : num_rows + len(chunks)] = table[:decodes], table[decodes:]
        pages = pages.to(way.device)
        cache = [torch.full((61, SIZE, KV_HEADS, DIM), 0.5, dtype=dtype) for _ in "kv"]
        k, v = (c.to(way.device) for c in cache)
        q, _, _ = qkv_linear(
            rows, weight, cos=cos, sin=sin, num_heads=HEADS, num_kv_heads=KV_HEADS, k_cache=k,
            v_cache=v, cache_seqlens=int32(own), block_table=pages, cu_seqlens=starts(lengths),
        )  # fmt: skip
        out = flash_attention(
            q[num_rows:], k, v, causal=True, cu_seqlens_q=starts(lengths[num_rows:]),
            max_seqlen_q=max(chunks) + num_behind, cache_seqlens=int32(ends),
            block_table=pages[num_rows:],
        )  # fmt: skip
        return [q[place], out[: sum(chunks)], k, v]

    plain = passed(decodes, len(chunks), 0)
    padded = passed(decodes + lot.randint(0, 5), 4, lot.randint(0, 60))
    # Two steps of the largest numbers: queries are rounded once or twice, by how many there are.
    for one, other in zip(plain, padded, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0.07)
    for one, other in zip(plain[2:], padded[2:], strict=True):  # nothing else is written
        assert torch.equal((one == 0.5).all(-1), (other == 0.5).all(-1))
