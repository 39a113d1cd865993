"""Counts which functions of the manifest a full `--require-gpu` run launched on the real GPU.

A pytest plugin (conftest.py registers it). A function that no test launched fails the session.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kernel_hub import _launch, driver
from kernel_hub.manifest import open_collection
from kernel_hub.resolve import refusal

TESTS = Path(__file__).resolve().parent


class LaunchCoverage:
    """Wraps the launch call of every real driver opened from here on."""

    def __init__(self, config: pytest.Config) -> None:
        paths = {(Path(config.invocation_params.dir) / arg).resolve() for arg in config.args}
        selected = config.option.keyword or config.option.markexpr
        self.is_full_run = not selected and paths <= {TESTS, TESTS.parent}
        self.launched: set[str] = set()
        self.missing: list[str] = []
        self._names: dict[int, str] = {}
        self._kept: list[object] = []  # so that no id in _names is used twice
        self._gpu: driver.Driver | None = None

    def install(self) -> None:
        """Patch the two places where a launch gets its function and its driver call."""
        make_function = _launch.DeviceFunction.__init__
        open_driver = driver.Driver.__init__

        def new_function(function: Any, *args: Any, **kwargs: Any) -> None:
            make_function(function, *args, **kwargs)
            self._names[id(function.argument)] = function.spec.name
            self._kept.append(function.argument)

        def new_driver(opened: Any, *args: Any, **kwargs: Any) -> None:
            open_driver(opened, *args, **kwargs)
            if "fakecuda" not in opened.path:
                self._gpu = opened
                opened.launch_ex = self._counting(opened.launch_ex)

        _launch.DeviceFunction.__init__ = new_function  # type: ignore[method-assign]
        driver.Driver.__init__ = new_driver  # type: ignore[method-assign]

    def _counting(self, launch_ex: Callable[..., int]) -> Callable[..., int]:
        def launch(config: Any, function: Any, values: Any, extra: Any) -> int:
            code = launch_ex(config, function, values, extra)
            if code == 0:
                self.launched.add(self._names.get(id(function), ""))
            return code

        return launch

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.is_full_run or self._gpu is None:
            return
        capability = self._gpu.compute_capability(0)
        for cubin in open_collection().manifest.cubins.values():
            # Of several that run here the resolver takes the one with the highest target.
            usable = {e.target: e for e in cubin.values() if not refusal(capability, e.target)}
            if usable:
                self.missing += sorted(set(usable[max(usable)].functions) - self.launched)
        if self.missing and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.is_full_run or self._gpu is None:
            return
        terminalreporter.section("functions of the manifest launched on the GPU")
        terminalreporter.write_line(f"{len(self.launched - {''})} launched")
        for name in self.missing:
            terminalreporter.write_line(f"FAILED: no test launched {name}", red=True)
