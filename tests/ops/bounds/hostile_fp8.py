"""flash_attention in e4m3 with tables that lie, on a Hopper GPU, held against the CPU's path."""

from __future__ import annotations

import random

import torch
from arena import Arena
from hostile_attention import E4M3, HostileAttention
from led_outside import check_said, forget

from kernel_hub.ops import flash_attention

LAYOUTS = ("varlen", "varlen_q", "varlen_k", "cache", "varlen_cache")
TOKENS = 128  # of a block with a scale


class HostileFp8(HostileAttention):
    """The arguments, drawn."""

    def __init__(self, generator: random.Random, arena: Arena) -> None:
        super().__init__(
            generator, arena, layout=generator.choice(LAYOUTS), dtype=E4M3, softcap=0.0,
            window_size=(-1, -1), own_head_dim_v=None,
            head_dim=generator.choice((64, 96, 128, 160, 192, 224, 256)),
        )  # fmt: skip
        kind = generator.choice(("none", "batch", "blocks"))
        self.scales: dict[str, torch.Tensor] = {}
        for name, longest in (("q", self.longest_q), ("k", self.longest_k), ("v", self.longest_k)):
            shape: tuple[int, ...] = (self.drawn["batch"], self.free[name].shape[-2])
            if kind == "blocks":
                shape = (*shape, -(-longest // TOKENS))
            if kind != "none":
                scale = 0.25 + torch.rand(shape, generator=self.seed)
                self.scales[f"{name}_scale"] = scale
        print(kind)

    def forward(self) -> None:
        """Call the op; guard bands and flag must be right, the values near those of the CPU."""
        q = self.given["q"]
        scales = self.arena.put_all(**{n: x.to(self.arena.device) for n, x in self.scales.items()})
        out = self.arena.empty("out", q.shape, torch.bfloat16)
        forget(q)
        options = {"causal": self.drawn["causal"], **self.extra}
        flash_attention(**self.given, **scales, **options, out=out)
        self.arena.check()
        check_said("flash_attention", q, self.certain)
        found = out.cpu()
        for row, own_rows in self.sequences():
            got = (found[own_rows] if found.dim() == 3 else found[row]).float()
            if got.numel():
                start = (self.queries[row] or (0, 0))[0]
                wanted = self._alone(row)[[i - start for i in own_rows]].float()
                # e4m3 probabilities: 2^-4 of a value, of which many are summed.
                torch.testing.assert_close(got, wanted, atol=0.15, rtol=0.1)
        if found.dim() == 3:
            written = {i for one in self.queries for i in range(*(one or (0, 0)))}
            rest = [i for i in range(found.shape[0]) if i not in written]
            assert bool((found[rest].view(torch.uint8) == 0xFF).all())

    def _alone(self, row: int) -> torch.Tensor:
        """out of one sequence, by the CPU's path."""
        given = {
            "q": self.queries_of(self.free["q"], row), "k": self.keys_of("k", row),
            "v": self.keys_of("v", row),
        }  # fmt: skip
        scales = {}
        for name, x in given.items():
            scale = self.scales.get(f"{name}_scale")
            if scale is not None:
                blocks = -(-len(x) // TOKENS)
                one = scale[row : row + 1]
                scales[f"{name}_scale"] = one[..., :blocks] if scale.dim() == 3 else one
        tensors = {name: x[None] for name, x in given.items()}
        found: torch.Tensor = flash_attention(**tensors, **scales, causal=self.drawn["causal"])
        return found[0]
