"""Types and paths that the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent


class Ran(NamedTuple):
    """Exit code and what was printed."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]
