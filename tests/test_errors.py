"""Lists of names in messages."""

from __future__ import annotations

import pytest

from kernel_hub import Kernel, registry
from kernel_hub.errors import CubinNotFoundError, listed


def test_a_list_that_is_cut_says_how_many_more() -> None:
    assert listed([]) == "none"
    assert listed("abc", 3) == "a, b, c"
    assert listed("abcde", 3) == "a, b, c, … and 2 more"
    assert listed([1, 2, 3], 1, "; ") == "1; … and 2 more"


def test_names_that_are_not_there_are_answered_with_a_cut_list() -> None:
    left = len(registry) - 12
    for asking in (lambda: registry["rms_nrm"], lambda: Kernel("rms_nrm")):
        with pytest.raises(CubinNotFoundError, match=f"ships: rms_norm, .*… and {left} more"):
            asking()
