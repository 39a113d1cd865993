"""What the attention kernels of Hopper share on the host: tensor maps, which tensors have them."""

from __future__ import annotations

from typing import Any

import torch

from ...arrays.tensor_map import TensorMap
from ..core import common

_PANEL_BYTES = 128  # of a row of shared memory: the span of the swizzle
_MAX_STRIDE_BYTES = 1 << 40
# Descriptors by what they hold. Their bytes alone: a TensorMap would keep its tensor alive.
_maps: dict[tuple[Any, ...], bytes] = {}


def is_mappable(tensor: torch.Tensor) -> bool:
    """Whether the TMA takes it: 16-byte aligned, something in it, no element twice."""
    element_bytes = tensor.element_size()
    elems = common.VEC_BYTES // element_bytes
    return (
        tensor.numel() > 0
        and tensor.stride(-1) == 1
        and tensor.shape[-1] % elems == 0
        and tensor.data_ptr() % common.VEC_BYTES == 0
        and all(
            size == 1 or (stride % elems == 0 and 0 < stride * element_bytes < _MAX_STRIDE_BYTES)
            for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        )
    )


def tensor_map(tensor: torch.Tensor, rows: int) -> bytes:
    """The descriptor of boxes of `rows` tokens of one head, 128 bytes of it wide.

    Dimensions: (batch, heads, tokens, head_dim), batch 1 where the tensor has none.
    """
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), rows, tensor.device)
    found = _maps.get(key)
    if found is not None:
        return found
    head_dim = tensor.shape[-1]
    sizes = tensor.shape if tensor.dim() == 4 else (1, *tensor.shape)
    steps = tensor.stride() if tensor.dim() == 4 else (0, *tensor.stride())
    # A stride along a single element says nothing; the TMA wants a valid one.
    steps = tuple(s if n > 1 else head_dim for n, s in zip(sizes[:-1], steps[:-1], strict=True))
    made = TensorMap.tiled(
        tensor,
        (1, 1, rows, _PANEL_BYTES // tensor.element_size()),
        swizzle="128B",
        l2_promotion="256B",
        shape=(sizes[0], sizes[2], sizes[1], head_dim),
        strides=(steps[0], steps[2], steps[1], 1),
    ).raw
    if len(_maps) >= common.MAX_PLANS:
        _maps.clear()
    _maps[key] = made
    return made
