"""Draws calls of F.scaled_dot_product_attention as diffusers, vision and text models make them.

Knows no torch.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

FAMILIES = ("sdpa", "sdpa_eager", "sdpa_training")
# How heads lie: of three products, of one (as timm's qkv), each head's tokens together.
SEPARATE, PACKED, HEADS_FIRST = LAYOUTS = "separate", "packed", "heads first"
_MOST_FLOPS, _MOST_BYTES = 1.0e12, 2 << 30
_LONGEST_TRAINED = 9216  # whose gradients are held against fp64


class Calling(NamedTuple):
    """A layer: heads of queries and of keys, head_dim, lengths of images or texts as published,
    and of what they cross to; 0: any length up to the first."""

    name: str
    heads: tuple[int, int, int]
    lengths: tuple[int, ...]
    keys: tuple[int, ...] = ()
    is_causal: bool = False
    is_free: bool = False


_IMAGES = (
    Calling("SD 1.5 64x64", (8, 8, 40), (4096, 9216), (77,)),
    Calling("SD 1.5 32x32", (8, 8, 80), (1024, 2304), (77,)),
    Calling("SD 1.5 16x16", (8, 8, 160), (256, 576, 64), (77,)),
    Calling("SD 2.1", (5, 5, 64), (4096, 9216), (77,)),
    Calling("SDXL 64x64", (10, 10, 64), (4096, 3952), (77, 154)),
    Calling("SDXL 32x32", (20, 20, 64), (1024, 988), (77, 154)),
    Calling("SVD", (5, 5, 64), (9216, 2304), ()),
    Calling("PixArt", (16, 16, 72), (1024, 4096, 256), (120, 300)),
    Calling("DiT-XL", (16, 16, 72), (256, 1024), ()),
    Calling("Hunyuan-DiT", (16, 16, 88), (4096, 1024), (333,)),
    Calling("SD 3", (24, 24, 64), (4250, 1178, 4429), ()),
    Calling("SD 3.5 large", (38, 38, 64), (4250, 4429), ()),
    Calling("FLUX", (24, 24, 128), (4608, 1536, 4352, 2816), ()),
    Calling("Lumina 2", (24, 8, 96), (4352, 1280), ()),
    Calling("AuraFlow", (12, 12, 256), (4352, 1280), ()),
    Calling("CogVideoX", (30, 30, 64), (17776,), ()),
    Calling("LTX", (32, 32, 64), (4992, 7776), (128, 256)),
    Calling("Wan 1.3B", (12, 12, 128), (7800, 14040), (512,)),
    Calling("Sana cross", (20, 20, 112), (1024, 4096), (300,)),
    Calling("VAE middle", (1, 1, 512), (4096, 1024), ()),
)  # fmt: skip
_VISION = (
    Calling("ViT-Ti", (3, 3, 64), (197,)),
    Calling("ViT-S", (6, 6, 64), (197, 257)),
    Calling("ViT-B", (12, 12, 64), (197, 577, 50)),
    Calling("ViT-L", (16, 16, 64), (197, 257, 577)),
    Calling("ViT-H", (16, 16, 80), (257, 730)),
    Calling("ViT-g", (16, 16, 88), (257,)),
    Calling("SigLIP so400m", (16, 16, 72), (729, 256, 1024)),
    Calling("DINOv2-g", (24, 24, 64), (257, 1370)),
    Calling("DINOv3-7B", (32, 32, 128), (201, 1029)),
    Calling("InternViT-6B", (25, 25, 128), (1025,)),
    Calling("Qwen2-VL vision", (16, 16, 80), (2048,), is_free=True),
    Calling("Whisper encoder", (20, 20, 64), (1500,)),
    Calling("BERT base", (12, 12, 64), (512,), is_free=True),
    Calling("BERT large", (16, 16, 64), (512,), is_free=True),
    Calling("ModernBERT", (12, 12, 64), (8192,), is_free=True),
)
_TEXT = (
    Calling("GPT-2", (12, 12, 64), (1024,), (), True, True),
    Calling("GPT-2 XL", (25, 25, 64), (1024,), (), True),
    Calling("Llama 3.2 1B", (32, 8, 64), (4096,), (), True, True),
    Calling("Llama 3 8B", (32, 8, 128), (8192,), (), True, True),
    Calling("Llama 2 7B", (32, 32, 128), (4096,), (), True, True),
    Calling("Qwen3 0.6B", (16, 8, 128), (4096,), (), True, True),
    Calling("Phi 3 mini", (32, 32, 96), (4096,), (), True, True),
    Calling("Gemma 2 2B", (8, 4, 256), (4096,), (), True, True),
)  # fmt: skip


@dataclass(frozen=True)
class SdpaLot:
    """One call; heads: of queries, of keys, and head_dim."""

    family: str
    number: int
    layer: str
    heads: tuple[int, int, int]
    batch_size: int
    seqlen_q: int
    seqlen_k: int
    dtype: str
    is_causal: bool
    layout: str

    @property
    def name(self) -> str:
        """Of the row; the number is the one that draws it again."""
        lengths = f"{self.seqlen_q}" + f" over {self.seqlen_k}" * (self.seqlen_q != self.seqlen_k)
        heads, kv_heads, head_dim = self.heads
        return (
            f"{self.number}: {self.layer}, {self.batch_size} x {lengths} h{heads}/{kv_heads} "
            f"d{head_dim} {'causal' if self.is_causal else 'full'} {self.dtype} {self.layout}"
        )

    @property
    def num_flops(self) -> int:
        """Two products forward, and five of the backward behind them."""
        pairs = self.seqlen_q * self.seqlen_k // (2 if self.is_causal else 1)
        products = 7 if self.family == "sdpa_training" else 2
        return 2 * products * self.batch_size * pairs * self.heads[0] * self.heads[2]

    @property
    def num_bytes(self) -> int:
        """Read and written at least."""
        heads, kv_heads, head_dim = self.heads
        rows = 2 * self.batch_size * (self.seqlen_q * heads + self.seqlen_k * kv_heads)
        return 2 * head_dim * rows * (3 if self.family == "sdpa_training" else 1)

    @property
    def is_matrix_bound(self) -> bool:
        """Whether clocks fall under longer load."""
        return self.num_flops > 150 * self.num_bytes

    @property
    def expected_us(self) -> float:
        """About, on an H200."""
        least = 4 if self.family == "sdpa" else 20
        return least + max(self.num_flops / 450e6, self.num_bytes / 4e6)


def draw(family: str, seed: int, number: int) -> SdpaLot:
    """The case `number` of a family under a seed."""
    lots = random.Random(f"{seed} {family} {number}")
    groups = (_IMAGES, _VISION, _TEXT) if family == "sdpa_training" else (_IMAGES, _VISION)
    layer = lots.choice(lots.choice(groups))
    lengths = [x for x in layer.lengths if family != "sdpa_training" or x <= _LONGEST_TRAINED]
    length = lots.choice(lengths or [_LONGEST_TRAINED])
    if layer.is_free:
        length = max(16, round(math.exp(lots.uniform(math.log(64), math.log(length)))))
    keys, layout = length, lots.choice(LAYOUTS)
    if layer.keys and lots.random() < 0.4:
        keys, layout = lots.choice(layer.keys), SEPARATE
    if layer.heads[0] != layer.heads[1] and layout == PACKED:
        layout = SEPARATE
    most = 8 if layer in _IMAGES else 256 if layer in _VISION else 16
    batch_size = max(1, round(math.exp(lots.uniform(0, math.log(most)))))
    found = SdpaLot(
        family, number, layer.name, layer.heads, batch_size, length, keys,
        "fp16" if lots.random() < 0.4 else "bf16", layer.is_causal, layout,
    )  # fmt: skip
    while found.batch_size > 1 and not (
        found.num_flops <= _MOST_FLOPS and found.num_bytes <= _MOST_BYTES
    ):
        found = replace(found, batch_size=found.batch_size // 2)
    return found
