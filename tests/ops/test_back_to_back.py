"""The watchdog itself, on the CPU: it ends what hangs, and finds bits that change."""

from __future__ import annotations

import pytest
from back_to_back import check_back_to_back

# The CPU stands in for the GPU.
HERE = """
import contextlib
torch.cuda.Stream = object
torch.cuda.stream = lambda _: contextlib.nullcontext()
torch.cuda.synchronize = lambda: None
x = torch.arange(6.0)
"""


def test_what_repeats_itself_passes() -> None:
    check_back_to_back(HERE + "cases = [lambda: x + 1, lambda: (x * 2, None, x.half())]")


def test_what_changes_is_found() -> None:
    changing = "calls = itertools.count()\ncases = [lambda: x, lambda: x + (next(calls) > 25)]"
    with pytest.raises(AssertionError, match=r"cases \[1\]"):
        check_back_to_back(HERE + changing, launches=100)


def test_what_hangs_is_ended() -> None:
    with pytest.raises(AssertionError, match="not done after 2 s"):
        check_back_to_back(HERE + "import time\ncases = [lambda: time.sleep(60)]", seconds=2)
