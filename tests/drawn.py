"""Of the many cases of a test function some, drawn by lot; of costly ones one in four; all with
`--every-case`.

A pytest plugin (conftest.py registers it). Each run draws others; the number it prints draws the
same again, in KERNEL_HUB_LOT. All run on a GPU and where less than all tests are asked for.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

import costs
import pytest

VARIABLE = "KERNEL_HUB_LOT"
# Lots themselves, and the many tilings of a kernel, all of which a GPU runs.
DRAWS = {"case", "group", "index", "lot", "number", "seed", "turn", "variant"}
ALWAYS = 6  # cases of a function that are not worth drawing from
ONE_IN = 4  # of what costs.json lists: all of it takes two cores six minutes
OWED = "opcheck"  # what each run does for all ops (launch_coverage.py): what calls it is run
_T = TypeVar("_T")
_lots: list[str] = []  # the number of a run that draws


def some(cases: Sequence[_T], number: int, *what: object) -> list[_T]:
    """Of cases that a test goes through itself `number` by the run's lot; all where none draws."""
    if not _lots or len(cases) <= number:
        return list(cases)
    chosen = random.Random(repr((_lots[0], *what))).sample(range(len(cases)), number)
    return [cases[i] for i in sorted(chosen)]


class DrawnCases:
    """Draws alike in all processes of a run, and says by which number."""

    def __init__(self) -> None:
        # Processes of pytest-xdist inherit it.
        self.lot = os.environ.setdefault(VARIABLE, str(random.SystemRandom().randrange(10**6)))
        _lots[:] = [self.lot]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        functions: dict[tuple[object, ...], list[Any]] = defaultdict(list)
        for item in items:
            if hasattr(item, "callspec") and not item.get_closest_marker("gpu"):
                functions[item.path, item.parent, getattr(item, "originalname", "")].append(item)
        left_out: set[pytest.Item] = set()
        for (_, _, name), cases in functions.items():
            if len(cases) > ALWAYS:
                lot = random.Random(f"{self.lot} {cases[0].path.name} {name}")
                left_out.update(set(cases) - set(draw(cases, lot)))
        rest = [item for item in items if item not in left_out]
        left_out.update(set(rest) - set(thinned(rest, costs.read(), random.Random(self.lot))))
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(
            f"cases were drawn by lot: {VARIABLE}={self.lot} draws the same, --every-case runs all"
        )


def draw(cases: list[Any], lot: random.Random) -> list[Any]:
    """Every value of every parameter at least once, but for numbers of draws; at least a 12th."""
    values = [
        {(name, str(value)) for name, value in case.callspec.params.items() if name not in DRAWS}
        for case in cases
    ]
    order = lot.sample(range(len(cases)), len(cases))
    unseen, chosen = set().union(*values), list[int]()
    least = ALWAYS - 2 + len(cases) // 12
    while order and (unseen or len(chosen) < least):
        best = max(order, key=lambda i: len(values[i] & unseen))
        order.remove(best)
        chosen.append(best)
        unseen -= values[best]
    return [cases[i] for i in sorted(chosen)]


def thinned(
    items: list[Any], seconds: dict[str, dict[str, float]], lot: random.Random
) -> list[Any]:
    """All that `seconds` does not list, and one of each ONE_IN of the others that are beside each
    other in file and cost: a run takes about as long as the next."""
    chosen, costly = list[Any](), list[tuple[str, float, int]]()
    for i, item in enumerate(items):
        file, _, function = item.nodeid.partition("[")[0].partition("::")
        cost = seconds.get(file, {}).get(function)
        is_owed = OWED in item.function.__code__.co_names
        if cost is None or is_owed or item.get_closest_marker("gpu"):
            chosen.append(i)
        else:
            costly.append((file, cost, i))
    costly.sort()
    for first in range(0, len(costly), ONE_IN):
        chosen.append(lot.choice(costly[first : first + ONE_IN])[2])
    return [items[i] for i in sorted(chosen)]
