"""What a GPU test leaves of the card's memory to tests of other processes."""

from __future__ import annotations

from typing import Any

KEPT_BYTES = 2 << 30


def give_back(cuda: Any) -> None:
    """Free what torch keeps for later, where that is much. cuda: `torch.cuda`."""
    if cuda.memory_reserved() > KEPT_BYTES:
        cuda.empty_cache()
