"""Which variant of csrc/matmul/linear_fp8_sm90.cu computes a product: pure functions of sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ...collection.entries import Lazy
from ...tuning import Gpu, Row, Table
from ..core.device import SM90, launch_facts
from . import tiles
from .tiles import Cost, Tile, TileChoice

CUBIN = "linear_fp8_sm90"
SCALE_BLOCK = 128  # elements of k, and rows of b, under one scale; also those of k in a stage
_GROUP = 8


@dataclass(frozen=True, slots=True)
class Scaled(Tile):
    """A variant of linear_fp8_sm90.cu."""

    is_fast: bool  # sums stay in the tensor cores


def _scaled(name: str, _: None) -> Scaled:
    facts = launch_facts(CUBIN, f"linear_fp8_bf16_{name}")
    return Scaled.stated(CUBIN, "linear_fp8", name, bool(facts.sizes["fast"]))


# Variants of csrc/matmul/linear_fp8_sm90.cu, each for every dtype of out.
_NAMES = (
    *("128x256_c21_fast", "128x192_c21_fast", "128x128_c21", "128x64_c21", "swapped_64x16_c11_b2"),
    *("swapped_64x16_c11_k2_b2", "swapped_64x64_c11_b2", "swapped_64x64_c11"),
    *("swapped_64x64_c11_k2", "swapped_64x64_c11_k4", "swapped_64x128_c11"),
    *("swapped_64x128_c11_k2", "swapped_128x128_c21", "swapped_128x160_c21"),
    *("swapped_128x160_c21_fast", "swapped_128x192_c21_fast"),
)
VARIANTS = Lazy(dict.fromkeys(_NAMES), _scaled)


# Those that another body of the same source computes where there are scales of blocks.
WITH_BLOCKS = {
    name: f"{name}_blocks"
    for name in ("128x128_c21", "swapped_64x64_c11_b2", "swapped_128x128_c21")
}
WITHOUT_BLOCKS = ("swapped_128x160_c21",)  # sums and factors of so many columns need more registers


def applies(name: str, k: int, is_fast: bool, has_blocks: bool = False) -> bool:
    """Whether a variant computes such a product. is_fast: sums may stay in the tensor cores."""
    variant = VARIANTS[name]
    if (variant.is_fast and not is_fast) or (has_blocks and name in WITHOUT_BLOCKS):
        return False
    return -(-k // SCALE_BLOCK) >= variant.splits


def make_choice(
    name: str, num_sms: int, m: int, n: int, k: int, has_blocks: bool = False,
    group: int = _GROUP, deals: bool = False,
) -> TileChoice:  # fmt: skip
    """The launch of a variant. has_blocks: scales are of blocks; deals: clusters may share k."""
    variant = VARIANTS[name]
    return TileChoice(
        CUBIN, WITH_BLOCKS.get(name, name) if has_blocks else name, block=variant.block,
        shared_bytes=variant.shared_bytes, boxes=variant.row_boxes, swaps=variant.swaps,
        out_box_rows=variant.out_box_rows, group=group,
        **variant.dealt(num_sms, m, n, k, deals),
    )  # fmt: skip


def expected_us(
    name: str, num_sms: int, m: int, n: int, k: int, deals: bool = False, has_blocks: bool = False
) -> float:
    """Microseconds a variant is expected to take."""
    cost = Cost.stated(TABLE.costs("sm90")[name], "blocks_" if has_blocks else "")
    num_bytes = n * k + m * k + 2 * m * n
    return cost.expected_us(VARIANTS[name], num_sms, m, n, k, num_bytes, deals)


@functools.lru_cache(maxsize=4096)
def choose(
    num_sms: int, m: int, n: int, k: int, is_fast: bool, gpu_name: str = "",
    has_blocks: bool = False, batch_invariant: bool = False,
) -> TileChoice:  # fmt: skip
    """The launch for out (m, n): what was measured, else what is expected to be fastest.

    is_fast: sums may stay in the tensor cores over all of k. has_blocks: scales are of blocks.
    batch_invariant: of what adds up in the order of k, and leaves the tensor cores at the same k.
    """
    is_fast = is_fast and not batch_invariant
    gpu = Gpu(SM90, num_sms, gpu_name)
    row = TABLE.lookup(gpu, m, n=n, k=k, fast=int(is_fast))
    if row is not None and applies(row.variant, k, is_fast, has_blocks):
        group, deals = row.numbers.get("group", _GROUP), bool(row.numbers.get("deals", 0))
        if batch_invariant and (deals or VARIANTS[row.variant].splits > 1):
            row = None
    if row is not None and applies(row.variant, k, is_fast, has_blocks):
        return make_choice(row.variant, num_sms, m, n, k, has_blocks, group, deals)
    best = min(
        (expected_us(name, num_sms, m, n, k, deals, has_blocks), name, deals)
        for name in VARIANTS
        if applies(name, k, is_fast, has_blocks)
        for deals in tiles.ways(VARIANTS[name], num_sms, m, n, k, batch_invariant)
    )
    return make_choice(best[1], num_sms, m, n, k, has_blocks, deals=best[2])


def _check(row: Row, arch: str, m: int, *, n: int, k: int, fast: int) -> str:
    """'' or why this row of a table cannot be."""
    if arch != "sm90":
        return "these kernels are for sm90 alone"
    if row.variant not in VARIANTS:
        return f"there are {', '.join(VARIANTS)}"
    if n < 1 or not applies(row.variant, k, bool(fast)):
        return f"it does not apply to n = {n}, k = {k}, fast = {fast}"
    return ""


TABLE = Table(
    "linear_fp8", key=("n", "k", "fast"), bucket="m", cubins=(CUBIN,),
    numbers={"group": (1, 64), "deals": (0, 1)}, check=_check,
)  # fmt: skip
TABLE.on_change(choose.cache_clear)


def candidates(gpu: Gpu, m: int, *, n: int, k: int, fast: int) -> Iterator[Row]:
    """Every launch that `kernel-hub tune` measures."""
    rows = (
        Row(name, {"group": group, "deals": int(deals)})
        for name in VARIANTS
        for deals in tiles.ways(VARIANTS[name], gpu.num_sms, m, n, k)
        for group in tiles.groups_of(m)
    )
    yield from (row for row in rows if not _check(row, gpu.arch, m, n=n, k=k, fast=fast))
