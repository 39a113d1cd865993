"""What the attention kernels of Hopper share on the host: tensor maps, which tensors have them."""

from __future__ import annotations

import torch

from ..core import common, tensor_maps
from ..core.tensor_maps import Boxes

_PANEL_BYTES = 128  # of a row of shared memory: the span of the swizzle
_MAX_STRIDE_BYTES = 1 << 40


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
    """The tensor map of boxes of `rows` tokens of one head, 128 bytes of it wide.

    Dimensions: (batch, heads, tokens, head_dim), batch 1 where the tensor has none.
    """
    key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), rows)
    return tensor_maps.known.get(key) or tensor_maps.make(key, tensor, _boxes(tensor, rows))


def _boxes(tensor: torch.Tensor, rows: int) -> Boxes:
    sizes, steps = tuple(tensor.shape), tensor.stride()
    head_dim = sizes[-1]
    if tensor.dim() != 4:
        sizes, steps = (1, *sizes), (0, *steps)
    # A stride along a single element says nothing; the TMA wants a valid one.
    steps = [s if n > 1 else head_dim for n, s in zip(sizes[:-1], steps[:-1], strict=True)]
    return Boxes(
        (sizes[0], sizes[2], sizes[1], head_dim), (steps[0], steps[2], steps[1], 1),
        (1, 1, rows, _PANEL_BYTES // tensor.element_size()),
    )  # fmt: skip
