"""One step of mla_decode whose tables lie: drawn by lot, run between guard bands, held against
fp64.

A key on a page that is not there is 0. A length below 0 is a finished row: nothing read, out 0.
What comes of a sequence whose length is more than there is room for is its own business.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from arena import Arena, outside
from hostile_decode import drawn_table
from led_outside import check_said, forget

from kernel_hub.ops import mla_decode
from kernel_hub.testing.compare import check
from kernel_hub.testing.reference_attention import reference_mla_decode

KEY_DIM, LATENT_DIM = 576, 512


class HostileLatents:
    """The arguments, drawn; `run` calls the op and checks all that it did."""

    def __init__(self, generator: random.Random, arena: Arena, **fixed: Any) -> None:
        choose, self.arena = generator.choice, arena
        seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
        drawn = {
            "dtype": choose((torch.float16, torch.bfloat16)), "batch": generator.randrange(1, 5),
            "heads": choose((1, 4, 16)), "seqlen_q": choose((1, 1, 2, 5)),
            "page_size": choose((0, 8, 16, 24, 64, 1, 5)), "pages": generator.randrange(1, 9),
            "num_splits": choose((0, 1, 3)), "bad_pages": generator.random() < 0.8,
            "bad_lengths": generator.random() < 0.5,
        }  # fmt: skip
        drawn |= fixed
        self.drawn = drawn
        batch, columns, self.page_size = drawn["batch"], drawn["pages"], drawn["page_size"]
        self.room = columns * self.page_size if self.page_size else generator.randrange(20, 150)
        self.lengths = [generator.randrange(self.room + 1) for _ in range(batch)]
        if drawn["bad_lengths"]:
            for row in range(batch):
                if generator.random() < 0.5:
                    self.lengths[row] = outside(generator, self.room + 1)
        pages = batch * columns + 1 if self.page_size else batch
        self.num_pages = pages
        shape = (pages, self.page_size or self.room, KEY_DIM)
        cache = torch.randn(shape, generator=seed).to(drawn["dtype"])
        q = torch.randn(batch, drawn["seqlen_q"], drawn["heads"], KEY_DIM, generator=seed)
        given = {
            "q": q.to(drawn["dtype"]), "kv_cache": cache,
            "cache_seqlens": torch.tensor(self.lengths, dtype=torch.int32),
        }  # fmt: skip
        self.table: list[list[int]] = []
        if self.page_size:
            self.table = drawn_table(generator, pages, batch, columns, drawn["bad_pages"])
            given["block_table"] = torch.tensor(self.table, dtype=torch.int32)
        self.plain = given
        self.given = {
            name: arena.put(name, value.to(arena.device)) for name, value in given.items()
        }

    def run(self) -> None:
        """Call the op; its output and everything around it must be right."""
        q = self.given["q"]
        out = self.arena.empty("out", (*q.shape[:3], LATENT_DIM), q.dtype)
        options: dict[str, Any] = {"softmax_scale": 0.05}
        forget(q)
        mla_decode(**self.given, **options, num_splits=self.drawn["num_splits"], out=out)
        self.arena.check()
        self._check_said(q)
        if self.table:  # a page of zeros for those that are not there
            cache = self.plain["kv_cache"]
            self.plain["kv_cache"] = torch.cat((cache, torch.zeros_like(cache[:1])))
            table = self.plain["block_table"]
            table[(table < 0) | (table >= self.num_pages)] = self.num_pages
        truth, own = (
            reference_mla_decode(**self.plain, **options, dtype=dtype)[0]
            for dtype in (torch.float64, q.dtype)
        )
        fits = [length <= self.room for length in self.lengths]
        check(out.cpu()[fits], truth[fits], own[fits])

    def _check_said(self, q: torch.Tensor) -> None:
        """The flag names the tables that lied."""
        said = set()
        if any(length > self.room for length in self.lengths):
            said.add("cache_seqlens")
        for length, row in zip(self.lengths, self.table, strict=False):
            used = row[: -(-max(0, min(length, self.room)) // self.page_size)]
            if any(not 0 <= page < self.num_pages for page in used):
                said.add("block_table")
        check_said("mla_decode", q, said)
