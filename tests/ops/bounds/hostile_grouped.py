"""grouped_linear with offsets that lie, drawn by lot between guard bands, held against fp64."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from arena import Arena, outside
from led_outside import check_said, forget

from kernel_hub.ops import grouped_linear
from kernel_hub.testing.compare import check


class HostileGroups:
    """The arguments, drawn. Offsets count as the nearest inside; a row of two experts is undefined,
    one of none is not written."""

    def __init__(self, generator: random.Random, arena: Arena, **fixed: Any) -> None:
        choose, self.arena = generator.choice, arena
        seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
        drawn = {
            "dtype": choose((torch.float16, torch.bfloat16)), "n": choose((24, 45, 136)),
            "k": choose((16, 72, 264)), "experts": choose((1, 3, 7, 40, 140)),
            "rows": choose((1, 5, 130, 300)), "is_wide": generator.random() < 0.25,
        } | fixed  # fmt: skip
        self.drawn, rows, experts = drawn, drawn["rows"], drawn["experts"]
        offsets = sorted([0, rows, *(generator.randrange(rows + 1) for _ in range(experts - 1))])
        lie = choose(("none", "far", "shuffled", "both"))
        if lie in ("far", "both"):
            for i in range(experts + 1):
                if generator.random() < 0.2:
                    offsets[i] = outside(generator, rows + 1)
        if lie in ("shuffled", "both"):
            generator.shuffle(offsets)
        self.offsets = offsets
        self.free = {
            "a": torch.randn(rows, drawn["k"], generator=seed).to(drawn["dtype"]),
            "b": torch.randn(experts, drawn["n"], drawn["k"], generator=seed).to(drawn["dtype"]),
            "offsets": torch.tensor(offsets, dtype=torch.int32),
        }
        self.given = arena.put_all(**{name: x.to(arena.device) for name, x in self.free.items()})
        print(drawn, offsets)

    def run(self) -> None:
        """Call the op; its output and everything around it must be right."""
        rows, dtype = self.drawn["rows"], self.drawn["dtype"]
        kind = torch.float32 if self.drawn["is_wide"] else dtype
        out = self.arena.empty("out", (rows, self.drawn["n"]), kind)
        forget(self.given["a"])
        grouped_linear(**self.given, out=out)
        self.arena.check()
        inside = [min(max(each, 0), rows) for each in self.offsets]
        is_right = inside == self.offsets and inside == sorted(inside)
        # A walk ends where there are more tiles than offsets in order can make.
        is_whole = sum(max(b - a, 0) for a, b in itertools.pairwise(inside)) <= rows
        said = () if is_right else ("offsets",)
        check_said("grouped_linear", out, said if is_whole else (), said)
        experts: list[list[int]] = [[] for _ in range(rows)]
        for expert, (start, end) in enumerate(itertools.pairwise(inside)):
            for row in range(start, end):
                experts[row].append(expert)
        found = out.cpu()
        alone = [row for row in range(rows) if len(experts[row]) == 1]
        if alone and is_whole:
            b = self.free["b"][[experts[row][0] for row in alone]]
            a = self.free["a"][alone]
            truth, own = (
                torch.einsum("rk,rnk->rn", a.to(each), b.to(each)) for each in (torch.float64, kind)
            )
            atol = 2.0**-18 * float(truth.abs().max()) if kind == torch.float32 else None
            check(found[alone], truth, own, atol=atol)
        nobodys = [row for row in range(rows) if not experts[row]]
        assert bool((found[nobodys].view(torch.uint8) == 0xFF).all()), "a row of no expert"
