"""The benchmarks as programs: every op has its own, and each says at once that it needs a GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the benchmarks measure torch ops")

from kernel_hub.errors import DriverNotFoundError
from kernel_hub.measure import results

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
BENCHMARKS = [*sorted(path.stem for path in FOLDER.glob("bench_*.py")), "by_lot"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_needs_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def environment() -> object:
        raise DriverNotFoundError("none here", tried=[])

    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(results, "environment", environment)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick"])
    if "from moe_peers import" in (FOLDER / f"{name}.py").read_text(encoding="utf-8"):
        pytest.importorskip("triton")
    with pytest.raises(SystemExit, match=r"needs an NVIDIA GPU: none here"):
        importlib.import_module(name).main()


def test_no_module_has_the_name_of_one_of_the_tests() -> None:
    """Both folders stand on sys.path here: the first imported would be both."""
    tests = {path.stem for path in Path(__file__).parents[1].rglob("*.py")}
    assert not {path.stem for path in FOLDER.glob("*.py")} & (tests - {"__init__"})
