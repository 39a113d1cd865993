"""Tokens and the caches of keys and values that they go to."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def batch_and_seqlen(k: torch.Tensor, cu_seqlens: torch.Tensor | None) -> tuple[int, int]:
    """Sequences, and tokens from one to the next of a dense k."""
    if cu_seqlens is not None:
        return cu_seqlens.shape[0] - 1, max(1, k.shape[0])
    if k.dim() == 4:
        return k.shape[0], max(1, k.shape[1])
    return 1, max(1, k.shape[0])


@dataclass(frozen=True)
class Places:
    """Where tokens go, each a (num_tokens,) tensor."""

    inside: torch.Tensor  # of a sequence
    stored: torch.Tensor
    page: torch.Tensor
    row: torch.Tensor
    position: torch.Tensor
    batch: torch.Tensor
    index: torch.Tensor  # in the sequence, what the cache holds included


def places(
    k: torch.Tensor,
    k_cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    block_table: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> Places:
    """Where each token goes."""
    batch_size, seqlen = batch_and_seqlen(k, cu_seqlens)
    token = torch.arange(k.shape[:-2].numel(), device=k.device)
    if cu_seqlens is None:
        batch, index = token // seqlen, token % seqlen
        inside = torch.ones_like(token, dtype=torch.bool)
    else:
        starts = cu_seqlens.long()
        batch = torch.searchsorted(starts[1:].contiguous(), token, right=True)
        inside = (token >= starts[0]) & (batch < batch_size)
        batch = batch.clamp(max=max(0, batch_size - 1))
        index = token - starts[batch]
    if cache_seqlens is not None and batch_size:
        index = index + cache_seqlens.long()[batch]
    position = index if positions is None else positions.flatten().long()
    num_pages, page_size = k_cache.shape[:2]
    rows = max(1, page_size)
    if slot_mapping is not None:
        slot = slot_mapping.flatten().long()
        page, row = slot // rows, slot % rows
        known = (slot >= 0) & (slot < num_pages * page_size)
    elif block_table is not None:
        known = (index >= 0) & (index < block_table.shape[1] * page_size)
        row = index % rows
        page = torch.full_like(token, -1)
        entry = (batch[known], (index // rows)[known])
        page[known] = block_table[entry].long()
        known = (page >= 0) & (page < num_pages)
    else:
        page, row = batch, index
        known = (index >= 0) & (index < page_size)
    return Places(inside, inside & known, page, row, position, batch, index)
