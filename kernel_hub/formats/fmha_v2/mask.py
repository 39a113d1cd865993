"""The custom mask of fmha_v2 kernels: one bit a pair of query and key, in the kernels' order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ParamsError, TensorError
from ...kernel import KernelFunction
from .names import KernelName, parse_name

ROW_UNIT, COLUMN_UNIT = 128, 256
_TILE = 64
# Of all sequences, packed: 2 GiB.
_MAX_MASK_BITS = 1 << 34
# Bit of (group of 8 columns, upper or lower row, even or odd column) in a thread's word.
_BIT = (4 * np.arange(8)[:, None, None] + 2 * np.arange(2)[:, None] + np.arange(2)).astype("<u4")


def mask_row_bytes(max_seqlen_k: int) -> int:
    """Bytes of one row of the packed mask: `packed_mask_stride` of the struct."""
    return -(-max_seqlen_k // COLUMN_UNIT) * COLUMN_UNIT // 8


def pack_mask(
    kernel: KernelFunction | KernelName, masks: Sequence[Any], max_seqlen_k: int
) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
    """Pack one mask a sequence for a `custom_mask` kernel; to be copied to the GPU by the caller.

    kernel: the one that will read it. Those other than tma_ws look at it from the K step of a query
        block's own place on: keys before that are visible, so a mask that hides one is refused.
    masks: for each sequence a boolean array of (seqlen_q, seqlen_k), True where a query sees a key.
    max_seqlen_k: the longest K; `run` must be given the same.

    Returns: the words, and int32 (batch_size + 1) cumulative rows, each sequence's rounded up to a
    multiple of 128. Raises TensorError; ParamsError for another kind of argument.
    """
    if not isinstance(kernel, (KernelFunction, KernelName)):
        raise ParamsError(f"kernel={kernel!r:.80}: a KernelFunction, or the name that found it")
    name = kernel if isinstance(kernel, KernelName) else parse_name(kernel.name)
    if not isinstance(max_seqlen_k, (int, np.integer)) or not 0 < max_seqlen_k < 2**31:
        raise TensorError(f"max_seqlen_k={max_seqlen_k!r:.80}: expected a positive int")
    if not isinstance(masks, Iterable):
        raise ParamsError(f"masks={masks!r:.80}: a boolean array for each sequence")
    words, rows = [], [0]
    columns = 8 * mask_row_bytes(int(max_seqlen_k))
    for index, given in enumerate(masks):
        try:
            mask = np.asarray(given)
        except (TypeError, ValueError) as error:  # rows of several lengths, a GPU's tensor
            raise TensorError(f"masks[{index}]: expected a boolean array: {error}") from error
        if mask.dtype != bool or mask.ndim != 2 or mask.shape[1] > max_seqlen_k:
            raise TensorError(
                f"masks[{index}]: expected bool (seqlen_q, seqlen_k of at most {max_seqlen_k}), "
                f"found {mask.dtype} {mask.shape}"
            )
        _check_reach(name, mask, index)
        padded_rows = -(-mask.shape[0] // ROW_UNIT) * ROW_UNIT
        rows.append(rows[-1] + padded_rows)
        if rows[-1] * columns > _MAX_MASK_BITS:
            raise TensorError(
                f"masks[{index}], max_seqlen_k={max_seqlen_k}: {rows[-1]} rows of {columns} bits "
                f"are more than the {_MAX_MASK_BITS >> 33} GiB packed here; give fewer at a time"
            )
        # Only what the mask covers is unfolded: max_seqlen_k may be that of a longer sequence.
        covered = -(-mask.shape[1] // _TILE) * _TILE
        padded = np.zeros((padded_rows, covered), bool)
        padded[: mask.shape[0], : mask.shape[1]] = mask
        # A tile of 64 x 64: rows are (warp, half, row of 8), columns (group of 8, pair, of 2);
        # a thread (warp, row, pair) holds the bits of both halves and all groups.
        tiles = padded.reshape(padded_rows // _TILE, 4, 2, 8, covered // _TILE, 8, 4, 2)
        bits = tiles.transpose(0, 4, 1, 3, 6, 5, 2, 7).astype("<u4") << _BIT
        packed = np.zeros((padded_rows // _TILE, columns // _TILE, 4, 8, 4), "<u4")
        packed[:, : covered // _TILE] = bits.sum(axis=(-3, -2, -1), dtype="<u4")
        words.append(packed.ravel())
    whole = np.concatenate(words) if words else np.zeros(0, "<u4")
    return whole, np.array(rows, np.int32)


def _check_reach(name: KernelName, mask: NDArray[np.bool_], index: int) -> None:
    if name.variant == "tma_ws" or not name.q_step or not name.kv_step:
        return
    rows, columns = mask.shape
    for first in range(0, rows, name.q_step):
        start = max(0, first + columns - rows) // name.kv_step * name.kv_step
        hidden = np.argwhere(~mask[first : first + name.q_step, :start])
        if len(hidden):
            row, column = hidden[0]
            raise TensorError(
                f"masks[{index}] hides key {column} from query {first + row}: {name} reads the "
                f"mask of queries {first} to {min(first + name.q_step, rows) - 1} from key {start} "
                "on and takes the keys before as visible; take a tma_ws kernel"
            )
