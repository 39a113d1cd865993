"""The `way` fixture; and where torch is missing, none of these tests: the ops are torch ops."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["*test_*.py"]  # of folders too
else:
    from ways import hopper_way as hopper_way
    from ways import way as way

    from kernel_hub.ops.core.launch import forget_all

    @pytest.fixture(autouse=True)
    def forget_plans() -> Iterator[None]:
        """Each test plans for itself, and leaves no plans for kernels that were emulated."""
        forget_all()
        yield
        forget_all()
