"""Hopper's own forward kernels without a GPU: their source in the emulator, held against fp64."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import Case, run
from attention_devices import taken
from attention_split_random import EMULATED, random_split_case
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.ops import flash_attention
from kernel_hub.ops.attention.problem import Problem
from kernel_hub.testing.reference_attention import reference_attention

SM90: Any = importlib.import_module("kernel_hub.ops.attention.forward_sm90")
SPLIT: Any = importlib.import_module("kernel_hub.ops.attention.forward_split_sm90")
DRAWN = 12


@pytest.fixture
def blocks(hopper_way: Way, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The blocks of each launch."""
    if hopper_way.is_gpu:
        pytest.skip("test_flash_attention_sm90.py does that with larger cases")
    monkeypatch.setattr(SPLIT, "choice", False)
    yield taken(monkeypatch, SM90, lambda planned, *_: int(planned.grid[0]))


@pytest.mark.parametrize("index", range(DRAWN))
def test_drawn(blocks: list[int], monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    generator = random.Random(f"whole {index}")
    with hopper_attention(monkeypatch, generator.choice((1, 2, 5, 13))):
        run(random_split_case(generator, EMULATED), "cpu")
    assert blocks


@pytest.mark.parametrize("head_dim", [64, 192, 256])
def test_many_tiles_without_keys(
    blocks: list[int], monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    # More than the ring of tiles has places; and, causal, first blocks that a warpgroup leaves out.
    case = Case(head_dim=head_dim, causal=True, lengths_q=(1100,), lengths_k=(70,))
    with hopper_attention(monkeypatch, 1):
        run(case, "cpu")
        lengths = (0, 0, 0, 0, 0, 130)
        run(dataclasses.replace(case, layout="varlen_cache", lengths_q=(130,) * 6,
            lengths_k=lengths), "cpu")  # fmt: skip
    assert blocks == [1, 1]


@pytest.mark.parametrize("lengths_k", [300, 70], ids=["", "tiles without keys"])
@pytest.mark.parametrize("options", [{}, {"softcap": 9.0}, {"window_size": (-1, 20)}], ids=str)
def test_two_rounds_are_dealt(
    blocks: list[int], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], lengths_k: int
) -> None:  # fmt: skip
    """Of 9 tiles 5 blocks take one and then another, the last of them the longest that are left."""
    found: list[bool] = []
    is_dealt = SM90.is_dealt
    monkeypatch.setattr(SM90, "is_dealt", lambda *a: found.append(is_dealt(*a)) or found[-1])
    case = Case(
        num_heads=3, num_kv_heads=1, head_dim=128, causal="window_size" not in options,
        lengths_q=(300,), lengths_k=(lengths_k,), **options,
    )  # fmt: skip
    with hopper_attention(monkeypatch, 5):
        run(case, "cpu")
        run(dataclasses.replace(case, num_heads=4), "cpu")
    assert blocks == [5, 5] and found == [True, False]


@pytest.mark.parametrize("causal", [False, True])
def test_many_sequences(blocks: list[int], monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    # More than are sorted, most of them of no queries or no keys.
    lengths_q, lengths_k = [0, 1] * 150, [2, 0] * 150
    for i, length_q, length_k in (
        (0, 130, 3),
        (31, 1, 1),
        (32, 2, 130),
        (255, 3, 2),
        (299, 70, 70),
    ):
        lengths_q[i], lengths_k[i] = length_q, length_k
    case = Case(causal=causal, layout="varlen", lengths_q=tuple(lengths_q), head_dim=64)
    with hopper_attention(monkeypatch, 3):
        run(dataclasses.replace(case, lengths_k=tuple(lengths_k), softcap=9.0), "cpu")
        run(dataclasses.replace(case, lengths_k=tuple(lengths_k[::-1])), "cpu")
    assert blocks == [3, 3]


@pytest.mark.parametrize("layout", ["varlen", "paged"])
@pytest.mark.parametrize("kinds", [(200,), (200, 70, 1), (200, 140, 0, 130)], ids=str)
@pytest.mark.parametrize("together", [None, 1, 3, 40])
def test_sequences_that_are_alike(
    blocks: list[int], monkeypatch: pytest.MonkeyPatch, layout: str, kinds: tuple[int, ...],
    together: int | None,
) -> None:  # fmt: skip
    """They run through their tiles together, so many of them: more than a group and a warp has."""
    if together is not None:
        monkeypatch.setattr(SM90, "heads_a_group", lambda *_: 2 * together)
    lengths = tuple(kinds[i * i % len(kinds)] for i in range(38))
    lengths_q = (200,) * 38 if layout == "paged" else lengths
    case = Case(
        num_heads=2, num_kv_heads=1, causal=True, layout=layout, lengths_q=lengths_q,
        lengths_k=lengths, page_size=16, return_lse=True,
    )  # fmt: skip
    with hopper_attention(monkeypatch, 5):
        run(case, "cpu")
    assert blocks == [5]


@pytest.mark.parametrize("head_dim", [96, 128, 160])
@pytest.mark.parametrize("softcap", [0.3, 3.0, 20.0])
def test_softcap(
    blocks: list[int], monkeypatch: pytest.MonkeyPatch, softcap: float, head_dim: int
) -> None:
    # Blocks without masks: of large scores, of some large ones, of small ones.
    case = Case(head_dim=head_dim, softcap=softcap, lengths_q=(70,), lengths_k=(390,))
    monkeypatch.setattr(SM90, "wider_rows", lambda _: 96)  # tiles of 192 rows where there are any
    with hopper_attention(monkeypatch, 2):
        run(case, "cpu")
        lengths = {"lengths_q": (70, 3, 0), "lengths_k": (290, 0, 60)}
        run(dataclasses.replace(case, layout="varlen", causal=True, **lengths), "cpu")
    assert len(blocks) == 2


@pytest.mark.parametrize("causal", [False, True])
def test_softcap_beside_large_scores(
    blocks: list[int], monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    # The way to a sequence's tanh is its own: that of small scores, whatever lies behind it.
    generator = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(140, 3, 128, generator=generator).bfloat16() for _ in range(3))
    lengths = torch.tensor([0, 70, 140], dtype=torch.int32)
    outs = []
    with hopper_attention(monkeypatch, 1):
        for magnitude in (1.0, 64.0):
            k[70:] *= magnitude
            outs.append(
                flash_attention(
                    q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=70,
                    max_seqlen_k=70, causal=causal, softcap=20.0,
                )
            )  # fmt: skip
    assert torch.equal(outs[0][:70], outs[1][:70])
    assert not torch.equal(outs[0][70:], outs[1][70:])
    assert len(blocks) == 2


@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 256])
def test_softcap_in_every_turn(
    blocks: list[int], monkeypatch: pytest.MonkeyPatch, head_dim: int
) -> None:
    # The scores of a block's first tile come under no product: which tile that is may be drawn.
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(1, 90, 1, head_dim, generator=generator).bfloat16().expand(-1, -1, 2, -1)
        for _ in range(3)
    )
    with hopper_attention(monkeypatch, 1):
        out, lse = flash_attention(
            *(x.contiguous() for x in (q, k, v)), causal=True, softcap=20.0, return_lse=True
        )
    assert torch.equal(out[:, :, 0], out[:, :, 1])
    assert torch.equal(lse[:, 0], lse[:, 1])
    assert blocks == [1]


