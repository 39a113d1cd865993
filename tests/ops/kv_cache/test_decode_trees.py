"""Trees of drafts in decode_attention, against fp64 of each token over its own sequence alone: each
kernel, pages, what is fused in, windows, finished rows; and of a chain the bits without a mask."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from bits import same_bits
from decode_step import E4M3, Step
from drawn_sinks import KINDS, draw_sinks
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import decode_attention
from kernel_hub.ops.kv_cache import decode_plan, decode_short, decode_sm90
from kernel_hub.ops.trees import tree_mask
from kernel_hub.testing import reference
from kernel_hub.testing.compare import attention_parts_atol, check
from kernel_hub.testing.reference_attention import reference_attention


def drawn_masks(lot: random.Random, batch: int, seqlen_q: int) -> list[list[int]]:
    """Of trees, as a list of words a sequence; now and then of any bits at all."""
    if lot.random() < 0.25:
        return [[lot.getrandbits(seqlen_q) for _ in range(seqlen_q)] for _ in range(batch)]
    parents = [[lot.randrange(-1, i) for i in range(seqlen_q)] for _ in range(batch)]
    return tree_mask(torch.tensor(parents, dtype=torch.int32), has_root=False).tolist()


def tensor_of(lot: random.Random, way: Way, words: list[list[int]]) -> torch.Tensor:
    """The words in either type, rows evenly spaced or not, with bits that no token has."""
    dtype = lot.choice((torch.int32, torch.int64))
    above = lot.choice((0, 1 << 20, 1 << 30)) | (1 << 40 if dtype == torch.int64 else 0)
    wide = torch.full((len(words), len(words[0]) + lot.randrange(3)), -1, dtype=dtype)
    wide[:, : len(words[0])] = torch.tensor(words, dtype=dtype) | above
    return wide.to(way.device)[:, : len(words[0])]


def drawn(lot: random.Random, way: Way, **more: Any) -> Step:
    """A small step of several tokens, of any kind."""
    appends = lot.random() < 0.5
    seqlen_q = lot.choice((2, 3, 5, 8, 16))
    least = 0 if appends else seqlen_q
    lengths = [max(least, lot.choice((0, 1, 63, 64, 60, 126, lot.randrange(280))))
               for _ in range(lot.choice((1, 2, 4)))]  # fmt: skip
    cache_dtype = lot.choice((None, None, E4M3))
    dtype = lot.choice((torch.float16, torch.bfloat16))
    if cache_dtype is None and lot.random() < 0.2:
        dtype = torch.float32
    options = {
        "dtype": dtype, "cache_dtype": cache_dtype, "heads": lot.choice(((4, 2), (2, 2), (8, 1))),
        "head_dim": lot.choice((64, 80, 128) if dtype == torch.float32 else (64, 80, 128, 256)),
        "seqlen_q": seqlen_q, "page_size": lot.choice((0, 16, 7)), "append": appends,
        "rope": lot.choice((0, 32, 64)) if appends else 0,
        "interleaved": lot.random() < 0.5, "bias": appends and lot.random() < 0.3,
        "seed": lot.randrange(1 << 20), **more,
    }  # fmt: skip
    return Step(way, lengths, **options)


def turned(
    step: Step, words: list[list[int]], x: torch.Tensor, head: int, kind: torch.dtype
) -> Any:
    """x + bias, rotated at the place that each token has in its own sequence."""
    plain = Step.rotated(step_without_rope(step), x, head, x.shape[2], kind)
    if not step.rope or head >= sum(step.heads):
        return plain
    depths = torch.tensor([[max(w.bit_count() - 1, 0) for w in row] for row in words])
    first = step.options["cache_seqlens"] - (0 if step.append else step.seqlen_q)
    return reference.rope(
        plain, step.options["cos"], step.options["sin"], first[:, None] + depths.to(x.device),
        interleaved=step.interleaved, dtype=kind,
    )  # fmt: skip


def step_without_rope(step: Step) -> Any:
    """What `Step.rotated` reads of one that does not rotate."""

    class Plain:
        bias, options, head_dim, rope, heads = (
            step.bias, step.options, step.head_dim, 0, step.heads
        )  # fmt: skip

    return Plain


def truth_of(
    step: Step, words: list[list[int]], kind: torch.dtype, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token alone, over its own sequence: what is before the new tokens, and those it sees."""
    query = turned(step, words, step.q, 0, kind).to(step.dtype)
    out = torch.zeros(step.q.shape, dtype=kind, device=step.q.device)
    lse = out.new_full((len(words), step.heads[0], step.seqlen_q), -math.inf)
    scales = [step.options.get(name) for name in ("k_scale", "v_scale")]
    for b, row in enumerate(words):
        length = int(step.options["cache_seqlens"][b]) + (step.seqlen_q if step.append else 0)
        first = length - step.seqlen_q
        for i, word in enumerate(row):
            own = [*range(first), *(first + j for j in range(step.seqlen_q) if word >> j & 1)]
            keys, values = (
                step.cached(which)[b : b + 1, own].to(kind)
                * (1 if s is None else s.to(kind)[:, None])
                for which, s in enumerate(scales)
            )
            found, found_lse = reference_attention(
                query[b : b + 1, i : i + 1].to(kind),
                keys,
                values,
                causal=True,
                dtype=kind,
                **options,
            )
            out[b, i], lse[b, :, i] = found[0, 0], found_lse[0, :, 0]
    return out, lse


