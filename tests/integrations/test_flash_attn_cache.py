"""flash_attn_with_kvcache on the CPU, in both versions, against fp64 token by token."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_hub import flash_attn as two  # noqa: E402
from kernel_hub import flash_attn_interface as three  # noqa: E402
from kernel_hub import ops  # noqa: E402
from kernel_hub.errors import TensorError  # noqa: E402
from kernel_hub.testing.compare import compare  # noqa: E402
from kernel_hub.testing.reference_attention import reference_attention  # noqa: E402

HEADS, KV_HEADS, BATCH = 4, 2, 3


def turned(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """x (batch, seqlen, heads, head_dim) rotated at positions (batch, seqlen)."""
    half = cos.shape[-1]
    c, s = (table[positions][:, :, None].to(x.dtype) for table in (cos, sin))
    part, rest = x[..., : 2 * half], x[..., 2 * half :]
    first, second = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    pair = first * c - second * s, second * c + first * s
    part = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([part, rest], -1)


def case_by_lot(lot: random.Random) -> dict[str, Any]:
    seqlen_q = lot.choice([1, 1, 3, 17, 33])
    seqlen_new = lot.choice([None, seqlen_q, seqlen_q + 2])
    return {
        "seqlen_q": seqlen_q,
        "seqlen_new": seqlen_new,
        "head_dim": lot.choice([32, 59, 64]),
        "causal": lot.random() < 0.6,
        "window_size": lot.choice([(-1, -1), (-1, -1), (11, 0), (6, 4)]),
        "softcap": lot.choice([0.0, 20.0]),
        "alibi": lot.random() < 0.3,
        "rotary": seqlen_new and lot.choice([0, 16, 32]),
        "interleaved": lot.random() < 0.5,
        "places": lot.choice(["own", "rows", "pages", "large pages", "odd pages", "pages apart"]),
        "lengths": lot.choice(["tensor", "number", None]) if seqlen_new is None else "tensor",
        "num_splits": lot.choice([0, 1, 3]),
        "version": lot.choice([2, 3]),
        "starts": lot.choice(["own", "same", "none"]),
    }


@pytest.mark.parametrize("seed", range(60))
def test_by_lot(seed: int) -> None:
    lot = random.Random(seed)
    torch.manual_seed(seed)
    case = case_by_lot(lot)
    head_dim, seqlen_q, seqlen_new = case["head_dim"], case["seqlen_q"], case["seqlen_new"]
    page_size = {"pages": 16, "large pages": 514, "odd pages": 3, "pages apart": 512}.get(
        case["places"], 120
    )
    pages = 1 if page_size >= 120 else -(-120 // page_size)
    num = BATCH * pages + 2
    if case["places"] == "own":
        num = BATCH
    rows = page_size + 8 * (case["places"] == "pages apart")
    caches = [
        torch.randn(num, rows, KV_HEADS, head_dim).bfloat16()[:, :page_size] for _ in range(2)
    ]
    table = torch.randperm(num)[: BATCH * pages].view(BATCH, pages).int()
    if case["places"] == "own":
        table = torch.arange(BATCH).int()[:, None]
    room = page_size * pages
    lengths = torch.tensor([lot.randrange(0, 80) for _ in range(BATCH)], dtype=torch.int32)
    if case["lengths"] == "number":
        lengths.fill_(50)
    elif case["lengths"] is None:
        lengths.fill_(room)
    q = torch.randn(BATCH, seqlen_q, HEADS, head_dim).bfloat16()
    k = v = None
    given: dict[str, Any] = {
        name: case[name] for name in ("causal", "window_size", "softcap", "num_splits")
    }
    if case["alibi"] and case["version"] == 2:
        given["alibi_slopes"] = torch.rand(HEADS)
    options = {name: given[name] for name in given if name != "num_splits"}
    given["cache_seqlens"] = {"number": 50, "tensor": lengths}.get(str(case["lengths"]))
    if case["places"] == "rows":
        given["cache_batch_idx"] = table[:, 0].contiguous()
    elif case["places"] != "own":
        given["block_table" if case["version"] == 2 else "page_table"] = table

    # What must come out: the caches by rows, rotation and reference in wider arithmetic.
    at = table.long()
    dense = [cache[at].flatten(1, 2).clone() for cache in caches]
    query, total = q, lengths
    if seqlen_new is not None:
        k, v = (torch.randn(BATCH, seqlen_new, KV_HEADS, head_dim).bfloat16() for _ in range(2))
        new_k = k
        if case["rotary"]:
            angles = torch.rand(200, case["rotary"] // 2) * 6
            cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
            given |= {
                "rotary_cos": cos,
                "rotary_sin": sin,
                "rotary_interleaved": case["interleaved"],
            }
            starts = lengths
            if case["version"] == 3 and case["starts"] != "none":
                starts = lengths if case["starts"] == "same" else lengths // 2
                given["rotary_seqlens"] = starts
            steps = torch.arange(max(seqlen_q, seqlen_new)) + starts[:, None]
            how = cos, sin
            is_masked = case["causal"] or case["window_size"] != (-1, -1)
            places = steps if is_masked else starts[:, None].expand_as(steps)
            query = turned(q.float(), *how, places[:, :seqlen_q], case["interleaved"]).bfloat16()
            new_k = turned(k.float(), *how, steps[:, :seqlen_new], case["interleaved"]).bfloat16()
        for index, length in enumerate(lengths.tolist()):
            dense[0][index, length : length + seqlen_new] = new_k[index]
            dense[1][index, length : length + seqlen_new] = v[index]
        total = lengths + seqlen_new
    truth, own = (
        reference_attention(query, *dense, cache_seqlens=total, dtype=dtype, **options)
        for dtype in (torch.float64, torch.bfloat16)
    )
    module = two if case["version"] == 2 else three
    out, lse, *rest = module.flash_attn_with_kvcache(
        q, *caches, k, v, return_softmax_lse=True, **given
    )
    verdict = compare(out, truth[0], own[0])
    assert verdict.ok, (case, verdict.message)
    torch.testing.assert_close(lse.double(), truth[1], rtol=2e-2, atol=2e-2)
    assert len(rest) == (2 if case["version"] == 3 else 0)
    for cache, rows in zip(caches, dense, strict=True):
        written = cache[at].flatten(1, 2)
        torch.testing.assert_close(written, rows, rtol=1e-2, atol=1e-2)


def test_a_decode_step_is_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotation, append and attention of a step are `decode_attention`'s; nothing else runs."""
    for name in ("append_kv", "flash_attention", "rope"):
        monkeypatch.delattr(ops, name)
    q, k = torch.randn(2, 1, 4, 64).half(), torch.randn(2, 1, 2, 64).half()
    caches = torch.zeros(2, 2, 512, 2, 64).half()
    lengths = torch.tensor([3, 300], dtype=torch.int32)
    cos, sin = torch.rand(2, 512, 32).half()
    two.flash_attn_with_kvcache(q, *caches, k, k, cos, sin, lengths, causal=True)
    pages = caches.view(2, 4, 256, 2, 64)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    two.flash_attn_with_kvcache(q, *pages, k, k, cos, sin, lengths, block_table=table)
    rows = torch.tensor([1, 0], dtype=torch.int32)
    two.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, cache_batch_idx=rows)


