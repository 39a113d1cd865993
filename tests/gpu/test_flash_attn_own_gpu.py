"""flash-attn's own tests through kernel_hub's names on a GPU: a few cases of each by lot.

Their file, tests/test_flash_attn.py, lies in the folder $FLASH_ATTN_TESTS; `python
tests/flash_attn_own.py` runs more of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lots import SEED

torch = pytest.importorskip("torch")
pytest.importorskip("einops")

import flash_attn_own  # noqa: E402

TESTS = [
    "bwd_overflow", "bwd_transpose", "bwd_varlen_overflow", "causal", "deterministic", "kvcache",
    "output", "qkvpacked", "race_condition", "splitkv", "varlen_causal", "varlen_deterministic",
    "varlen_output", "varlen_qkvpacked",
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs() -> Iterator[ModuleType]:
    folder = Path(os.environ.get("FLASH_ATTN_TESTS", ""))
    if not (folder / flash_attn_own.FILE).is_file():
        pytest.skip(f"$FLASH_ATTN_TESTS names no folder with {flash_attn_own.FILE}")
    with flash_attn_own.their_tests(folder) as module:
        yield module


def test_these_are_all(theirs: ModuleType) -> None:
    assert [f"test_flash_attn_{name}" for name in TESTS] == sorted(flash_attn_own.names(theirs))


@pytest.mark.parametrize("name", TESTS)
def test_by_lot(theirs: ModuleType, name: str) -> None:
    count = 4 if "race" in name or "deterministic" in name else 12
    failed: list[Any] = []
    for seed in range(SEED, SEED + count):
        given = flash_attn_own.case(theirs, f"test_flash_attn_{name}", seed, longest=1024)
        outcome = flash_attn_own.run(theirs, f"test_flash_attn_{name}", given)
        if outcome not in ("passed", "skipped by them"):
            failed.append((outcome, given))
    assert not failed, f"KERNEL_HUB_SEED={SEED} draws these again: {failed}"
