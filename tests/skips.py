"""Why tests skipped: what is missing and how to get it, grouped at the end of a run."""

from __future__ import annotations

import importlib.util
import os
import types
from collections import Counter
from collections.abc import Iterable
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


def grouped(reports: Iterable[Any]) -> list[str]:
    """`3,234 x no usable GPU`, the most frequent reason first."""
    counts = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    lines = [f"{count:6,} x {reason}" for reason, count in counts.most_common()]
    if len(lines) > MOST_LINES:
        rest = counts.most_common()[MOST_LINES - 1 :]
        number = sum(count for _, count in rest)
        lines[MOST_LINES - 1 :] = [f"{number:6,} x {len(rest)} other reasons: pytest -rs"]
    return lines


class SkipSummary:
    """Prints them, unless pytest itself was told to (-rs)."""

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        reports = terminalreporter.stats.get("skipped", [])
        if reports and not terminalreporter.hasopt("s"):
            terminalreporter.section("skipped")
            for line in grouped(reports):
                terminalreporter.write_line(line)