def check_tree(step: Step, words: list[list[int]], mask: torch.Tensor, num_splits: int = 0,
               **options: Any) -> None:  # fmt: skip
    """Run, and hold out and lse against fp64, and what was appended against its rotation."""
    out, lse = step.run(tree_mask=mask, num_splits=num_splits, **options)
    truth, truth_lse = truth_of(step, words, torch.float64, options)
    own, own_lse = truth_of(step, words, step.dtype, options)
    atol = attention_parts_atol(truth, step.dtype, options.get("softcap", 0.0))
    check(out, truth, own, atol=atol, name="out")
    check(lse, truth_lse, own_lse, atol=1e-4, name="lse")
    if step.append and step.keys.dtype != E4M3:
        new = turned(step, words, step.options["k"], step.heads[0], torch.float64)
        rounded = turned(step, words, step.options["k"], step.heads[0], step.dtype)
        for b, length in enumerate(step.lengths):
            found = step.cached(0)[b, length : length + step.seqlen_q]
            check(found, new[b], rounded[b], name="k")


@pytest.mark.parametrize("number", range(32))
def test_by_lot(way: Way, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lot = random.Random(f"decode trees {number}")
    if lot.random() < 0.5:  # equal shares, worked out from the lengths, of short caches too
        monkeypatch.setattr(decode_plan, "SHORT_TOKENS", 0)
    step = drawn(lot, way)
    words = drawn_masks(lot, len(step.lengths), step.seqlen_q)
    options: dict[str, Any] = lot.choice(({}, {}, {"softcap": 4.0}, {"softmax_scale": -0.1}))
    if lot.random() < 0.3:
        options["sinks"] = draw_sinks(lot.choice(list(KINDS)), step.heads[0], number, way.device)
    mask = tensor_of(lot, way, words)
    check_tree(step, words, mask, lot.choice((0, 1, 2, 3)), **options)


@pytest.mark.parametrize("number", range(16))
def test_windows_and_alibi(way: Way, number: int) -> None:
    """Distances are those in a token's own sequence."""
    lot = random.Random(f"windows of trees {number}")
    step = drawn(lot, way)
    parents = [[lot.randrange(-1, i) for i in range(step.seqlen_q)] for _ in step.lengths]
    words = tree_mask(torch.tensor(parents, dtype=torch.int32), has_root=False).tolist()
    options: dict[str, Any] = {}
    if lot.random() < 0.6:
        options["window_size"] = (lot.choice((0, 1, 2, 5, 30, 100)), 0)
    if not options or lot.random() < 0.5:
        slopes = 0.3 / torch.arange(1, step.heads[0] + 1, device=way.device)
        options["alibi_slopes"] = slopes
    check_tree(step, words, tensor_of(lot, way, words), lot.choice((0, 2)), **options)


@pytest.mark.parametrize("number", range(24))
def test_the_mask_of_a_chain_gives_the_same_bits(
    way: Way, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By parts, as steps with a mask go; clusters and attention's tiles have bits of their own."""
    for other in (decode_short, decode_sm90):
        monkeypatch.setattr(other, "choice", False)
    lot = random.Random(f"chains {number}")
    step = drawn(lot, way)
    step.options["cache_seqlens"] = step.options["cache_seqlens"].clone()
    if lot.random() < 0.3:  # a finished row
        step.options["cache_seqlens"][lot.randrange(len(step.lengths))] = -1
    if lot.random() < 0.3 and step.append:  # new tokens past the end of the cache
        step.options["cache_seqlens"][0] = 320 - lot.randrange(step.seqlen_q + 1)
    chain = [[(2 << i) - 1 for i in range(step.seqlen_q)]] * len(step.lengths)
    mask = tensor_of(lot, way, chain)
    options: dict[str, Any] = {
        "window_size": (lot.choice((-1, -1, 0, 3, 50)), 0), "softcap": lot.choice((0.0, 0.0, 5.0)),
        "num_splits": lot.choice((0, 1, 3)),
    }  # fmt: skip
    if lot.random() < 0.3:
        options["alibi_slopes"] = 0.3 / torch.arange(1, step.heads[0] + 1, device=way.device)
    before = [cache.tensor.clone() for cache in step.caches]
    masked, masked_lse = step.run(tree_mask=mask, **options)
    written = [cache.tensor.clone() for cache in step.caches]
    for cache, was in zip(step.caches, before, strict=True):
        cache.tensor.copy_(was)
    out, lse = step.run(**options)
    same_bits(masked, out)
    same_bits(masked_lse, lse)
    for cache, was in zip(step.caches, written, strict=True):
        same_bits(cache.tensor.view(torch.uint8), was.view(torch.uint8))
    one_row, _ = step.run(tree_mask=mask[0].contiguous(), **options)  # the same for all sequences
    same_bits(one_row, out)


@pytest.mark.parametrize("number", range(12))
def test_what_torch_computes_on_the_cpu(number: int) -> None:
    lot = random.Random(f"trees by torch {number}")
    way = Way("torch", "cpu")
    step = drawn(lot, way)
    words = tree_mask(
        torch.tensor(
            [[lot.randrange(-1, i) for i in range(step.seqlen_q)] for _ in step.lengths],
            dtype=torch.int32,
        ),
        has_root=False,
    ).tolist()
    options: dict[str, Any] = lot.choice(({}, {"softcap": 4.0}, {"window_size": (3, 0)}))
    if lot.random() < 0.4:
        slopes = 0.3 / torch.arange(1, step.heads[0] + 1)
        options["alibi_slopes"] = slopes
    check_tree(step, words, tensor_of(lot, way, words), **options)


def test_a_finished_row_sees_nothing(way: Way) -> None:
    step = Step(way, [40, 90], seqlen_q=3)
    step.options["cache_seqlens"][0] = -1
    mask = torch.tensor([7, 7, 7], dtype=torch.int32, device=way.device)
    out, lse = step.run(tree_mask=mask)
    assert not bool(out[0].any()) and bool((lse[0] == -math.inf).all())
    assert not bool(out[1].isnan().any())


def test_masks_of_parents() -> None:
    """A root, two drafts behind it, one behind each, one that is not in the tree."""
    parents = torch.tensor([-1, -1, 0, 1, 7], dtype=torch.int32)
    expected = [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b100000]
    assert tree_mask(parents).tolist() == expected
    assert tree_mask(parents, has_root=False).tolist() == [1, 2, 0b101, 0b1010, 0b10000]
    chain = torch.arange(-1, 30, dtype=torch.int32).expand(2, -1)
    words = tree_mask(chain)
    assert words.dtype == torch.int32 and words.shape == (2, 32)
    assert [word & 0xFFFFFFFF for word in words[1].tolist()] == [(2 << i) - 1 for i in range(32)]
    assert tree_mask(parents[:0]).tolist() == [1]
    assert tree_mask(parents[:0], has_root=False).tolist() == []


@pytest.mark.parametrize("parents, expected", [
    (torch.zeros(3), r"dtype int32"), (torch.zeros(2, 2, 2, dtype=torch.int32), r"num_drafts"),
    (torch.zeros(32, dtype=torch.int32), "at most 31 drafts"), ([0], "a torch tensor"),
], ids=str)  # fmt: skip
def test_parents_that_are_refused(parents: Any, expected: str) -> None:
    with pytest.raises(TensorError, match=f"tree_mask: parents: .*{expected}"):
        tree_mask(parents)


def test_masks_that_are_refused() -> None:
    q, cache = torch.zeros(2, 3, 4, 64).bfloat16(), torch.zeros(2, 8, 2, 64).bfloat16()
    lengths = torch.tensor([5, 6], dtype=torch.int32)
    words = torch.ones(2, 3, dtype=torch.int32)
    for mask, expected in (
        (words[:, :2], r"shape \(3,\) or \(2, 3\)"), (words[:1], "shape"), (words[0, :2], "shape"),
        (words.short(), "dtype int32 or int64"), (words.bool(), "dtype"), (words.float(), "dtype"),
        (words.t().contiguous().t(), "contiguous last dimension"), (7, "a torch tensor"),
    ):  # fmt: skip
        with pytest.raises(TensorError, match=f"decode_attention: tree_mask: .*{expected}"):
            decode_attention(q, cache, cache.clone(), cache_seqlens=lengths, tree_mask=mask)
    with pytest.raises(TensorError, match=r"tree_mask: .*deterministic is 'batch'"):
        decode_attention(
            q, cache, cache.clone(), cache_seqlens=lengths, tree_mask=words, deterministic="batch"
        )


@pytest.mark.gpu
def test_a_graph_whose_tree_changes() -> None:
    way, lot = Way("gpu", "cuda"), random.Random("trees in a graph")
    step = Step(way, [100, 33, 250], seqlen_q=8, rope=64, append=False)
    mask = torch.zeros(3, 8, dtype=torch.int64, device="cuda")
    caches = [cache.tensor for cache in step.caches]
    decode_attention(step.q, *caches, **step.options, tree_mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(step.q, *caches, **step.options, tree_mask=mask)
    for _ in range(20):
        words = drawn_masks(lot, 3, 8)
        mask.copy_(torch.tensor(words))
        graph.replay()
        truth, own = (truth_of(step, words, kind, {})[0] for kind in (torch.float64, step.dtype))
        check(out, truth, own, atol=attention_parts_atol(truth, step.dtype, 0.0))
