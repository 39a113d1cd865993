"""Fixtures of the command line's tests: running it in this process, or without a driver."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cli_run import Ran, Run

from kernel_hub import cli, driver


@pytest.fixture
def kernel_hub_cli(capsys: pytest.CaptureFixture[str]) -> Run:
    """`kernel_hub_cli("list", "--json")` in this process."""

    def run(*argv: str) -> Ran:
        code = cli.main(argv)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has no libcuda."""
    monkeypatch.setenv(driver.LIBRARY_VARIABLE, "/nowhere/libcuda.so.1")
    monkeypatch.setattr(driver.library, "_driver", None)
    yield
