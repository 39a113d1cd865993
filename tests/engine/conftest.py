"""One thread for models this small: more of them wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Until the test ends."""
    torch = pytest.importorskip("torch", reason="the ops are torch ops")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
