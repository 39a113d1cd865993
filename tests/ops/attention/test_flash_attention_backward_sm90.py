"""Hopper's own gradients of attention: which problems they take, and on an H200 whether they are
right."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import Case, run
from attention_devices import taken
from back_to_back import check_back_to_back
from bits import same_bits

from kernel_hub.ops import flash_attention
from kernel_hub.ops.attention.backward.works import Parting
from kernel_hub.ops.attention.problem import Gradients, Problem
from kernel_hub.ops.core.device import has_wgmma

SM90: Any = importlib.import_module("kernel_hub.ops.attention.backward.sm90")
BACKWARD: Any = importlib.import_module("kernel_hub.ops.attention.backward.portable")
DTYPES = ["fp16", "bf16"]
# Those of the compiled kernels, and some that fill one in part.
HEAD_DIMS = [24, 32, 40, 64, 72, 96, 104, 128, 136, 160, 192, 200, 224, 256]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (70, 19)},
}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The head_dims of the launches that the Hopper kernels took."""
    if not has_wgmma(torch.cuda.get_device_capability()):
        pytest.skip("not compute capability 9.0")
    yield taken(monkeypatch, SM90, lambda plan, qkv, *given: int(qkv[0].shape[-1]))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel(
    hopper: list[int], dtype: str, head_dim: int, mask: str, deterministic: bool
) -> None:
    case = Case(
        dtype=dtype, head_dim=head_dim, num_heads=4, num_kv_heads=2, backward=True,
        deterministic=deterministic, seed=1, **MASKS[mask],
    )  # fmt: skip
    run(dataclasses.replace(case, lengths_q=(1,), lengths_k=(1,)), "cuda")
    run(dataclasses.replace(case, lengths_q=(515,) * 2, lengths_k=(515,) * 2, seed=2), "cuda")
    run(dataclasses.replace(case, lengths_q=(127,), lengths_k=(700,)), "cuda")
    run(dataclasses.replace(case, lengths_q=(2000,), lengths_k=(900,)), "cuda")
    run(dataclasses.replace(case, lengths_q=(700,), lengths_k=(129,)), "cuda")
    # nan around q, k and v, and past the end of every sequence.
    run(dataclasses.replace(case, layout="strided", lengths_q=(97,), lengths_k=(333,)), "cuda")
    ragged = dataclasses.replace(
        case, lengths_q=(1, 77, 300, 513, 64, 0, 130), lengths_k=(1, 200, 129, 513, 0, 5, 5)
    )
    run(dataclasses.replace(ragged, layout="varlen", seed=3), "cuda")
    assert hopper == [head_dim] * len(hopper) and len(hopper) >= 6


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bhsd", "kvpacked", "qkvpacked", "gqapacked", "varlen_packed"])
def test_layouts(hopper: list[int], layout: str) -> None:
    heads = 2 if layout == "qkvpacked" else 1
    case = Case(layout=layout, num_kv_heads=heads, lengths_q=(150,) * 2, lengths_k=(150,) * 2,
                backward=True, seed=1)  # fmt: skip
    for causal in (False, True):
        for head_dim in (128, 256):
            run(dataclasses.replace(case, causal=causal, head_dim=head_dim), "cuda")
    assert hopper


