"""The tensor maps that launches pass to kernels, made once each: one cache for all ops."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

_MAX_MAPS = 8192
# The 128 bytes of a tensor map say all about it and own nothing: address, sizes, strides, box.
known: dict[tuple[Any, ...], bytes] = {}


class Boxes(NamedTuple):
    """A tensor as a kernel reads or writes it, box by box, with a swizzle."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements, the last one 1
    box: tuple[int, ...]
    dtype: torch.dtype | None = None  # what its elements are taken for; None: their own
    promotion: str | None = None  # bytes that the L2 fetches at a time; None: as strides allow
    swizzle: str = "128B"


def tensor_map(tensor: torch.Tensor, boxes: Boxes) -> bytes:
    """The tensor map of `tensor` cut into boxes; made once."""
    key = (tensor.data_ptr(), tensor.dtype, boxes)
    return known.get(key) or make(key, tensor, boxes)


def make(key: tuple[Any, ...], tensor: torch.Tensor, boxes: Boxes) -> bytes:
    """Make the map and know it by `key`, in which address, dtype and layout are."""
    from ...arrays.tensor_map import TensorMap  # see `common.shipped`

    elements = tensor if boxes.dtype is None else tensor.view(boxes.dtype)
    # Rows that begin within a line of 128 bytes end within another: pairs of lines would be fetched
    # twice (10-18 % of a product).
    size = elements.element_size()
    promotion = boxes.promotion or (
        "128B" if any(stride * size % 128 for stride in boxes.strides[:-1]) else "256B"
    )
    made = TensorMap.tiled(
        elements, boxes.box, swizzle=boxes.swizzle, l2_promotion=promotion,
        shape=boxes.shape, strides=boxes.strides,
    ).raw  # fmt: skip
    if len(known) >= _MAX_MAPS:
        known.clear()
    known[key] = made
    return made
