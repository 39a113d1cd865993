"""What draws the calls of plan_lots.py: sizes, tensors that hold nothing, heads and caches."""

from __future__ import annotations

import random
from typing import Any

import torch

HALF = (torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn


class Lot:
    """Draws calls as models have them. Tensors hold nothing but what an op reads on the host."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def one(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def log(self, least: int, most: int) -> int:
        """A size, each order of magnitude as likely, powers of two and odd ones."""
        found = round(least * (most / least) ** self.random.random())
        return self.one(found, 1 << max(found.bit_length() - 1, 0), found | 1)

    def rows(self, *shape: int, dtype: torch.dtype, aligned: bool = True) -> torch.Tensor:
        """Contiguous, or rows of a wider tensor, or (not `aligned`) beginning off 16 bytes."""
        how = self.random.random() * (0.9 if aligned else 1.0)
        if how < 0.7:
            return torch.empty(shape, dtype=dtype)
        if how < 0.9:
            return torch.empty(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., : shape[-1]]
        size = 1
        for n in shape:
            size *= n
        return torch.empty(size + 8, dtype=dtype)[1 : 1 + size].view(shape)

    def tables(self, tokens: int, dim: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        dtype = self.one(dtype, torch.float32)
        return {name: torch.empty(tokens, dim // 2, dtype=dtype) for name in ("cos", "sin")}


def heads_of(lot: Lot) -> tuple[int, int, int]:
    """(num_heads, num_kv_heads, head_dim)."""
    return lot.one((32, 8, 128), (14, 2, 64), (28, 4, 128), (40, 10, 128), (16, 16, 80),
                   (8, 4, 256), (12, 12, 64), (8, 1, 96), (24, 8, 192))  # fmt: skip


def cache_of(lot: Lot, kv_heads: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """k_cache and v_cache, of bytes with a scale a head."""
    shape = lot.one((600, 16, kv_heads, dim), (64, 128, kv_heads, dim))
    found: dict[str, Any] = {
        name: torch.empty(shape, dtype=dtype) for name in ("k_cache", "v_cache")
    }
    if dtype.itemsize == 1:
        found |= {name: torch.empty(kv_heads) for name in ("k_scale", "v_scale")}
    return found
