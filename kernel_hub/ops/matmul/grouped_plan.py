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
        return 2 * (rows * (self.k + self.n) + self.active() * self.n * self.k)


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """A variant of grouped_linear_sm90.cu or batched_matmul_sm90.cu as its source states it, and
    the microseconds that a step of 64 elements of k and a tile cost a block."""

    block: tuple[int, int, int]
    shared_bytes: int
    swaps: bool
    consumers: int
    block_m: int  # rows of a block's tile of the product
    block_n: int
    cluster_size: int
    out_box_rows: int
    min_blocks: int
    step_us: float
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

    @property
    def fetched_rows(self) -> float:
        """Rows of boxes that the L2 brings a block for a step of k."""
        # Half of one side comes to both blocks of a pair at once.
        return self.block_m + self.block_n / self.cluster_size

    @property
    def box_rows(self) -> tuple[int, int, int]:
        """Rows of a box of out, a and b."""
        a_rows, b_rows = self.tile
        return self.out_box_rows, a_rows // self.cluster_size, b_rows // self.cluster_size


# Variants of the two cubins: (step_us, tile_us).
_COSTS = {
    "grouped_linear": {
        "128x256_c2": (0.655, 2.4),
        "128x128_c2": (0.355, 1.7),
        "64x128_b2": (0.8, 1.2),
        "swapped_64x16_b2": (0.38, 1.0),
    },
    "batched_matmul": {
        "128x256_c2": (0.655, 2.4),
        "128x256_c2_x4": (0.675, 2.2),
        "128x128": (0.38, 1.2),
        "128x128_c2": (0.37, 1.2),
        "128x64_c2": (0.26, 0.9),
        "128x64_b2": (0.26, 0.9),
        "64x256_b2": (0.38, 1.2),
        "64x192_b2": (0.3, 1.0),
        "64x128_b2": (0.23, 0.8),
        "64x64_b3": (0.15, 0.6),
        "swapped_64x64_b2": (0.42, 1.0),
        "swapped_64x32_b2": (0.4, 1.0),
        "swapped_64x16_b2": (0.38, 1.0),
    },
}
_STATED = ("consumers", "block_m", "block_n", "cluster_m", "box_rows", "blocks_per_sm")


def _tile(op: str, name: str, cost: tuple[float, float]) -> GroupedTile:
    facts = launch_facts(f"{op}_sm90", f"{op}_bf16_{name}")
    more: list[Any] = [*(facts.sizes[field] for field in _STATED), *cost]
    return GroupedTile(facts.block, facts.shared_bytes, bool(facts.sizes["swaps"]), *more)


def _tiles(op: str, costs: dict[str, tuple[float, float]]) -> dict[str, GroupedTile]:
    return {name: _tile(op, name, cost) for name, cost in costs.items()}


HOPPER = Lazy(_COSTS, _tiles)
# Of reading, in microseconds, and of starting clusters.
_BYTES_A_US, _CLUSTER_US = 4.3e6, 1.0
# Rows of 128 bytes that the L2 brings in a microsecond, of what it brings for tiles of 128 x 160;
# the part of a tile's end that another block's product does not hide.
_ROWS_A_US, _HIDDEN_END = 61.5e3, 0.5
# Up to so many rows of a matrix the choice is among what was measured there.
_FEW_ROWS, _OF_FEW_ROWS = 128, ("128x256_c2", "128x256_c2_x4", "128x128")


# A share of k below this costs more in adding up than it gains; csrc/matmul/grouped/walk.cuh knows
# the number of tiles at once of so many products.
_SHARED_K, _COUNTED_PRODUCTS = 2048, 128


