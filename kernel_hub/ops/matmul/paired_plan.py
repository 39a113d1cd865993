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
from . import linear_plan, tiles
from .tiles import BLOCK_K, Cost, Tile, TileChoice

GROUP_ROWS = 16


@dataclass(frozen=True, slots=True)
class PairedTile(Tile):
    """A variant of an sm90 body."""

    op: str

    @property
    def a_box_rows(self) -> int:
        """Rows of a in one copy."""
        return self.row_boxes[self.swaps]

    @property
    def is_seven(self) -> bool:
        """Whether a cluster has seven units of 64 rows of b (csrc/matmul/paired/seven.cuh)."""
        return self.swaps and self.block_m > 64 * self.consumers

    @property
    def b_share(self) -> int:
        """Rows of b in one copy: all that one block of a cluster fetches for a step, or a unit."""
        return 64 if self.is_seven else self.row_boxes[not self.swaps]

    def takes(self, m: int, k: int) -> bool:
        """Whether it computes a product of m rows and k columns of a."""
        # qkv_linear finds the places of all tokens of a swapped tile once.
        is_column = self.op == "qkv_linear" or self.block_n < 64 or self.is_seven
        most = self.block_n if is_column else self.most_columns
        return (not self.swaps or m <= most) and -(-k // BLOCK_K) >= self.splits

    def cost_us(self, num_sms: int, m: int, n: int, k: int) -> float:
        """Microseconds it is expected to take."""
        cost = Cost.stated(TABLES[self.op].costs("sm90")[self.name])
        out_columns = n // 2 if self.op == "swiglu_linear" else n
        num_bytes = 2 * (n * k + m * k + m * out_columns)
        return cost.expected_us(self, num_sms, m, n, k, num_bytes, False)


# Variants of csrc/matmul/<op>_sm90.cu.
_NAMES = {
    "swiglu_linear": (
        *("128x256_c21", "128x320_c21", "128x224_c21", "128x128_c21", "128x128_c11"),
        *("swapped_64x16_c11_b2", "swapped_64x16_c11_k4_b2", "swapped_64x32_c11_b2"),
        *("swapped_64x64_c11_b2", "swapped_64x64_c11", "swapped_64x64_c11_k2"),
        *("swapped_64x64_c11_k4", "swapped_64x128_c11", "swapped_64x128_c11_k2"),
        "swapped_112x64_c11_b2",
        *("swapped_128x128_c21", "swapped_128x160_c21", "swapped_128x192_c21"),
        *("swapped_128x200_c21", "swapped_128x224_c21", "swapped_224x208_c21"),
    ),
    "qkv_linear": (
        *("128x256_c21", "128x320_c21", "128x192_c21", "128x128_c21", "128x128_c11"),
        *("swapped_64x16_c11_b2", "swapped_64x16_c11_k4_b2", "swapped_64x32_c11_b2"),
        *("swapped_64x32_c11_k4_b2", "swapped_48x64_c11", "swapped_64x64_c11"),
        *("swapped_64x64_c11_k2", "swapped_64x64_c11_k4", "swapped_64x128_c11"),
    ),
}


def _tiles(op: str, names: tuple[str, ...]) -> tuple[PairedTile, ...]:
    return tuple(PairedTile.stated(f"{op}_sm90", op, name, op) for name in names)


HOPPER = Lazy(_NAMES, _tiles)


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
    op: str, compute_capability: tuple[int, int], num_sms: int, m: int, n: int,
    batch_invariant: bool = False,
) -> TileChoice:  # fmt: skip
    choices = list(portable_choices(op, compute_capability, num_sms, m, n))
    if batch_invariant:
        choices = [choice for choice in choices if choice.variant in tiles.PORTABLE]
    elif m <= 16:
        return choices[0]

    blocks = tiles.portable_sizes(op, compute_capability)["blocks_per_sm"]

    def cost(choice: TileChoice) -> float:
        # The half tile reads b as often for half the work.
        waves = -(-choice.grid[0] // (blocks * num_sms))
        return waves * (0.6 if choice.variant.startswith("64") else 1.0)

    return min(choices, key=cost)


# qkv_linear as a product by linear, then append_kv (qkv_apart.py), where that is quicker.
APART = TileChoice("", "apart", (0, 0, 0), (0, 0, 0), 0)
_APPEND_US, _APPEND_BYTES_A_US = 2.4, 4.6e6  # of append_kv behind a product, out of the L2


def _apart_us(num_sms: int, m: int, n: int, k: int) -> float:
    """Microseconds that both launches are expected to take."""
    product_us = linear_plan.cheapest(num_sms, m, n, k)[0]
    return product_us + _APPEND_US + 2 * 2 * m * n / _APPEND_BYTES_A_US


@functools.lru_cache(maxsize=4096)
def choose(
    op: str, gpu: Gpu, m: int, n: int, k: int, has_maps: bool, may_part: bool = False,
    batch_invariant: bool = False,
) -> TileChoice:  # fmt: skip
    """The launch for m rows of a and n rows of b, in whole groups of 16.

    What was measured, else what is expected. has_maps: the layout of a and b is one that tensor
    maps describe; may_part: APART computes it too. batch_invariant: of what adds up in the order of
    k; APART, which rounds in between, for every m or none.
    """
    capability, num_sms = gpu.compute_capability, gpu.num_sms
    row = TABLES[op].lookup(gpu, m, n=n, k=k)
    if row is not None and not batch_invariant:
        variant = _hopper(op, row.variant)
        if variant is None:
            applying = portable_choices(op, capability, num_sms, m, n)
            return next(choice for choice in applying if choice.variant == row.variant)
        if has_maps:
            return hopper_choice(op, variant, num_sms, m, n, row.numbers.get("group", 8))
    is_hopper = has_wgmma(capability) and k > 0
    may_part = may_part and is_hopper
    is_few = not batch_invariant and tiles.prefers_small_m(m, 2 * k)
    if not is_hopper or not has_maps or is_few:
        # Where there are more than the bodies of few rows take.
        if may_part and (m > 16 or batch_invariant):
            return APART
        return _choose_portable(op, capability, num_sms, m, n, batch_invariant)
    costs = TABLES[op].costs("sm90")  # a variant without figures is taken where it was measured
    taking = (
        variant
        for variant in HOPPER[op]
        if variant.name in costs
        and variant.takes(m, k)
        and (variant.splits == 1 or not batch_invariant)
    )
    cost_us, best = min(
        ((variant.cost_us(num_sms, m, n, k), variant) for variant in taking), key=lambda x: x[0]
    )
    if may_part and not batch_invariant and _apart_us(num_sms, m, n, k) < cost_us:
        return APART
    return hopper_choice(op, best, num_sms, m, n)


def _hopper(op: str, name: str) -> PairedTile | None:
    return next((variant for variant in HOPPER[op] if variant.name == name), None)


def _check(op: str, row: Row, arch: str, m: int, *, n: int, k: int) -> str:
    """'' or why this row of a table cannot be."""
    capability = capability_of(arch)
    variant = _hopper(op, row.variant) if has_wgmma(capability) else None
    if variant is not None:
        return "" if variant.takes(m, k) else f"it does not take m = {m} and k = {k}"
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
