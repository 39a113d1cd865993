"""What the plans of all products share: tiles of the sm90 bodies, launches of the portable ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.device import SM80, Stated, has_wgmma, launch_facts

if TYPE_CHECKING:
    from typing_extensions import Self

Dims = tuple[int, int, int]

BLOCK_K = 64  # elements of k in a box of the sm90 bodies: 128 bytes, the span of the swizzle
_ROW_BYTES = 128
_STATED = (
    *("block_m", "block_n", "block_k", "consumers", "cluster_m", "cluster_n", "splits", "boxes"),
    *("box_rows", "blocks_per_sm"),
)
_WIDE = 128  # columns of a tile
_ODD_COLUMNS = 1100  # up to which tiles were measured whose shares overlap
LEAST_DEALT = 4  # steps of k that a cluster has, where they are dealt out
# Fitted on an H200 to 667 products drawn by lot (docs/notes/linear.md): rows of a box that the L2
# brings in a microsecond, by where in 128 bytes they may begin (each lies in two of its lines
# then); and rows that come from memory, those of clusters that are at different steps of k, and
# meet in the L2 less often the more bytes there are.
_BROUGHT_A_US = {16: 53.2e3, 32: 76.9e3, 64: 95.4e3}
_AGAIN_A_US, _KEPT_BYTES = 54.7e3, 20e6
# The bodies with mma.sync, rows of a x rows of b; those of few rows.
PORTABLE = ("128x128", "64x128")
SMALL_M = ("m8", "m8_deep", "m16")


@dataclass(frozen=True, slots=True)
class TileChoice:
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
    num_whole: int = 0  # tiles that one cluster computes each
    num_dealt: int = 0  # steps of the others, dealt out to all


@dataclass(frozen=True, slots=True)
class Tile:
    """A variant of an sm90 body, as its source states it; `name` without op and dtype."""

    name: str
    block: Dims
    shared_bytes: int
    swaps: bool  # the rows of the product are the rows of b
    block_m: int  # rows of a block's tile
    block_n: int  # its columns
    block_k: int  # elements of k of a step
    consumers: int  # warpgroups
    cluster_m: int
    cluster_n: int
    splits: int  # blocks of a cluster that share k
    boxes: int
    box_rows: int  # of out, in a box on its way out; it has BLOCK_K columns
    min_blocks: int  # of a multiprocessor

    @classmethod
    def stated(cls, cubin: str, op: str, name: str, *more: Any) -> Self:
        """The variant `name`; more: the fields of a class of its own."""
        facts = launch_facts(cubin, f"{op}_bf16_{name}")
        sizes = [facts.sizes[field] for field in _STATED]
        return cls(name, facts.block, facts.shared_bytes, bool(facts.sizes["swaps"]), *sizes, *more)

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return self.cluster_m * self.cluster_n * self.splits

    @property
    def row_boxes(self) -> tuple[int, int]:
        """Rows of the boxes of the product's rows and columns; of columns whole groups of 8."""
        return self.block_m // self.cluster_n, -(-self.block_n // self.cluster_m // 8) * 8

    @property
    def most_columns(self) -> int:
        """Of the product: it was measured up to so many."""
        return _ODD_COLUMNS if self.block_n % 16 else 1 << 30

    def last_box(self, columns: int) -> int:
        """Rows of the last box of the product's columns: two of a tile may both have some."""
        left, share = columns % self.block_n or self.block_n, self.row_boxes[1]
        return left - (self.block_n - share) if left > share else left

    @property
    def out_box_rows(self) -> int:
        """Rows of the boxes in which results leave; 0: they leave from registers."""
        return self.box_rows if self.boxes else 0

    def tiles(self, m: int, n: int) -> int:
        """Clusters' worth of tiles."""
        rows, columns = (n, m) if self.swaps else (m, n)
        tiles_m = -(-rows // (self.block_m * self.cluster_m))
        return tiles_m * -(-columns // (self.block_n * self.cluster_n))

    @property
    def fetched_rows(self) -> int:
        """Rows of boxes that a cluster fetches for a step of k."""
        return self.block_m * self.cluster_m + self.block_n * self.cluster_n

    @property
    def rows_a_product(self) -> float:
        """Of these, for each product of a row of a and one of b."""
        area = self.block_m * self.cluster_m * self.block_n * self.cluster_n
        return self.fetched_rows / area

    def clusters_at_once(self, num_sms: int) -> int:
        """Clusters that a persistent grid has."""
        # NOTE: a cluster lies within a GPC, of 16 or 18 multiprocessors: an H200, which has 132,
        # runs 30 clusters of four at once and not 32.
        usable = num_sms if self.cluster_size <= 2 else num_sms * 10 // 11
        return max(1, usable * self.min_blocks // self.cluster_size)

    def launch(self, num_sms: int, m: int, n: int) -> tuple[Dims, Dims]:
        """Grid and block."""
        clusters = self.tiles(m, n)
        if self.splits == 1:  # those that share k take one tile each
            clusters = min(clusters, self.clusters_at_once(num_sms))
        return (clusters * self.cluster_size, 1, 1), self.block

    def dealt(self, num_sms: int, m: int, n: int, k: int, deals: bool) -> dict[str, Any]:
        """The fields of a TileChoice that say who computes which steps of which tile.

        deals: the steps of what is left of full rounds of tiles, and of the round before, are dealt
        out, so that a cluster has a tile's at least, or all where there are fewer tiles.
        """
        num_tiles = self.tiles(m, n)
        grid = self.launch(num_sms, m, n)[0]
        clusters = self.clusters_at_once(num_sms)
        if not deals or self.splits > 1 or num_tiles % clusters == 0:
            return {"grid": grid, "num_whole": num_tiles}
        whole = max(0, num_tiles // clusters - 1) * clusters
        steps = (num_tiles - whole) * -(-k // self.block_k)
        clusters = max(1, min(clusters, steps // LEAST_DEALT))
        blocks = clusters * self.cluster_size
        return {
            "grid": (blocks, 1, 1),
            "num_whole": whole,
            "num_dealt": steps,
            "num_partials": blocks * self.block_m * self.block_n,
            "num_arrivals": blocks * self.consumers,
        }


class Cost(NamedTuple):
    """What a variant takes, in microseconds; fitted to products drawn by lot."""

    start_us: float  # of a launch
    step_us: float  # of a step of k where few multiprocessors work,
    busy_us: float  # and what all of them add to it
    tile_us: float  # of a tile besides
    deal_us: float  # where clusters share the k of tiles,
    share_us: float  # and of each that shares besides two
    bytes_a_us: float  # of memory

    @classmethod
    def stated(cls, figures: Mapping[str, float], prefix: str = "") -> Self:
        """Of a table's figures."""
        return cls(*(figures[prefix + name] for name in cls._fields))

    def expected_us(
        self, tile: Tile, num_sms: int, m: int, n: int, k: int, num_bytes: int, deals: bool
    ) -> float:
        """Of a product; num_bytes: of its operands and results."""
        dealt = tile.dealt(num_sms, m, n, k, deals)
        clusters, steps = tile.clusters_at_once(num_sms), -(-k // tile.block_k)
        tiles = tile.tiles(m, n)
        if num_dealt := dealt.get("num_dealt"):
            whole = dealt["num_whole"]
            taking = dealt["grid"][0] // tile.cluster_size
            rounds, last, busy = whole // clusters, num_dealt / taking, taking / clusters
            waves = rounds + (tiles - whole) / taking
            sharing = self.deal_us + self.share_us * max(0.0, taking / (tiles - whole) - 1)
        else:
            steps = -(-steps // tile.splits)
            rounds, left = divmod(tiles, clusters)
            last, busy = (float(steps), left / clusters) if left else (0.0, 0.0)
            waves, sharing = rounds + (left > 0), 0.0
        computing = rounds * steps * (self.step_us + self.busy_us)
        computing += last * (self.step_us + self.busy_us * busy) + self.tile_us * waves + sharing
        reading = num_bytes / self.bytes_a_us + self.tile_us
        # Close to the largest one; a little more where they are alike.
        largest = computing**6 + reading**6
        row_bytes = k * _ROW_BYTES // tile.block_k
        brought = tiles * -(-k // tile.block_k) * tile.fetched_rows
        if bringing := brought_us(brought, row_bytes):
            largest += (bringing + self.tile_us) ** 6
        if num_dealt and (rest := 1 - _KEPT_BYTES / ((m + n) * row_bytes)) > 0:
            largest += (num_dealt * tile.fetched_rows / _AGAIN_A_US * rest) ** 6
        return float(self.start_us + largest ** (1 / 6))


def brought_us(num_rows: float, row_bytes: int) -> float:
    """What the L2 takes for rows of boxes, where not all begin at one of its lines; else 0."""
    offset = row_bytes % _ROW_BYTES  # rows lie one behind the other
    return num_rows / _BROUGHT_A_US[offset & -offset] if offset else 0.0


def ways(
    tile: Tile, num_sms: int, m: int, n: int, k: int, batch_invariant: bool = False
) -> tuple[bool, ...]:
    """Whether clusters share the k of a tile: both where both can be; () where none should.

    batch_invariant: none may, nor the blocks of a cluster.
    """
    if m > tile.most_columns:
        return ()
    if batch_invariant:
        return (False,) if tile.splits == 1 else ()
    # Tiles of few rows of a read the weights once for each of them.
    if -(-k // tile.block_k) < tile.splits or (tile.swaps and tile.block_n < min(m, 64)):
        return ()
    # Measured in two rounds of one column of tiles (docs/notes/linear.md), not in more.
    is_measured = m <= tile.block_n and tile.tiles(m, n) <= 2 * tile.clusters_at_once(num_sms)
    if tile.splits > 1 and tile.block_n > _WIDE and not is_measured:
        return ()
    if tile.splits > 1 or tile.tiles(m, n) % tile.clusters_at_once(num_sms) == 0:
        return (False,)
    return (False, True)


def _stated(cubin: str, name: str, compute_capability: tuple[int, int]) -> Stated:
    function = f"{cubin.removesuffix('_small_m')}_bf16_{name}"
    return launch_facts(cubin, function, compute_capability)


def portable_sizes(cubin: str, compute_capability: tuple[int, int]) -> Mapping[str, int]:
    """What the bodies with mma.sync have in common: block_n, block_k, blocks_per_sm."""
    return _stated(cubin, PORTABLE[0], compute_capability).sizes


def small_m_warps(cubin: str) -> int:
    """Warps of a block of the bodies of few rows."""
    return _stated(cubin, SMALL_M[0], SM80).block[0] // 32


def prefers_small_m(m: int, row_bytes: int) -> bool:
    """Whether a GPU with tensor copies does m rows faster without: rows of b lie row_bytes apart.

    Measured on an H200 (docs/notes/linear.md): of rows that begin between two sectors of the L2, or
    for several rows of a between two pairs of sectors, these bodies read at 60 to 90 % of the speed
    of tensor copies.
    """
    return m <= 4 and row_bytes % (32 if m == 1 else 64) == 0


def small_m_choices(
    cubin: str, compute_capability: tuple[int, int], m: int, n: int, num_sms: int,
    num_splits: int = 1, names: Sequence[str] = SMALL_M,
) -> Iterator[TileChoice]:  # fmt: skip
    """The launches of the bodies of few rows, in the order of `names`."""
    for name in names:
        block, shared_bytes, sizes = _stated(cubin, name, compute_capability)
        if m > sizes["block_m"] or (name == "m8_deep" and not has_wgmma(compute_capability)):
            continue
        tiles = -(-n // sizes["block_n"])
        sums = sizes["block_m"] * sizes["block_n"]
        yield TileChoice(
            cubin,
            name,
            (min(tiles, sizes["blocks_per_sm"] * num_sms), num_splits, 1),
            block,
            shared_bytes,
            num_partials=num_splits * tiles * sums if num_splits > 1 else 0,
        )


def portable_choices(
    cubin: str, compute_capability: tuple[int, int], row_tiles: Callable[[int], int], n: int,
    num_splits: int = 1,
) -> Iterator[TileChoice]:  # fmt: skip
    """The launches of the bodies with mma.sync; row_tiles: of so many rows each."""
    for name in PORTABLE:
        block, shared_bytes, sizes = _stated(cubin, name, compute_capability)
        tiles = row_tiles(sizes["block_m"]) * -(-n // sizes["block_n"])
        sums = sizes["block_m"] * sizes["block_n"]
        yield TileChoice(
            cubin,
            name,
            (tiles, num_splits, 1),
            block,
            shared_bytes,
            num_partials=num_splits * tiles * sums if num_splits > 1 else 0,
        )


def groups_of(rows: int) -> tuple[int, ...]:
    """The groups of rows of tiles that `kernel-hub tune` measures."""
    return (8,) if rows <= 1024 else (4, 8, 16)
