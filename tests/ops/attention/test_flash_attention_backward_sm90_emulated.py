"""Hopper's own gradients of attention without a GPU: their source in the emulator, held against
fp64."""

from __future__ import annotations

import dataclasses
import importlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import Case, run
from attention_random import random_case
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.ops.attention.problem import Gradients, Problem
from kernel_hub.testing.guard import Guarded

SM90: Any = importlib.import_module("kernel_hub.ops.attention.backward.sm90")
ORDER: Any = importlib.import_module("kernel_hub.ops.attention.backward.turns")
WORKS: Any = importlib.import_module("kernel_hub.ops.attention.backward.works")
DRAWN = 12
# A block of threads is emulated at some 10^6 scores a second.
MAX_SCORES = 120_000


@pytest.fixture
def bodies(hopper_way: Way, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The main kernels that were launched."""
    if hopper_way.is_gpu:
        pytest.skip("test_flash_attention_backward_sm90.py does that with larger cases")
    taken: list[str] = []
    launch = SM90.launch

    def counted(plan: Any, *given: Any) -> None:
        if plan.boxes:
            taken.append(plan.main.function.name)
        launch(plan, *given)

    monkeypatch.setattr(SM90, "launch", counted)
    monkeypatch.setattr(SM90, "applies", SM90.fits)
    yield taken


def drawn(generator: random.Random) -> Case:
    """A case that these kernels take."""
    while True:
        case = random_case(generator)
        pairs = zip(case.lengths_q, case.lengths_k, strict=True)
        scores = case.num_heads * sum(a * b for a, b in pairs)
        is_small = min(case.lengths_q) > 0 and 0 < scores <= MAX_SCORES
        is_mapped = "paged" not in case.layout and case.layout not in ("unaligned", "expanded")
        if is_small and is_mapped:
            break
    return dataclasses.replace(
        case, head_dim=8 * generator.randrange(2, 33), own_head_dim_v=None, backward=True,
        softcap=0.0, alibi="", softmax_scale=None, magnitude=1.0, twice=False,
    )  # fmt: skip


@pytest.mark.parametrize("index", range(DRAWN))
def test_drawn(bodies: list[str], monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    generator = random.Random(f"backward {index}")
    case = drawn(generator)
    with hopper_attention(monkeypatch, generator.choice((1, 2, 5))):
        run(case, "cpu")
    assert bodies, case


@pytest.mark.parametrize("head_dim", [72, 96, 104, 128, 152, 160, 192, 224, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (70, 19)}], ids=str)
def test_many_blocks(
    bodies: list[str],
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    options: dict[str, Any],
) -> None:
    # Every stage and buffer more than once, and heads that share their keys.
    case = Case(
        head_dim=head_dim, lengths_q=(300,), lengths_k=(130,), backward=True, deterministic=True,
        **options,
    )  # fmt: skip
    with hopper_attention(monkeypatch, 1):
        run(case, "cpu")
    width = 112 if head_dim == 104 else -(-head_dim // 32) * 32
    assert set(bodies) == {f"{SM90.CUBIN}_bf16_hdim{width}_rows64"}


@pytest.mark.parametrize("head_dim", [24, 64, 96, 104, 128, 160, 224, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (70, 19)}], ids=str)
@pytest.mark.parametrize("layout", ["bshd", "varlen"])
def test_parts(
    bodies: list[str], monkeypatch: pytest.MonkeyPatch, head_dim: int, options: dict[str, Any],
    layout: str,
) -> None:  # fmt: skip
    # The first work whole, or none of ragged ones; the others by three blocks each, some of which
    # have no round.
    is_ragged = layout == "varlen"
    lengths = (150, 40) if is_ragged else (150,)
    case = Case(
        head_dim=head_dim, num_heads=4, num_kv_heads=2, lengths_q=lengths, lengths_k=lengths,
        layout=layout, backward=True, deterministic=True, **options,
    )  # fmt: skip
    monkeypatch.setattr(SM90, "parting", lambda *given, **more: WORKS.Parting(1, 3))
    monkeypatch.setattr(SM90.ragged, "parting", lambda *given, **more: 3)
    with hopper_attention(monkeypatch, 2):
        run(case, "cpu")
    assert bodies


@pytest.mark.parametrize("head_dim", [32, 96, 128, 160, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (70, 19)}], ids=str)
@pytest.mark.parametrize(
    ("sums", "together", "parted"),
    [(1, 1, (99, 1)), (1, 3, (0, 2)), (2, 4, (0, 6)), (-3, 2, (0, 2)), (-1, 2, (0, 3))], ids=str,
)  # fmt: skip
def test_turns(
    bodies: list[str], monkeypatch: pytest.MonkeyPatch, head_dim: int, options: dict[str, Any],
    sums: int, together: int, parted: tuple[int, int],
) -> None:  # fmt: skip
    # The emulator runs a launch's blocks one after another: what waited for a later one would wait
    # for ever.
    lengths = (150, 300, 35) if head_dim > 128 else (300, 500, 35)
    case = Case(
        head_dim=head_dim, num_heads=4, num_kv_heads=2, lengths_q=(150, 35, 90), lengths_k=lengths,
        layout="varlen", backward=True, deterministic=True, **options,
    )  # fmt: skip
    plan = ORDER.Turns(sums, together, WORKS.Parting(*parted))
    monkeypatch.setattr(SM90, "turns", lambda *given, **more: plan)
    with hopper_attention(monkeypatch, 3):
        run(case, "cpu")
    assert bodies


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize(
    ("length", "together", "blocks"), [(300, 4, 1), (300, 1, 2), (129, 6, 1), (500, 5, 3)]
)
def test_staggered(
    bodies: list[str], monkeypatch: pytest.MonkeyPatch, head_dim: int, length: int, together: int,
    blocks: int,
) -> None:  # fmt: skip
    # Six pairs, a smaller group first; blocks of keys that have halves, or a middle one; parts by
    # heads, of which one has more.
    lengths = (length if head_dim > 128 else 2 * length,) * 2
    case = Case(
        head_dim=head_dim, num_heads=15, num_kv_heads=3, lengths_q=(35, 35), lengths_k=lengths,
        backward=True, deterministic=True, causal=True,
    )  # fmt: skip
    num_works = 6 * -(-lengths[0] // (64 if head_dim > 128 else 128))
    parted = WORKS.Parting(0 if blocks > 1 else num_works, blocks)
    plan = ORDER.Turns(1, together, parted, True)
    monkeypatch.setattr(SM90, "turns", lambda *given, **more: plan)
    with hopper_attention(monkeypatch, 3):
        run(case, "cpu")
    assert bodies


def test_turns_after_all(bodies: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # 16 sequences of 9 tokens go without turns, by six blocks each; one of 129 cannot, and a
    # group of five heads has no six parts whose sums have an order.
    lengths = (0, 129) + 14 * (0,)
    case = Case(
        head_dim=160, num_heads=5, num_kv_heads=1, lengths_q=lengths, lengths_k=lengths,
        layout="varlen", causal=True, backward=True, deterministic=True,
    )  # fmt: skip
    with hopper_attention(monkeypatch, 132):
        run(case, "cpu")
    assert bodies


def _between(
    bounds: tuple[int, ...], total: int, longest: int, deterministic: bool
) -> tuple[list[torch.Tensor], bool]:
    """(gradients of what lies between these bounds, whether some are outside), of one draw."""
    batch_size, table = len(bounds) - 1, torch.tensor(bounds, dtype=torch.int32)
    torch.manual_seed(7)
    q, k, v, out, dout = torch.randn(5, total, 2, 128).bfloat16().unbind()
    grads = [Guarded(x.shape, x.dtype, "cpu") for x in (q, k, v)]
    for each in grads:
        each.tensor.zero_()
    lse = torch.randn(2, total)
    given = Gradients(out, lse, dout, *[each.tensor for each in grads])
    problem = Problem(
        q, k, v, batch_size, longest, longest, 0.1, -1, 0, cu_seqlens_q=table, cu_seqlens_k=table
    )
    flag = torch.zeros(1, dtype=torch.int32)
    plan = SM90.plan(problem, given, deterministic=deterministic)
    SM90.launch(plan, (q, k, v), given, SM90.Tables(flag, table, table, None, None), (0, 1, 2, 3))
    for each in grads:
        each.check("a gradient")
    return [each.tensor for each in grads], bool(flag)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "bounds",
    [(0, 0, 0, 0, 0, 0, 0, 0, 200), (200, 0, 0, 0, 0, 0, 0), (0, 2**31 - 1, 0, 0), (-(2**31),) * 3,
     (7, -1, 2**31 - 1, 150, 200)], ids=str,
)  # fmt: skip
def test_bounds_that_fall(
    bodies: list[str], monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, ...], deterministic: bool
) -> None:
    # What they lead to is no sequence's: neither read nor written outside of the tensors.
    with hopper_attention(monkeypatch, 3):
        _, is_outside = _between(bounds, 200, 200, deterministic)
    assert is_outside != (bounds == (0, 0, 0, 0, 0, 0, 0, 0, 200))


@pytest.mark.parametrize("many", [0, 60])
def test_sequences_beside_bounds_that_fall(
    bodies: list[str], monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    # Have the gradients that they have beside others.
    more = many * (202,)
    with hopper_attention(monkeypatch, 3):
        sane, _ = _between((0, 60, 112, 133, 202, *more), 202, 69, True)
        found, is_outside = _between((0, 203, 112, 133, 202, *more), 202, 69, True)
    assert is_outside
    for ours, right in zip(found, sane, strict=True):
        assert right[112:].any() and torch.equal(ours[112:], right[112:])