def test_softcap_of_scores_below_zero(blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks whose largest score is below 0, far above their others and those to their right.
    q = torch.ones(1, 70, 2, 128, dtype=torch.float16)
    k, v = torch.empty_like(q).resize_(1, 400, 2, 128), torch.randn(1, 400, 2, 128).half()
    for begin, score in ((0, -0.5), (128, -10.0), (256, -24.0)):
        k[:, begin:] = score / 128**0.5
    k[:, ::2] = -24.0 / 128**0.5
    with hopper_attention(monkeypatch, 2):
        out, lse = flash_attention(q, k, v, softcap=50.0, return_lse=True)
    truth, truth_lse = reference_attention(q, k, v, softcap=50.0)
    torch.testing.assert_close(out.double(), truth, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), truth_lse.double(), rtol=0, atol=1e-4)
    assert len(blocks) == 1


def test_softcap_alone_and_in_batches(blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # deterministic="batch" takes no short way: that one is chosen for all rows of a warp.
    q, k, v = (torch.randn(1, 300, 2, 128).bfloat16() for _ in range(3))
    q[:, 270:275] *= 64.0
    options = {"causal": True, "softcap": 20.0, "deterministic": "batch"}
    with hopper_attention(monkeypatch, 1):
        whole = flash_attention(q, k, v, **options)
        part = flash_attention(q[:, 276:], k, v, **options)
    assert torch.equal(whole[:, 276:], part)
    assert len(blocks) == 2


def test_small_scores() -> None:
    q = torch.empty(1, 8, 1, 64)

    def small(scale: float, softcap: float) -> tuple[float, ...]:
        return Problem(q, q, q, 1, 8, 8, scale, softcap=softcap).small_scores

    for scale, softcap in itertools.product((0.0625, 0.125, 1.0), (0.7, 15.0, 30.0, 50.0)):
        largest, *terms = small(scale, softcap)
        for part in (-1.0, -0.5, 1e-3, 0.25, 1.0):
            score = part * largest
            found = sum(term * score ** (2 * i + 1) for i, term in enumerate(terms))
            truth = softcap / math.log(2) * math.tanh(score * scale / softcap)
            assert abs(found / truth - 1) < 1e-6
    for scale, softcap in ((1.0, 0.0), (1e20, 1e-20), (1e-20, 1e20), (1e-3, 1e20)):
        assert not any(small(scale, softcap))
