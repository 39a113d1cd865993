"""From tensors to the launch of a product of paired rows: strides."""

from __future__ import annotations

import torch

from ..core import common


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
