"""What kernels found of tables on the device that led outside: one flag for an op and a GPU.

Kernels mask and drop it (csrc/include/kernel_hub/bounds.cuh) and set bits of their flag; `report`
names the tables. What a check on the host can see before a launch is not reported here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch

from ...collection.manifest import open_collection
from ...errors import KernelHubError, TensorError
from .counters import zeros_begun
from .device import is_at_hand

# (table, what was expected of it), in the order of the bits of csrc/include/kernel_hub/bounds.cuh,
# then of those that one room alone reads, in its own headers.
_ROWS = "bounds from 0 to the rows there are, that do not fall and are no further apart than said"
TABLES = (
    ("block_table", "pages of the cache"),
    ("cache_seqlens", "lengths from 0 to what there is room for"),
    ("cu_seqlens_q", _ROWS),
    ("cu_seqlens_k", _ROWS),
    ("cu_seqlens", _ROWS),
    ("slot_mapping", "slots of the cache, or -1"),
    ("positions", "rows of cos and sin"),
    ("offsets", "offsets from 0 to the rows there are, that do not fall"),
    ("experts", "experts from 0 to one below num_experts, or -1"),
    ("row_id_map", "rows there are, or -1"),
    ("ids", "ids from 0 to one below vocab_size"),
    ("draft_ids", "tokens, and -1 behind the last"),
    ("block_mapping", "pages of the caches, or -1"),
    ("parents", "drafts before their own, or -1"),
)
_MOST_OPS = 64
_words: dict[int, torch.Tensor] = {}  # by device; an int an op
_begun: dict[int, Callable[[], torch.Tensor]] = {}  # words that nobody waited for yet
_flags: dict[tuple[str, int], torch.Tensor] = {}
_ops: list[str] = []
_lock = threading.Lock()


def flag(op: str, like: torch.Tensor) -> torch.Tensor | None:
    """The int32 on the device of `like` that launches of `op` leave bits in.

    None where there is none yet and the stream is captured: what is made now would be the graph's.
    """
    found = _flags.get((op, like.get_device()))
    return _make(op, like) if found is None else found


def begin(like: torch.Tensor) -> None:
    """Have what `flag` gives made, and the manifest read, under what a first call does before."""
    index = like.get_device()
    if index not in _words and index not in _begun and is_at_hand(like):
        _begun[index] = zeros_begun(_MOST_OPS, like.device, _read_ahead)


def _read_ahead() -> None:
    with contextlib.suppress(KernelHubError):  # the launch says what is wrong
        open_collection()


def _make(op: str, like: torch.Tensor) -> torch.Tensor | None:
    index = like.get_device()
    is_inference = torch.is_inference_mode_enabled()  # `take` may write it in any mode
    with _lock, torch.inference_mode(False) if is_inference else contextlib.nullcontext():
        words = _words.get(index)
        if words is None:
            if not like.is_cuda:
                words = torch.zeros(_MOST_OPS, dtype=torch.int32)
            elif torch.cuda.is_current_stream_capturing():
                return None
            else:
                words = (_begun.pop(index, None) or zeros_begun(_MOST_OPS, like.device))()
            _words[index] = words
        if op not in _ops:
            _ops.append(op)
        at = _ops.index(op)
        made = _flags[op, index] = words[at : at + 1]
    return made


def take(like: torch.Tensor) -> dict[str, tuple[str, ...]]:
    """By op, the tables that led its launches on the device of `like` outside since the last call.

    Waits for the current stream, and finds nothing while it is captured.
    """
    words = _words.get(like.get_device())
    if words is None or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        return {}
    found = {op: bits for op, bits in zip(_ops, words.tolist(), strict=False) if bits}
    if found:
        words.zero_()
    return {
        op: tuple(table for i, (table, _) in enumerate(TABLES) if bits >> i & 1)
        for op, bits in found.items()
    }


def report(like: torch.Tensor, *looked_at: tuple[str, str]) -> None:
    """Raise TensorError where a launch on the device of `like` was led outside since the last call.

    Waits for the current stream, and says nothing while it is captured. looked_at: ops and tables
    of theirs that the host has found right, whatever the launch said.
    """
    expected = dict(TABLES)
    led_outside = [
        f"{op}: {table}: expected {expected[table]}, found others on the device in a launch since "
        "the last report (KERNEL_HUB_DEBUG=1): what lies outside was masked, or not written"
        for op, tables in take(like).items()
        for table in tables
        if (op, table) not in looked_at
    ]
    if led_outside:
        raise TensorError("; ".join(led_outside))
