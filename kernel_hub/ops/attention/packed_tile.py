"""Tiles of Hopper's kernels in shares: which there are, how heads and tokens fill their rows, and
what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..core import common
from ..core.device import Stated, launch_facts

CUBIN = "flash_attention_split_sm90"
MAX_BLOCKS = 256  # merge.cuh holds two pieces of each of a tile's chunks

# Of a multiprocessor, by width and rows, and how much more of its part a block of few rows does
# where it has one alone.
_FLOPS_A_US = {
    (64, 128): 3.7e6, (64, 192): 4.3e6, (96, 128): 4.8e6, (96, 192): 5.4e6, (128, 64): 4.2e6,
    (128, 128): 5.8e6, (192, 128): 6.5e6, (256, 128): 7.0e6,
}  # fmt: skip
_ALONE = 1.72
_FEW_ENDS, _FEW_IN_TURN = 0.72, 0.95
_NEARLY = 1.04
_FEW_ROWS, _PLACES = 64, 2  # rows of a tile of which a multiprocessor has so many
# Pieces of 128 rows and columns, one from each multiprocessor, out, in again and merged.
_PIECES_US = 2.9


@dataclass(frozen=True, slots=True)
class Body:
    """One compiled tile shape: `{CUBIN}_{dtype}_hdim{head_dim}_{mask}{suffix}`."""

    mask: str
    head_dim: int
    suffix: str = ""

    @property
    def has_few_rows(self) -> bool:
        """Whether two blocks run on a multiprocessor."""
        return self.suffix == "_rows64"

    @property
    def stated(self) -> Stated:
        """Threads, shared memory, block_m (rows) and block_n (keys) of a tile."""
        return launch_facts(CUBIN, self.name(torch.bfloat16))

    def name(self, dtype: torch.dtype) -> str:
        """The function's name."""
        token = common.DTYPE_TOKENS[dtype]
        return f"{CUBIN}_{token}_hdim{self.head_dim}_{self.mask}{self.suffix}"


BODIES = (
    *(Body("causal", width) for width in (64, 96, 128, 192, 256)),
    *(Body("causal", width, "_rows192") for width in (64, 96)),
    Body("causal", 128, "_rows64"),
    *(Body("window", width) for width in (64, 128, 256)),
)


def merge_name(dtype: torch.dtype, scan: int = 1) -> str:
    """The second kernel, of all bodies; scan: not 1 where most tiles are written already."""
    return f"{CUBIN}_{common.DTYPE_TOKENS[dtype]}_merge" + "_left" * (scan != 1)


class PackedTile(NamedTuple):
    """Of a kernel in shares. is_alone: heads of a tile need not divide the group."""

    width: int
    block_m: int
    block_n: int
    is_alone: bool = False

    def pack(self, seqlen_q: int, group: int) -> tuple[int, int, int]:
        """(heads, tokens, tiles): heads of a group that share a tile, tokens of it, tiles of a
        group. The fewest tiles, and of those the most heads."""
        best = None
        for heads in range(1, min(group, self.block_m) + 1):
            if group % heads == 0 or self.is_alone:
                tokens = self.block_m // heads
                tiles = -(-seqlen_q // tokens) * -(-group // heads)
                if best is None or tiles <= best[2]:
                    best = heads, tokens, tiles
        assert best is not None
        return best

    @property
    def places(self) -> int:
        """How many blocks run on a multiprocessor."""
        return _PLACES if self.block_m == _FEW_ROWS else 1

    def blocks_at_once(self, num_sms: int) -> int:
        """How many run at once on so many of those."""
        return min(MAX_BLOCKS, num_sms * self.places)

    @property
    def ends(self) -> float:
        """What its beginning and end take of those of others."""
        return _FEW_ENDS if self.block_m == _FEW_ROWS else 1.0

    @property
    def in_turn(self) -> float:
        """What drawing the next tile takes of that."""
        return _FEW_IN_TURN if self.block_m == _FEW_ROWS else 1.0

    @property
    def unit_us(self) -> float:
        """Of a block of keys, where all places are taken."""
        rate = _FLOPS_A_US[self.width, self.block_m]
        return 4 * self.block_m * self.block_n * self.width / rate * self.places

    def unit_us_of(self, busy: float) -> float:
        """The same where so many of all places are."""
        is_alone = self.places > 1 and self.places * busy <= _NEARLY
        return self.unit_us / _ALONE if is_alone else self.unit_us

    @property
    def pieces_us(self) -> float:
        """Of pieces from each multiprocessor, out, in again and merged."""
        return _PIECES_US * self.width / 128 * self.places * self.block_m / 128
