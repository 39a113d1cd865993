"""flash-attn's `bert_padding`: between padded batches and the tokens alone. Plain torch."""

from __future__ import annotations

from typing import Any

import torch

from ..ops.core import common

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """The rows `indices` of the first dimension."""
    return input.index_select(0, indices)


def index_put_first_axis(
    values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int
) -> torch.Tensor:
    """Zeros (first_axis_dim, ...) with `values` as their rows `indices`."""
    zeros = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(
    input: torch.Tensor, indices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows, and the input itself for what is added to them later."""
    return input.index_select(0, indices), input


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """The tokens that a mask keeps, one behind the other. Waits for the device.

    hidden_states: (batch_size, seqlen, ...). attention_mask: (batch_size, seqlen), 0 or 1,
    1 is a token. unused_mask: the same of tokens that have a place but are not counted.

    Returns them (total, ...), their indices in the flattened batch, cu_seqlens (batch_size + 1,)
    int32, the longest length, and how many of each sequence attention_mask keeps, int32.
    """
    op = "unpad_input"
    _check_mask(op, "attention_mask", attention_mask, hidden_states)
    kept = attention_mask
    if unused_mask is not None:
        _check_mask(op, "unused_mask", unused_mask, hidden_states)
        kept = attention_mask + unused_mask
    used = attention_mask.sum(-1, dtype=torch.int32)
    lengths = kept.sum(-1, dtype=torch.int32)
    return *_gathered(op, "attention_mask", hidden_states, kept, lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """As `unpad_input`, of rows that hold several sequences each, one behind the other.

    attention_mask_in_length: (batch_size, seqlen), whole numbers: the lengths of a row's sequences,
    then zeros.
    """
    op = "unpad_input_for_concatenated_sequences"
    _check_mask(op, "attention_mask_in_length", attention_mask_in_length, hidden_states)
    places = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    kept = places < attention_mask_in_length.sum(-1, keepdim=True)
    lengths = attention_mask_in_length[attention_mask_in_length != 0].int()
    return _gathered(op, "attention_mask_in_length", hidden_states, kept, lengths)


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """(total, ...) back at its places in zeros (batch, seqlen, ...)."""
    common.check_tensor("pad_input", "hidden_states", hidden_states)
    common.check_tensor("pad_input", "indices", indices)
    if indices.dim() != 1 or hidden_states.shape[:1] != indices.shape:
        expected = f"one index for each of the {tuple(hidden_states.shape)[:1]} tokens"
        raise common.refuse("pad_input", "indices", expected, indices)
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )


def _gathered(
    op: str, argument: str, hidden_states: torch.Tensor, kept: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest, total = 0, 0
    if lengths.numel():
        longest, total = torch.stack([lengths.max(), cu_seqlens[-1]]).tolist()
    if total != indices.numel():
        expected = f"lengths that come to the {indices.numel()} tokens there are"
        raise common.refuse(op, argument, expected, total)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def _check_mask(op: str, argument: str, mask: Any, hidden_states: Any) -> None:
    common.check_tensor(op, "hidden_states", hidden_states)
    common.check_tensor(op, argument, mask)
    if hidden_states.dim() < 2:
        raise common.refuse(op, "hidden_states", "shape (batch_size, seqlen, ...)", hidden_states)
    if mask.shape != hidden_states.shape[:2]:
        raise common.refuse(op, argument, f"shape {tuple(hidden_states.shape[:2])}", mask)
