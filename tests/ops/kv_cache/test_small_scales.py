"""Caches of bytes with scales of tokens, of heads that are next to nothing."""

from __future__ import annotations

import pytest
import torch
from ways import Way

from kernel_hub.ops import append_kv, decode_attention
from kernel_hub.ops.core import bounds
from kernel_hub.ops.trees import tree_mask

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


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [INT8, E4M3], ids=str)
def test_a_head_whose_scale_is_zero(
    way: Way, kind: torch.dtype, dtype: torch.dtype, head_dim: int
) -> None:
    """All keys are zeros: what is masked was 0 times minus infinity."""
    cache = way.randn(2, 2, 40, 2, head_dim).mul(20).to(kind)
    q = way.randn(2, 1, 4, head_dim, dtype=dtype, seed=1)
    lengths = torch.tensor([40, 17], dtype=torch.int32, device=way.device)
    scales = torch.tensor([[0.0, 0.01], [0.02, 0.03]], device=way.device)
    out, lse = decode_attention(
        q, *cache, cache_seqlens=lengths, k_scale=scales[0], v_scale=scales[1], return_lse=True
    )
    assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
    expected = lengths.double().log()[:, None].expand(2, 2).float()
    torch.testing.assert_close(lse[:, :2, 0], expected)
    for row, length in enumerate(lengths.tolist()):
        mean = cache[1, row, :length, 0].double().mean(0) * 0.02
        torch.testing.assert_close(out[row, 0, 0].double(), mean, atol=2e-3, rtol=1e-2)


def test_places_of_a_tree_are_no_positions(way: Way) -> None:
    """Eight siblings behind twenty tokens stand at one angle, of which the table has that many."""
    q = way.randn(1, 8, 2, 64, dtype=torch.bfloat16)
    k = way.randn(1, 8, 2, 64, dtype=torch.bfloat16, seed=1)
    cache = torch.zeros(2, 1, 40, 2, 64, device=way.device).to(E4M3)
    lengths = torch.tensor([20], dtype=torch.int32, device=way.device)
    cos, sin = way.randn(23, 32, seed=2), way.randn(23, 32, seed=3)
    words = tree_mask(torch.full((8,), -1, dtype=torch.int32), has_root=False).to(way.device)
    bounds.take(q)
    out = decode_attention(
        q, *cache, k=k, v=k, cos=cos, sin=sin, cache_seqlens=lengths, tree_mask=words
    )
    assert bool(out.isfinite().all()) and not bounds.take(q)
