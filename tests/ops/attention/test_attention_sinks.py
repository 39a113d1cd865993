"""Sinks of flash_attention: each body against fp64, sinks far from the scores, no keys, gradients.

The lots of the other files draw sinks now and then; here every case has them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import Case, run
from attention_split_random import EMULATED, random_split_case
from bits import same_bits
from drawn_sinks import KINDS, draw_sinks
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.ops import flash_attention
from kernel_hub.testing.compare import check
from kernel_hub.testing.reference_attention import reference_attention

SM90: Any = importlib.import_module("kernel_hub.ops.attention.forward_sm90")
SPLIT: Any = importlib.import_module("kernel_hub.ops.attention.forward_split_sm90")
BODIES = ("portable", "whole", "shares")
MASKS: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"window_size": (31, 0)}, {"window_size": (5, 9)}, {"softcap": 3.0},
    {"causal": True, "softcap": 20.0}, {"window_size": (0, -1), "softmax_scale": 0.3},
)  # fmt: skip


@contextlib.contextmanager
def forced(patch: pytest.MonkeyPatch, body: str, way: Way) -> Iterator[None]:
    """The public op runs these kernels; in the emulator on few multiprocessors."""
    patch.setattr(SM90, "is_enabled", body != "portable")
    patch.setattr(SPLIT, "choice", body == "shares")
    patch.setattr(SM90, "_SHORT", 0)  # short sequences too
    is_emulated = body != "portable" and not way.is_gpu
    with hopper_attention(patch, 5) if is_emulated else contextlib.nullcontext():
        yield


@pytest.fixture
def body_and_way(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, hopper_way: Way
) -> Iterator[Way]:
    """A way on which the public op runs one of BODIES."""
    with forced(monkeypatch, request.param, hopper_way):
        yield hopper_way


on_every_body = pytest.mark.parametrize("body_and_way", BODIES, indirect=True)


@pytest.mark.parametrize("number", range(16))
def test_portable_by_lot(way: Way, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    with forced(monkeypatch, "portable", way):
        run(drawn(f"portable {number}", alibi=("", "heads", "batch")), way.device)


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("body", ["whole", "shares"])
def test_hopper_by_lot(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, body: str, number: int
) -> None:
    with forced(monkeypatch, body, hopper_way):
        run(drawn(f"{body} {number}"), hopper_way.device)


def drawn(seed: str, alibi: tuple[str, ...] = ("",)) -> Case:
    """A small case with sinks of any dtype."""
    lot = random.Random(seed)
    case = random_split_case(lot, EMULATED)
    return dataclasses.replace(case, sinks=lot.choice(list(KINDS)), alibi=lot.choice(alibi))


@on_every_body
@pytest.mark.parametrize("index", range(len(MASKS)), ids=[str(mask) for mask in MASKS])
def test_masks(body_and_way: Way, index: int) -> None:
    head_dim, mask = (64, 128, 256)[index % 3], MASKS[index]
    case = Case(
        head_dim=head_dim, num_heads=4, num_kv_heads=1, lengths_q=(70,), lengths_k=(150,),
        dtype="fp16", sinks="fp32", seed=head_dim, **mask,
    )  # fmt: skip
    run(case, body_and_way.device)
    # Rows before the first key, and lengths of none.
    run(dataclasses.replace(case, lengths_q=(150,), lengths_k=(40,)), body_and_way.device)
    more: dict[str, Any] = {"lengths_q": (3, 70, 0), "lengths_k": (0, 60, 9), "layout": "varlen"}
    run(dataclasses.replace(case, **more), body_and_way.device)


def inputs(way: Way, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """q, k and v of 2 sequences of 40 queries and 70 keys, 4 heads on 2."""
    return tuple(
        way.randn(2, tokens, heads, 64, dtype=dtype, seed=seed)
        for seed, (tokens, heads) in enumerate(((40, 4), (70, 2), (70, 2)))
    )


@on_every_body
def test_none_are_minus_infinity(body_and_way: Way) -> None:
    q, k, v = inputs(body_and_way)
    lengths = torch.tensor([70, 0], dtype=torch.int32, device=q.device)
    for options in ({}, {"causal": True}, {"window_size": (3, 3)}, {"cache_seqlens": lengths}):
        none = torch.full((4,), -math.inf, device=q.device)
        found = flash_attention(q, k, v, **options, sinks=none, return_lse=True)
        expected = flash_attention(q, k, v, **options, return_lse=True)
        for name, a, b in zip(("out", "lse"), found, expected, strict=True):
            same_bits(a, b, name=name)


@on_every_body
def test_infinity_takes_all_and_nan_spreads(body_and_way: Way) -> None:
    check_infinity_and_nan(body_and_way)


def check_infinity_and_nan(way: Way) -> None:
    q, k, v = inputs(way)
    sinks = torch.tensor([0.5, math.inf, math.nan, 1e38], device=q.device)
    out, lse = flash_attention(q, k, v, sinks=sinks, return_lse=True)
    assert bool(out[:, :, 0].isfinite().all()) and bool(lse[:, 0].isfinite().all())
    assert not bool(out[:, :, 1].any()) and bool((lse[:, 1] == math.inf).all())
    assert bool(out[:, :, 2].isnan().all()) and bool(lse[:, 2].isnan().all())
    assert not bool(out[:, :, 3].any())
    torch.testing.assert_close(lse[:, 3], torch.full_like(lse[:, 3], 1e38), rtol=1e-6, atol=0)


@on_every_body
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_rows_without_keys_and_finished_ones(
    body_and_way: Way, kind: str, debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lse is the sink; of lengths below 0 it is -inf. Both are 0, and nothing to refuse."""
    monkeypatch.setenv("KERNEL_HUB_DEBUG", debug)
    q, k, v = (torch.cat((x, x)) for x in inputs(body_and_way))
    sinks = draw_sinks(kind, 4, 3, body_and_way.device)
    lengths = torch.tensor([0, 33, -1, -(2**31)], dtype=torch.int32, device=q.device)
    out, lse = flash_attention(
        q, k, v, cache_seqlens=lengths, causal=True, sinks=sinks, return_lse=True
    )
    options = {"causal": True, "sinks": sinks}
    truth, truth_lse = reference_attention(q[1:2], k[1:2, :33], v[1:2, :33], **options)
    own, _ = reference_attention(q[1:2], k[1:2, :33], v[1:2, :33], **options, dtype=q.dtype)
    check(out[1:2], truth, own)
    check(lse[1:2], truth_lse, truth_lse.float(), atol=1e-4, name="lse")
    assert not bool(out[[0, 2, 3]].any())
    for rows in (lse[0], lse[1, :, :7]):
        torch.testing.assert_close(rows, sinks.float()[:, None].expand_as(rows), rtol=5e-7, atol=0)
    assert bool((lse[2:] == -math.inf).all())


