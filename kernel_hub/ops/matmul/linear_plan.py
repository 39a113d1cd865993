"""Which body of linear computes a product, and its launch shape: pure functions of sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ...tuning import Gpu, Row, Table
from ..core.device import capability_of, has_wgmma, mma_stages

BLOCK_K = 64  # elements of k in a box of linear_sm90.cu: 128 bytes, the span of the swizzle
BOX_ROWS = 64  # of out, in a box on its way out (block_n where swapped); it has BLOCK_K columns
_BOX_BYTES = BOX_ROWS * BLOCK_K * 2
# csrc/matmul/linear.cu
_PORTABLE_N, _PORTABLE_K, _PORTABLE_THREADS, _BLOCKS_AN_SM = 128, 32, 128, 2
# csrc/matmul/linear_small_m.cu
_WARPS, _CHUNK = 8, 64
MAX_SPLIT_TILES = 4096  # more tiles than that fill any GPU without sharing k
# name, tiles of 8 rows of a, stages, slices of 32 elements of k a chunk, blocks a multiprocessor
_SMALL_M = (("m8", 1, 3, 2, 2), ("m8_deep", 1, 4, 4, 1), ("m16", 2, 2, 2, 2))


@dataclass(frozen=True, slots=True)
class Choice:
    """One launch. boxes: rows of the two tensor maps' boxes, or None where pointers are passed."""

    cubin: str
    variant: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    boxes: tuple[int, int] | None = None
    swaps: bool = False  # the rows of the product are the rows of b
    out_box_rows: int = 0  # of the boxes in which results leave; 0: they leave from registers
    group: int = 1
    num_partials: int = 0
    overlaps: bool = True  # with the end of the launch before, where the kernel waits for it


