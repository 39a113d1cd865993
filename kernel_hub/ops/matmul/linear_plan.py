"""Which body of linear computes a product, and its launch shape: pure functions of sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ...collection.entries import Lazy
from ...tuning import Gpu, Row, Table
from ..core.device import capability_of, has_wgmma
from . import tiles
from .tiles import BLOCK_K, Cost, Tile, TileChoice

# Long products run at the clock that the card's power allows, and fetching draws it: what a tile
# that fetches twice as much takes more than 128x256_c21, which fetches a row for 128 products of
# rows.
_LONG_FLOPS, _LEAST_FETCHING, _POWER_SHARE = 4e10, 128, 0.04
_CHUNK = 64  # elements of k of a warp, in csrc/matmul/linear_small_m.cu
MAX_SPLIT_TILES = 4096  # more tiles than that fill any GPU without sharing k


# Variants of csrc/matmul/linear_sm90.cu, and which of them have fp32 results too.
_NAMES = (
    "128x256_c21", "128x224_c21", "128x192_c21", "128x160_c21", "128x128_c21", "128x128_c11",
    "128x96_c21", "swapped_64x16_c11_b2", "swapped_64x16_c11_k2_b2", "swapped_64x32_c11_b2",
    "swapped_64x32_c11_k2_b2", "swapped_64x64_c11_b2", "swapped_64x64_c11", "swapped_64x64_c11_k2",
    "swapped_64x64_c11_k4", "swapped_64x128_c11", "swapped_64x128_c11_k2", "swapped_64x128_c11_k4",
    "swapped_64x160_c11_k2", "swapped_64x208_c11_k2", "swapped_64x160_c21", "swapped_64x224_c21",
    "swapped_128x96_c21", "swapped_128x128_c21", "swapped_128x160_c21", "swapped_128x192_c21",
    "swapped_128x200_c21", "swapped_128x224_c21",
)  # fmt: skip
HOPPER = Lazy(dict.fromkeys(_NAMES), lambda name, _: Tile.stated("linear_sm90", "linear", name))
HOPPER_FP32 = (
    "128x256_c21",
    "128x128_c21",
    "swapped_64x16_c11_b2",
    "swapped_64x64_c11_b2",
    "swapped_64x128_c11",
    "swapped_128x224_c21",
)


def hopper_choice(
    name: str, num_sms: int, m: int, n: int, k: int, group: int = 8, deals: bool = False
) -> TileChoice:
    """The launch of a variant of linear_sm90.cu. deals: clusters may share the k of a tile."""
    variant = HOPPER[name]
    dealt = variant.dealt(num_sms, m, n, k, deals)
    # Blocks of few rows that begin early take places unevenly where there is not one for each.
    overlaps = not variant.swaps or dealt["grid"][0] <= num_sms
    return TileChoice(
        "linear_sm90", name, block=variant.block, shared_bytes=variant.shared_bytes,
        boxes=variant.row_boxes, swaps=variant.swaps, out_box_rows=variant.out_box_rows,
        group=group, overlaps=overlaps, tile=variant, **dealt,
    )  # fmt: skip


def hopper_cost(
    name: str, num_sms: int, m: int, n: int, k: int, deals: bool = False, added_bytes: int = 2
) -> float:
    """Microseconds a variant is expected to take. added_bytes: of each element of out and of what
    is added to it."""
    cost, variant = Cost.stated(TABLE.costs("sm90")[name]), HOPPER[name]
    num_bytes = 2 * (n * k + m * k) + added_bytes * m * n
    expected = cost.expected_us(variant, num_sms, m, n, k, num_bytes, deals)
    if 2 * m * n * k >= _LONG_FLOPS:
        expected *= 1 + _POWER_SHARE * (variant.rows_a_product * _LEAST_FETCHING - 1)
    return expected


def cheapest(
    num_sms: int, m: int, n: int, k: int, is_wide: bool = False, has_residual: bool = False,
    batch_invariant: bool = False,
) -> tuple[float, str, bool]:  # fmt: skip
    """(microseconds, variant, whether clusters share the k of its tiles) of what is expected to be
    fastest of linear_sm90.cu. batch_invariant: of what adds up in the order of k."""
    added_bytes = (4 if is_wide else 2) * (1 + has_residual)
    return min(
        (hopper_cost(name, num_sms, m, n, k, deals, added_bytes), name, deals)
        for name in (HOPPER_FP32 if is_wide else HOPPER)
        for deals in tiles.ways(HOPPER[name], num_sms, m, n, k, batch_invariant)
    )


def portable_choices(
    compute_capability: tuple[int, int], m: int, n: int, k: int, num_splits: int, num_sms: int = 132
) -> Iterator[TileChoice]:
    """The launches of every portable body that applies, with k shared by `num_splits` blocks."""
    yield from tiles.small_m_choices(
        "linear_small_m", compute_capability, m, n, num_sms, num_splits
    )
    yield from tiles.portable_choices(
        "linear", compute_capability, lambda rows: -(-m // rows), n, num_splits
    )


def _choose_portable(
    compute_capability: tuple[int, int], num_sms: int, m: int, n: int, k: int,
    batch_invariant: bool = False,
) -> TileChoice:  # fmt: skip
    sizes = tiles.portable_sizes("linear", compute_capability)
    slots = sizes["blocks_per_sm"] * num_sms
    if m <= 16 and not batch_invariant:
        chunks = -(-k // _CHUNK)
        # Each warp wants several chunks, and a tile's shares are worth adding up only to fill
        # the GPU.
        splits = max(
            1, min(slots // -(-n // 16), chunks // (4 * tiles.small_m_warps("linear_small_m")))
        )
        return next(portable_choices(compute_capability, m, n, k, splits, num_sms))
    steps = -(-k // sizes["block_k"])
    best: tuple[float, TileChoice] | None = None
    for splits in (1,) if batch_invariant else (1, 2, 3, 4, 6, 8):
        if splits > 1 and steps < 16 * splits:
            break
        for choice in portable_choices(compute_capability, m, n, k, splits, num_sms):
            if splits > 1 and choice.grid[0] > MAX_SPLIT_TILES:
                continue
            if batch_invariant and choice.variant not in tiles.PORTABLE:
                continue
            # In steps of a 128 x 128 tile; the half tile reads b as often for half the work.
            a_step = 0.6 if choice.variant.startswith("64") else 1.0
            waves = -(-choice.grid[0] * splits // slots)
            cost = waves * (-(-steps // splits) * a_step + (10 if splits == 1 else 30))
            if best is None or cost < best[0]:
                best = cost, choice
    assert best is not None
    return best[1]


@functools.lru_cache(maxsize=4096)
def choose(
    compute_capability: tuple[int, int], num_sms: int, m: int, n: int, k: int, is_wide: bool,
    gpu_name: str = "", has_residual: bool = False, b_stride: int = 0,
    batch_invariant: bool = False,
) -> TileChoice:  # fmt: skip
    """The launch for out (m, n) = a (m, k) b (n, k)^T: what was measured, else what is expected.

    is_wide: out is fp32 and a is not. gpu_name: whose file of `kernel-hub tune` counts.
    has_residual: one is added, which is read too. b_stride: 0 stands for k. batch_invariant: of
    what adds up in the order of k (docs/batch_invariance.md).
    """
    if not is_wide:
        row = TABLE.lookup(Gpu(compute_capability, num_sms, gpu_name), m, n=n, k=k)
        if row is not None and (not batch_invariant or _is_in_order(row)):
            return _measured(row, compute_capability, num_sms, m, n, k)
    if not has_wgmma(compute_capability) or k == 0:
        return _choose_portable(compute_capability, num_sms, m, n, k, batch_invariant)
    if not batch_invariant and tiles.prefers_small_m(m, 2 * (b_stride or k)):
        return _choose_portable(compute_capability, num_sms, m, n, k)
    _, name, deals = cheapest(num_sms, m, n, k, is_wide, has_residual, batch_invariant)
    return hopper_choice(name, num_sms, m, n, k, deals=deals)


def _is_in_order(row: Row) -> bool:
    """Whether a row of a table is of what a batch-invariant plan may take on Hopper."""
    return (
        row.variant in HOPPER
        and HOPPER[row.variant].splits == 1
        and not row.numbers.get("deals", 0)
    )


def _measured(
    row: Row, compute_capability: tuple[int, int], num_sms: int, m: int, n: int, k: int
) -> TileChoice:
    if row.variant in HOPPER:
        group, deals = row.numbers.get("group", 8), bool(row.numbers.get("deals", 0))
        return hopper_choice(row.variant, num_sms, m, n, k, group, deals)
    splits = row.numbers.get("num_splits", 1)
    applying = portable_choices(compute_capability, m, n, k, splits, num_sms)
    return next(choice for choice in applying if choice.variant == row.variant)


def _check(row: Row, arch: str, m: int, *, n: int, k: int) -> str:
    """'' or why this row of a table cannot be."""
    capability = capability_of(arch)
    hopper = HOPPER.get(row.variant) if has_wgmma(capability) else None
    if hopper is not None:
        return "" if k >= BLOCK_K * hopper.splits else f"it shares k, and {k} is too small"
    splits = row.numbers.get("num_splits", 1)
    if k < 1 or n < 1 or splits > max(1, k // _CHUNK):
        return f"k = {k} in {splits} shares"
    if splits > 1 and -(-n // 16) * -(-m // 64) > MAX_SPLIT_TILES:
        return "too many tiles to share k"
    names = [choice.variant for choice in portable_choices(capability, m, n, k, splits)]
    return "" if row.variant in names else f"on {arch} with {m} rows there are {', '.join(names)}"


TABLE = Table(
    "linear", key=("n", "k"), bucket="m", cubins=("linear", "linear_small_m", "linear_sm90"),
    numbers={"group": (1, 64), "num_splits": (1, 64), "deals": (0, 1)}, check=_check,
)  # fmt: skip
TABLE.on_change(choose.cache_clear)


def candidates(gpu: Gpu, m: int, *, n: int, k: int) -> Iterator[Row]:
    """Every launch that `kernel-hub tune` measures.

    Tiles of linear.cu are left out on Hopper: wgmma is three times as fast.
    """
    rows = []
    if has_wgmma(gpu.compute_capability):
        rows += [
            Row(name, {"group": group, "deals": int(deals)})
            for name in HOPPER
            for deals in tiles.ways(HOPPER[name], gpu.num_sms, m, n, k)
            for group in tiles.groups_of(m)
        ]
    names = list(tiles.SMALL_M)
    if not has_wgmma(gpu.compute_capability):
        names += tiles.PORTABLE
    rows += [Row(name, {"num_splits": splits}) for name in names for splits in (1, 2, 3, 4, 6, 8)]
    yield from (row for row in rows if not _check(row, gpu.arch, m, n=n, k=k))
