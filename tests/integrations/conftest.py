"""The alias put in place for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernel_hub.integrations import cpm_kernels


@pytest.fixture
def alias() -> Iterator[None]:
    """`import cpm_kernels` is kernel_hub's until the test ends."""
    cpm_kernels.install()
    yield
    cpm_kernels.uninstall()
