"""decode_attention against fp64: lengths, groups, caches, pages, the whole step, splits."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from bits import same_bits
from decode_step import E4M3, Step, check_nan_stays, check_replays
from ways import Way

from kernel_hub.ops import decode_attention
from kernel_hub.ops.kv_cache import decode_plan
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded
from kernel_hub.testing.reference_attention import reference_attention

DTYPES = [torch.float16, torch.bfloat16]
LENGTHS = [300, 0, 1, 65, 64, 129, 128, 17]


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dims(way: Way, dtype: torch.dtype, head_dim: int) -> None:
    Step(way, LENGTHS[:4], dtype, head_dim=head_dim).check()


@pytest.mark.parametrize("heads", [(4, 4), (5, 1), (8, 1), (6, 2), (16, 1), (40, 2)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups(way: Way, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    Step(way, LENGTHS[:3], dtype, heads=heads, head_dim=head_dim).check()


@pytest.mark.parametrize("seqlen_q", [2, 5, 16])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (8, 1)], ids=str)
def test_several_new_tokens(way: Way, heads: tuple[int, int], seqlen_q: int) -> None:
    # The first tokens of a sequence shorter than seqlen_q see nothing: zeros, and -inf.
    Step(way, [300, 0, 3, 16], heads=heads, seqlen_q=seqlen_q).check()


@pytest.mark.parametrize("page_size", [1, 2, 4, 7, 8, 16, 24, 64, 256])
@pytest.mark.parametrize("cache_dtype", [torch.float16, E4M3], ids=str)
def test_pages(way: Way, cache_dtype: torch.dtype, page_size: int) -> None:
    Step(way, LENGTHS, torch.float16, cache_dtype, page_size=page_size).check()


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_e4m3(way: Way, dtype: torch.dtype, head_dim: int) -> None:
    Step(way, LENGTHS[:4], dtype, E4M3, head_dim=head_dim).check()
    Step(way, LENGTHS[:4], dtype, E4M3, heads=(6, 1), head_dim=head_dim, seqlen_q=4).check()


@pytest.mark.parametrize("seqlen_q", [1, 4, 16])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
def test_append(way: Way, cache_dtype: torch.dtype | None, page_size: int, seqlen_q: int) -> None:
    # 60 and 250: the new tokens lie in two units.
    Step(
        way, [250, 0, 60, 1], cache_dtype=cache_dtype, heads=(8, 2), seqlen_q=seqlen_q,
        page_size=page_size, append=True,
    ).check()  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("rope", [128, 32, 20, 2])
@pytest.mark.parametrize("table32", [False, True], ids=["own table", "fp32 table"])
def test_the_whole_step(way: Way, table32: bool, rope: int, interleaved: bool) -> None:
    for page_size, dtype in ((0, torch.bfloat16), (16, torch.float16)):
        Step(
            way, [250, 0, 60], dtype, seqlen_q=3, page_size=page_size, append=True, rope=rope,
            interleaved=interleaved, table32=table32, bias=True,
        ).check()  # fmt: skip


@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 256])
def test_the_whole_step_in_other_sizes(
    way: Way, head_dim: int, cache_dtype: torch.dtype | None
) -> None:
    head_dim = 48 if cache_dtype and head_dim == 40 else head_dim
    Step(
        way, [200, 5], cache_dtype=cache_dtype, heads=(12, 2), head_dim=head_dim, seqlen_q=6,
        append=True, rope=head_dim, bias=True,
    ).check()  # fmt: skip


def test_rotated_queries_alone(way: Way) -> None:
    Step(way, [250, 9], seqlen_q=2, rope=64, bias=True).check()


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7, 100])
def test_splits(way: Way, num_splits: int) -> None:
    step = Step(way, LENGTHS, heads=(8, 2), seqlen_q=3, page_size=16, append=True)
    step.check(num_splits=num_splits)


@pytest.mark.parametrize("lengths", [[300], [0], LENGTHS, [300, *[5] * 40], [64, 640, 64]], ids=str)
@pytest.mark.parametrize("window", [-1, 100])
def test_equal_shares(
    way: Way, monkeypatch: pytest.MonkeyPatch, window: int, lengths: list[int]
) -> None:
    # Cut from the lengths, though the caches are short.
    monkeypatch.setattr(decode_plan, "SHORT_TOKENS", 0)
    options = {"seqlen_q": 2, "max_seqlen": 700, "page_size": 16, "append": True, "rope": 64}
    Step(way, lengths, heads=(4, 1), **options).check(window_size=(window, 0))


@pytest.mark.parametrize("lot", range(8))
def test_shares_of_many_sizes(way: Way, monkeypatch: pytest.MonkeyPatch, lot: int) -> None:
    # Caches of one length, of many, one that is much longer: cut as if they were large.
    drawn = random.Random(f"shares of many sizes {lot}")
    monkeypatch.setattr(decode_plan, "SHORT_TOKENS", 0)
    monkeypatch.setattr(decode_plan, "FINE_BYTES", 2 ** drawn.randint(12, 20))
    most = drawn.choice([60, 300, 900])
    lengths = [drawn.randint(0, most) for _ in range(drawn.choice([1, 3, 20, 70]))]
    if drawn.random() < 0.3:
        lengths = [most] * len(lengths)
    if drawn.random() < 0.4:
        lengths[drawn.randrange(len(lengths))] = 1500
    page_size = drawn.choice([16, 64])
    heads = drawn.choice([(4, 1), (4, 2), (8, 8)])
    step = Step(way, lengths, heads=heads, max_seqlen=1536, page_size=page_size, seqlen_q=1)
    step.check(window_size=(drawn.choice([-1, 400]), 0))


def test_shares_of_caches_nearly_alike(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of 7 multiprocessors, one part more than two places each: all are computed.
    monkeypatch.setattr(decode_plan, "SHORT_TOKENS", 0)
    monkeypatch.setattr(decode_plan, "FINE_BYTES", 1 << 17)
    Step(way, [1535, 1344], heads=(4, 1), max_seqlen=1536, page_size=64, seqlen_q=1).check()


GENERAL: list[dict[str, Any]] = [
    {"window_size": (0, 0)}, {"window_size": (100, -1)}, {"softcap": 5.0}, {"alibi_slopes": True},
    {"window_size": (70, 0), "softcap": 20.0, "alibi_slopes": True}, {"softmax_scale": -0.2},
    {"softmax_scale": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("general", GENERAL, ids=str)
@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=str)
@pytest.mark.parametrize("num_splits", [0, 2])
def test_window_softcap_alibi(
    way: Way, num_splits: int, cache_dtype: torch.dtype | None, general: dict[str, Any]
) -> None:
    step = Step(way, [250, 0, 60, 5], cache_dtype=cache_dtype, heads=(16, 2), seqlen_q=4)
    options = dict(general)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = 0.3 / torch.arange(1, 17, device=way.device)
    step.check(**options, num_splits=num_splits)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"] * torch.ones(4, 1, device=way.device)
        step.check(**options, num_splits=num_splits)


def test_heads_before_tokens(way: Way) -> None:
    # A (layers, batch, num_kv_heads, max_seqlen, head_dim) cache, as one layer's view.
    step = Step(way, [100, 33, 0], append=True, seqlen_q=2)
    expected, lse = step.run()
    layers = torch.full((2, 2, 3, 2, 320, 128), math.nan, dtype=step.dtype, device=way.device)
    for which, tensor in enumerate((step.keys, step.values)):
        layers[which, 1] = tensor.transpose(1, 2)
    views = [layers[which, 1].transpose(1, 2) for which in (0, 1)]
    out, found_lse = decode_attention(step.q, *views, **step.options, return_lse=True)
    same_bits(out.contiguous(), expected)
    same_bits(found_lse, lse)
    for which, view in enumerate(views):
        same_bits(view, step.caches[which].tensor)
    assert bool(layers[:, 0].isnan().all())


def test_unaligned_rows(way: Way) -> None:
    step = Step(way, [100, 33, 0], append=True, seqlen_q=2, rope=64, bias=True)
    expected = step.check()
    again = Step(way, [100, 33, 0], append=True, seqlen_q=2, rope=64, bias=True)
    moved = [Guarded(x.shape, x.dtype, way.device, shift=1) for x in (step.q, step.q)]
    moved[0].fill(step.q)
    decode_attention(
        moved[0].tensor, *(cache.tensor for cache in again.caches), **again.options,
        out=moved[1].tensor,
    )  # fmt: skip
    moved[1].check()
    check(moved[1].tensor, expected.double(), expected, name="out")


def test_tokens_past_the_end_of_a_cache_are_dropped(way: Way) -> None:
    step = Step(way, [319, 320, 10], append=True, seqlen_q=3)
    out, _ = step.run()
    step.check_appended()
    assert not bool(out.isnan().any())


@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_large_scores_and_minus_inf(way: Way, num_splits: int) -> None:
    step = Step(way, [300, 40], heads=(4, 2), max_seqlen=320)
    step.q.mul_(1000)
    for cache in step.caches[:1]:
        cache.tensor[0, 7, 0, 3] = -math.inf
        step.q[0, 0, :2, 3] = step.q[0, 0, :2, 3].abs()
    step.check(num_splits=num_splits)


def test_a_nan_in_a_query_stays_in_its_row(way: Way) -> None:
    check_nan_stays(Step(way, [200, 70], heads=(4, 2), seqlen_q=2))


def test_many_sequences(way: Way) -> None:
    # More sequences than threads in a block.
    count = 1000 if way.is_gpu else 140
    lengths = [(37 * i) % (300 if way.is_gpu else 70) for i in range(count)]
    Step(way, lengths, heads=(2, 1), head_dim=64, page_size=16, append=True).check()


@pytest.mark.parametrize("shape", [(0, 1, 4), (2, 1, 0)])
def test_nothing_to_do(way: Way, shape: tuple[int, int, int]) -> None:
    q = way.randn(*shape, 64, dtype=torch.float16)
    cache = way.randn(shape[0], 8, 2, 64, dtype=torch.float16)
    lengths = torch.zeros(shape[0], dtype=torch.int32, device=way.device)
    out, lse = decode_attention(q, cache, cache.clone(), cache_seqlens=lengths, return_lse=True)
    assert out.shape == q.shape and lse.shape == (shape[0], shape[2], 1)


def test_the_same_bits_every_time(way: Way) -> None:
    step = Step(way, [300, 7, 129, 300], heads=(8, 2), seqlen_q=2, append=True, rope=128)
    first, first_lse = step.run()
    for _ in range(20 if way.is_gpu else 1):
        out, lse = step.run()
        same_bits(out, first)
        same_bits(lse, first_lse)


@pytest.mark.gpu
def test_graph_with_growing_lengths() -> None:
    way = Way("gpu", "cuda")
    step = Step(way, [0, 5, 250], append=True, rope=128, bias=True, page_size=16)
    check_replays(step, 40, more=1)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    way = Way("gpu", "cuda")
    pages = (1 << 31) // (16 * 8 * 128) + 7
    cache = torch.full((pages, 16, 8, 128), math.nan, device="cuda", dtype=torch.bfloat16)
    tokens = way.randn(2, 64, 8, 128, dtype=torch.bfloat16)
    table = torch.arange(pages - 8, pages, dtype=torch.int32, device="cuda").view(2, 4)
    cache[table.long()] = tokens.view(2, 4, 16, 8, 128)
    q = way.randn(2, 1, 16, 128, dtype=torch.bfloat16, seed=1)
    lengths = torch.tensor([64, 50], dtype=torch.int32, device="cuda")
    out = decode_attention(q, cache, cache, cache_seqlens=lengths, block_table=table)
    options: dict[str, Any] = {"causal": True, "cache_seqlens": lengths}
    truth, _ = reference_attention(q, tokens, tokens, **options)
    check(out, truth, reference_attention(q, tokens, tokens, **options, dtype=q.dtype)[0])
