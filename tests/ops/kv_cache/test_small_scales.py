"""Caches of bytes with scales of tokens, of heads that are next to nothing."""

from __future__ import annotations

import pytest
import torch
from ways import Way

from kernel_hub.ops import append_kv, decode_attention

E4M3, INT8 = torch.float8_e4m3fn, torch.int8


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("most", [1e-30, 1e-36, 1e-37, 1e-38, 1e-39])
def test_heads_whose_scale_is_subnormal(way: Way, most: float, head_dim: int) -> None:
    """0 over such a scale is 0, no nan: 1 over the scale may be an infinity."""
    k = torch.zeros(1, 3, 2, head_dim, dtype=torch.bfloat16, device=way.device)
    k[..., ::3] = most
    k[0, 1] = way.randn(2, head_dim, dtype=torch.bfloat16)
    q = way.randn(1, 1, 2, head_dim, dtype=torch.bfloat16, seed=1)
    lengths = torch.tensor([3], dtype=torch.int32, device=way.device)
    for kind in (INT8, E4M3):
        cache = torch.zeros(2, 1, 4, 2, head_dim, device=way.device).to(kind)
        scales = torch.zeros(2, 1, 4, 2, device=way.device)
        given = {"k_scale_cache": scales[0], "v_scale_cache": scales[1]}
        append_kv(k, k, *cache, **given)
        read = cache.float() * scales[..., None]
        assert not bool(read[:, 0, ::2, :, 1::3].any())
        assert bool(read.isfinite().all())
        assert bool(decode_attention(q, *cache, cache_seqlens=lengths, **given).isfinite().all())
