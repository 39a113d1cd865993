"""Counts what a whole run of the tests launched; what none launched fails the session.

Pytest plugins (conftest.py registers them): functions of the manifest on the GPU of a
`--require-gpu` run; in every run, kernels of each op in the emulator (tests/ops/emulated.py), and
the ops registered with torch that `torch.library.opcheck` was given.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernel_hub import driver
from kernel_hub.collection.manifest import open_collection
from kernel_hub.collection.resolve import refusal
from kernel_hub.launch import device_function

TESTS = Path(__file__).resolve().parent
EACH_KERNEL = re.compile(r"ran \w+ in the emulator")  # as tests/ops/ops_coverage.py says it
_LAUNCH_EX = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
# Each leaves tests out.
_SUBSETS = (
    *("keyword", "markexpr", "deselect", "ignore", "ignore_glob"),
    *("lf", "stepwise", "collectonly"),
)


def is_full_run(config: pytest.Config, *folders: Path, mark: str | None = None) -> bool:
    """Whether all tests are to run, or all of one of `folders`, or all that have `mark`."""
    paths = {(Path(config.invocation_params.dir) / arg).resolve() for arg in config.args}
    given = {name: getattr(config.option, name, None) for name in _SUBSETS}
    if mark and given["markexpr"] == mark:
        del given["markexpr"]
    return not any(given.values()) and bool(paths & {TESTS, TESTS.parent, *folders})


def fail(session: pytest.Session) -> None:
    """Turn a session that went well into one that did not."""
    if session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


class LaunchCoverage:
    """Wraps the launch call of every real driver opened from here on.

    Adds up what the test processes launched, be it one or the workers of pytest-xdist.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.is_full_run = is_full_run(config, mark="gpu")
        self.launched: set[str] = set()
        self.missing: list[str] = []
        self._capability: tuple[int, int] | None = None
        self._names: dict[int, str] = {}  # by handle, and by the id of what Python passes for it
        self._kept: list[object] = []  # so that no id in _names is used twice

    def install(self) -> None:
        """Patch the two places where a launch gets its function and its driver call."""
        make_function = device_function.DeviceFunction.__init__
        open_driver = driver.Driver.__init__

        def new_function(function: Any, *args: Any, **kwargs: Any) -> None:
            make_function(function, *args, **kwargs)
            for key in (id(function.argument), function.handle):
                self._names[key] = function.spec.name
            self._kept.append(function.argument)

        def new_driver(opened: Any, *args: Any, **kwargs: Any) -> None:
            open_driver(opened, *args, **kwargs)
            if "fakecuda" not in opened.path:
                opened.launch_ex = self._counting(opened, opened.launch_ex, id)
                # The C launcher calls the driver without Python, with the handle itself.
                by_address = _LAUNCH_EX(opened.launch_ex_address)
                from_c = _LAUNCH_EX(self._counting(opened, by_address, int))
                opened.launch_ex_address = ctypes.cast(from_c, ctypes.c_void_p).value or 0
                self._kept.append(from_c)

        device_function.DeviceFunction.__init__ = new_function  # type: ignore[method-assign]
        driver.Driver.__init__ = new_driver  # type: ignore[method-assign]

    def _counting(
        self, opened: driver.Driver, launch_ex: Callable[..., int], key_of: Callable[[Any], int]
    ) -> Callable[..., int]:
        def launch(config: Any, function: Any, values: Any, extra: Any) -> int:
            code = launch_ex(config, function, values, extra)
            if code == 0:
                self.launched.add(self._names.get(key_of(function), ""))
                self._capability = self._capability or opened.compute_capability(0)
            return code

        return launch

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        launched, capability = getattr(node, "workeroutput", {}).get("launched", ((), None))
        self.launched.update(launched)
        self._capability = self._capability or capability

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["launched"] = sorted(self.launched), self._capability
            return
        if not self.is_full_run or self._capability is None:
            return
        capability = self._capability
        for cubin in open_collection().manifest.cubins.values():
            # Of several that run here the resolver takes the one with the highest target.
            usable = {e.target: e for e in cubin.values() if not refusal(capability, e.target)}
            if usable:
                self.missing += sorted(set(usable[max(usable)].functions) - self.launched)
        if self.missing:
            fail(session)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.is_full_run or self._capability is None:
            return
        terminalreporter.section("functions of the manifest launched on the GPU")
        terminalreporter.write_line(f"{len(self.launched - {''})} launched")
        for name in self.missing:
            terminalreporter.write_line(f"FAILED: no test launched {name}", red=True)


class EmulatorCoverage:
    """Adds up what the test processes ran, be it one or the workers of pytest-xdist."""

    def __init__(self, config: pytest.Config, is_drawn: bool) -> None:
        """is_drawn: some cases run, so of an op's kernels one has to, not each."""
        self.counts = is_full_run(config, TESTS / "ops")
        self.is_drawn = is_drawn
        self.missing: list[str] = []
        self._expected: set[str] = set()
        self._seen: set[str] = set()
        self._notes: set[str] = set()

    def _add(self, expected: list[str], seen: list[str], note: str) -> None:
        self._expected.update(expected)
        self._seen.update(seen)
        self._notes.update({note} - {""})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if found := getattr(node, "workeroutput", {}).get("kernels"):
            self._add(*found)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # Without torch, or where no test of an op was collected, nobody has loaded it.
        if ops_coverage := sys.modules.get("ops_coverage"):
            self._add(*ops_coverage.report())
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["kernels"] = sorted(self._expected), sorted(self._seen), "; ".join(self._notes)
            return
        self.counts &= not (session.shouldstop or session.shouldfail)
        if self.counts:
            missing = self._expected - self._seen
            each = {line for line in missing if EACH_KERNEL.fullmatch(line)}
            self.missing = sorted(missing - each if self.is_drawn else missing)
        if self.missing:
            fail(session)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.counts or not self._expected | self._notes:
            return
        terminalreporter.section("kernels that ran in the emulator, ops given to opcheck")
        terminalreporter.write_line(f"{len(self._seen)} seen")
        for note in sorted(self._notes):
            terminalreporter.write_line(note)
        for name in self.missing:
            terminalreporter.write_line(f"FAILED: no test {name}", red=True)