def test_ragged_queries_and_keys_in_3() -> None:
    bounds = torch.tensor([0, 2, 3, 20], dtype=torch.int32)
    new = torch.tensor([0, 1, 1, 6], dtype=torch.int32)
    q, k = torch.randn(20, 4, 32).bfloat16(), torch.randn(6, 2, 32).bfloat16()
    caches = torch.randn(2, 3, 40, 2, 32).bfloat16()
    lengths = torch.tensor([10, 0, 30], dtype=torch.int32)
    dense = caches.clone()
    for cache in dense:
        cache[0, 10], cache[2, 30:35] = k[0], k[1:]
    out = three.flash_attn_with_kvcache(
        q, *caches, k, k, cache_seqlens=lengths, cu_seqlens_q=bounds, cu_seqlens_k_new=new,
        max_seqlen_q=17, causal=True,
    )  # fmt: skip
    assert torch.equal(caches, dense)
    options: Any = {"cu_seqlens_q": bounds, "cache_seqlens": lengths + new.diff(), "causal": True}
    truth, own = (
        reference_attention(q, *dense, dtype=dtype, **options)[0]
        for dtype in (torch.float64, torch.bfloat16)
    )
    verdict = compare(out, truth, own)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_a_head_dim_of_v_in_3(seqlen_q: int) -> None:
    q, k, v = (torch.randn(2, n, 2, d).half() for n, d in ((seqlen_q, 32), (40, 32), (40, 20)))
    lengths = torch.tensor([10, 40], dtype=torch.int32)
    out = three.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
    truth, own = (
        reference_attention(q, k, v, cache_seqlens=lengths, causal=True, dtype=dtype)[0]
        for dtype in (torch.float64, torch.float16)
    )
    verdict = compare(out, truth, own)
    assert verdict.ok, verdict.message


def test_gradients_are_refused() -> None:
    q, caches = torch.randn(1, 20, 4, 32).half(), torch.randn(2, 1, 40, 2, 32).half()
    q.requires_grad_()
    with pytest.raises(TensorError, match=r"q: requires grad.* under torch.no_grad\(\)"):
        two.flash_attn_with_kvcache(q, *caches, causal=True)
    with torch.no_grad():
        two.flash_attn_with_kvcache(q, *caches, causal=True)
