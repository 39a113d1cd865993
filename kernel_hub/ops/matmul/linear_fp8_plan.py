"""Which variant of csrc/matmul/linear_fp8_sm90.cu computes a product: pure functions of sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ...collection.entries import Lazy
from ...tuning import Gpu, Row, Table
from ..core.device import SM90, launch_facts
from .tiles import Tile, TileChoice, groups_of

CUBIN = "linear_fp8_sm90"
SCALE_BLOCK = 128  # elements of k, and rows of b, under one scale; also those of k in a stage
_GROUP = 8
# Of reading weights and starting a kernel, in microseconds.
_BYTES_A_US, _START_US = 4.2e6, 3.0


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
    "swapped_64x64_c11_k2",
)
VARIANTS = Lazy(dict.fromkeys(_NAMES), _scaled)


# Those that another body of the same source computes where there are scales of blocks.
WITH_BLOCKS = {name: f"{name}_blocks" for name in ("128x128_c21", "swapped_64x64_c11_b2")}


def applies(name: str, m: int, k: int, is_fast: bool) -> bool:
    """Whether a variant computes such a product. is_fast: sums may stay in the tensor cores."""
    variant = VARIANTS[name]
    if variant.is_fast and not is_fast:
        return False
    if variant.swaps and m > variant.block_n:
        return False
    return -(-k // SCALE_BLOCK) >= variant.splits


def make_choice(
    name: str, num_sms: int, m: int, n: int, has_blocks: bool = False, group: int = _GROUP
) -> TileChoice:
    """The launch of a variant. has_blocks: there are scales of blocks."""
    variant = VARIANTS[name]
    grid, block = variant.launch(num_sms, m, n)
    variant_name = WITH_BLOCKS.get(name, name) if has_blocks else name
    return TileChoice(
        CUBIN, variant_name, grid, block, variant.shared_bytes, variant.row_boxes, variant.swaps,
        variant.out_box_rows, group,
    )  # fmt: skip


def expected_us(name: str, num_sms: int, m: int, n: int, k: int) -> float:
    """Microseconds a variant is expected to take."""
    variant = VARIANTS[name]
    cost = TABLE.costs("sm90")[name]
    steps = -(-k // SCALE_BLOCK)
    waves = -(-variant.tiles(m, n) // variant.clusters_at_once(num_sms))
    busy = waves * (cost["step_us"] * -(-steps // variant.splits) + cost["tile_us"])
    memory = (n * k + m * k + 2 * m * n) / _BYTES_A_US + _START_US
    return max(busy, memory) + 0.01 * busy


@functools.lru_cache(maxsize=4096)
def choose(
    num_sms: int,
    m: int,
    n: int,
    k: int,
    is_fast: bool,
    gpu_name: str = "",
    has_blocks: bool = False,
) -> TileChoice:
    """The launch for out (m, n): what was measured, else what is expected to be fastest.

    is_fast: sums may stay in the tensor cores over all of k. has_blocks: scales are of blocks.
    """
    gpu = Gpu(SM90, num_sms, gpu_name)
    row = TABLE.lookup(gpu, m, n=n, k=k, fast=int(is_fast))
    if row is not None:
        group = row.numbers.get("group", _GROUP)
        return make_choice(row.variant, num_sms, m, n, has_blocks, group)
    names = [name for name in VARIANTS if applies(name, m, k, is_fast)]
    best = min(names, key=lambda name: expected_us(name, num_sms, m, n, k))
    return make_choice(best, num_sms, m, n, has_blocks)


def _check(row: Row, arch: str, m: int, *, n: int, k: int, fast: int) -> str:
    """'' or why this row of a table cannot be."""
    if arch != "sm90":
        return "these kernels are for sm90 alone"
    if row.variant not in VARIANTS:
        return f"there are {', '.join(VARIANTS)}"
    if n < 1 or not applies(row.variant, m, k, bool(fast)):
        return f"it does not apply to m = {m}, n = {n}, k = {k}, fast = {fast}"
    return ""


TABLE = Table(
    "linear_fp8",
    key=("n", "k", "fast"),
    bucket="m",
    cubins=(CUBIN,),
    numbers={"group": (1, 64)},
    check=_check,
)
TABLE.on_change(choose.cache_clear)


def candidates(gpu: Gpu, m: int, *, n: int, k: int, fast: int) -> Iterator[Row]:
    """Every launch that `kernel-hub tune` measures."""
    rows = (Row(name, {"group": group}) for name in VARIANTS for group in groups_of(m))
    yield from (row for row in rows if not _check(row, gpu.arch, m, n=n, k=k, fast=fast))
