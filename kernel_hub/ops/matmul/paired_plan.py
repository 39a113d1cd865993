"""Which body of swiglu_linear and qkv_linear computes a product: pure functions of sizes.

Both take the rows of b in groups of 16 (csrc/include/kernel_hub/paired_linear*.cuh).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ...tuning import Gpu, Row, Table
from ..core.device import capability_of, has_wgmma, mma_stages

GROUP_ROWS = 16
BLOCK_K = 64  # elements of k in a box of the Hopper bodies: 128 bytes, the span of the swizzle
_TILE_N, _TILE_K, _TILE_THREADS, _BLOCKS_AN_SM = 128, 32, 128, 2  # matmul/paired/portable.cuh
_WARPS = 8  # matmul/paired/small_m.cuh
# name, tiles of 8 rows of a, stages, slices of 32 elements of k a chunk, blocks a multiprocessor
_SMALL_M = (("m8_deep", 1, 4, 4, 1), ("m8", 1, 3, 2, 2), ("m16", 2, 2, 2, 2))
# Of reading weights and starting a kernel, in microseconds.
_BYTES_A_US, _START_US = 4.2e6, 3.5


@dataclass(frozen=True, slots=True)
class Choice:
    """One launch; `hopper` is None where pointers are passed in place of tensor maps."""

    cubin: str
    variant: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    hopper: Hopper | None = None
    group: int = 1  # rows of tiles that are walked together


@dataclass(frozen=True, slots=True)
class Hopper:
    """A variant of a body on Hopper; the fields are those of its Config, and what it costs.

    step_us, tile_us: microseconds a step of BLOCK_K, and a tile.
    """

    swaps: bool  # the rows of the product are the rows of b
    consumers: int
    pieces: int
    piece_n: int
    stages: int
    cluster: int
    splits: int  # blocks of a cluster that share k
    min_blocks: int
    step_us: float
    tile_us: float

    @property
    def name(self) -> str:
        """As it is exported, without op and dtype."""
        name = f"{self.block_m}x{self.block_n}_c{self.cluster}1"
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
    def a_box_rows(self) -> int:
        """Rows of a in one copy."""
        return self.block_n // self.cluster if self.swaps else self.block_m

    @property
    def b_share(self) -> int:
        """Rows of b that one block of a cluster fetches for each step."""
        return self.block_m if self.swaps else self.block_n // self.cluster

    @property
    def shared_bytes(self) -> int:
        """The ring, and two barriers a stage."""
        return self.stages * ((self.block_m + self.block_n) * 2 * BLOCK_K + 16)

    def clusters(self, m: int, n: int) -> int:
        """Clusters' worth of tiles."""
        rows, columns = (n, m) if self.swaps else (m, n)
        return -(-rows // (self.block_m * self.cluster)) * -(-columns // self.block_n)

    def clusters_at_once(self, num_sms: int) -> int:
        """Clusters that a persistent grid has."""
        return max(1, num_sms * self.min_blocks // (self.cluster * self.splits))

    def cost_us(self, num_sms: int, m: int, n: int, k: int) -> float | None:
        """Microseconds it is expected to take; None where it does not apply."""
        least_k = BLOCK_K * self.splits if self.splits > 1 else 1
        if (self.swaps and m > self.block_n) or k < least_k:
            return None
        waves = -(-self.clusters(m, n) // self.clusters_at_once(num_sms))
        steps = -(-k // (BLOCK_K * self.splits))
        busy = waves * (self.step_us * steps + self.tile_us)
        memory = 2 * (n * k + m * k + m * n) / _BYTES_A_US + _START_US
        return max(busy, memory) + 0.01 * busy


# What csrc/<op>_sm90.cu exports.
HOPPER: dict[str, tuple[Hopper, ...]] = {
    "swiglu_linear": (
        Hopper(False, 2, 1, 256, 4, 2, 1, 1, 0.648, 2.6),
        Hopper(False, 2, 2, 160, 4, 2, 1, 1, 0.8, 2.8),
        Hopper(False, 2, 1, 224, 5, 2, 1, 1, 0.595, 2.4),
        Hopper(False, 2, 1, 128, 6, 2, 1, 1, 0.375, 2.8),
        Hopper(True, 1, 1, 16, 10, 1, 1, 2, 0.2, 3.2),
        Hopper(True, 1, 1, 32, 8, 1, 1, 2, 0.2, 3.3),
        Hopper(True, 1, 1, 64, 6, 1, 1, 2, 0.24, 3.4),
    ),
    "qkv_linear": (
        Hopper(False, 2, 1, 256, 4, 2, 1, 1, 0.648, 3.5),
        Hopper(False, 2, 2, 160, 4, 2, 1, 1, 0.81, 3.8),
        Hopper(False, 2, 1, 192, 5, 2, 1, 1, 0.525, 3.2),
        Hopper(False, 2, 1, 128, 7, 2, 1, 1, 0.375, 3.2),
        Hopper(True, 1, 1, 16, 10, 1, 1, 2, 0.2, 3.2),
        Hopper(True, 1, 1, 16, 10, 1, 4, 2, 0.2, 4.5),
        Hopper(True, 1, 1, 32, 8, 1, 1, 2, 0.2, 3.3),
        Hopper(True, 1, 1, 32, 8, 1, 4, 2, 0.2, 4.6),
        Hopper(True, 1, 1, 64, 13, 1, 1, 1, 0.22, 3.6),
        Hopper(True, 1, 1, 64, 13, 1, 2, 1, 0.22, 4.6),
        Hopper(True, 1, 1, 64, 13, 1, 4, 1, 0.22, 5.0),
    ),
}


def hopper_choice(op: str, variant: Hopper, num_sms: int, m: int, n: int, group: int = 8) -> Choice:
    """The launch of a variant on Hopper; n: rows of b in whole groups."""
    clusters = variant.clusters(m, n)
    if variant.splits == 1:  # those that share k take one tile each
        clusters = min(clusters, variant.clusters_at_once(num_sms))
    return Choice(
        f"{op}_sm90",
        variant.name,
        (clusters * variant.cluster * variant.splits, 1, 1),
        (128 * (variant.consumers + 1), 1, 1),
        variant.shared_bytes,
        variant,
        group,
    )


def portable_choices(
    op: str, compute_capability: tuple[int, int], num_sms: int, m: int, n: int
) -> Iterator[Choice]:
    """The launches of every portable body that applies, the likeliest of few rows first."""
    for name, columns, stages, slices, blocks in _SMALL_M:
        if m <= 8 * columns and (name != "m8_deep" or has_wgmma(compute_capability)):
            ring = _WARPS * stages * slices * (2 + columns) * 512
            buffers = 2 * _WARPS * 4 * columns * 32 * 4
            grid = min(n // GROUP_ROWS, blocks * num_sms)
            yield Choice(op, name, (grid, 1, 1), (32 * _WARPS, 1, 1), ring + buffers)
    stages = mma_stages(compute_capability)
    for block_m in (128, 64):
        tiles = -(-m // block_m) * -(-n // _TILE_N)
        shared = stages * (block_m + _TILE_N) * _TILE_K * 2
        block = (_TILE_THREADS, 1, 1)
        yield Choice(op, f"{block_m}x{_TILE_N}", (tiles, 1, 1), block, shared)


def _choose_portable(
    op: str, compute_capability: tuple[int, int], num_sms: int, m: int, n: int
) -> Choice:
    choices = list(portable_choices(op, compute_capability, num_sms, m, n))
    if m <= 16:
        return choices[0]

    def cost(choice: Choice) -> float:
        # The half tile reads b as often for half the work.
        waves = -(-choice.grid[0] // (_BLOCKS_AN_SM * num_sms))
        return waves * (0.6 if choice.variant.startswith("64") else 1.0)

    return min(choices, key=cost)


@functools.lru_cache(maxsize=4096)
def choose(op: str, gpu: Gpu, m: int, n: int, k: int, has_maps: bool) -> Choice:
    """The launch for m rows of a and n rows of b, in whole groups of 16.

    What was measured, else what is expected. has_maps: the layout of a and b is one that tensor
    maps describe.
    """
    capability, num_sms = gpu.compute_capability, gpu.num_sms
    row = TABLES[op].lookup(gpu, m, n=n, k=k)
    if row is not None:
        variant = _hopper(op, row.variant)
        if variant is None:
            applying = portable_choices(op, capability, num_sms, m, n)
            return next(choice for choice in applying if choice.variant == row.variant)
        if has_maps:
            return hopper_choice(op, variant, num_sms, m, n, row.numbers.get("group", 8))
    if not has_wgmma(capability) or k == 0 or not has_maps or m <= 4:
        return _choose_portable(op, capability, num_sms, m, n)
    costs = {variant: variant.cost_us(num_sms, m, n, k) for variant in HOPPER[op]}
    known = {variant: cost for variant, cost in costs.items() if cost is not None}
    return hopper_choice(op, min(known, key=known.__getitem__), num_sms, m, n)


def _hopper(op: str, name: str) -> Hopper | None:
    return next((variant for variant in HOPPER[op] if variant.name == name), None)


def _check(op: str, row: Row, arch: str, m: int, *, n: int, k: int) -> str:
    """'' or why this row of a table cannot be."""
    capability = capability_of(arch)
    variant = _hopper(op, row.variant) if has_wgmma(capability) else None
    if variant is not None:
        fits = not variant.swaps or m <= variant.block_n
        least = BLOCK_K * variant.splits if variant.splits > 1 else 1
        expected = f"it takes at most {variant.block_n} rows, and k of at least {least}"
        return "" if fits and k >= least else expected
    names = [choice.variant for choice in portable_choices(op, capability, 132, m, n)]
    return "" if row.variant in names else f"on {arch} with {m} rows there are {', '.join(names)}"


TABLES = {
    op: Table(
        op,
        key=("n", "k"),
        bucket="m",
        cubins=(op, f"{op}_sm90"),
        numbers={"group": (1, 64)},
        check=functools.partial(_check, op),
    )
    for op in HOPPER
}
for _table in TABLES.values():
    _table.on_change(choose.cache_clear)


def candidates(op: str, gpu: Gpu, m: int, *, n: int, k: int) -> Iterator[Row]:
    """Every launch that `kernel-hub tune` measures; tiles of mma.sync only where wgmma is not."""
    names = ["m8_deep", "m8", "m16"]
    if has_wgmma(gpu.compute_capability):
        groups = (8,) if m <= 1024 else (4, 8, 16)
        for variant in HOPPER[op]:
            for group in groups:
                row = Row(variant.name, {"group": group})
                if not _check(op, row, gpu.arch, m, n=n, k=k):
                    yield row
    else:
        names += [f"128x{_TILE_N}", f"64x{_TILE_N}"]
    rows = (Row(name, {}) for name in names)
    yield from (row for row in rows if not _check(op, row, gpu.arch, m, n=n, k=k))
