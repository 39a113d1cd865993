"""Which cases of a test a run draws."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import costs
import drawn
import pytest


def cases_of(**params: list[Any]) -> list[Any]:
    """One of each combination, as pytest has them."""
    return [
        SimpleNamespace(callspec=SimpleNamespace(params=dict(zip(params, values, strict=True))))
        for values in itertools.product(*params.values())
    ]


def item_of_no_op() -> None:
    """A test's function."""


def owed() -> None:
    """One that gives ops to opcheck."""
    SimpleNamespace(opcheck=int).opcheck()


def test_every_value_is_drawn_and_few_cases() -> None:
    sizes, dtypes = list(range(20)), ["fp16", "bf16", "fp32"]
    cases = cases_of(size=sizes, dtype=dtypes, seed=list(range(10)))
    for number in range(20):
        found = drawn.draw(cases, random.Random(number))
        assert {case.callspec.params["size"] for case in found} == set(sizes)
        assert {case.callspec.params["dtype"] for case in found} == set(dtypes)
        assert 54 <= len(found) < 80
        assert [cases.index(case) for case in found] == sorted(map(cases.index, found))


def test_all_are_drawn_in_the_end_and_a_number_draws_the_same() -> None:
    cases = cases_of(seed=list(range(60)))
    runs = [drawn.draw(cases, random.Random(number)) for number in range(100)]
    assert {len(run) for run in runs} == {9}
    assert len({id(case) for run in runs for case in run}) == 60
    assert drawn.draw(cases, random.Random(7)) == runs[7]


def test_of_costly_cases_one_in_four_is_drawn_and_each_run_costs_the_same() -> None:
    def item(name: str, marker: str = "", function: Any = item_of_no_op) -> Any:
        return SimpleNamespace(
            nodeid=f"a.py::test_{name}",
            function=function,
            get_closest_marker=lambda asked: asked == marker,
        )

    names = [f"long[{i}]" for i in range(12)] + [f"longer[{i}]" for i in range(4)]
    kept = [item("short[x]"), item("long[gpu]", marker="gpu"), item("long[op]", function=owed)]
    items = [*map(item, names), *kept]
    seconds = {"a.py": {"test_long": 0.3, "test_longer": 7.0}, "b.py": {"test_short": 1.0}}
    runs = [drawn.thinned(items, seconds, random.Random(number)) for number in range(60)]
    for run in runs:
        assert len(run) == 7 and run[4:] == kept
        assert sum("longer" in each.nodeid for each in run) == 1
    assert {each.nodeid for run in runs for each in run} == {each.nodeid for each in items}


def test_costs_are_of_tests_that_are_there() -> None:
    """Nearly all: who moves a test need not record anew what it costs."""
    listed = costs.read()
    gone, number = costs.gone(listed), sum(map(len, listed.values()))
    assert len(gone) <= number // 20, f'make test ARGS="--every-case --record-costs": {gone}'


def test_of_a_tests_own_cases_a_run_that_draws_takes_some(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = list("abcdefgh")
    monkeypatch.setattr(drawn, "_lots", [])
    assert drawn.some(cases, 3) == cases
    found = []
    for number in range(40):
        monkeypatch.setattr(drawn, "_lots", [str(number)])
        found.append(drawn.some(cases, 3, "a test"))
        assert len(found[-1]) == 3 and found[-1] == sorted(found[-1])
        assert drawn.some(cases, 3, "a test") == found[-1] and drawn.some(cases, 9) == cases
    assert set().union(*found) == set(cases)
