"""`bench`: what it asks for before it starts, its table, its JSON and its plot; ops beside peers
are measured in tests/measure/test_beside.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from cli_run import Run
from fakecuda import FakeCuda

from kernel_hub.cli import bench
from kernel_hub.measure import launch, results
from kernel_hub.measure.results import ResultRow

ROWS = [
    ResultRow("launch", "3 tensors", "kernel_hub", 4500.0, 4400.0, 4700.0, "ns", 1.4, "C loop"),
    ResultRow("launch", "3 tensors", "C loop", 3200.0, 3150.0, 3300.0, "ns", 1.0, "C loop"),
    ResultRow("launch", "12 parameters", "kernel_hub", 5100.0, 5000.0, 5200.0, "ns", None, None),
    ResultRow("start", "import", "kernel_hub", 12.0, 11.0, 13.0, "ms"),
]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement is replaced: ROWS, and one peer that is missing."""

    def run(rounds: int, tell: object) -> list[ResultRow]:
        assert callable(tell)
        tell("without cupy: ImportError: no module")
        tell("3 tensors: 2 contenders")
        return ROWS[:3]

    monkeypatch.setattr(launch, "run", run)
    monkeypatch.setattr(launch, "import_milliseconds", lambda: ROWS[3:])
    monkeypatch.setattr(bench, "check_ready", lambda _: None)


def test_it_needs_a_gpu(no_driver: None, kernel_hub_cli: Run) -> None:
    ran = kernel_hub_cli("bench")
    assert ran.code == 2 and "no CUDA driver library" in ran.err


@pytest.mark.parametrize(
    ("missing", "message"), [("torch", "need torch with CUDA"), ("matplotlib", "pip install mat")]
)
def test_what_is_missing_is_said_first(
    fakecuda: FakeCuda,
    kernel_hub_cli: Run,
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
    message: str,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    ran = kernel_hub_cli("bench", "--plot", "x.png")
    assert ran.code == 2 and message in ran.err


def test_table_and_json(
    measured: None, fakecuda: FakeCuda, kernel_hub_cli: Run, tmp_path: Path
) -> None:
    file = tmp_path / "out" / "rows.json"
    ran = kernel_hub_cli("bench", "--rounds", "2", "--json", str(file))
    assert ran.code == 0, ran.err
    assert "1.40 x C loop" in ran.out and "without cupy" in ran.out
    rows = results.read(file)
    assert [row["contender"] for row in rows] == [row.contender for row in ROWS]
    assert rows[0]["gpu"] and rows[0]["driver"].startswith("CUDA 13.0")


def test_plot(measured: None, fakecuda: FakeCuda, kernel_hub_cli: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    file = tmp_path / "launches.png"
    assert kernel_hub_cli("bench", "--plot", str(file)).code == 0
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_bars_are_sorted_and_of_one_unit() -> None:
    assert bench.bars(ROWS, "ns") == {
        "3 tensors": {"C loop": 3200.0, "kernel_hub": 4500.0},
        "12 parameters": {"kernel_hub": 5100.0},
    }


@pytest.mark.parametrize("note", ["1.20 TB/s", "WRONG: kernel_hub: largest error 3"])
def test_an_op(
    note: str, fakecuda: FakeCuda, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ("rope", "tokens=3 bf16")
    rows = [
        ResultRow(*case, "kernel_hub", 2.0, 1.0, 3.0, "us", 1.0, "kernel_hub", note),
        ResultRow(*case, "torch", 4.0, 3.0, 5.0, "us", 2.0, "kernel_hub", "WRONG: torch"),
    ]
    asked = []
    monkeypatch.setattr(bench, "check_ready", lambda _: None)
    monkeypatch.setattr(bench, "measure_op", lambda args: asked.append(args) or rows)
    ran = kernel_hub_cli("bench", "rope", "--shape", "tokens=3", "--against", "torch")
    assert (asked[0].op, asked[0].shape, asked[0].against) == ("rope", "tokens=3", "torch")
    assert ran.code == (1 if note.startswith("WRONG") else 0), ran.err
    assert "2.00 x kernel_hub" in ran.out and note[:9] in ran.out
