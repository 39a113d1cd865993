"""Which body computes many products in one launch, and its launch shape: pure functions of sizes.

For grouped_linear and batched_matmul, whose cubins have the same variants.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...collection.entries import Lazy
from ...tuning import Gpu, Row, Table
from ..core.device import SM80, capability_of, has_wgmma, launch_facts
from . import tiles
from .tiles import BLOCK_K, TileChoice

# Tile indices are ints on the device, and a persistent block steps past the last one.
MAX_TILES = 2**29
# Experts are chosen unevenly: (times the mean, part of the experts), a lognormal law of spread 0.7.
_POPULARITY = ((0.27, 0.16), (0.55, 0.34), (1.1, 0.34), (2.42, 0.16))


@dataclass(frozen=True, slots=True)
class GroupedProblem:
    """Sizes of a launch. For grouped products `rows` is of all together, else of each."""

    op: str  # 'grouped_linear' or 'batched_matmul'
    num_products: int
    rows: int
    n: int
    k: int
    out_bytes: int = 2  # of an element

    def most_row_tiles(self, height: int) -> int:
        """Rows of tiles that `height` rows each can make at most."""
        if self.op == "grouped_linear":
            return self.rows // height + min(self.num_products, self.rows)
        return self.num_products * -(-self.rows // height)

    def row_tiles(self, height: int) -> float:
        """The same as expected: offsets are not read on the host."""
        if self.op != "grouped_linear":
            return self.most_row_tiles(height)
        mean = self.rows / self.num_products
        if mean > 16 * height:
            return self.rows / height + 0.5 * self.num_products
        expected = 0.0
        for share, weight in _POPULARITY:
            # Of a Poisson law (a normal one in its place) of this expert's rows.
            about, width = mean * share, math.sqrt(mean * share) + 1e-9
            tiles = -math.expm1(-about)
            for i in range(1, math.ceil((about + 3 * width) / height) + 1):
                tiles += 0.5 * math.erfc((i * height + 0.5 - about) / width / math.sqrt(2))
            expected += weight * tiles
        return self.num_products * expected

    def active(self) -> float:
        """Products that are expected to have rows."""
        if self.op != "grouped_linear":
            return self.num_products
        mean = self.rows / self.num_products
        few = sum(weight * -math.expm1(-mean * share) for share, weight in _POPULARITY)
        return self.num_products * few

    @property
    def num_bytes(self) -> float:
        """Read and written, each once."""
        rows = self.rows * (1 if self.op == "grouped_linear" else self.num_products)
        return rows * (2 * self.k + self.out_bytes * self.n) + 2 * self.active() * self.n * self.k


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """A variant of grouped_linear_sm90.cu or batched_matmul_sm90.cu as its source states it, and
    the microseconds that it costs: tiles.Cost says of what."""

    block: tuple[int, int, int]
    shared_bytes: int
    swaps: bool
    consumers: int
    block_m: int  # rows of a block's tile of the product
    block_n: int
    cluster_size: int
    out_box_rows: int
    min_blocks: int
    start_us: float
    step_us: float
    busy_us: float
    tile_us: float

    @property
    def pairs(self) -> bool:
        """Whether two blocks make a cluster."""
        return self.cluster_size == 2

    @property
    def tile(self) -> tuple[int, int]:
        """Rows of a and of b in a block's tile."""
        sizes = self.block_m, self.block_n
        return (sizes[1], sizes[0]) if self.swaps else sizes

    def clusters_of(self, row_tiles: int, column_tiles: int) -> int:
        """Clusters' worth of tiles of one product."""
        if not self.pairs:
            return row_tiles * column_tiles
        # One below the other, those of an odd last row side by side.
        return row_tiles // 2 * column_tiles + row_tiles % 2 * -(-column_tiles // 2)

    @property
    def box_rows(self) -> tuple[int, int, int]:
        """Rows of a box of out, a and b."""
        a_rows, b_rows = self.tile
        return self.out_box_rows, a_rows // self.cluster_size, b_rows // self.cluster_size


