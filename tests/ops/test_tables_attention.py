"""The tables of attention's gradients in kernel_hub/ops are those of csrc: all that a launch needs.

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

DTYPES = (torch.float16, torch.bfloat16)

ATTENTION = {
    "threads": "C::kThreads", "head_dim": "C::kHeadDim", "block_m": "C::kBlockM",
    "block_n": "C::kBlockN", "shared": "C::kSharedBytes",
}  # fmt: skip


def _attention(row: Any, threads: int, block_n: int) -> dict[str, int]:
    return {
        "threads": threads, "head_dim": row.head_dim, "block_m": row.block_m, "block_n": block_n,
        "shared": row.shared_bytes,
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
    *((replace(BACKWARD, arch=arch), partial(flash_attention_backward, arch)) for arch in DEVICES),
    (BACKWARD_SM90, flash_attention_backward_sm90),
]


@pytest.mark.parametrize("source, rows", CASES, ids=[f"{s.cubin}-{s.arch}" for s, _ in CASES])
def test_the_plan_launches_what_the_source_says(source: Source, rows: Callable[[], Rows]) -> None:
    kernels, _ = source.read()
    assert rows() == kernels
