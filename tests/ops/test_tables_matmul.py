"""The tables of products in kernel_hub/ops are those of csrc: all that a launch depends on.

Of every row what the plan launches (threads, shared memory, boxes of tensor maps, clusters, room
for sums) against what the source's configuration of that name says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from kernel_figures import HALVES, Rows, Source

from kernel_hub.ops.matmul import grouped_plan as grouped
from kernel_hub.ops.matmul import linear_fp8_plan as linear_fp8
from kernel_hub.ops.matmul import linear_plan as linear
from kernel_hub.ops.matmul import paired_plan as paired
from kernel_hub.ops.matmul import tiles

SMS = 132

# Of the products on Hopper; block_m is of the rows of the product, whosever they are.
CLUSTERS = {
    "threads": "C::kThreads", "min_blocks": "C::kMinBlocks", "swaps": "C::kSwaps",
    "block_m": "C::kBlockM", "block_n": "C::kBlockN", "splits": "C::kSplits",
    "cluster_m": "C::kClusterM", "cluster_n": "C::kClusterN",
    "row_box": "C::kBlockM / C::kClusterN", "column_box": "C::kBlockN / C::kClusterM",
}  # fmt: skip
OUT_BOX = "C::kBoxes == 0 ? 0 : C::kSwaps ? C::kBlockN : 64"
CONFIG = "Config<__VA_ARGS__>"


def _clusters(row: Any, choice: Any) -> dict[str, int]:
    return {
        "threads": choice.block[0], "min_blocks": row.min_blocks, "swaps": row.swaps,
        "block_m": row.block_m, "block_n": row.block_n, "splits": row.splits,
        "shared": choice.shared_bytes,
    }  # fmt: skip


LINEAR_SM90 = Source(
    "linear_sm90", "EXPORT_LINEAR", "NAME", CONFIG,
    CLUSTERS | {
        "shared": "C::kBiasAt + (C::kStagesBias ? 2 * C::kConsumers * C::kBlockN : 0)",
        "out_box": OUT_BOX,
    },
    ("kBlockK", "kBoxColumns"),
)  # fmt: skip


def linear_sm90() -> Rows:
    assert LINEAR_SM90.read()[1] == {"kBlockK": tiles.BLOCK_K, "kBoxColumns": tiles.BOX_ROWS}
    rows: Rows = {}
    for name, row in linear.HOPPER.items():
        choice = linear.hopper_choice(name, SMS, 8, 4096, 4096)
        assert choice.boxes is not None and choice.grid[0] % row.cluster_size == 0
        figures = _clusters(row, choice) | {
            "cluster_m": row.cluster_m, "cluster_n": row.cluster_n, "row_box": choice.boxes[0],
            "column_box": choice.boxes[1], "out_box": choice.out_box_rows,
        }  # fmt: skip
        for token, suffix in itertools.product(HALVES, ("", "_fp32")):
            if not suffix or name in linear.HOPPER_FP32:
                rows[f"linear_{token}_{name}{suffix}"] = figures
    return rows


LINEAR_FP8 = Source(
    "linear_fp8_sm90", "EXPORT_LINEAR_FP8", "NAME", "ScaledConfig<__VA_ARGS__>",
    CLUSTERS | {
        # One room for a variant and for its twin that takes scales of blocks.
        "shared": "C::kSlotsAt + (C::kPromotes ? 4 * C::kStages * C::kSlotFloats : 0)",
        "out_box": OUT_BOX, "is_fast": "!C::kPromotes", "takes_blocks": "C::kTakesBlocks",
        "takes_rows": "C::kTakesRows",
    },
    ("kScaleBlock", "kBoxColumns", "kBoxBytes"),
)  # fmt: skip


def linear_fp8_sm90() -> Rows:
    assert LINEAR_FP8.read()[1] == {
        "kScaleBlock": linear_fp8.SCALE_BLOCK,
        "kBoxColumns": tiles.BOX_ROWS,
        "kBoxBytes": linear_fp8._BOX_BYTES,
    }
    rows: Rows = {}
    for name, row in linear_fp8.VARIANTS.items():
        for has_blocks in (False, True):
            if has_blocks and row.is_fast:
                continue
            choice = linear_fp8.make_choice(name, SMS, 8, 4096, has_blocks)
            assert choice.boxes is not None
            figures = _clusters(row, choice) | {
                "cluster_m": row.cluster_m, "cluster_n": row.cluster_n, "row_box": choice.boxes[0],
                "column_box": choice.boxes[1], "out_box": choice.out_box_rows,
                "is_fast": row.is_fast,
            }  # fmt: skip
            for token in (*HALVES, "fp32"):
                found = rows.setdefault(f"linear_fp8_{token}_{choice.variant}", dict(figures))
                found |= figures
                found.setdefault("takes_blocks", 0)
                found.setdefault("takes_rows", 0)
                found["takes_blocks" if has_blocks else "takes_rows"] = 1
    return rows


def _paired_sm90(op: str) -> Source:
    # No bias and no boxes: the barriers are the last.
    figures = CLUSTERS | {"shared": "C::kBiasAt"}
    return Source(f"{op}_sm90", f"EXPORT_{op.upper()}", "NAME", CONFIG, figures, ("kBlockK",))


def paired_sm90(op: str) -> Rows:
    assert _paired_sm90(op).read()[1] == {"kBlockK": tiles.BLOCK_K}
    rows: Rows = {}
    for row in paired.HOPPER[op]:
        choice = paired.hopper_choice(op, row, SMS, 8, 4096)
        assert choice.grid[0] % (row.cluster_size) == 0
        boxes = (row.b_share, row.a_box_rows) if row.swaps else (row.a_box_rows, row.b_share)
        figures = _clusters(row, choice) | {
            "cluster_m": row.cluster_m, "cluster_n": 1, "row_box": boxes[0], "column_box": boxes[1],
        }  # fmt: skip
        rows |= {f"{op}_{token}_{choice.variant}": figures for token in HALVES}
    return rows


def _grouped_sm90(op: str) -> Source:
    figures = {
        "threads": "C::kThreads", "min_blocks": "C::kMinBlocks", "swaps": "C::kSwaps",
        "block_m": "C::kBlockM", "block_n": "C::kBlockN", "cluster": "C::kClusterSize",
        "shared": "C::kRecordsAt + C::kStages * sizeof(Record)",
        "a_box": "C::kTokens / C::kClusterSize", "b_box": "C::kWeights / C::kClusterSize",
        "out_box": "C::kBoxRows", "consumers": "C::kConsumers",
    }  # fmt: skip
    config = "GroupedConfig<__VA_ARGS__>"
    return Source(f"{op}_sm90", f"EXPORT_{op.upper()}", "NAME", config, figures, ("kBlockK",))


def grouped_sm90(op: str) -> Rows:
    assert _grouped_sm90(op).read()[1] == {"kBlockK": tiles.BLOCK_K}
    rows: Rows = {}
    problem = grouped.Problem(op, 4, 4096, 4096, 4096)
    for name, row in grouped.HOPPER[op].items():
        choice = grouped.hopper_choice(name, SMS, problem)
        assert choice.boxes is not None and choice.grid[0] % row.cluster_size == 0
        figures = {
            "threads": choice.block[0], "min_blocks": row.min_blocks, "swaps": row.swaps,
            "block_m": row.block_m, "block_n": row.block_n, "cluster": row.cluster_size,
            "shared": choice.shared_bytes, "a_box": choice.boxes[1],
            "b_box": choice.boxes[2], "out_box": choice.boxes[0], "consumers": row.consumers,
        }  # fmt: skip
        # Tiles of which two blocks share k: sums of 64 rows a consumer, a counter each.
        num_tiles = SMS // 2 // row.cluster_size * row.cluster_size if row.pairs else 0
        assert choice.num_arrivals == num_tiles * row.consumers
        assert choice.num_partials == num_tiles * row.consumers * 64 * row.block_n
        rows |= {f"{op}_{token}_{name}": figures for token in HALVES}
    return rows


def _portable(cubin: str, macro: str, arch: str) -> Source:
    figures = {
        "threads": "kThreads", "block_m": "C::kBlockM",
        "block_n": "kBlockN", "block_k": "kBlockK",
        "shared": "kStages * C::kStageBytes",
        "sums": "kThreads * C::kSums",
    }  # fmt: skip
    return Source(cubin, macro, "NAME", "Tile<BLOCK_M>", figures, (), arch)


def portable(op: str, capability: tuple[int, int]) -> Rows:
    """sums: those that a block leaves where several share k."""
    rows: Rows = {}
    for block_m in (128, 64):
        if op == "linear":
            choices = linear.portable_choices(capability, block_m, 128, 4096, 3)
        else:
            problem = grouped.Problem(op, 4, 4096, 4096, 4096)
            choices = grouped.portable_choices(capability, problem)
        choice = next(c for c in choices if c.variant == f"{block_m}x128")
        figures = {
            "threads": choice.block[0], "block_m": block_m, "block_n": tiles.PORTABLE_N,
            "block_k": tiles.PORTABLE_K, "shared": choice.shared_bytes,
            "sums": choice.num_partials // 3 if op == "linear" else block_m * tiles.PORTABLE_N,
        }  # fmt: skip
        for token, suffix in itertools.product(HALVES, ("", "_fp32") if op == "linear" else ("",)):
            rows[f"{op}_{token}_{choice.variant}{suffix}"] = figures
    return rows


LINEAR_SMALL_M = Source(
    "linear_small_m", "EXPORT_LINEAR_SMALL_M", "NAME", "SmallM<__VA_ARGS__>",
    {
        "threads": "32 * kWarps", "min_blocks": "BLOCKS",
        "columns": "C::kColumnTiles", "slices": "C::kSlices", "sums": "32 * C::kSums",
        "shared": "C::kRingBytes + 2 * 4 * C::kBufferFloats",
    },
    ("kWarps", "kSlice"), "sm_80",
)  # fmt: skip


def linear_small_m() -> Rows:
    assert LINEAR_SMALL_M.read()[1] == {"kWarps": tiles.WARPS, "kSlice": 32}
    rows: Rows = {}
    for name, (columns, _, slices, blocks) in tiles.SMALL_M.items():
        choices = linear.portable_choices((9, 0), 1, 16, 4096, 3)
        choice = next(c for c in choices if c.variant == name)
        figures = {
            "threads": choice.block[0], "min_blocks": blocks, "columns": columns, "slices": slices,
            "shared": choice.shared_bytes, "sums": choice.num_partials // 3,
        }  # fmt: skip
        for token, suffix in itertools.product(HALVES, ("", "_fp32")):
            if not suffix or name != "m8_deep":
                rows[f"linear_{token}_{name}{suffix}"] = figures
    return rows


def _paired(op: str, arch: str) -> Source:
    before = """
        template <int kM> constexpr int shared_of(PairedTile<kM> tile) {
            return kPairedStages * tile.kStageBytes;
        }
        template <int... k> constexpr int shared_of(PairedSmallM<k...> body) {
            return body.kRingBytes + 2 * 4 * body.kBufferFloats;
        }
        template <int kM> constexpr int rows_of(PairedTile<kM>) { return kM; }
        template <int... k> constexpr int rows_of(PairedSmallM<k...> body) {
            return 8 * body.kColumnTiles;
        }
    """
    figures = {
        "threads": "C::kThreads", "min_blocks": "BLOCKS", "rows": "rows_of(C{})",
        "shared": "shared_of(C{})",
    }  # fmt: skip
    macro, config = f"EXPORT_{op.upper()}", "__VA_ARGS__"
    return Source(op, macro, "NAME", config, figures, (), arch, before)


def paired_portable(op: str, capability: tuple[int, int]) -> Rows:
    few = {name: (8 * body[0], body[3]) for name, body in tiles.SMALL_M.items()}
    rows: Rows = {}
    many_rows = paired.portable_choices(op, capability, SMS, 17, 4096)
    # m8_deep is in every cubin, and for 9.0 alone.
    few_rows = itertools.islice(paired.portable_choices(op, (9, 0), SMS, 1, 4096), len(few))
    for choice in (*few_rows, *many_rows):
        block_m = int(choice.variant.partition("x")[0]) if "x" in choice.variant else 0
        most, blocks = few.get(choice.variant, (block_m, tiles.BLOCKS_AN_SM))
        rows |= {
            f"{op}_{token}_{choice.variant}": {
                "threads": choice.block[0], "min_blocks": blocks, "rows": most,
                "shared": choice.shared_bytes,
            }
            for token in HALVES
        }  # fmt: skip
    return rows


PAIRED, GROUPED = ("swiglu_linear", "qkv_linear"), ("grouped_linear", "batched_matmul")
ARCHS = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90a": (9, 0)}
CASES: list[tuple[Source, Callable[[], Rows]]] = [
    (LINEAR_SM90, linear_sm90),
    (LINEAR_FP8, linear_fp8_sm90),
    (LINEAR_SMALL_M, linear_small_m),
    *((_paired_sm90(op), partial(paired_sm90, op)) for op in PAIRED),
    *((_grouped_sm90(op), partial(grouped_sm90, op)) for op in GROUPED),
    *(
        (_portable(op, f"EXPORT_{op.upper()}", arch), partial(portable, op, capability))
        for op in ("linear", *GROUPED)
        for arch, capability in ARCHS.items()
    ),
    *(
        (_paired(op, arch), partial(paired_portable, op, capability))
        for op in PAIRED
        for arch, capability in ARCHS.items()
    ),
]


@pytest.mark.parametrize("source, rows", CASES, ids=[f"{s.cubin}-{s.arch}" for s, _ in CASES])
def test_the_plan_launches_what_the_source_says(source: Source, rows: Callable[[], Rows]) -> None:
    kernels, _ = source.read()
    assert rows() == kernels
