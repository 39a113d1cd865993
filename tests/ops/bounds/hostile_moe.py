"""moe_permute and moe_combine with tables that lie, drawn by lot between guard bands.

A slot whose expert or row is none goes nowhere and counts nothing; the others are right.
"""

from __future__ import annotations

import random

import torch
from arena import Arena, outside
from bits import same_bits
from led_outside import check_said, forget

from kernel_hub.ops import moe_combine, moe_permute
from kernel_hub.testing import reference_moe
from kernel_hub.testing.compare import check

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _table(generator: random.Random, tokens: int, k: int, count: int) -> tuple[torch.Tensor, bool]:
    """Numbers below `count`, -1, and others; whether there are others."""
    found = [generator.randrange(-1, count) for _ in range(tokens * k)]
    is_hostile = False
    for i in range(len(found)):
        if generator.random() < 0.15:
            found[i] = outside(generator, count)
            is_hostile = is_hostile or found[i] != -1
    return torch.tensor(found, dtype=torch.int32).view(tokens, k), is_hostile


def hostile_permute(generator: random.Random, arena: Arena) -> None:
    """What is placed, and that nothing else was written."""
    tokens, k = generator.choice((1, 5, 40)), generator.choice((1, 2, 9))
    num_experts, hidden = generator.choice((1, 8, 70)), generator.choice((1, 8, 72))
    experts, is_hostile = _table(generator, tokens, k, num_experts)
    seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
    x = torch.randn(tokens, hidden, generator=seed).to(generator.choice(_DTYPES))
    print(tokens, k, num_experts, hidden, x.dtype, experts.tolist())
    given = arena.put_all(x=x.to(arena.device), experts=experts.to(arena.device))
    outs = {
        "out": arena.empty("out", (tokens * k, hidden), x.dtype),
        "offsets": arena.empty("offsets", (num_experts + 1,), torch.int32),
        "row_id_map": arena.empty("row_id_map", (tokens, k), torch.int32),
    }
    forget(given["x"])
    found = moe_permute(**given, num_experts=num_experts, **outs)
    arena.check()
    check_said("moe_permute", found[0], ("experts",) if is_hostile else ())
    rows, offsets, row_id_map = reference_moe.moe_permute(x, experts, num_experts)
    assert torch.equal(found[1].cpu(), offsets) and torch.equal(found[2].cpu(), row_id_map)
    same_bits(found[0][: len(rows)].cpu(), rows)


def hostile_combine(generator: random.Random, arena: Arena) -> None:
    """What is summed, and that nothing else was read or written."""
    tokens, k = generator.choice((1, 5, 40)), generator.choice((1, 2, 9))
    num_rows, hidden = generator.choice((1, 8, 70)), generator.choice((1, 8, 72))
    row_id_map, is_hostile = _table(generator, tokens, k, num_rows)
    seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
    dtype = generator.choice(_DTYPES)
    free = {
        "rows": torch.randn(num_rows, hidden, generator=seed).to(dtype),
        "row_id_map": row_id_map,
        "weights": torch.randn(tokens, k, generator=seed),
    }
    print(tokens, k, num_rows, hidden, dtype, row_id_map.tolist())
    given = arena.put_all(**{name: x.to(arena.device) for name, x in free.items()})
    out = arena.empty("out", (tokens, hidden), dtype)
    forget(given["rows"])
    moe_combine(**given, out=out)
    arena.check()
    check_said("moe_combine", out, ("row_id_map",) if is_hostile else ())
    truth, own = (reference_moe.moe_combine(**free, dtype=each) for each in (torch.float64, dtype))
    check(out.cpu(), truth, own)
