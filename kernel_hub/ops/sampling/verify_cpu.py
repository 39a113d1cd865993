"""Drafts verified by torch, with the very numbers of csrc/sampling: the same tokens."""

from __future__ import annotations

from typing import Any

import torch

from . import cpu

_FIX = 2.0**56  # in which p and q are compared


def _fixed(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x.double() * scale).round().long()


def _below(weights: torch.Tensor, bits: int) -> int:
    """The index whose weight, with those before it, passes a random number below their sum."""
    sums = weights.cumsum(0)
    return int(torch.searchsorted(sums, int(sums[-1]) * bits >> 64, right=True))


def _token(
    masses: torch.Tensor, draft: int | None, probs: torch.Tensor | None, seed: int, offset: int
) -> int:
    """What a position leaves: the draft where it is kept, else what is drawn in its place."""
    bits = cpu.random_bits(seed, offset)
    if draft is None or probs is None:
        return _below(masses, bits)
    target = _fixed(masses, _FIX / float(masses.sum()))
    given = _fixed(probs.nan_to_num(0.0).clamp(0, 1), _FIX)
    chance = float(cpu.random_bits(seed, offset, 1) >> 11) * 2.0**-53
    if chance * float(given[draft]) < float(target[draft]):
        return draft
    rest = (target - given).clamp(min=0)
    return _below(rest if bool(rest.any()) else masses, bits)


class _Rows:
    """The rows of logits of all positions, as `cpu.weigh` takes them."""

    softcap = 0.0
    bias = token_bitmask = prompt_bitmask = output_counts = None
    top_k = top_p = min_p = None

    def __init__(self, given: Any) -> None:
        positions = given.target_logits.shape[1]
        self.logits = given.target_logits.flatten(0, 1)
        self.temperature = None
        if given.temperature is not None:
            self.temperature = given.temperature.repeat_interleave(positions)


def verify_into(given: Any) -> None:
    """Write the tokens, how many of them are drafts, and of a tree the path that is kept."""
    if given.target_logits.shape[0] == 0:
        return
    drawn = cpu.weigh(_Rows(given))
    given.out_ids.fill_(-1)
    if given.path is not None:
        given.path.fill_(-1)
    walk = _walk_chain if given.parents is None else _walk_tree
    for row in range(given.target_logits.shape[0]):
        seed, offset = (0 if x is None else int(x[row]) for x in (given.seed, given.offset))
        given.num_accepted[row] = walk(given, drawn, row, seed, offset)


def _largest(values: torch.Tensor) -> int:
    return int((values == values.max()).nonzero()[0])


def _walk_chain(given: Any, drawn: Any, row: int, seed: int, offset: int) -> int:
    """Write a row's tokens; how many are drafts."""
    _, positions, vocab_size = given.target_logits.shape
    drafts = given.draft_ids[row].tolist()
    for position in range(positions):
        at = row * positions + position
        has_draft = position < positions - 1 and 0 <= drafts[position] < vocab_size
        draft = drafts[position] if has_draft else None
        if drawn.greedy[at]:
            token = _largest(drawn.values[at])
        else:
            probs = given.draft_probs[row, position] if (
                given.draft_probs is not None and has_draft
            ) else None  # fmt: skip
            token = _token(drawn.masses[at], draft, probs, seed, offset + position)
        given.out_ids[row, position] = token
        if token != draft:
            break
    return position


def _child_or_token(
    masses: torch.Tensor, children: list[tuple[int, int, torch.Tensor]], seed: int, offset: int
) -> tuple[int | None, int]:
    """(the child that is kept, its token), or (None, what is drawn in their place).

    children: of each its place, its token and the probabilities it was drawn by.
    """
    bits, left = cpu.random_bits(seed, offset), masses
    scale = _FIX / float(masses.sum())
    for number, (child, draft, probs) in enumerate(children):
        target = _fixed(left, scale)
        given = _fixed(probs.nan_to_num(0.0).clamp(0, 1), _FIX)
        chance = float(cpu.random_bits(seed, offset, 1 + number) >> 11) * 2.0**-53
        if chance * float(given[draft]) < float(target[draft]):
            return child, draft
        left = (target - given).clamp(min=0)
        if not bool(left.any()):
            return None, _below(masses, bits)
        scale = _FIX / float(left.sum())
    return None, _below(left, bits)


def _walk_tree(given: Any, drawn: Any, row: int, seed: int, offset: int) -> int:
    """Write a row's tokens and its path; how many drafts are kept."""
    _, positions, vocab_size = given.target_logits.shape
    ids, parents = given.draft_ids[row].tolist(), given.parents[row].tolist()
    node: int | None = -1
    num = 0
    while node is not None:
        at = row * positions + node + 1
        children = [
            (c, ids[c]) for c, parent in enumerate(parents)
            if parent == node and parent < c and 0 <= ids[c] < vocab_size
        ]  # fmt: skip
        node_offset, node = offset + node + 1, None
        if drawn.greedy[at]:
            token = _largest(drawn.values[at])
        elif given.draft_probs is None:
            token = _below(drawn.masses[at], cpu.random_bits(seed, node_offset))
        else:
            tried = [(c, each, given.draft_probs[row, c]) for c, each in children]
            node, token = _child_or_token(drawn.masses[at], tried, seed, node_offset)
        if node is None:
            node = next((c for c, each in children if each == token), None)
        given.out_ids[row, num] = token
        if node is not None:
            given.path[row, num] = node
            num += 1
    return num
