"""Sinks of heads, drawn by lot: of any dtype, near the scores, far above and below them, none."""

from __future__ import annotations

import math
import random

import torch

KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FAR = (40.0, -40.0, 300.0, -1e4, -math.inf)


def draw_sinks(kind: str, num_heads: int, seed: int, device: str = "cpu") -> torch.Tensor:
    """(num_heads,) of a kind of KINDS."""
    lot = random.Random(f"sinks {seed}")
    values = [lot.choice(FAR) if lot.random() < 0.3 else lot.gauss(0, 3) for _ in range(num_heads)]
    return torch.tensor(values, device=device).to(KINDS[kind])
