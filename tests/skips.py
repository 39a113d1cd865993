"""Why tests skipped: what is missing and how to get it, grouped at the end of a run."""

from __future__ import annotations

import importlib.util
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
}
_importorskip = pytest.importorskip


def importorskip(modname: str, minversion: str | None = None, **options: Any) -> Any:
    """pytest's own, but a module that is not there is said to be missing, and where it is from."""
    try:
        found = importlib.util.find_spec(modname)
    except ModuleNotFoundError:
        found = None
    if found is None:
        top = modname.partition(".")[0]
        distribution = _DISTRIBUTIONS.get(top, top)
        options["reason"] = f"{modname} is not installed: pip install {distribution}"
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
