"""What the plans of all products share: tiles of the sm90 bodies, launches of the portable ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.device import has_wgmma, mma_stages

Dims = tuple[int, int, int]

BLOCK_K = 64  # elements of k in a box of the sm90 bodies: 128 bytes, the span of the swizzle
BOX_ROWS = 64  # of out, in a box on its way out (block_n where swapped); it has BLOCK_K columns
# The portable bodies with mma.sync.
PORTABLE_N, PORTABLE_K, PORTABLE_THREADS, BLOCKS_AN_SM = 128, 32, 128, 2
# Those of few rows.
WARPS = 8
# tiles of 8 rows of a, stages, slices of 32 elements of k a chunk, blocks a multiprocessor
SMALL_M = {"m8": (1, 3, 2, 2), "m8_deep": (1, 4, 4, 1), "m16": (2, 2, 2, 2)}


@dataclass(frozen=True, slots=True)
class Choice:
    """One launch. boxes: rows of the boxes of tensor maps, or None where pointers are passed."""

    cubin: str
    variant: str
    grid: Dims
    block: Dims
    shared_bytes: int
    boxes: tuple[int, ...] | None = None
    swaps: bool = False  # the rows of the product are the rows of b
    out_box_rows: int = 0  # of the boxes in which results leave; 0: they leave from registers
    group: int = 1  # rows of tiles that are walked together
    num_partials: int = 0  # fp32 sums of blocks that share k
    num_arrivals: int = 0  # counters of blocks that left theirs
    overlaps: bool = True  # with the end of the launch before, where the kernel waits for it
    tile: Any = None  # of an sm90 body


@dataclass(frozen=True, slots=True)
class Tile:
    """A variant of an sm90 body; the fields are those of its Config."""

    swaps: bool  # the rows of the product are the rows of b
    consumers: int
    pieces: int
    piece_n: int
    stages: int
    cluster_m: int
    cluster_n: int
    splits: int  # blocks of a cluster that share k
    boxes: int
    min_blocks: int

    @property
    def name(self) -> str:
        """As it is exported, without op and dtype."""
        name = f"{self.block_m}x{self.block_n}_c{self.cluster_m}{self.cluster_n}"
        name += f"_k{self.splits}" if self.splits > 1 else ""
        return ("swapped_" if self.swaps else "") + name + ("_b2" if self.min_blocks == 2 else "")

    @property
    def block_m(self) -> int:
        """Rows of a block's tile."""
        return 64 * self.consumers

    @property
    def block_n(self) -> int:
        """Columns of a block's tile."""
        return self.pieces * self.piece_n

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return self.cluster_m * self.cluster_n * self.splits

    @property
    def ring_bytes(self) -> int:
        """Of shared memory: the stages, and two barriers each."""
        return self.stages * ((self.block_m + self.block_n) * 2 * BLOCK_K + 16)

    @property
    def row_boxes(self) -> tuple[int, int]:
        """Rows of the boxes of the product's rows and columns."""
        return self.block_m // self.cluster_n, self.block_n // self.cluster_m

    @property
    def out_box_rows(self) -> int:
        """Rows of the boxes in which results leave; 0: they leave from registers."""
        return (self.block_n if self.swaps else BOX_ROWS) if self.boxes else 0

    def tiles(self, m: int, n: int) -> int:
        """Clusters' worth of tiles."""
        rows, columns = (n, m) if self.swaps else (m, n)
        tiles_m = -(-rows // (self.block_m * self.cluster_m))
        return tiles_m * -(-columns // (self.block_n * self.cluster_n))

    def clusters_at_once(self, num_sms: int) -> int:
        """Clusters that a persistent grid has."""
        return max(1, num_sms * self.min_blocks // self.cluster_size)

    def launch(self, num_sms: int, m: int, n: int) -> tuple[Dims, Dims]:
        """Grid and block."""
        clusters = self.tiles(m, n)
        if self.splits == 1:  # those that share k take one tile each
            clusters = min(clusters, self.clusters_at_once(num_sms))
        return (clusters * self.cluster_size, 1, 1), (128 * (self.consumers + 1), 1, 1)


def small_m_choices(
    cubin: str, compute_capability: tuple[int, int], m: int, n: int, num_sms: int,
    num_splits: int = 1, names: Sequence[str] = tuple(SMALL_M),
) -> Iterator[Choice]:  # fmt: skip
    """The launches of the bodies of few rows, in the order of `names`."""
    for name in names:
        columns, stages, slices, blocks = SMALL_M[name]
        if m > 8 * columns or (name == "m8_deep" and not has_wgmma(compute_capability)):
            continue
        tiles = -(-n // 16)
        sums = 4 * columns * 32
        ring = WARPS * stages * slices * (2 + columns) * 512
        yield Choice(
            cubin,
            name,
            (min(tiles, blocks * num_sms), num_splits, 1),
            (32 * WARPS, 1, 1),
            ring + 2 * WARPS * sums * 4,
            num_partials=num_splits * tiles * sums if num_splits > 1 else 0,
        )


def portable_choices(
    cubin: str,
    compute_capability: tuple[int, int],
    row_tiles: Callable[[int], int],
    n: int,
    num_splits: int = 1,
) -> Iterator[Choice]:
    """The launches of the bodies with mma.sync; row_tiles: of so many rows each."""
    for block_m in (128, 64):
        tiles = row_tiles(block_m) * -(-n // PORTABLE_N)
        sums = block_m * PORTABLE_N
        yield Choice(
            cubin,
            f"{block_m}x{PORTABLE_N}",
            (tiles, num_splits, 1),
            (PORTABLE_THREADS, 1, 1),
            mma_stages(compute_capability) * (block_m + PORTABLE_N) * PORTABLE_K * 2,
            num_partials=num_splits * tiles * sums if num_splits > 1 else 0,
        )


def groups_of(rows: int) -> tuple[int, ...]:
    """The groups of rows of tiles that `kernel-hub tune` measures."""
    return (8,) if rows <= 1024 else (4, 8, 16)