def _last_round(variant: GroupedTile, num_sms: int, problem: GroupedProblem) -> tuple[float, bool]:
    """(rounds of tiles that the clusters take, whether two share each of the last round's)."""
    rows, columns = variant.tile
    tiles = problem.row_tiles(rows) * -(-problem.n // columns)
    rounds = tiles / (num_sms * variant.min_blocks)
    shares = variant.pairs and problem.k >= _SHARED_K and 0 < rounds % 1 <= 0.5
    if problem.op == "grouped_linear":
        return rounds, shares and problem.num_products <= _COUNTED_PRODUCTS
    return rounds, shares


def hopper_choice(name: str, num_sms: int, problem: GroupedProblem, group: int = 8) -> TileChoice:
    """The launch of a Hopper variant."""
    variant = HOPPER[problem.op][name]
    rows, columns = variant.tile
    most = problem.most_row_tiles(rows) * -(-problem.n // columns)
    clusters = num_sms * variant.min_blocks // variant.cluster_size
    num_tiles = 0  # that two blocks share, at most
    is_counted = problem.op == "batched_matmul" or problem.num_products <= _COUNTED_PRODUCTS
    if variant.pairs and problem.k >= _SHARED_K and is_counted:
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
    if problem.op == "grouped_linear":
        mean = problem.rows / problem.num_products
        least, most = (20.0, 3.0), 0.75
    else:
        mean, least, most = float(problem.rows), (33.0, 33.0), 2.0
        if problem.rows > _FEW_ROWS:
            return [name for name, x in HOPPER[problem.op].items() if not x.swaps]
    return [
        name
        for name, variant in HOPPER[problem.op].items()
        if (
            mean <= most * variant.block_n
            if variant.swaps
            else mean >= least[variant.block_m == 64]
        )
        and (problem.op == "grouped_linear" or variant.swaps or name in _OF_FEW_ROWS)
    ]


def hopper_cost(name: str, num_sms: int, problem: GroupedProblem) -> float:
    """Microseconds a Hopper variant is expected to take, but for what all take."""
    variant = HOPPER[problem.op][name]
    if problem.op == "batched_matmul" and problem.rows > _FEW_ROWS:
        return _batched_cost(variant, num_sms, problem)
    waves, shares = _last_round(variant, num_sms, problem)
    if variant.min_blocks == 1:
        waves = max(0.6 if shares else 1.0, math.floor(waves) + (0.6 if shares else 1.0))
        step_us = variant.step_us
    else:
        # Two blocks of a multiprocessor slow each other down; experts' tiles are not known exactly.
        step_us = variant.step_us * (0.5 if waves <= 0.5 else 1.0)
        is_exact = problem.op == "batched_matmul" and waves <= 1.0
        waves = 1.0 if is_exact else max(1.0, waves + 0.3)
    busy = waves * (step_us * -(-problem.k // BLOCK_K) + variant.tile_us)
    memory = problem.num_bytes / _BYTES_A_US
    return max(busy, memory) + 0.25 * min(busy, memory) + (_CLUSTER_US if variant.pairs else 0.0)


def _batched_cost(variant: GroupedTile, num_sms: int, problem: GroupedProblem) -> float:
    rows, columns = variant.tile
    steps = -(-problem.k // BLOCK_K)
    tiles = problem.row_tiles(rows) * -(-problem.n // columns)
    waves, shares = _last_round(variant, num_sms, problem)
    rounds = math.floor(waves) + 0.6 if shares else math.ceil(waves)
    # A block's tiles come one after another; blocks of a multiprocessor hide each other's ends.
    alone = rounds * (steps * variant.step_us + variant.tile_us)
    together = tiles / num_sms * (steps * variant.step_us + _HIDDEN_END * variant.tile_us)
    busy = max(alone, together)
    fetched = tiles * steps * variant.fetched_rows / _ROWS_A_US
    memory = problem.num_bytes / _BYTES_A_US
    # Close to the largest one; more where they are alike.
    return float((busy**4 + fetched**4 + memory**4) ** 0.25) + _CLUSTER_US * variant.pairs


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
    compute_capability: tuple[int, int],
    num_sms: int,
    problem: GroupedProblem,
    has_maps: bool,
    gpu_name: str = "",
) -> TileChoice:
    """The launch for a problem: what was measured, else what is expected to be fastest.

    has_maps: tensor maps can describe a and b. gpu_name: whose file of `kernel-hub tune` counts.
    """
    gpu = Gpu(compute_capability, num_sms, gpu_name)
    row = TABLES[problem.op].lookup(
        gpu, problem.rows, num_products=problem.num_products, n=problem.n, k=problem.k
    )
    if row is not None and (has_maps or row.variant not in HOPPER[problem.op]):
        return _measured(row, gpu, problem)
    if has_wgmma(compute_capability) and has_maps and problem.k > 0:
        names = hopper_names(problem)
        name = min(names, key=lambda name: hopper_cost(name, num_sms, problem))
        return hopper_choice(name, num_sms, problem)
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
