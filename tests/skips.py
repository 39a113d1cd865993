"""Why tests skipped: what is missing and how to get it, grouped at the end of a run."""

from __future__ import annotations

import importlib.util
import os
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

MOST_LINES = 25
# What pip calls them, where that is another name than Python's.
_DISTRIBUTIONS = {
    "cuda": '"cuda-core>=1.2" cuda-bindings nvidia-cuda-nvrtc',
    "tvm_ffi": "apache-tvm-ffi",
    "cupy": "cupy-cuda13x",
    "numba": "numba-cuda",
    "cpm_kernels": "--no-deps cpm_kernels",
    "cyclonedx": "cyclonedx-python-lib",
    "jsonschema": '"cyclonedx-python-lib[json-validation]"',
}
_importorskip = pytest.importorskip
# For tests of the card's free memory or rates.
alone = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ, reason="what other workers take counts too: run without -n"
)


def is_there(modname: str) -> bool:
    """Whether the module could be imported; a package around it that is not there says no."""
    try:
        return importlib.util.find_spec(modname) is not None
    except ModuleNotFoundError:
        return False


class Missing(types.ModuleType):
    """In place of a module: `from it import name`, at the top of a test file, skips the file."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        reason = f"{self.__name__} is not installed: pip install {self.__name__}"
        pytest.skip(reason, allow_module_level=True)


def importorskip(modname: str, minversion: str | None = None, **options: Any) -> Any:
    """pytest's own, but a module that is not there is said to be missing, and where it is from.

    One that KERNEL_HUB_TEST_REQUIRES lists must be there.
    """
    if not is_there(modname):
        top = modname.partition(".")[0]
        distribution = _DISTRIBUTIONS.get(top, top)
        options["reason"] = f"{modname} is not installed: pip install {distribution}"
        if modname in os.environ.get("KERNEL_HUB_TEST_REQUIRES", "").split(","):
            pytest.fail(options["reason"], pytrace=False)
    return _importorskip(modname, minversion, **options)


def grouped(reports: Iterable[Any], more: Mapping[str, int] | None = None) -> list[str]:
    """`3,234 x no usable GPU`, the most frequent reason first; more: what has no reports."""
    counts = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    counts.update(more)
    lines = [f"{count:6,} x {reason}" for reason, count in counts.most_common()]
    if len(lines) > MOST_LINES:
        rest = counts.most_common()[MOST_LINES - 1 :]
        number = sum(count for _, count in rest)
        lines[MOST_LINES - 1 :] = [f"{number:6,} x {len(rest)} other reasons: pytest -rs"]
    return lines


class SkipSummary:
    """Prints them, unless pytest itself was told to (-rs).

    no_gpu: why there is none, or ''. Where it is given, GPU tests beside others are then counted as
    skipped and never started: thousands cost seconds.
    """

    def __init__(self, no_gpu: Callable[[], str] | None) -> None:
        self.no_gpu = no_gpu
        self.left_out: dict[str, int] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        others = [item for item in items if not item.get_closest_marker("gpu")]
        number = len(items) - len(others)
        if self.no_gpu and number and others and (reason := self.no_gpu()):
            self.left_out = {reason: number}
            items[:] = others

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["left_out"] = self.left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        # All workers leave out the same.
        self.left_out = getattr(node, "workeroutput", {}).get("left_out", self.left_out)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        reports = terminalreporter.stats.get("skipped", [])
        if self.left_out or (reports and not terminalreporter.hasopt("s")):
            terminalreporter.section("skipped")
            for line in grouped(reports, self.left_out):
                terminalreporter.write_line(line)
