"""The child process in which the GPU tests call fmha_v2 kernels: one that breaks it fails alone."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[1] / "gpu/fmha_worker.py"
# Kernels by what they do; a child without torch stands in for that of the GPU tests.
CHILD = """
import json, os, sys, time
for line in sys.stdin:
    path, name = json.loads(line)
    answer = {"text": f"{name} of {path}", "failed": name == "wrong", "broken": name == "asserts"}
    if name == "asserts":
        os.write(2, b"x.h:185: Assertion `false` failed.\\n" * 10000)
    if name == "dies":
        os.abort()
    if name == "hangs":
        time.sleep(600)
    print(json.dumps(answer), flush=True)
    if answer["broken"]:
        os._exit(1)
"""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("fmha_worker", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "fmha_worker", module)
    spec.loader.exec_module(module)
    made = module.Worker([sys.executable, "-c", CHILD], timeout_s=60)
    yield made
    made.close()


def test_one_child_for_all_that_leave_it_whole(worker: Any) -> None:
    for name, failed in (("fine", False), ("wrong", True), ("fine", False)):
        outcome = worker.run(Path("a.cubin"), name)
        assert (outcome.text, outcome.failed) == (f"{name} of a.cubin", failed)
    assert worker.started == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("asserts", "asserts of a.cubin; it printed: x.h:185: Assertion `false` failed."),
        ("dies", "the process ended, exit status -6; it printed: nothing"),
        ("hangs", "no answer in 3 s; it printed: nothing"),
    ],
)
def test_what_breaks_it_fails_alone(worker: Any, name: str, said: str) -> None:
    assert not worker.run(Path("a.cubin"), "fine").failed
    with pytest.MonkeyPatch.context() as changed:
        if name == "hangs":  # others may take their time to start and to end
            changed.setattr(worker, "_timeout_s", 3)
        outcome = worker.run(Path("a.cubin"), name)
    assert outcome.failed and f"broke its process: {said}" in outcome.text
    assert len(outcome.text) < 4000
    assert not worker.run(Path("a.cubin"), "fine").failed
    assert not worker.run(Path("a.cubin"), "fine").failed
    assert worker.started == 2


def test_an_end_between_two_jobs(worker: Any) -> None:
    assert not worker.run(Path("a.cubin"), "fine").failed
    worker._child.kill()
    worker._child.wait()
    assert "exit status -9" in worker.run(Path("a.cubin"), "fine").text
    assert not worker.run(Path("a.cubin"), "fine").failed
