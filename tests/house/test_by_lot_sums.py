"""What benchmarks/by_lot.py sums up, and how it times: arithmetic and order, without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("torch", reason="the benchmarks measure torch ops")

from lot_cases import lot_modules

lot = lot_modules()


def test_graphs_hold_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Graph:
        def capture_begin(self, capture_error_mode: str) -> None:
            self.start = len(log)

        def capture_end(self) -> None:
            self.held = log[self.start :]

        def replay(self) -> None:
            log.append("replay")

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None: ...

        synchronize = record

        def elapsed_time(self, stop: Any) -> float:
            return 0.1

    def launches(*names: str) -> list[Any]:
        return [functools.partial(log.append, name) for name in names]

    def broken() -> None:
        raise RuntimeError("not while\n capturing")

    cuda = SimpleNamespace(CUDAGraph=Graph, Event=Event, synchronize=lambda: None)
    spacer = SimpleNamespace(mul_=lambda _: log.append("spacer"))
    fake = SimpleNamespace(cuda=cuda, zeros=lambda *_, **__: 0, ones=lambda *_, **__: spacer,
                           sum=lambda _: log.append("flush"), int32=0, float16=0)  # fmt: skip
    monkeypatch.setattr(lot.clock, "torch", fake)
    monkeypatch.setattr(lot.clock, "l2_bytes", lambda: 50 << 20)
    clock = lot.clock.Clock(2, is_behind=True)
    given = {"x": launches("a", "b"), "y": [broken]}
    times = clock.measure(given, 600.0, is_rotated=False, is_matrix_bound=True)
    assert times.failed == {"y": "in a graph: not while capturing"}
    assert times.train == {"x": [50.0] * len(times.train["x"])} and len(times.behind["x"]) >= 2
    text = " ".join(log)
    assert "a a b a spacer a spacer b spacer spacer" in text  # warmed, captured; behind; alone
    assert text.count("replay") == text.count("flush replay") == 3 * (1 + len(times.train["x"]))


def outcome(case: str, ours: float, peers: Mapping[str, float],
            refused: Sequence[str] = (), behind: float = 0.0) -> Any:  # fmt: skip
    train = {"kernel_hub": [ours], **{name: [us] for name, us in peers.items()}}
    later = {name: [us[0] + behind] for name, us in train.items()} if behind else {}
    return lot.outcome.Outcome(
        "linear", case, "tile", train, later, {name: (name,) for name in peers},
        {name: (name,) for name in refused}, dict.fromkeys(refused, "not here"),
    )  # fmt: skip


def test_the_summary() -> None:
    found = [
        outcome("a", 2.0, {"A": 4.0, "B": 3.0}, behind=1.0),
        outcome("b", 3.45, {"A": 3.0, "B": 4.0}),
        outcome("c", 1.0, {"A": 1.0}, refused=["B"]),
    ]
    assert [x.best_peer() for x in found] == ["B", "A", "A"]
    total = lot.outcome.summary([x.ratio() for x in found])
    assert total.geometric_mean == pytest.approx((2 / 3 * 1.15) ** (1 / 3))
    assert total.worst == pytest.approx(1.15) and total.over_110 == 1 / 3 and not total.over_120
    lines = lot.outcome.told(found)
    assert lines[0] == f"linear: {total}" and ", 3 cases" in lines[0]
    assert "  1.15  b  [tile]  us: A 3.00, kernel_hub 3.45, B 4.00" in lines
    assert lines[1].startswith("  behind an ordinary kernel: geometric mean 0.750")
    assert "kernel_hub +1.00 us, A +1.00 us" in lines[2]
    assert "  B left out in 1, first c: not here" in lines
    families = {row.family for row in lot.outcome.rows(found, "by lot")}
    assert families == {"by lot linear", "by lot linear, behind a kernel"}
    noted = [row.note for row in lot.outcome.rows(found, "by lot") if row.contender == "kernel_hub"]
    assert noted == ["tile"] * 4
    assert lot.outcome.summary([]) is None


def test_a_case_counts_only_beside_peers_that_are_there() -> None:
    found = [outcome("a", 2.0, {"A": 4.0}, ["C"]), outcome("b", 2.0, {"A": 4.0})]
    found += [outcome("c", 2.0, {})]
    lines = lot.outcome.told(found)
    assert lines[0].endswith(", 1 cases") and "  2 cases do not count: C never ran" in lines
    families = [row.family for row in lot.outcome.rows(found, "by lot", ", emptied")]
    plain = "by lot linear, emptied"
    assert families == [f"{plain}, not counted"] * 2 + [plain] * 2 + [f"{plain}, not counted"]
    assert lot.outcome.told(found[2:])[0] == "linear: no case counts"


def test_the_kernel_before_is_subtracted() -> None:
    samples = {("x", False): [5.0], ("x", True): [16.0, 17.0], ("", True): [10.0, 11.0, 90.0]}
    times = lot.clock.split(samples, {"y": "no"})
    assert times == ({"x": [5.0]}, {"x": [5.0, 6.0]}, {"y": "no"})
    assert lot.clock.launches_a_replay(10.0, 3, True) == 100
    assert lot.clock.launches_a_replay(10.0, 64, False) == 64
    assert lot.clock.launches_a_replay(9000.0, 1, True) == 2
    assert [lot.clock.rounds_of(5, us) for us in (100.0, 1500.0, 15_000.0, 90_000.0)] == [
        10,
        5,
        4,
        3,
    ]


def test_the_sweep() -> None:
    sizes = lot.sweep.sizes(1)
    assert set(range(1, 65)) | {95, 96, 97, 1023, 1024} <= set(sizes) and max(sizes) == 1024
    assert sizes == lot.sweep.sizes(1) != lot.sweep.sizes(2)
    assert lot.sweep.sizes(1, every=True) == list(range(1, 1025))
    flat = dict.fromkeys(range(1, 9), 10.0)
    assert lot.sweep.jumps(flat | {5: 12.0}, flat) == [(5, 1.2, 1.0)]
    assert not lot.sweep.jumps(flat | {5: 12.0}, flat | {5: 13.0})
    few = lot.sweep.lots(1, count=20)
    assert len(few) == 60 and {x.m for x in few} < set(sizes)
    lots = [x for x in lot.sweep.lots(1) if x.m in (3, 4)]
    found = [(x, outcome(x.name, 2.0 * x.m, {"cuBLAS": 6.0 + x.m})) for x in lots]
    lines = lot.sweep.told(found)
    assert lines[0].startswith("6144x4096: geometric mean 0.730, worst 0.80")
    assert lines[2] == "  jumps at m 4: x 1.33, the peer x 1.11"
    rows = [vars(row) for row in lot.outcome.rows([x for _, x in found], "sweep")]
    panels = lot.plot_sweep.panels(rows)
    assert panels["1280x8192"] == {
        "kernel_hub": [(3, 6.0), (4, 8.0)], "cuBLAS": [(3, 9.0), (4, 10.0)],
    }  # fmt: skip
    drawn = ElementTree.fromstring(lot.plot_sweep.svg(panels, "linear"))
    lines = [x.get("points") for x in drawn.iter() if x.tag.endswith("polyline")]
    assert len(lines) == 6 and lines[0] == "72.9,120.9 78.5,88.5"
