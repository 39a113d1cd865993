"""flash_attention of a v whose head_dim is not that of q and k, in every kernel that takes it."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import ONE_HEAD_DIM, Case, run
from attention_devices import taken
from emulated_attention import hopper_attention
from test_flash_attention import LAYOUTS, layout_case
from ways import Way

from kernel_hub.ops import flash_attention
from kernel_hub.ops.attention.problem import Problem
from kernel_hub.ops.core.launch import forget_all

SM90: Any = importlib.import_module("kernel_hub.ops.attention.forward_sm90")
SPLIT: Any = importlib.import_module("kernel_hub.ops.attention.forward_split_sm90")
BACKWARD: Any = importlib.import_module("kernel_hub.ops.attention.backward.portable")
# (head_dim, v's): DeepSeek's, in part, and where v is the wider one.
PAIRS = [(192, 128), (136, 72), (64, 16), (40, 96)]
OWN = [layout for layout in LAYOUTS if layout not in ONE_HEAD_DIM]


@pytest.mark.parametrize("layout", OWN)
def test_layouts(way: Way, layout: str) -> None:
    run(layout_case(layout, head_dim=48, own_head_dim_v=24, causal=True, seed=3), way.device)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_head_dims(way: Way, pair: tuple[int, int]) -> None:
    case = Case(head_dim=pair[0], own_head_dim_v=pair[1], lengths_q=(17,), lengths_k=(70,))
    run(dataclasses.replace(case, causal=True), way.device)
    run(dataclasses.replace(case, softcap=3.0, sinks="bf16", dtype="fp16"), way.device)
    ragged = dataclasses.replace(case, lengths_q=(5, 18), lengths_k=(9, 70), layout="varlen_paged")
    run(ragged, way.device)


@pytest.mark.parametrize("pair", [(48, 16), (32, 64)], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "strided", "varlen", "cache"])
def test_gradients(way: Way, layout: str, pair: tuple[int, int]) -> None:
    options = {"head_dim": pair[0], "own_head_dim_v": pair[1], "backward": True}
    run(layout_case(layout, causal=True, deterministic=True, **options), way.device)


@pytest.fixture
def bodies(hopper_way: Way, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The functions of the launches that Hopper's kernels took, a tile a block."""
    monkeypatch.setattr(SPLIT, "choice", False)
    monkeypatch.setattr(SM90, "_SHORT", 0)  # short sequences too
    forget_all()
    yield taken(monkeypatch, SM90, lambda planned, *_: str(planned.function.name))


MASKS: list[tuple[str, dict[str, Any]]] = [
    ("full", {}), ("causal", {"causal": True}), ("window", {"window_size": (70, 19)}),
    ("window", {"softcap": 3.0}),
]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_hopper(
    bodies: list[str], hopper_way: Way, monkeypatch: pytest.MonkeyPatch, pair: tuple[int, int],
    mask: tuple[str, dict[str, Any]],
) -> None:  # fmt: skip
    case = Case(
        head_dim=pair[0], own_head_dim_v=pair[1], num_heads=4, num_kv_heads=2, twice=True, **mask[1]
    )
    cases = [
        dataclasses.replace(case, lengths_q=(150,), lengths_k=(290,), sinks="fp32"),
        dataclasses.replace(case, lengths_q=(70,), lengths_k=(133,), layout="strided"),
        # More than a ring has stages; rows without keys; nan past the end of every sequence.
        dataclasses.replace(
            case, layout="varlen", lengths_q=(1, 140, 3, 0), lengths_k=(520, 60, 0, 5)
        ),
        dataclasses.replace(
            case, layout="varlen_paged", lengths_q=(1, 140), lengths_k=(300, 60), dtype="fp16"
        ),
    ]
    cases = hopper_way.some(cases, 2, pair, mask)
    if hopper_way.is_gpu:
        for each in cases:
            run(each, "cuda")
    else:
        with hopper_attention(monkeypatch, 2):
            for each in cases:
                run(each, "cpu")
    own = "hdim192_v128" if pair[0] > 128 and mask[0] != "window" else f"_{mask[0]}"
    # Full attention of 96 columns, and few causal rows of them, take windows' tiles.
    fewer = "hdim96_window" if 64 < max(pair) <= 96 and mask[0] != "window" else own
    assert len(bodies) == 2 * len(cases)
    assert all(own in name or fewer in name for name in bodies)


@pytest.mark.parametrize("pair", [(192, 128), (64, 128)], ids=str)
def test_equal_shares(
    hopper_way: Way, monkeypatch: pytest.MonkeyPatch, pair: tuple[int, int]
) -> None:
    monkeypatch.setattr(SPLIT, "choice", True)
    forget_all()
    found = taken(monkeypatch, SPLIT, lambda planned, *_: str(planned.function.name))
    case = Case(head_dim=pair[0], own_head_dim_v=pair[1], num_heads=4, num_kv_heads=2, causal=True)
    case = dataclasses.replace(case, lengths_q=(40,), lengths_k=(900,))
    if hopper_way.is_gpu:
        run(case, "cuda")
    else:
        with hopper_attention(monkeypatch, 7):
            run(case, "cpu")
    assert found


def test_which_body_of_hopper() -> None:
    def body(head_dim: int, head_dim_v: int, **more: Any) -> str:
        q, v = (torch.empty(1, 4000, 2, width).half() for width in (head_dim, head_dim_v))
        found = SM90._choose(Problem(q, q, v, 1, 4000, 4000, 1.0, **more))
        return found.name(torch.float16).removeprefix("flash_attention_sm90_fp16_hdim")

    assert body(192, 128) == "192_v128_full"
    assert body(192, 128, window_right=0) == body(136, 16, window_right=0) == "192_v128_causal"
    assert body(192, 136) == "192_full" and body(192, 192) == "192_full"
    assert body(192, 128, window_left=5) == body(192, 128, softcap=1.0) == "192_window"
    assert body(128, 64) == body(64, 128) == "128_full" and body(128, 192) == "192_full"


def test_the_registered_ops_pass_opcheck() -> None:
    q, k, v = (torch.randn(2, 5, 2, width).half() for width in (32, 32, 16))
    options = (True, None, [-1, -1], 0.0, *[None] * 8, False)
    op = torch.ops.kernel_hub.flash_attention.default
    torch.library.opcheck(op, (q, k, v, *options, False, True))
    out, lse = op(q, k, v, *options, False, True)
    into = torch.ops.kernel_hub.flash_attention_out.default
    torch.library.opcheck(into, (q, k, v, *options, True, torch.empty_like(out)))
    backward = torch.ops.kernel_hub.flash_attention_backward.default
    torch.library.opcheck(backward, (torch.ones_like(out), q, k, v, out, lse, *options, True))


def test_scales_are_those_of_q() -> None:
    q, k, v = (torch.randn(1, 9, 2, width).half() for width in (32, 32, 16))
    scaled = flash_attention(q, k, v, softmax_scale=32**-0.5)
    assert torch.equal(flash_attention(q, k, v), scaled)