_Figures = tuple[float, float, float, float]
# Variants of the two cubins: (start_us, step_us, busy_us, tile_us).
_COSTS: dict[str, dict[str, _Figures]] = {
    "grouped_linear": {
        "128x256_c2": (1.0, 0.655, 0.0, 2.4),
        "128x128_c2": (1.0, 0.355, 0.0, 1.7),
        "64x128_b2": (0.0, 0.8, 0.0, 1.2),
        "swapped_64x16_b2": (0.0, 0.38, 0.0, 1.0),
    },
    # Fitted on an H200 to 679 batches drawn by lot (docs/notes/grouped_linear.md).
    "batched_matmul": {
        "128x256_c2": (3.89, 0.0664, 0.731, 0.808),
        "128x256_c2_x4": (3.91, 0.543, 0.0838, 0.662),
        "192x128": (3.2, 0.62, 0.02, 0.6),  # not measured: of 128x128, by rows and products
        "128x128": (2.6, 0.437, 0.0201, 0.347),
        "128x128_c2": (2.87, 0.354, 0.00559, 0.435),
        "128x64_c2": (2.6, 0.236, 0.0957, 0.209),
        "128x64_b2": (2.26, 0.282, 0.513, 0.193),
        "64x256_b2": (3.42, 0.0365, 0.932, 0.643),
        "64x192_b2": (3.07, 0.196, 0.393, 0.689),
        "64x128_b2": (2.76, 0.276, 0.275, 0.223),
        "64x64_b3": (2.4, 0.227, 0.422, 0.0389),
        "swapped_64x64_b2": (1.95, 0.0958, 0.569, 0.146),
        "swapped_64x32_b2": (2.15, 0.0606, 0.431, 0.0831),
        "swapped_64x16_b2": (2.02, 0.05, 0.335, 0.17),
    },
}
_STATED = ("consumers", "block_m", "block_n", "cluster_m", "box_rows", "blocks_per_sm")


def _tile(op: str, name: str, cost: _Figures) -> GroupedTile:
    facts = launch_facts(f"{op}_sm90", f"{op}_bf16_{name}")
    more: list[Any] = [*(facts.sizes[field] for field in _STATED), *cost]
    return GroupedTile(facts.block, facts.shared_bytes, bool(facts.sizes["swaps"]), *more)


def _tiles(op: str, costs: dict[str, _Figures]) -> dict[str, GroupedTile]:
    return {name: _tile(op, name, cost) for name, cost in costs.items()}


HOPPER = Lazy(_COSTS, _tiles)
_BYTES_A_US = 4.3e6  # of memory, for grouped_linear
# For batched_matmul; and where rows of out do not begin at sectors of memory: what its bytes cost
# besides, a row of a tile by whether they begin at 16 bytes, and tiles that leave without the copy
# engine (times as much).
_BATCHED_BYTES_A_US, _SECTOR_BYTES, _VEC_BYTES = 3.88e6, 32, 16
_SPLIT, _EDGE_US, _SHIFTED = 0.32, {True: 26e-6, False: 47e-6}, 3.6


# A share of k below this costs more in adding up than it gains; csrc/matmul/grouped/walk.cuh knows
# the number of tiles at once of so many products.
_SHARED_K, _COUNTED_PRODUCTS = 2048, 128


