"""Sliding layers of transformers' StaticCache in steps of one token that a graph holds.

Such a layer counts its tokens on the host, which no replay does, and once it is full rolls its
tensors by an index that it makes there. While a step is captured the count is a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

NAME = "StaticSlidingWindowLayer"
_COUNT = "cumulative_length_int"
_METHODS = ("get_seq_length", "get_mask_sizes", "update")


class Sliding:
    """The sliding layers of a cache, before a step."""

    def __init__(self, cache: Any) -> None:
        layers = getattr(cache, "layers", None) or ()
        self.layers = [x for x in layers if type(x).__name__ == NAME]
        self.counts = [vars(x).get(_COUNT) for x in self.layers]

    def refused(self) -> str | None:
        """Why graphs do not take these layers; None: they do."""
        if len({*self.counts}) > 1 or None in self.counts:
            return f"layers of {NAME} that count in another way"
        return None

    def kind(self) -> tuple[bool, ...]:
        """Which of them are full: their steps are other graphs."""
        pairs = zip(self.counts, self.layers, strict=True)
        return tuple(n is not None and n >= layer.max_cache_len for n, layer in pairs)

    def advance(self, new_tokens: int) -> None:
        """Let them count so many on from where they stood."""
        for layer, count in zip(self.layers, self.counts, strict=True):
            setattr(layer, _COUNT, count + new_tokens)

    def count_into(self, seen: torch.Tensor) -> None:
        """Where they stand, for a graph."""
        if self.layers:
            seen.fill_(self.counts[0])


@contextmanager
def counted_by(layers: Sequence[Any], seen: torch.Tensor) -> Iterator[None]:
    """Let masks, positions and updates of a step read the count from `seen` (0-d, int64)."""
    for layer in layers:
        vars(layer)["get_seq_length"] = lambda: seen
        if getattr(layer, _COUNT) >= layer.max_cache_len:
            vars(layer).update(
                get_mask_sizes=partial(_full_sizes, layer, seen), update=partial(_rolled, layer)
            )
    try:
        yield
    finally:
        for layer in layers:
            for name in _METHODS:
                vars(layer).pop(name, None)


def _full_sizes(layer: Any, seen: torch.Tensor, *given: Any, **more: Any) -> tuple[int, Any]:
    """How many keys a full layer gives, and the number of the first in its sequence."""
    length, _ = type(layer).get_mask_sizes(layer, *given, **more)
    return length, seen - (layer.max_cache_len - 1)


def _rolled(layer: Any, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
    """A full layer's update by one token: the oldest goes, all move up."""
    for kept, new in ((layer.keys, k), (layer.values, v)):
        kept.copy_(torch.cat((kept[:, :, 1:], new), 2))
    return layer.keys, layer.values
