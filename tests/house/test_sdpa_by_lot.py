"""Calls of torch's attention in benchmarks/by_lot.py without a GPU: what is drawn, and that the
door is open for ours and for nobody else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the benchmarks measure torch ops")

from lot_cases import Eager, lot_modules  # noqa: E402

lot = lot_modules()
FAMILIES = lot.run.GROUPS["torch"]
CASES = 300


def small(case: Any) -> Any:
    keys = 33 if case.seqlen_k == case.seqlen_q else 9
    group = case.heads[0] // case.heads[1]
    heads = (2 * group, 2, case.heads[2])
    return dataclasses.replace(case, heads=heads, batch_size=2, seqlen_q=33, seqlen_k=keys)


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether the door was open, call by call."""
    calls: list[bool] = []
    is_open = [False]
    door = SimpleNamespace(
        activate=lambda: is_open.__setitem__(0, True),
        restore=lambda: is_open.__setitem__(0, False),
    )
    monkeypatch.setattr(lot.sdpa, "sdpa", door)
    own = torch.nn.functional.scaled_dot_product_attention

    def attend(*given: Any, **options: Any) -> Any:
        calls.append(is_open[0])
        return own(*given, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    yield calls
    assert not is_open[0]


def test_what_is_drawn() -> None:
    assert lot.by_lot.families(["torch"]) == list(FAMILIES) == list(lot.sdpa_shapes.FAMILIES)
    for family in FAMILIES:
        cases = [lot.run.draw(family, 3, i) for i in range(CASES)]
        assert cases == [lot.run.draw(family, 3, i) for i in range(CASES)]
        assert len({x.name for x in cases}) == CASES
        assert {x.layout for x in cases} == set(lot.sdpa_shapes.LAYOUTS)
        assert {x.dtype for x in cases} == {"fp16", "bf16"}
        assert {40, 64, 72, 80, 88, 128} <= {x.heads[2] for x in cases}
        assert any(x.seqlen_k < x.seqlen_q for x in cases)
        assert any(x.is_causal for x in cases) == (family == "sdpa_training")
        # What is packed is of one length and as many heads; torch's causal mask of one length too.
        assert all(x.seqlen_k == x.seqlen_q for x in cases if x.is_causal or x.layout == "packed")
        assert all(x.heads[0] == x.heads[1] for x in cases if x.layout == "packed")


@pytest.mark.parametrize("family", FAMILIES)
def test_contenders(family: str, doors: list[bool]) -> None:
    source = lot.contenders.Source("cpu")
    for i in range(8):
        case = small(lot.run.draw(family, 5, i))
        made = lot.sdpa.make(case, source)
        assert made.is_eager == (family == "sdpa_eager")
        doors.clear()
        assert made.ours.wrong("kernel_hub") == ""
        assert doors == [True]
        with torch.no_grad():
            outcome = lot.run.run(case, source, Eager(), lot.sdpa.PEERS)
        assert not outcome.wrong and set(outcome.train) == {"kernel_hub", lot.sdpa.TORCH}
        assert not outcome.reasons and doors[-1] is False


def test_a_wrong_result_is_said(doors: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *given, **options: own(*given, **options) * (1.1 if doors and doors[-1] else 1),
    )
    case = small(lot.run.draw("sdpa", 5, 0))
    outcome = lot.run.run(case, lot.contenders.Source("cpu"), Eager(), lot.sdpa.PEERS)
    assert outcome.wrong