@dataclass(frozen=True, slots=True)
class Hopper:
    """A variant of linear_sm90.cu; the fields are those of its Config."""

    sharing: str  # 'together' or 'swapped'
    consumers: int
    pieces: int
    piece_n: int
    stages: int
    cluster_m: int
    cluster_n: int
    splits: int
    boxes: int
    min_blocks: int

    @property
    def name(self) -> str:
        """As it is exported, without op and dtype."""
        name = f"{self.block_m}x{self.block_n}_c{self.cluster_m}{self.cluster_n}"
        if self.sharing != "together":
            name = f"{self.sharing}_{name}"
        name += f"_k{self.splits}" if self.splits > 1 else ""
        return name + ("_b2" if self.min_blocks == 2 else "")

    @property
    def swaps(self) -> bool:
        """Whether the rows of the product are the rows of b."""
        return self.sharing == "swapped"

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
    def shared_bytes(self) -> int:
        """The ring, the boxes, two barriers a stage, and the bias of each consumer's tile."""
        stage = (self.block_m + self.block_n) * 2 * BLOCK_K + 16
        bias = 0 if self.swaps or self.splits > 1 else self.consumers * self.block_n * 2
        return self.stages * stage + self.consumers * self.boxes * _BOX_BYTES + bias

    def tiles(self, m: int, n: int) -> tuple[int, int]:
        """Clusters' worth of tiles along the rows and the columns of the product."""
        rows, columns = (n, m) if self.swaps else (m, n)
        return (
            -(-rows // (self.block_m * self.cluster_m)),
            -(-columns // (self.block_n * self.cluster_n)),
        )

    def clusters_at_once(self, num_sms: int) -> int:
        """Clusters that a persistent grid has."""
        return max(1, num_sms * self.min_blocks // self.cluster_size)


# What csrc/matmul/linear_sm90.cu exports, and which of it with fp32 results too.
HOPPER: dict[str, Hopper] = {
    variant.name: variant
    for variant in (
        Hopper("together", 2, 1, 256, 4, 2, 1, 1, 2, 1),
        Hopper("together", 2, 2, 160, 3, 2, 1, 1, 3, 1),
        Hopper("together", 2, 1, 224, 4, 2, 1, 1, 2, 1),
        Hopper("together", 2, 1, 192, 4, 2, 1, 1, 2, 1),
        Hopper("together", 2, 1, 160, 5, 2, 1, 1, 2, 1),
        Hopper("together", 2, 1, 128, 6, 2, 1, 1, 2, 1),
        Hopper("together", 2, 1, 96, 7, 2, 1, 1, 1, 1),
        Hopper("together", 2, 1, 64, 8, 2, 1, 1, 1, 1),
        Hopper("together", 2, 1, 128, 6, 1, 1, 2, 0, 1),
        Hopper("swapped", 1, 1, 16, 10, 1, 1, 1, 1, 2),
        Hopper("swapped", 1, 1, 16, 11, 1, 1, 2, 0, 2),
        Hopper("swapped", 1, 1, 32, 8, 1, 1, 1, 1, 2),
        Hopper("swapped", 1, 1, 32, 9, 1, 1, 2, 0, 2),
        Hopper("swapped", 1, 1, 64, 6, 1, 1, 1, 1, 2),
        Hopper("swapped", 1, 1, 64, 13, 1, 1, 1, 1, 1),
        Hopper("swapped", 1, 1, 64, 13, 1, 1, 2, 0, 1),
        Hopper("swapped", 1, 1, 128, 8, 1, 1, 1, 2, 1),
        Hopper("swapped", 1, 1, 128, 9, 1, 1, 2, 0, 1),
        Hopper("swapped", 2, 1, 128, 6, 2, 1, 1, 2, 1),
    )
}
HOPPER_FP32 = ("128x256_c21", "128x128_c21", "swapped_64x16_c11_b2", "swapped_64x64_c11_b2")
# Of reading weights and starting a kernel, in microseconds.
_BYTES_A_US, _START_US = 4.2e6, 3.5


def hopper_choice(name: str, num_sms: int, m: int, n: int, k: int, group: int = 8) -> Choice:
    """The launch of a variant of linear_sm90.cu."""
    variant = HOPPER[name]
    tiles_m, tiles_n = variant.tiles(m, n)
    clusters = tiles_m * tiles_n
    # Blocks of few rows that begin early take places unevenly where there is not one for each.
    overlaps = not variant.swaps or clusters * variant.cluster_size <= num_sms
    if variant.splits == 1:  # those that share k take one tile each
        clusters = min(clusters, variant.clusters_at_once(num_sms))
    return Choice(
        "linear_sm90",
        name,
        (clusters * variant.cluster_size, 1, 1),
        (128 * (variant.consumers + 1), 1, 1),
        variant.shared_bytes,
        (variant.block_m // variant.cluster_n, variant.block_n // variant.cluster_m),
        variant.swaps,
        (variant.block_n if variant.swaps else BOX_ROWS) if variant.boxes else 0,
        group,
        overlaps=overlaps,
    )


def hopper_cost(name: str, num_sms: int, m: int, n: int, k: int) -> float | None:
    """Microseconds a variant is expected to take; None where it does not apply."""
    variant = HOPPER[name]
    steps = -(-k // BLOCK_K)
    if steps < variant.splits or (variant.swaps and m > variant.block_n):
        return None
    cost = TABLE.costs("sm90")[name]
    tiles_m, tiles_n = variant.tiles(m, n)
    waves = -(-tiles_m * tiles_n // variant.clusters_at_once(num_sms))
    busy = waves * (cost["step_us"] * -(-steps // variant.splits) + cost["tile_us"])
    memory = 2 * (n * k + m * k + m * n) / _BYTES_A_US + _START_US
    return max(busy, memory) + 0.01 * busy


def portable_choices(
    compute_capability: tuple[int, int], m: int, n: int, k: int, num_splits: int, num_sms: int = 132
) -> Iterator[Choice]:
    """The launches of every portable body that applies, with k shared by `num_splits` blocks."""
    for name, columns, stages, slices, blocks in _SMALL_M:
        if m > 8 * columns or (name == "m8_deep" and not has_wgmma(compute_capability)):
            continue
        tiles = -(-n // 16)
        sums = 4 * columns * 32
        ring = _WARPS * stages * slices * (2 + columns) * 512
        yield Choice(
            "linear_small_m",
            name,
            (min(tiles, blocks * num_sms), num_splits, 1),
            (32 * _WARPS, 1, 1),
            ring + 2 * _WARPS * sums * 4,
            num_partials=num_splits * tiles * sums if num_splits > 1 else 0,
        )
    stages = mma_stages(compute_capability)
    for block_m in (128, 64):
        tiles = -(-m // block_m) * -(-n // _PORTABLE_N)
        sums = block_m * _PORTABLE_N
        yield Choice(
            "linear",
            f"{block_m}x{_PORTABLE_N}",
            (tiles, num_splits, 1),
            (_PORTABLE_THREADS, 1, 1),
            stages * (block_m + _PORTABLE_N) * _PORTABLE_K * 2,
            num_partials=num_splits * tiles * sums if num_splits > 1 else 0,
        )


def _choose_portable(
    compute_capability: tuple[int, int], num_sms: int, m: int, n: int, k: int
) -> Choice:
    slots = _BLOCKS_AN_SM * num_sms
    if m <= 16:
        tiles, chunks = -(-n // 16), -(-k // _CHUNK)
        # Each warp wants several chunks, and a tile's shares are worth adding up only to fill
        # the GPU.
        splits = max(1, min(slots // tiles, chunks // (4 * _WARPS)))
        return next(portable_choices(compute_capability, m, n, k, splits, num_sms))
    steps = -(-k // _PORTABLE_K)
    best: tuple[float, Choice] | None = None
    for splits in (1, 2, 3, 4, 6, 8):
        if splits > 1 and steps < 16 * splits:
            break
        for choice in portable_choices(compute_capability, m, n, k, splits, num_sms):
            if splits > 1 and choice.grid[0] > MAX_SPLIT_TILES:
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
    compute_capability: tuple[int, int],
    num_sms: int,
    m: int,
    n: int,
    k: int,
    is_wide: bool,
    gpu_name: str = "",
) -> Choice:
    """The launch for out (m, n) = a (m, k) b (n, k)^T: what was measured, else what is expected.

    is_wide: out is fp32 and a is not. gpu_name: whose file of `kernel-hub tune` counts.
    """
    if not is_wide:
        row = TABLE.lookup(Gpu(compute_capability, num_sms, gpu_name), m, n=n, k=k)
        if row is not None:
            return _measured(row, compute_capability, num_sms, m, n, k)
    if not has_wgmma(compute_capability) or k == 0:
        return _choose_portable(compute_capability, num_sms, m, n, k)
    if m <= 4:
        return _choose_portable(compute_capability, num_sms, m, n, k)
    names = HOPPER_FP32 if is_wide else tuple(HOPPER)
    costs = {name: hopper_cost(name, num_sms, m, n, k) for name in names}
    known = {name: cost for name, cost in costs.items() if cost is not None}
    return hopper_choice(min(known, key=known.__getitem__), num_sms, m, n, k)


def _measured(
    row: Row, compute_capability: tuple[int, int], num_sms: int, m: int, n: int, k: int
) -> Choice:
    if row.variant in HOPPER:
        return hopper_choice(row.variant, num_sms, m, n, k, row.numbers.get("group", 8))
    splits = row.numbers.get("num_splits", 1)
    applying = portable_choices(compute_capability, m, n, k, splits, num_sms)
    return next(choice for choice in applying if choice.variant == row.variant)


def _check(row: Row, arch: str, m: int, *, n: int, k: int) -> str:
    """'' or why this row of a table cannot be."""
    capability = capability_of(arch)
    hopper = HOPPER.get(row.variant) if has_wgmma(capability) else None
    if hopper is not None:
        if hopper.swaps and m > hopper.block_n:
            return f"it takes at most {hopper.block_n} rows"
        return "" if k >= BLOCK_K * hopper.splits else f"it shares k, and {k} is too small"
    splits = row.numbers.get("num_splits", 1)
    if k < 1 or n < 1 or splits > max(1, k // _CHUNK):
        return f"k = {k} in {splits} shares"
    if splits > 1 and -(-n // 16) * -(-m // 64) > MAX_SPLIT_TILES:
        return "too many tiles to share k"
    names = [choice.variant for choice in portable_choices(capability, m, n, k, splits)]
    return "" if row.variant in names else f"on {arch} with {m} rows there are {', '.join(names)}"


TABLE = Table(
    "linear",
    key=("n", "k"),
    bucket="m",
    cubins=("linear", "linear_small_m", "linear_sm90"),
    numbers={"group": (1, 64), "num_splits": (1, 64)},
    check=_check,
)
TABLE.on_change(choose.cache_clear)


def candidates(gpu: Gpu, m: int, *, n: int, k: int) -> Iterator[Row]:
    """Every launch that `kernel-hub tune` measures.

    Tiles of linear.cu are left out on Hopper: wgmma is three times as fast.
    """
    rows = []
    if has_wgmma(gpu.compute_capability):
        groups = (8,) if m <= 1024 else (4, 8, 16)
        rows += [Row(name, {"group": group}) for name in HOPPER for group in groups]
    names = [name for name, *_ in _SMALL_M]
    if not has_wgmma(gpu.compute_capability):
        names += [f"128x{_PORTABLE_N}", f"64x{_PORTABLE_N}"]
    rows += [Row(name, {"num_splits": splits}) for name in names for splits in (1, 2, 3, 4, 6, 8)]
    yield from (row for row in rows if not _check(row, gpu.arch, m, n=n, k=k))
