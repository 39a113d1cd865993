"""Sums over the GPUs of a host, which write into memory of each other (sum_ranks_sm90.cu).

No op: who sums has memory that the processes of a model have opened to each other
(engine/parallel.py), and all of them launch alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .core import common
from .core.device import device_of

CUBIN = "sum_ranks_sm90"
THREADS, MOST_BLOCKS = 256, 512
_DTYPES = (torch.float16, torch.bfloat16)
_TURNS = 3  # which launches take of the inboxes
_NOT_COME = 0x80008000 - 2**32  # awaited.cuh


def inbox_bytes(world: int, most_bytes: int) -> int:
    """Of the memory of each rank, for sums of up to so many bytes."""
    return _TURNS * world * (most_bytes // common.VEC_BYTES) * common.VEC_BYTES


def clear(inbox: torch.Tensor) -> None:
    """Before the first sum of any rank: nothing has come."""
    inbox.view(torch.int32).fill_(_NOT_COME)


class RankSums:
    """Of one process: where the inboxes of all are, and whose turn it is of each block."""

    def __init__(
        self, inboxes: Sequence[int], rank: int, most_bytes: int, device: torch.device
    ) -> None:
        """inboxes: their addresses for this GPU, in the order of the ranks; nobody sums before all
        of them are clear.
        """
        self._rank, self._world = rank, len(inboxes)
        self._capacity = most_bytes // common.VEC_BYTES
        self._inboxes = torch.tensor(inboxes, dtype=torch.int64, device=device)
        self._turns = torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=device)

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x is summed here: few bytes, whole vectors."""
        num_bytes = x.nbytes
        return (
            x.dtype in _DTYPES
            and 0 < num_bytes <= self._capacity * common.VEC_BYTES
            and num_bytes % common.VEC_BYTES == 0
            and x.data_ptr() % common.VEC_BYTES == 0
            and x.is_contiguous()
        )

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """x summed over the ranks, in place; each launches as much, in the same order."""
        num_vecs = x.nbytes // common.VEC_BYTES
        function = common.shipped(CUBIN, f"sum_ranks_{common.DTYPE_TOKENS[x.dtype]}")
        params = (
            x, x, self._inboxes, self._turns, num_vecs, self._capacity, self._rank, self._world
        )  # fmt: skip
        blocks = min(-(-num_vecs // THREADS), MOST_BLOCKS)
        grid, block = (blocks, 1, 1), (THREADS, 1, 1)
        function(grid, block, 0, None, params, **device_of(x.device).following)
        return x
