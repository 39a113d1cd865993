"""A step of mla_decode for tests: its arguments, its truth, and what it must leave alone."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from attention_cases import GARBAGE_PAGES
from ways import Way

from kernel_hub.ops import mla_decode
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded
from kernel_hub.testing.reference_attention import reference_mla_decode

KEY_DIM, LATENT_DIM = 576, 512


@dataclass
class LatentStep:
    """What lies past the end of a sequence in its cache is nan, and table entries that no length
    reaches are garbage. page_size 0: no pages, `room` tokens a sequence."""

    way: Way
    lengths: list[int]
    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 16
    seqlen_q: int = 1
    page_size: int = 64
    room: int = 0  # tokens; 0: of the longest
    num_splits: int = 0
    softmax_scale: float = 192**-0.5
    has_heads: bool = False  # a dimension of one head in the cache
    is_strided: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        way, batch = self.way, len(self.lengths)
        room = max(self.room, *self.lengths, 1)
        page = self.page_size or room
        columns = -(-room // page)
        pages = batch * columns + (3 if self.page_size else 0)
        rows = (batch, self.seqlen_q, self.num_heads)
        wide = KEY_DIM + (24 if self.is_strided else 0)
        self.q = way.randn(*rows, wide, dtype=self.dtype, seed=self.seed)[..., :KEY_DIM]
        cache = way.randn(pages, page, wide, dtype=self.dtype, seed=self.seed + 1)
        order = list(range(pages))
        random.Random(self.seed).shuffle(order) if self.page_size else None
        table = [order[row * columns : (row + 1) * columns] for row in range(batch)]
        seen = torch.zeros(pages, page, dtype=torch.bool)
        for row, length in enumerate(self.lengths):
            for column, at in enumerate(table[row]):
                left = max(0, min(length - column * page, page))
                seen[at, :left] = True
                if left == 0 and self.page_size:
                    table[row][column] = GARBAGE_PAGES[(row + column) % len(GARBAGE_PAGES)]
        cache[~seen.to(way.device)] = math.nan
        self.kv_cache = cache[..., :KEY_DIM]
        if self.has_heads:
            self.kv_cache = self.kv_cache.unsqueeze(2)
        self.options: dict[str, Any] = {
            "cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32, device=way.device),
            "softmax_scale": self.softmax_scale,
        }
        if self.page_size:
            self.options["block_table"] = torch.tensor(
                table, dtype=torch.int32, device=way.device
            ).view(batch, columns)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse); what the op wrote is inside its bounds."""
        shape = (*self.q.shape[:3], LATENT_DIM)
        stride = LATENT_DIM + 8 if self.is_strided else None
        out = Guarded(shape, self.dtype, self.way.device, row_stride=stride)
        found = mla_decode(
            self.q, self.kv_cache, **self.options, num_splits=self.num_splits, out=out.tensor,
            return_lse=True,
        )  # fmt: skip
        out.check()
        return out.tensor, found[1]

    def truth(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by the reference."""
        return reference_mla_decode(self.q, self.kv_cache, **self.options, dtype=dtype)

    def check(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run, and hold out and lse against fp64."""
        out, lse = self.run()
        (truth, truth_lse), (own, own_lse) = self.truth(torch.float64), self.truth(self.dtype)
        check(out, truth, own, name="out")
        check(lse, truth_lse, own_lse, atol=1e-4, name="lse")
        return out, lse

    def with_(self, **changes: Any) -> LatentStep:
        """Another step."""
        return replace(self, **changes)


def draw_step(lot: random.Random, way: Way, *, is_small: bool, by_eights: bool) -> LatentStep:
    """Any step; by_eights: of pages that the kernel for Hopper takes."""
    most = 260 if is_small else 3000
    usual = (0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 199, lot.randrange(most))
    batch = lot.choice((1, 1, 2, 3)) if is_small else lot.choice((1, 2, 5, 40))
    lengths = [lot.choice((*usual, -1, -(2**31))) for _ in range(batch)]
    pages = (8, 16, 24, 64, 128, 256, 0) if by_eights else (1, 3, 7, 16, 20, 64, 0)
    return LatentStep(
        way, lengths, lot.choice((torch.float16, torch.bfloat16)),
        num_heads=lot.choice((1, 5, 8, 16) if is_small else (1, 7, 16, 24, 64, 100, 128)),
        seqlen_q=lot.choice((1, 1, 2, 5, 8)), page_size=lot.choice(pages),
        room=lot.choice((0, 0, 300)), num_splits=lot.choice((0, 0, 1, 2, 3, 9)),
        softmax_scale=lot.choice((192**-0.5, 192**-0.5, 0.02, 1.0, -0.1, 0.0)),
        has_heads=lot.random() < 0.5, is_strided=lot.random() < 0.3,
        seed=lot.randrange(1 << 30),
    )  # fmt: skip
