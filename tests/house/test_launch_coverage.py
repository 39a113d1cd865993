"""What tests/launch_coverage.py makes of a session: what it counts as missing, and when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import launch_coverage
import pytest

TESTS = Path(__file__).parents[1]


def config_of(*args: str, **options: Any) -> Any:
    where = SimpleNamespace(dir=TESTS.parent)
    return SimpleNamespace(
        args=args, option=SimpleNamespace(**options), invocation_params=where, workeroutput=None
    )


def worker(*found: object) -> Any:
    return SimpleNamespace(workeroutput={"kernels": found})


def finish(monkeypatch: pytest.MonkeyPatch, coverage: Any, config: Any, **ended: object) -> int:
    """The exit status of a session in whose controller nothing ran."""
    monkeypatch.delitem(launch_coverage.sys.modules, "ops_coverage", raising=False)
    ended = {"shouldstop": False, "shouldfail": False, "exitstatus": 0} | ended
    session = SimpleNamespace(config=config, **ended)
    coverage.pytest_sessionfinish(session)
    return int(session.exitstatus)


@pytest.mark.parametrize(
    "args, options, counts",
    [
        (["tests"], {}, True),
        (["."], {"keyword": "", "markexpr": "", "deselect": None}, True),
        (["tests/ops"], {}, True),
        (["tests/cubin", "tests/ops"], {}, True),
        (["tests/ops/rowwise/test_rope.py"], {}, False),
        (["tests/ops/rowwise/test_rope.py::test_shapes"], {}, False),
        (["tests/cubin"], {}, False),
        (["tests"], {"keyword": "rope"}, False),
        (["tests"], {"markexpr": "not gpu"}, False),
        (["tests"], {"deselect": ["tests/ops/rowwise/test_rope.py"]}, False),
        (["tests"], {"lf": True}, False),
    ],
)
def test_what_no_worker_ran_fails_a_whole_run_alone(
    monkeypatch: pytest.MonkeyPatch, args: list[str], options: dict[str, Any], counts: bool
) -> None:
    config = config_of(*args, **options)
    coverage = launch_coverage.EmulatorCoverage(config, is_drawn=False)
    coverage.pytest_testnodedown(worker(["ran a", "ran b", "ran c"], ["ran a"], ""))
    coverage.pytest_testnodedown(worker(["ran a", "ran b", "ran c"], ["ran c"], ""))
    coverage.pytest_testnodedown(SimpleNamespace())  # one that broke down
    assert finish(monkeypatch, coverage, config) == (1 if counts else 0)
    assert coverage.missing == (["ran b"] if counts else [])


def test_what_all_workers_ran_together_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("tests")
    coverage = launch_coverage.EmulatorCoverage(config, is_drawn=False)
    for seen in (["ran a"], ["ran b"]):
        coverage.pytest_testnodedown(worker(["ran a", "ran b"], seen, ""))
    assert finish(monkeypatch, coverage, config) == 0


def test_a_drawn_run_owes_a_kernel_of_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("tests")
    coverage = launch_coverage.EmulatorCoverage(config, is_drawn=True)
    wanted = ["ran rope_bf16 in the emulator", "ran a kernel of rope in the emulator"]
    coverage.pytest_testnodedown(worker(wanted, [], ""))
    assert finish(monkeypatch, coverage, config) == 1
    assert coverage.missing == wanted[1:]


@pytest.mark.parametrize("ended", [{"shouldstop": "-x"}, {"shouldfail": "--maxfail"}])
def test_a_session_that_ended_early_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, ended: dict[str, str]
) -> None:
    config = config_of("tests")
    coverage = launch_coverage.EmulatorCoverage(config, is_drawn=False)
    coverage.pytest_testnodedown(worker(["ran a"], [], ""))
    assert finish(monkeypatch, coverage, config, **ended) == 0


@pytest.mark.parametrize("options", [{}, {"markexpr": "gpu"}])
@pytest.mark.parametrize("misses", [False, True])
def test_launches_of_workers_add_up(
    monkeypatch: pytest.MonkeyPatch, misses: bool, options: dict[str, Any]
) -> None:
    config = config_of("tests", **options)
    coverage = launch_coverage.LaunchCoverage(config)
    manifest = launch_coverage.open_collection().manifest
    entries = [cubin["sm80"] for cubin in manifest.cubins.values() if "sm80" in cubin]
    names = {name for entry in entries for name in entry.functions}
    first = sorted(names)[0]
    workers = (names - {first}, {first} if not misses else {""})
    for launched in workers:
        coverage.pytest_testnodedown(
            SimpleNamespace(workeroutput={"launched": (sorted(launched), (8, 0))})
        )
    coverage.pytest_testnodedown(SimpleNamespace())  # one that broke down
    assert finish(monkeypatch, coverage, config) == (1 if misses else 0)
    assert coverage.missing == ([first] if misses else [])