def hopper_choice(
    name: str, num_sms: int, problem: GroupedProblem, group: int = 8, may_share: bool = True
) -> TileChoice:
    """The launch of a Hopper variant; may_share: two blocks may have the k of a tile."""
    variant = HOPPER[problem.op][name]
    rows, columns = variant.tile
    most = problem.most_row_tiles(rows) * -(-problem.n // columns)
    clusters = num_sms * variant.min_blocks // variant.cluster_size
    num_tiles = 0  # that two blocks share, at most
    is_counted = problem.op == "batched_matmul" or problem.num_products <= _COUNTED_PRODUCTS
    if variant.pairs and problem.k >= _SHARED_K and is_counted and may_share:
        num_tiles = clusters // 2 * variant.cluster_size
    clusters = min(clusters, most * (2 if num_tiles else 1))
    return TileChoice(
        f"{problem.op}_sm90", name, (clusters * variant.cluster_size, 1, 1),
        variant.block, variant.shared_bytes, variant.box_rows,
        group=group, num_partials=num_tiles * variant.block_m * variant.block_n,
        num_arrivals=num_tiles * variant.consumers,
    )  # fmt: skip


def hopper_names(problem: GroupedProblem) -> list[str]:
    """The variants that suit the rows of a product, about or exactly."""
    if problem.op == "batched_matmul":
        return [name for name, x in HOPPER[problem.op].items() if _suits(x, problem)]
    mean = problem.rows / problem.num_products
    return [
        name
        for name, variant in HOPPER[problem.op].items()
        if (
            mean <= 0.75 * variant.block_n
            if variant.swaps
            else mean >= (3.0 if variant.block_m == 64 else 20.0)
        )
    ]


def _suits(variant: GroupedTile, problem: GroupedProblem) -> bool:
    """Whether a batch was measured with this variant: a tile is not mostly outside."""
    if variant.swaps:
        return problem.rows <= 2 * variant.block_n
    return problem.rows >= 24 and (variant.block_n <= 64 or variant.block_n < 2 * problem.n)


def hopper_cost(name: str, num_sms: int, problem: GroupedProblem) -> float:
    """Microseconds a Hopper variant is expected to take; grouped_linear: but for what all take."""
    variant = HOPPER[problem.op][name]
    if problem.op == "batched_matmul":
        return _batched_us(variant, num_sms, problem)
    rows, columns = variant.tile
    tiles = problem.row_tiles(rows) * -(-problem.n // columns)
    waves = tiles / (num_sms * variant.min_blocks)
    if variant.min_blocks == 1:
        shares = variant.pairs and problem.k >= _SHARED_K and 0 < waves % 1 <= 0.5
        last = 0.6 if shares and problem.num_products <= _COUNTED_PRODUCTS else 1.0
        waves = max(last, math.floor(waves) + last)
        step_us = variant.step_us
    else:
        # Two blocks of a multiprocessor slow each other down; experts' tiles are not known exactly.
        step_us = variant.step_us * (0.5 if waves <= 0.5 else 1.0)
        waves = max(1.0, waves + 0.3)
    busy = waves * (step_us * -(-problem.k // BLOCK_K) + variant.tile_us)
    memory = problem.num_bytes / _BYTES_A_US
    return max(busy, memory) + 0.25 * min(busy, memory) + variant.start_us


def _batched_us(variant: GroupedTile, num_sms: int, problem: GroupedProblem) -> float:
    rows, columns = variant.tile
    row_tiles, column_tiles = -(-problem.rows // rows), -(-problem.n // columns)
    steps, clusters = -(-problem.k // BLOCK_K), num_sms * variant.min_blocks // variant.cluster_size
    # As tiles.Cost has it; no two share the k of a tile.
    rounds, left = divmod(
        problem.num_products * variant.clusters_of(row_tiles, column_tiles), clusters
    )
    row_bytes = problem.n * problem.out_bytes
    has_map = row_bytes % _VEC_BYTES == 0
    computing = rounds * steps * (variant.step_us + variant.busy_us)
    if left:
        computing += steps * (variant.step_us + variant.busy_us * left / clusters)
    computing += (rounds + (left > 0)) * variant.tile_us * (1.0 if has_map else _SHIFTED)
    reading = problem.num_bytes / _BATCHED_BYTES_A_US
    if row_bytes % _SECTOR_BYTES:
        num_rows = problem.num_products * problem.rows
        reading += _SPLIT * num_rows * row_bytes / _BATCHED_BYTES_A_US
        reading += num_rows * column_tiles * _EDGE_US[has_map]
    brought = problem.rows * column_tiles + problem.n * row_tiles / variant.cluster_size
    bringing = tiles.brought_us(steps * problem.num_products * brought, 2 * problem.k)
    return float(variant.start_us + (computing**4 + reading**4 + bringing**4) ** 0.25)


def portable_choices(
    compute_capability: tuple[int, int], problem: GroupedProblem
) -> Iterator[TileChoice]:
    """The launches of the portable bodies."""
    row_tiles = problem.most_row_tiles
    yield from tiles.portable_choices(problem.op, compute_capability, row_tiles, problem.n)


def _portable_cost(choice: TileChoice, num_sms: int, problem: GroupedProblem) -> float:
    """In steps of a 128 x 128 tile; the half tile reads b as often for half the work."""
    block_m = int(choice.variant.partition("x")[0])
    sizes = tiles.portable_sizes(problem.op, SM80)
    count = problem.row_tiles(block_m) * -(-problem.n // sizes["block_n"])
    waves = math.ceil(count / (sizes["blocks_per_sm"] * num_sms))
    return waves * (-(-problem.k // sizes["block_k"]) * (1.0 if block_m == 128 else 0.6) + 10)


def too_large(problem: GroupedProblem) -> bool:
    """Whether there may be more tiles than the kernels can count, whichever is taken."""
    if problem.op == "grouped_linear":
        row_tiles = problem.rows // 16 + problem.num_products
    else:
        row_tiles = problem.num_products * -(-problem.rows // 16)
    return row_tiles * -(-problem.n // 64) > MAX_TILES


@functools.lru_cache(maxsize=4096)
def choose(
    compute_capability: tuple[int, int], num_sms: int, problem: GroupedProblem, has_maps: bool,
    gpu_name: str = "", batch_invariant: bool = False,
) -> TileChoice:  # fmt: skip
    """The launch for a problem: what was measured, else what is expected to be fastest.

    has_maps: tensor maps can describe a and b. gpu_name: whose file of `kernel-hub tune` counts.
    batch_invariant: of what adds up in the order of k.
    """
    gpu = Gpu(compute_capability, num_sms, gpu_name)
    row = TABLES[problem.op].lookup(
        gpu, problem.rows, num_products=problem.num_products, n=problem.n, k=problem.k
    )
    if (
        row is not None
        and not batch_invariant
        and (has_maps or row.variant not in HOPPER[problem.op])
    ):
        return _measured(row, gpu, problem)
    if has_wgmma(compute_capability) and has_maps and problem.k > 0:
        names = hopper_names(problem)
        name = min(names, key=lambda name: hopper_cost(name, num_sms, problem))
        return hopper_choice(name, num_sms, problem, may_share=not batch_invariant)
    return min(
        portable_choices(compute_capability, problem),
        key=lambda choice: _portable_cost(choice, num_sms, problem),
    )


def _measured(row: Row, gpu: Gpu, problem: GroupedProblem) -> TileChoice:
    # A portable body may have the same name.
    if has_wgmma(gpu.compute_capability) and row.variant in HOPPER[problem.op]:
        return hopper_choice(row.variant, gpu.num_sms, problem, row.numbers.get("group", 8))
    applying = portable_choices(gpu.compute_capability, problem)
    return next(choice for choice in applying if choice.variant == row.variant)


def _check(op: str, row: Row, arch: str, rows: int, *, num_products: int, n: int, k: int) -> str:
    """'' or why this row of a table cannot be."""
    capability = capability_of(arch)
    problem = GroupedProblem(op, num_products, rows, n, k)
    if min(num_products, n, k) < 1 or too_large(problem):
        return "sizes from 1 up that the kernels can count"
    names = [choice.variant for choice in portable_choices(capability, problem)]
    names += HOPPER[op] if has_wgmma(capability) else ()
    return "" if row.variant in names else f"on {arch} there are {', '.join(names)}"


# For grouped_linear the rows are of all products together, for batched_matmul of each.
TABLES = {
    op: Table(
        op,
        key=("num_products", "n", "k"),
        bucket="rows",
        cubins=(op, f"{op}_sm90"),
        numbers={"group": (1, 64)},
        check=functools.partial(_check, op),
    )
    for op in ("grouped_linear", "batched_matmul")
}
for _table in TABLES.values():
    _table.on_change(choose.cache_clear)


def candidates(op: str, gpu: Gpu, rows: int, *, num_products: int, n: int, k: int) -> Iterator[Row]:
    """Every launch that `kernel-hub tune` measures; tiles of mma.sync only where wgmma is not."""
    if has_wgmma(gpu.compute_capability):
        groups = tiles.groups_of(rows)
        yield from (Row(name, {"group": group}) for name in HOPPER[op] for group in groups)
    else:
        problem = GroupedProblem(op, num_products, rows, n, k)
        choices = portable_choices(gpu.compute_capability, problem)
        yield from (Row(choice.variant) for choice in choices)
