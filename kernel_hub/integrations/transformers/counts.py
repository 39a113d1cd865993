"""What the door took and what it passed on, with reasons: counts since the process began."""

from __future__ import annotations

from collections import Counter

import torch

_taken: Counter[str] = Counter()
_passed: Counter[tuple[str, str]] = Counter()
_is_compiling = torch.compiler.is_compiling


def took(what: str) -> None:
    """Count a call that ran here. Calls inside torch.compile's graphs are not counted."""
    if not _is_compiling():
        _taken[what] += 1


def passed(what: str, reason: str) -> None:
    """Count a call that went to what was there before."""
    if not _is_compiling():
        _passed[what, reason] += 1


def report() -> dict[str, dict[str, int]]:
    """{"taken": {op: calls}, "passed": {"op: reason": calls}}, of calls outside torch.compile."""
    return {
        "taken": dict(_taken),
        "passed": {f"{what}: {reason}": count for (what, reason), count in _passed.items()},
    }


def reset() -> None:
    """Begin to count again."""
    _taken.clear()
    _passed.clear()
