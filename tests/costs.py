"""What cases of each test function cost: tests/costs.json, which drawn.py draws by.

`make test ARGS="--every-case --record-costs"` writes it anew; a run that draws, what it ran of it.
Do so once the emulator has its libraries. A pytest plugin (conftest.py registers it).
"""

from __future__ import annotations

import json
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

FILE = Path(__file__).with_suffix(".json")
# Seconds of one core: a case that takes less is not worth leaving out.
LEAST = 0.2
_STARTED = pytest.StashKey[float]()


def read() -> dict[str, dict[str, float]]:
    """Seconds a case by file and function, of those that take LEAST and more."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def gone(costs: dict[str, dict[str, float]]) -> list[tuple[str, str]]:
    """(file, function) of what is listed and not there."""
    found = []
    for file, functions in costs.items():
        path = FILE.parent.parent / file
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        names = {name: name.rpartition("::")[2] for name in functions}
        found += [(file, name) for name, own in names.items() if f"def {own}(" not in text]
    return found


def write(costs: dict[str, dict[str, float]]) -> None:
    """A line a file, of what is there."""
    for file, function in gone(costs):
        del costs[file][function]
    lines = (
        f"{json.dumps(file)}: {json.dumps(dict(sorted(functions.items())))}"
        for file, functions in sorted(costs.items())
        if functions
    )
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _used() -> float:
    """Seconds that this process and its children have computed."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


class RecordedCosts:
    """Adds up what the test processes measured, be it one or the workers of pytest-xdist."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._passed: set[str] = set()  # what is skipped costs nothing, here

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_STARTED] = _used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            return (yield)
        finally:
            item.user_properties.append(("cpu", _used() - item.stash[_STARTED]))

    def pytest_runtest_logreport(self, report: Any) -> None:
        file, _, function = report.nodeid.partition("[")[0].partition("::")
        if report.when == "call" and report.passed:
            self._passed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid in self._passed:
            self._seconds[file, function] += (
                v for name, v in report.user_properties if name == "cpu"
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            return
        costs = read()
        for (file, function), seconds in self._seconds.items():
            functions = costs.setdefault(file, {})
            functions.pop(function, None)
            if (mean := round(fmean(seconds), 1)) >= LEAST:
                functions[function] = mean
        write(costs)
