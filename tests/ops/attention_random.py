"""Cases of attention drawn by lot, for test_flash_attention.py and tests/gpu_attention_grid.py."""

from __future__ import annotations

import random

from attention_cases import (
    LAYOUTS,
    ONE_HEAD_DIM,
    ONE_LENGTH_K,
    ONE_LENGTH_Q,
    PAGED,
    SAME_LENGTHS,
    Case,
)

LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 199, 255, 256, 257, 511, 1023)
HEAD_DIMS = (16, 32, 64, 96, 128, 160, 192, 256)
# fp64 scores of one case, in elements: what the reference needs decides how long a case takes.
MAX_SCORES = 24_000_000


def _length(generator: random.Random) -> int:
    if generator.random() < 0.7:
        return generator.choice(LENGTHS)
    return generator.randrange(1, 1100)


def _head_dim(generator: random.Random) -> int:
    if generator.random() < 0.7:
        return generator.choice(HEAD_DIMS)
    return 8 * generator.randrange(2, 33)


def random_head_dim_v(generator: random.Random, layout: str, head_dim: int) -> int | None:
    """Of its own, narrower or wider, now and then; for a head_dim of 192 mostly DeepSeek's 128."""
    if layout in ONE_HEAD_DIM or generator.random() < 0.6:
        return None
    return 128 if head_dim == 192 and generator.random() < 0.6 else _head_dim(generator)


def random_case(generator: random.Random, *, backward_share: float = 0.4) -> Case:
    """Any layout with any features; gradients for a share of those that have them."""
    layout = generator.choice(LAYOUTS)
    batch_size = generator.choice((1, 1, 2, 3, 5))
    kv_heads = generator.choice((1, 1, 2, 3))
    group = 1 if layout == "qkvpacked" else generator.choice((1, 2, 4, 8))
    heads = kv_heads * group
    while True:
        lengths_q = tuple(_length(generator) for _ in range(batch_size))
        lengths_k = tuple(_length(generator) for _ in range(batch_size))
        if layout in ONE_LENGTH_Q:
            lengths_q = lengths_q[:1] * batch_size
        if layout in ONE_LENGTH_K:
            lengths_k = lengths_k[:1] * batch_size
        if layout in SAME_LENGTHS:
            lengths_k = lengths_q
        products = (a * b for a, b in zip(lengths_q, lengths_k, strict=True))
        if heads * sum(products) <= MAX_SCORES:
            break
    window = (-1, -1)
    if generator.random() < 0.35:
        sides = (-1, 0, 1, 5, 31, 64, 100, 128, 300, 2000)
        window = (generator.choice(sides), generator.choice(sides))
    magnitude = 35.0 if generator.random() < 0.08 else 1.0
    has_backward = layout not in PAGED and magnitude == 1.0
    head_dim = _head_dim(generator)
    return Case(
        layout=layout,
        dtype=generator.choice(("fp16", "bf16")),
        head_dim=head_dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        causal=generator.random() < 0.5,
        window_size=window,
        softcap=generator.choice((0.0, 0.0, 0.0, 1.0, 20.0)),
        alibi=generator.choice(("", "", "", "heads", "batch")),
        softmax_scale=generator.choice((None, None, None, 0.3, 0.02, -0.1)),
        page_size=generator.choice((1, 2, 4, 7, 8, 16, 24, 32, 64, 100, 128, 256)),
        bound=generator.choice(("tight", "loose", "none")),
        magnitude=magnitude,
        return_lse=generator.random() < 0.7,
        backward=has_backward and generator.random() < backward_share,
        deterministic=generator.random() < 0.5,
        twice=generator.random() < 0.2,
        seed=generator.randrange(1 << 30),
        sinks=generator.choice(("", "", "fp32", "bf16", "fp16")),
        own_head_dim_v=random_head_dim_v(generator, layout, head_dim),
    )
