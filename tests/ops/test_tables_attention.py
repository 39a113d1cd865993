"""The tables of attention in kernel_hub/ops are those of csrc: all that a launch depends on.

Of every row its tile, threads and shared memory against what the source's configuration of that
name says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import attention_devices
import pytest
import torch
from kernel_figures import HALVES, Rows, Source

from kernel_hub.ops.attention import backward_portable as backward
from kernel_hub.ops.attention import backward_sm90 as backward_sm90
from kernel_hub.ops.attention import forward_fp8 as attention_fp8
from kernel_hub.ops.attention import forward_portable as forward
from kernel_hub.ops.attention import forward_sm90 as attention_sm90
from kernel_hub.ops.kv_cache import decode_plan as decode

DTYPES = (torch.float16, torch.bfloat16)

DECODE = Source(
    "decode_attention", "EXPORT_DECODE_ATTENTION",
    "decode_attention_##DTYPE##_hdim##HEAD_DIM##FLAGS",
    "DecodeConfig<T, CACHE, HEAD_DIM, TILE, SLOTS, ROW_TILES>",
    {
        "threads": "C::kThreads", "head_dim": "C::kHeadDim", "cache_bytes": "sizeof(CACHE)",
        "tile": "C::kTile", "slots": "C::kSlots", "rows": "C::kRows", "unit": "C::kUnit",
        "is_general": "C::kGeneral", "shared": "C::kSharedBytes", "blocks_per_sm": "MIN_BLOCKS",
    },
    (), "sm_80",
)  # fmt: skip


def decode_attention() -> Rows:
    return {
        f"decode_attention_{token}_hdim{row.head_dim}{row.suffix}": {
            "threads": decode.NUM_THREADS, "head_dim": row.head_dim, "tile": row.tile,
            "cache_bytes": row.cache_bytes, "slots": row.slots, "rows": row.rows,
            "unit": row.unit, "is_general": row.row_tiles == 1, "shared": row.shared_bytes,
            "blocks_per_sm": row.blocks_per_sm,
        }
        for row, token in itertools.product(decode.VARIANTS, HALVES)
    }  # fmt: skip


FORWARD = Source(
    "flash_attention", "EXPORT_FLASH_ATTENTION", "flash_attention_##DTYPE##_##NAME", "",
    {
        "threads": "32 * WARPS", "head_dim": "HEAD_DIM", "block_m": "BLOCK_M",
        "block_n": "BLOCK_N", "stages": "STAGES", "features": "Variant::VARIANT",
        "shared": "2 * HEAD_DIM * (BLOCK_M + 2 * STAGES * BLOCK_N)"
        " + WARPS * sizeof(WarpPlace) + (Variant::VARIANT"
        " == Variant::kPlain ? 0 : 4 * BLOCK_N * sizeof(KeyPlace))",
    },
    ("Variant::kPlain", "Variant::kPaged", "Variant::kGeneral"), "sm_80",
)  # fmt: skip


def flash_attention() -> Rows:
    codes = FORWARD.read()[1]
    rows: Rows = {}
    for row, dtype in itertools.product(forward.BODIES, DTYPES):
        rows[row.name(dtype)] = {
            "threads": 32 * row.num_warps, "head_dim": row.head_dim, "block_m": row.block_m,
            "block_n": row.block_n, "stages": row.num_stages,
            "shared": row.shared_bytes,
            "features": codes[f"Variant::k{row.features.capitalize()}"],
        }  # fmt: skip
    return rows


ATTENTION = {
    "threads": "C::kThreads", "head_dim": "C::kHeadDim", "block_m": "C::kBlockM",
    "block_n": "C::kBlockN", "shared": "C::kSharedBytes",
}  # fmt: skip
ATTENTION_SM90 = Source(
    "flash_attention_sm90", "EXPORT_FLASH_ATTENTION",
    "flash_attention_sm90_##DTYPE##_hdim##HEAD_DIM##_##VARIANT",
    "Config<T, HEAD_DIM, CONSUMERS, BLOCK_N, Mask::MASK>",
    ATTENTION | {"mask": "C::kMask"}, ("Mask::kFull", "Mask::kCausal", "Mask::kWindow"),
)  # fmt: skip


def _attention(row: Any, threads: int, block_n: int) -> dict[str, int]:
    return {
        "threads": threads, "head_dim": row.head_dim, "block_m": row.block_m, "block_n": block_n,
        "shared": row.shared_bytes,
    }  # fmt: skip


def flash_attention_sm90() -> Rows:
    codes = ATTENTION_SM90.read()[1]
    rows: Rows = {}
    for row, dtype in itertools.product(attention_sm90.BODIES, DTYPES):
        mask = codes[f"Mask::k{row.mask.capitalize()}"]
        rows[row.name(dtype)] = _attention(row, row.num_threads, row.block_n) | {"mask": mask}
    return rows


ATTENTION_FP8 = Source(
    "flash_attention_fp8_sm90", "EXPORT_FLASH_ATTENTION_FP8",
    "flash_attention_fp8_sm90_e4m3_hdim##HEAD_DIM##_##VARIANT",
    "Config<HEAD_DIM, CONSUMERS, BLOCK_N, Mask::MASK, "
    "Scales::SCALES>",
    ATTENTION | {
        "is_causal": "C::kMask == Mask::kCausal",
        "takes_blocks": "C::kScales == Scales::kBlocks",
    },
    ("kScaleTokens",),
)  # fmt: skip


def flash_attention_fp8() -> Rows:
    assert ATTENTION_FP8.read()[1] == {"kScaleTokens": attention_fp8.SCALE_TOKENS}
    return {
        row.name: _attention(row, row.num_threads, row.block_n) | {
            "is_causal": row.suffix.startswith("causal"),
            "takes_blocks": row.suffix.endswith("_blocks"),
        }
        for row in attention_fp8.BODIES
    }  # fmt: skip


TILES = {
    "head_dim": "kHeadDim", "block_m": "kBlockM", "block_n": "kBlockN", "warps": "kWarps",
    "warps_n": "kWarpsN", "warps_dkv": "kWarpsDkv", "warps_dq": "kWarpsDq",
    "stages_q": "kStagesQ", "stages_dout": "kStagesDout", "shared_bytes": "kSharedBytes",
}  # fmt: skip
BACKWARD = Source(
    "flash_attention_backward", "EXPORT_BACKWARD", "flash_attention_backward_##NAME",
    "Tiles<(GENERAL) ? 32 : 64, __VA_ARGS__>",
    {name: f"C::{figure}" for name, figure in TILES.items()} | {"threads": "THREADS"},
    ("kTileRows",), "sm_80",
)  # fmt: skip
# The devices that load a cubin, which has the variants for their shared memory alone.
DEVICES = {"sm_80": ((8, 0), (8, 6), (8, 7)), "sm_89": ((8, 9),), "sm_90a": ((9, 0),)}


def flash_attention_backward(arch: str) -> Rows:
    assert BACKWARD.read()[1] == {"kTileRows": backward._TILE_ROWS}
    rows: Rows = {}
    for head_dim, capability in itertools.product(range(8, 257, 8), DEVICES[arch]):
        row = backward.choose(head_dim, attention_devices.DEVICES[capability] << 10)
        figures = {name: getattr(row.tiles, name) for name in TILES}
        figures["threads"] = 32 * row.tiles.warps
        for token, suffix in itertools.product(HALVES, ("", "_general")):
            rows[f"{backward.CUBIN}_{token}_{row.name}{suffix}"] = figures
    return rows


BACKWARD_SM90 = Source(
    "flash_attention_backward_sm90", "EXPORT_BACKWARD", "flash_attention_backward_sm90_##NAME",
    "BackwardConfig<T, HEAD_DIM, BLOCK_M>", ATTENTION, ("kTileRows",),
)  # fmt: skip


def flash_attention_backward_sm90() -> Rows:
    assert BACKWARD_SM90.read()[1] == {"kTileRows": backward_sm90._TILE_ROWS}
    return {
        row.name(dtype): _attention(row, backward_sm90._THREADS, backward_sm90.BLOCK_N)
        for row, dtype in itertools.product(backward_sm90.BODIES, DTYPES)
    }


CASES: list[tuple[Source, Callable[[], Rows]]] = [
    (DECODE, decode_attention),
    (FORWARD, flash_attention),
    (ATTENTION_SM90, flash_attention_sm90),
    (ATTENTION_FP8, flash_attention_fp8),
    *((replace(BACKWARD, arch=arch), partial(flash_attention_backward, arch)) for arch in DEVICES),
    (BACKWARD_SM90, flash_attention_backward_sm90),
]


@pytest.mark.parametrize("source, rows", CASES, ids=[f"{s.cubin}-{s.arch}" for s, _ in CASES])
def test_the_plan_launches_what_the_source_says(source: Source, rows: Callable[[], Rows]) -> None:
    kernels, _ = source.read()
    assert rows() == kernels
