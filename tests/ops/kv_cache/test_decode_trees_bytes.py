"""Trees of drafts over caches of int8, and of int8 and e4m3 with scales of tokens, against fp64."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from test_decode_trees import drawn_masks, tensor_of
from test_scaled_caches import E4M3, HALF, INT8, Caches
from ways import Way

from kernel_hub.ops import append_kv, decode_attention
from kernel_hub.ops.trees import tree_mask
from kernel_hub.testing.compare import attention_parts_atol, check
from kernel_hub.testing.guard import Guarded
from kernel_hub.testing.reference_attention import reference_attention


@pytest.mark.parametrize("number", range(12))
def test_by_lot(way: Way, number: int) -> None:
    lot = random.Random(f"trees over bytes {number}")
    of_tokens = number % 3 != 0
    kind, dtype = lot.choice((INT8, E4M3)) if of_tokens else INT8, HALF[number % 2]
    kv_heads, seqlen_q, head_dim = lot.choice((1, 2)), lot.choice((2, 5, 16)), lot.choice((64, 128))
    heads = kv_heads * lot.choice((1, 4))
    appends = not of_tokens and lot.random() < 0.6
    lengths = [
        seqlen_q + lot.choice((0, 1, 60, 63, lot.randrange(200)))
        for _ in range(lot.choice((1, 3)))
    ]  # fmt: skip
    caches = Caches(way, lot, kind, lengths, kv_heads, head_dim, of_tokens=of_tokens)
    q = way.randn(len(lengths), seqlen_q, heads, head_dim, dtype=dtype, seed=number)
    words = drawn_masks(lot, len(lengths), seqlen_q)
    # Without bits a token stands at the first new place, which a window counts from; the truth
    # below knows places by the keys that are seen.
    words = [[word or 1 << i for i, word in enumerate(row)] for row in words]
    options: dict[str, Any] = {
        "softcap": lot.choice((0.0, 5.0)), "window_size": lot.choice(((-1, -1), (3, 0))),
    }  # fmt: skip
    more: dict[str, Any] = {}
    if appends:
        shape = (len(lengths), seqlen_q, kv_heads, head_dim)
        more = {name: way.randn(*shape, dtype=dtype, seed=i) for i, name in enumerate("kv")}
    given = caches.options
    if of_tokens and lot.random() < 0.5:  # scales that lie apart, nan between them
        given |= {
            name: torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]
            for name, x in given.items()
            if "scale" in name
        }
    out = Guarded(q.shape, dtype, way.device)
    before = [length - seqlen_q * appends for length in lengths]
    decode_attention(
        q, *caches.tensors, cache_seqlens=torch.tensor(before, device=way.device).int(),
        num_splits=lot.choice((0, 1, 3)), tree_mask=tensor_of(lot, way, words), out=out.tensor,
        **given, **options, **more,
    )  # fmt: skip
    out.check()
    caches.check_bounds()
    for row, length in enumerate(lengths):
        for i, word in enumerate(words[row]):
            seen = [*range(length - seqlen_q)]
            seen += [length - seqlen_q + j for j in range(seqlen_q) if word >> j & 1]
            keys, values = (caches.values(which, row, 0, length)[None, seen] for which in (0, 1))
            own_q = q[row : row + 1, i : i + 1]
            truth, own = (
                reference_attention(
                    *(x.to(as_type) for x in (own_q, keys, values)), causal=True, dtype=as_type,
                    **options,
                )[0]
                for as_type in (torch.float64, dtype)
            )  # fmt: skip
            atol = attention_parts_atol(truth, dtype, options["softcap"])
            check(out.tensor[row : row + 1, i : i + 1], truth, own, atol=atol)


@pytest.mark.parametrize("kind", [INT8, E4M3], ids=["int8", "e4m3"])
def test_a_step_of_drafts_is_appended_then_verified(way: Way, kind: torch.dtype) -> None:
    """As an engine does: append_kv finds the scales of the drafts, whose mask then attends."""
    parents = torch.tensor([[-1, -1, 0, 1, 3], [-1, 0, 1, 0, 1]], dtype=torch.int32)
    mask = tree_mask(parents.to(way.device))
    k, v = (way.randn(2, 6, 2, 64, dtype=torch.bfloat16, seed=i) for i in (1, 2))
    caches = [torch.zeros(2, 40, 2, 64, device=way.device).to(kind) for _ in "kv"]
    scales = {
        name: torch.zeros(2, 40, 2, device=way.device)
        for name in ("k_scale_cache", "v_scale_cache")
    }
    held = torch.tensor([20, 7], dtype=torch.int32, device=way.device)
    old = way.randn(2, 20, 2, 64, dtype=torch.bfloat16, seed=3)
    append_kv(old, old, *caches, cache_seqlens=torch.zeros_like(held), **scales)
    append_kv(k, v, *caches, cache_seqlens=held, **scales)
    q = way.randn(2, 6, 4, 64, dtype=torch.bfloat16)
    out = decode_attention(q, *caches, cache_seqlens=held + 6, tree_mask=mask, **scales)
    for row in range(2):
        first = int(held[row])
        seen = [*range(first), *(first + j for j in range(6) if int(mask[row, 5]) >> j & 1)]
        keys, values = (
            (caches[i][row, seen].float() * scales[name][row, seen][..., None])[None].double()
            for i, name in enumerate(scales)
        )
        truth, _ = reference_attention(q[row : row + 1, 5:].double(), keys, values, causal=True)
        torch.testing.assert_close(
            out[row : row + 1, 5:].double(), truth.to(way.device), rtol=2e-2, atol=2e-2
        )
