"""Cases of attention with few queries over many keys, drawn by lot: what equal shares are for."""

from __future__ import annotations

import dataclasses
import random
from typing import NamedTuple

from attention_cases import Case
from attention_random import random_head_dim_v

LAYOUTS = (
    "bshd", "bhsd", "strided", "kvpacked", "varlen", "varlen_q", "varlen_k", "cache",
    "varlen_cache", "paged", "paged_bhsd", "varlen_paged",
)  # fmt: skip
ONE_Q = ("bshd", "bhsd", "strided", "kvpacked", "varlen_k", "cache", "paged", "paged_bhsd")
ONE_K = ("bshd", "bhsd", "strided", "kvpacked", "varlen_q")
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
HEAD_DIMS = (64, 64, 128, 128, 128, 256, 256, 40, 72, 96, 192)


class Limits(NamedTuple):
    """Of the lengths, and of the scores of one case: how long it takes.

    tile: lengths count as whole ones of so many.
    """

    queries: int
    keys: int
    scores: int
    tile: int = 1

    def products(self, lengths_q: list[int], lengths_k: list[int]) -> int:
        """The scores of a head."""
        wholes = ([-(-n // self.tile) * self.tile for n in x] for x in (lengths_q, lengths_k))
        return sum(a * b for a, b in zip(*wholes, strict=True))


GPU = Limits(1100, 70_000, 24_000_000)
EMULATED = Limits(300, 3000, 1_000_000, 64)


def _log_uniform(generator: random.Random, least: int, most: int) -> int:
    return round(least * (most / least) ** generator.random())


def _length(generator: random.Random, longest: int) -> int:
    return generator.choice((0, 1, longest, generator.randint(0, longest)))


def random_split_case(generator: random.Random, limits: Limits = GPU) -> Case:
    """Lengths log-uniform up to `limits`, some of 0 among them."""
    layout = generator.choice(LAYOUTS)
    while True:
        batch_size = generator.choice((1, 1, 2, 3, 5, 9, 40))
        kv_heads, group = generator.choice((1, 1, 2, 3, 4)), generator.choice(GROUPS)
        longest_q = _log_uniform(generator, 1, limits.queries)
        longest_k = _log_uniform(generator, 1, limits.keys)
        lengths_q = [_length(generator, longest_q) for _ in range(batch_size)]
        lengths_k = [_length(generator, longest_k) for _ in range(batch_size)]
        if layout in ONE_Q:
            lengths_q = [longest_q] * batch_size
        if layout in ONE_K:
            lengths_k = [longest_k] * batch_size
        products = limits.products(lengths_q, lengths_k)
        if kv_heads * group * products <= limits.scores and max(lengths_q) > 0 < max(lengths_k):
            break
    window = (-1, -1)
    if generator.random() < 0.3:
        sides = (-1, 0, 1, 31, 100, 128, 300, 2000, 5000)
        window = generator.choice(sides), generator.choice(sides)
    head_dim = generator.choice((*HEAD_DIMS, 8 * generator.randint(2, 32)))
    case = Case(
        layout=layout,
        dtype=generator.choice(("fp16", "bf16")),
        head_dim=head_dim,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        lengths_q=tuple(lengths_q),
        lengths_k=tuple(lengths_k),
        causal=generator.random() < 0.6,
        window_size=window,
        softcap=generator.choice((0.0, 0.0, 0.0, 0.0, 20.0)),
        softmax_scale=generator.choice((None, None, 0.3, 0.02)),
        page_size=generator.choice((8, 16, 64, 256)),
        bound=generator.choice(("tight", "loose", "none")),
        return_lse=generator.random() < 0.7,
        twice=True,
        seed=generator.randrange(1 << 30),
        sinks=generator.choice(("", "", "fp32", "bf16", "fp16")),
        own_head_dim_v=random_head_dim_v(generator, layout, head_dim),
    )
    if generator.random() < 0.05:
        case = dataclasses.replace(case, magnitude=35.0)
    return case