@pytest.mark.parametrize("number", range(8))
def test_gradients_beside_sinks(way: Way, number: int) -> None:
    """dq, dk and dv against fp64's: with sinks in lse the backward is the same formula."""
    lot = random.Random(f"gradients {number}")
    lengths = [(lot.randrange(1, 80),) * 2 for _ in range(2)]
    case = Case(
        layout=lot.choice(("bshd", "bhsd", "varlen", "gqapacked", "varlen_packed")),
        dtype=lot.choice(("fp16", "bf16")), head_dim=lot.choice((32, 64, 128)),
        num_heads=4, num_kv_heads=2, lengths_q=lengths[0], lengths_k=lengths[1],
        causal=lot.random() < 0.5, window_size=lot.choice(((-1, -1), (9, 0), (5, 30))),
        softcap=lot.choice((0.0, 0.0, 5.0)), backward=True, deterministic=True,
        sinks=lot.choice(list(KINDS)), seed=number,
    )  # fmt: skip
    if "packed" in case.layout:
        case = dataclasses.replace(case, lengths_k=case.lengths_q)
    run(case, way.device)


@pytest.mark.parametrize("number", range(12))
def test_the_reference_on_the_cpu(number: int) -> None:
    lot = random.Random(f"cpu {number}")
    case = drawn(f"cpu {number}", alibi=("", "heads"))
    has_backward = "paged" not in case.layout and lot.random() < 0.5
    run(dataclasses.replace(case, backward=has_backward), "cpu")


def test_infinity_and_nan_on_the_cpu() -> None:
    check_infinity_and_nan(Way("cpu", "cpu"))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("page_size", [0, 1, 7])
def test_finished_rows_on_the_cpu(
    with_sinks: bool, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of lengths below 0, which no check of values refuses."""
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
    q, kv = torch.randn(3, 2, 4, 16), torch.randn(3, 7, 2, 16)
    lengths = torch.tensor([-1, 5, -(2**31)], dtype=torch.int32)
    options: dict[str, Any] = {"sinks": torch.zeros(4) if with_sinks else None}
    k = kv
    if page_size:
        k = kv.reshape(-1, page_size, 2, 16)
        options["block_table"] = torch.arange(len(k), dtype=torch.int32).view(3, -1)
        options["block_table"][0] = -1
    out, lse = flash_attention(
        q, k, k, causal=True, cache_seqlens=lengths, return_lse=True, **options
    )
    assert not bool(out[0::2].any()) and bool((lse[0::2] == -math.inf).all())
    whole = flash_attention(q[1:2], kv[1:2, :5], kv[1:2, :5], causal=True, sinks=options["sinks"])
    torch.testing.assert_close(out[1:2], whole)
