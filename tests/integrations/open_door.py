"""What tests of attn_implementation="kernel_hub" begin and end with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernel_hub.integrations import transformers as door
from kernel_hub.integrations.transformers import counts


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The door is open, and has counted nothing."""
    door.register()
    counts.reset()
    yield
    door.unregister()
