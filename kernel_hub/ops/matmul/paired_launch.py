"""From tensors to the launch of a product of paired rows: strides and tensor maps."""

from __future__ import annotations

from typing import Any

import torch

from ..core import common
from .paired_plan import BLOCK_K

_MAX_MAPS = 8192
# The 128 bytes of a tensor map say all about it and own nothing: address, sizes, strides, box.
_maps: dict[tuple[Any, ...], bytes] = {}


def tensor_map(
    tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """The tensor map for boxes of `box` rows of 64 elements of k; made once."""
    key = (tensor.data_ptr(), tensor.dtype, shape, strides, box)
    found = _maps.get(key)
    if found is None:
        from ...arrays.tensor_map import TensorMap  # CPU tensors do without the runtime

        found = TensorMap.tiled(
            tensor, (*box, BLOCK_K), swizzle="128B", l2_promotion="256B",
            shape=shape, strides=(*strides, 1),
        ).raw  # fmt: skip
        if len(_maps) >= _MAX_MAPS:
            _maps.clear()
        _maps[key] = found
    return found


def rows_and_strides(
    op: str, a: torch.Tensor, argument: str, b: torch.Tensor, *others: torch.Tensor
) -> tuple[int, tuple[int, ...], int]:
    """(rows of a, the row strides of a and of `others`, that of b), refusing misaligned rows.

    others: tensors with the leading dimensions of a.
    """
    k = a.shape[-1]
    tensors = [a, *others]
    (m,), columns = common.collapse(
        op, a.shape[:-1], [tensor.stride()[: a.dim() - 1] for tensor in tensors], groups=1
    )
    if m > common.MAX_SIZE:
        raise common.refuse(op, "a", f"at most {common.MAX_SIZE} rows", a)
    strides = [column[0] for column in columns]
    b_stride = b.stride(0)
    if m == 1:
        strides[0] = k
    if b.shape[0] == 1:
        b_stride = k
    for name, tensor, stride in (("a", a, strides[0]), (argument, b, b_stride)):
        if tensor.numel() and (stride % 8 or tensor.data_ptr() % common.VEC_BYTES):
            raise common.refuse(
                op, name, "rows that begin at multiples of 16 bytes (copy it first)", tensor
            )
    return m, tuple(strides), b_stride
