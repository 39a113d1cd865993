"""Which body of swiglu_linear and qkv_linear computes a product: pure functions of sizes.

Both take the rows of b in groups of 16 (csrc/matmul/paired).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ...collection.entries import Lazy
from ...tuning import Gpu, Row, Table
from ..core.device import capability_of, has_wgmma
from . import tiles
from .tiles import BLOCK_K, Tile, TileChoice

GROUP_ROWS = 16
# Of reading weights and starting a kernel, in microseconds.
_BYTES_A_US, _START_US = 4.2e6, 3.5


@dataclass(frozen=True, slots=True)
class PairedTile(Tile):
    """A variant of an sm90 body, and what it costs.

    step_us, tile_us: microseconds a step of BLOCK_K, and a tile.
    """

    step_us: float
    tile_us: float

    @property
    def a_box_rows(self) -> int:
        """Rows of a in one copy."""
        return self.row_boxes[self.swaps]

    @property
    def b_share(self) -> int:
        """Rows of b that one block of a cluster fetches for each step."""
        return self.row_boxes[not self.swaps]

    def cost_us(self, num_sms: int, m: int, n: int, k: int) -> float | None:
        """Microseconds it is expected to take; None where it does not apply."""
        least_k = BLOCK_K * self.splits if self.splits > 1 else 1
        if (self.swaps and m > self.block_n) or k < least_k:
            return None
        waves = -(-self.tiles(m, n) // self.clusters_at_once(num_sms))
        steps = -(-k // (BLOCK_K * self.splits))
        busy = waves * (self.step_us * steps + self.tile_us)
        memory = 2 * (n * k + m * k + m * n) / _BYTES_A_US + _START_US
        return max(busy, memory) + 0.01 * busy


# Variants of csrc/matmul/<op>_sm90.cu: (step_us, tile_us).
_COSTS = {
    "swiglu_linear": {
        "128x256_c21": (0.648, 2.6),
        "128x320_c21": (0.8, 2.8),
        "128x224_c21": (0.595, 2.4),
        "128x128_c21": (0.375, 2.8),
        "swapped_64x16_c11_b2": (0.2, 3.2),
        "swapped_64x32_c11_b2": (0.2, 3.3),
        "swapped_64x64_c11_b2": (0.24, 3.4),
    },
    "qkv_linear": {
        "128x256_c21": (0.648, 3.5),
        "128x320_c21": (0.81, 3.8),
        "128x192_c21": (0.525, 3.2),
        "128x128_c21": (0.375, 3.2),
        "swapped_64x16_c11_b2": (0.2, 3.2),
        "swapped_64x16_c11_k4_b2": (0.2, 4.5),
        "swapped_64x32_c11_b2": (0.2, 3.3),
        "swapped_64x32_c11_k4_b2": (0.2, 4.6),
        "swapped_64x64_c11": (0.22, 3.6),
        "swapped_64x64_c11_k2": (0.22, 4.6),
        "swapped_64x64_c11_k4": (0.22, 5.0),
    },
}


def _tiles(op: str, costs: dict[str, tuple[float, float]]) -> tuple[PairedTile, ...]:
    return tuple(PairedTile.stated(f"{op}_sm90", op, name, *cost) for name, cost in costs.items())


HOPPER = Lazy(_COSTS, _tiles)


def hopper_choice(
    op: str, variant: PairedTile, num_sms: int, m: int, n: int, group: int = 8
) -> TileChoice:
    """The launch of a variant on Hopper; n: rows of b in whole groups."""
    grid, block = variant.launch(num_sms, m, n)
    return TileChoice(
        f"{op}_sm90", variant.name, grid, block, variant.shared_bytes, variant.row_boxes,
        variant.swaps, group=group, tile=variant,
    )  # fmt: skip


def portable_choices(
    op: str, compute_capability: tuple[int, int], num_sms: int, m: int, n: int
) -> Iterator[TileChoice]:
    """The launches of every portable body that applies, the likeliest of few rows first."""
    names = ("m8_deep", "m8", "m16")
    yield from tiles.small_m_choices(op, compute_capability, m, n, num_sms, names=names)
    yield from tiles.portable_choices(op, compute_capability, lambda rows: -(-m // rows), n)


def _choose_portable(
    op: str, compute_capability: tuple[int, int], num_sms: int, m: int, n: int
) -> TileChoice:
    choices = list(portable_choices(op, compute_capability, num_sms, m, n))
    if m <= 16:
        return choices[0]

    blocks = tiles.portable_sizes(op, compute_capability)["blocks_per_sm"]

    def cost(choice: TileChoice) -> float:
        # The half tile reads b as often for half the work.
        waves = -(-choice.grid[0] // (blocks * num_sms))
        return waves * (0.6 if choice.variant.startswith("64") else 1.0)

    return min(choices, key=cost)


@functools.lru_cache(maxsize=4096)
def choose(op: str, gpu: Gpu, m: int, n: int, k: int, has_maps: bool) -> TileChoice:
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


def _hopper(op: str, name: str) -> PairedTile | None:
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
        for variant in HOPPER[op]:
            for group in tiles.groups_of(m):
                row = Row(variant.name, {"group": group})
                if not _check(op, row, gpu.arch, m, n=n, k=k):
                    yield row
    else:
        names += tiles.PORTABLE
    rows = (Row(name, {}) for name in names)
    yield from (row for row in rows if not _check(op, row, gpu.arch, m, n=n, k=k))
