"""What a run says of the tests that it skipped."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import skips


def skipped(reason: str, count: int = 1) -> list[Any]:
    return [SimpleNamespace(longrepr=("test_x.py", 3, f"Skipped: {reason}"))] * count


def test_reasons_are_counted_the_most_frequent_first() -> None:
    reports = skipped("no torch", 2) + skipped("no usable GPU", 3234) + skipped("other")
    assert skips.grouped(reports) == [
        " 3,234 x no usable GPU", "     2 x no torch", "     1 x other",
    ]  # fmt: skip


def test_gpu_tests_beside_others_are_counted_and_not_started() -> None:
    gpu, other = (
        SimpleNamespace(get_closest_marker=lambda name, mark=mark: name == mark)
        for mark in ("gpu", "slow")
    )
    for no_gpu, given, kept in (
        (lambda: "no GPU", [gpu, other, gpu], [other]),
        (lambda: "no GPU", [gpu, gpu], [gpu, gpu]),  # asked for alone each says why it skips
        (lambda: "", [gpu, other], [gpu, other]),
        (None, [gpu, other], [gpu, other]),
    ):
        summary, items = skips.SkipSummary(no_gpu), list[Any](given)
        summary.pytest_collection_modifyitems(SimpleNamespace(), items)  # type: ignore[arg-type]
        assert items == kept
        left_out = len(given) - len(kept)
        assert summary.left_out == ({"no GPU": left_out} if left_out else {})
    assert skips.grouped(skipped("no torch", 2), {"no GPU": 9}) == [
        "     9 x no GPU", "     2 x no torch",
    ]  # fmt: skip


def test_many_reasons_become_one_line() -> None:
    reports = [report for i in range(40) for report in skipped(f"reason {i}", 50 - i)]
    lines = skips.grouped(reports)
    assert len(lines) == skips.MOST_LINES and lines[0] == "    50 x reason 0"
    hidden = sum(50 - i for i in range(skips.MOST_LINES - 1, 40))
    assert lines[-1] == f"{hidden:6,} x 16 other reasons: pytest -rs"
    total = sum(int(line.split(" x ")[0].replace(",", "")) for line in lines)
    assert total == len(reports)


@pytest.mark.parametrize(
    "name, said",
    [
        ("no_such_module", "no_such_module is not installed: pip install no_such_module"),
        ("cpm_kernels_.x", "cpm_kernels_.x is not installed: pip install cpm_kernels_"),
    ],
)
def test_a_module_that_is_missing_says_where_it_is_from(name: str, said: str) -> None:
    with pytest.raises(pytest.skip.Exception) as caught:
        pytest.importorskip(name, reason="the test compares with it")
    assert str(caught.value) == said


def test_a_module_that_is_too_old_is_not_missing() -> None:
    assert pytest.importorskip("pytest", "8", reason="new there") is pytest
    with pytest.raises(pytest.skip.Exception, match="9999"):
        pytest.importorskip("pytest", "9999", reason="new there")


def test_a_file_that_imports_from_a_missing_module_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "no_such_module", skips.Missing("no_such_module"))
    with pytest.raises(pytest.skip.Exception, match="pip install no_such_module") as caught:
        exec("from no_such_module import given, strategies")
    assert caught.value.allow_module_level
    assert not hasattr(sys.modules["no_such_module"], "__path__")  # as a module without a folder


@pytest.mark.parametrize("name", ["no_such_module", "no_such_package.module", "os.no_such_module"])
def test_a_module_of_a_missing_package_is_not_there(name: str) -> None:
    assert not skips.is_there(name)
    assert skips.is_there("os.path")
