"""Which body of linear computes a product of fp32, and its launch: pure functions of sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..core.device import launch_facts
from . import tiles
from .tiles import TileChoice

TILES = ("96x128", "32x128")
_FEW_ROWS = ("m8", "m16")  # the variants of csrc/matmul/linear_small_m.cu
_CHUNK = 32  # elements of k of one of its warps
_SPLITS = (1, 2, 3, 4, 6, 8)
_MAX_SPLIT_TILES = 4096
# What a tile's step of k takes, and its start and its end, alone or with others that share its k;
# in steps of 96 x 128.
_STEP = {"96x128": 1.0, "32x128": 0.4}
_ALONE, _SHARED = 10, 30


def choices(
    compute_capability: tuple[int, int], num_sms: int, m: int, n: int, num_splits: int,
    is_aligned: bool = True,
) -> Iterator[TileChoice]:  # fmt: skip
    """The launches of every body that applies, with k shared by `num_splits` blocks.

    is_aligned: rows of a and b begin at multiples of 16 bytes.
    """
    if is_aligned:
        yield from tiles.small_m_choices(
            "linear_small_m", compute_capability, m, n, num_sms, num_splits, _FEW_ROWS
        )
    for name in TILES:
        block, shared_bytes, sizes = launch_facts(
            "linear_fp32", f"linear_fp32_{name}", compute_capability
        )
        block_m, block_n = sizes["block_m"], sizes["block_n"]
        num_tiles = -(-m // block_m) * -(-n // block_n)
        yield TileChoice(
            "linear_fp32", name, (num_tiles, num_splits, 1), block, shared_bytes, overlaps=False,
            num_partials=num_splits * num_tiles * block_m * block_n if num_splits > 1 else 0,
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def choose(
    compute_capability: tuple[int, int], num_sms: int, m: int, n: int, k: int,
    is_aligned: bool = True, batch_invariant: bool = False,
) -> TileChoice:  # fmt: skip
    """The launch for out (m, n) = a (m, k) b (n, k)^T; batch_invariant: in the order of k."""
    sizes = launch_facts("linear_fp32", f"linear_fp32_{TILES[0]}", compute_capability).sizes
    slots = sizes["blocks_per_sm"] * num_sms
    if is_aligned and m <= 16 and not batch_invariant:
        warps = tiles.small_m_warps("linear_small_m")
        splits = max(1, min(slots // -(-n // 16), -(-k // _CHUNK) // (4 * warps)))
        return next(choices(compute_capability, num_sms, m, n, splits))
    steps = -(-k // sizes["block_k"])
    best: tuple[float, TileChoice] | None = None
    for splits in (1,) if batch_invariant else _SPLITS:
        if splits > 1 and steps < 16 * splits:
            break
        for choice in choices(compute_capability, num_sms, m, n, splits, False):
            if splits > 1 and choice.grid[0] > _MAX_SPLIT_TILES:
                continue
            waves = -(-choice.grid[0] * splits // slots)
            around = _ALONE if splits == 1 else _SHARED
            cost = waves * (-(-steps // splits) * _STEP[choice.variant] + around)
            if best is None or cost < best[0]:
                best = cost, choice
    assert best is not None
    return best[1]