@pytest.mark.gpu
@pytest.mark.parametrize("window_size", [(0, 0), (9, 0), (-1, 3), (300, 200), (2, -1), (5000, 5)])
def test_windows(hopper: list[int], window_size: tuple[int, int]) -> None:
    for lengths_q, lengths_k in (((330,), (900,)), ((900,), (330,))):
        case = Case(lengths_q=lengths_q, lengths_k=lengths_k, window_size=window_size,
                    backward=True, deterministic=True, seed=1)  # fmt: skip
        for head_dim in (32, 64, 96, 128, 160, 192, 224, 256):
            run(dataclasses.replace(case, head_dim=head_dim, num_heads=4), "cuda")
    assert hopper


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "unaligned"}, {"softcap": 2.0}, {"alibi": "heads"}, {"softmax_scale": -0.3},
        {"head_dim": 32, "softcap": 3.0}, {"head_dim": 192, "softcap": 9.0},
    ],
    ids=str,
)  # fmt: skip
def test_the_portable_kernels_take_the_rest(hopper: list[int], options: dict[str, Any]) -> None:
    run(Case(backward=True, seed=1, **options), "cuda")
    assert not hopper


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_portable_kernels_on_hopper(
    hopper: list[int], dtype: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SM90, "is_enabled", False)
    case = Case(dtype=dtype, head_dim=head_dim, lengths_q=(129,), lengths_k=(200,), backward=True)
    for causal in (False, True):
        run(dataclasses.replace(case, causal=causal), "cuda")
    assert not hopper


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 112, 128, 160, 192, 224, 256])
def test_deterministic_repeats_its_bits(hopper: list[int], head_dim: int, causal: bool) -> None:
    # More blocks of keys than run at once, and heads that share their keys.
    leaves = [
        torch.randn(2, 5000, heads, head_dim, device="cuda").bfloat16().requires_grad_()
        for heads in (8, 4, 4)
    ]
    out = flash_attention(*leaves, causal=causal, deterministic=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(8):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        for one, other in zip(first, again, strict=True):
            same_bits(one, other)
    assert len(hopper) == 9


@pytest.mark.gpu
def test_large_scores(hopper: list[int]) -> None:
    for dtype, seed in (("fp16", 1), ("bf16", 2)):
        run(Case(dtype=dtype, magnitude=6.0, causal=True, seed=seed, lengths_q=(400,),
                 lengths_k=(700,), backward=True), "cuda")  # fmt: skip
    assert hopper


# Gradients of one order of summation, so that every launch must repeat its bits.
LAUNCHES = """
def gradients(batch, length, heads, kv_heads, head_dim, **options):
    counts = (heads, kv_heads, kv_heads)
    leaves = [randn(batch, length, count, head_dim).requires_grad_() for count in counts]
    out = ops.flash_attention(*leaves, deterministic=True, **options)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
cases = [
    gradients(4, 1024, 8, 8, 128), gradients(1, 130, 2, 1, 64, causal=True),
    gradients(9, 515, 4, 2, 96, window_size=(100, 7)), gradients(2, 777, 16, 4, 64),
    gradients(3, 333, 6, 6, 128, causal=True), gradients(5, 400, 4, 2, 256, causal=True),
    gradients(4, 300, 6, 3, 192), gradients(5, 270, 4, 2, 152), gradients(1, 900, 3, 3, 32),
]
"""


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back(hopper: list[int]) -> None:
    check_back_to_back(LAUNCHES)


def problem(head_dim: int, **options: Any) -> Problem:
    q = torch.zeros(1, 8, 2, head_dim, dtype=torch.bfloat16)
    return Problem(q, q, q, 1, 8, 8, 0.1, **options)


def test_cpu_tensors_never_take_them() -> None:
    small = problem(64)
    assert not SM90.applies(small, Gradients(*(torch.empty_like(small.q) for _ in range(6))))


def test_the_last_grid_has_room_for_parts() -> None:
    # One key head of as many query heads as these kernels take, whose one work is in parts.
    for num_heads in (1 << 15, 65535):
        q, k = (torch.empty(1, 1, heads, 8, dtype=torch.bfloat16) for heads in (num_heads, 1))
        many = Problem(q, k, k, 1, 1, 1, 0.1)
        given = Gradients(q, torch.empty(1, num_heads, 1), q, q, k, k)
        if SM90.fits(many, given):
            made = SM90.plan(many, given, deterministic=False)
            assert num_heads < made.after.grid[1] <= 65535


def test_parts_that_no_grid_has_room_for_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = (torch.empty(1, n, 1, 8, dtype=torch.bfloat16) for n in (8, 5_000_000))
    wide = Problem(q, k, k, 1, 8, 5_000_000, 0.1)
    monkeypatch.setattr(SM90, "parting", lambda *given, **more: Parting(0, 2))
    made = SM90.plan(wide, Gradients(q, torch.empty(1, 1, 8), q, q, k, k), deterministic=False)
    assert made.after.grid[1] == 1


def test_which_body() -> None:
    chosen = {d: SM90.choose(d) for d in range(8, 272, 8)}
    assert {d: body.head_dim for d, body in chosen.items() if body} == {
        **dict.fromkeys(range(8, 40, 8), 32), **dict.fromkeys(range(40, 72, 8), 64),
        **dict.fromkeys(range(72, 104, 8), 96), 104: 112, 112: 112,
        120: 128, 128: 128, **dict.fromkeys(range(136, 168, 8), 160),
        **dict.fromkeys(range(168, 200, 8), 192), **dict.fromkeys(range(200, 232, 8), 224),
        **dict.fromkeys(range(232, 264, 8), 256),
    }  # fmt: skip
    assert {body for body in chosen.values() if body} == set(SM90.BODIES)


def test_workspace_of_a_ragged_batch_holds_every_block() -> None:
    # The kernel's numbering: a sequence starts at block cu_seqlens // block_m + its index.
    for block_m in (64, 128):
        for lengths in ([0, 1, 64, 65, 127, 128, 0, 3], [block_m] * 5, [1] * 300):
            begin, end = 0, 0
            for index, length in enumerate(lengths):
                first = begin // block_m + index
                assert first >= end
                begin, end = begin + length, first + math.ceil(length / block_m)
            assert end <= begin // block_m + len(lengths)
