"""What every product asks of its operands and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import TensorError
from ..core import common


def check_operand(op: str, a: Any) -> int:
    """`a` must be fp16 or bf16 with rows of whole vectors; their length, k."""
    common.check_data(op, "a", a, common.HALF)
    k = int(a.shape[-1])
    if k % 8:
        raise common.refuse(op, "a", "a last dimension (k) that is a multiple of 8", a)
    return k


def check_weight(
    op: str, argument: str, value: Any, k: int, of: torch.Tensor, leading: str = "n"
) -> None:
    """`value` must be (leading, k), rows contiguous, dtype and device of the tensor `of`."""
    common.check_tensor(op, argument, value)
    rank = leading.count(",") + 2
    if value.dim() != rank or value.shape[-1] != k:
        expected = f"shape ({leading}, {k})"
        if value.dim() == rank and value.shape[-2] == k:
            expected += turned(argument, value)
        raise common.refuse(op, argument, expected, value)
    common.check_like(op, argument, value, value.shape, of)


def turned(argument: str, value: torch.Tensor) -> str:
    """What is said of a `value` with the rows of k where its columns should be."""
    other = f"{argument}.mT" if value.dim() > 2 else f"{argument}.T"
    contiguous = "" if value.stride(-2) == 1 else ".contiguous()"
    return f", a row an output (it looks transposed: pass {other}{contiguous})"


def check_results(
    op: str, shape: Sequence[int], like: torch.Tensor, dtype: torch.dtype, out: Any,
    residual: Any = None,
) -> None:  # fmt: skip
    """What is written, and what is added to it, must be of `shape` and `dtype`."""
    common.check_written(op, "out", out, shape, like, (dtype,))
    if residual is not None:
        common.check_like(op, "residual", residual, shape, like, dtypes=(dtype,))


def row_strides(
    op: str, sizes: Sequence[int], tensors: Mapping[str, torch.Tensor]
) -> tuple[int, list[int]]:
    """(rows, the stride of rows in each tensor), refusing rows that are not evenly spaced.

    sizes: the leading dimensions of all; tensors: by their names, the first says how many may be.
    """
    first, strides = next(iter(tensors)), []
    for argument, x in tensors.items():
        try:
            (m,), ((stride,),) = common.collapse(op, sizes, [x.stride()[: len(sizes)]], groups=1)
        except TensorError:
            expected = "evenly spaced rows (call .contiguous() first)"
            raise common.refuse(op, argument, expected, x) from None
        strides.append(stride)
    if m > common.MAX_SIZE:
        raise common.refuse(op, first, f"at most {common.MAX_SIZE} rows", tensors[first])
    return m, strides


def misaligned(op: str, argument: str, x: torch.Tensor) -> TensorError:
    """The refusal of an `x` whose rows do not begin where kernels read them."""
    behind = x.data_ptr() % common.VEC_BYTES
    found = f"{common.say(x)}, {behind} bytes behind one" if behind else x
    expected = f"rows that begin at multiples of {common.VEC_BYTES} bytes (copy it first)"
    return common.refuse(op, argument, expected, found)


def rows_and_strides(
    op: str, a: torch.Tensor, argument: str, b: torch.Tensor, *, a_name: str = "a",
    **others: torch.Tensor,
) -> tuple[int, tuple[int, ...], int]:  # fmt: skip
    """(rows of a, the row strides of a and of `others`, that of b), refusing misaligned rows.

    others: tensors with the leading dimensions of a.
    """
    k = a.shape[-1]
    m, (a_stride, *strides) = row_strides(op, a.shape[:-1], {a_name: a, **others})
    a_stride = k if m == 1 else a_stride
    b_stride = k if b.shape[0] == 1 else b.stride(0)
    for name, x, stride in ((a_name, a, a_stride), (argument, b, b_stride)):
        is_aligned = stride * x.element_size() % common.VEC_BYTES == 0
        if x.numel() and (not is_aligned or x.data_ptr() % common.VEC_BYTES):
            raise misaligned(op, name, x)
    return m, (a_stride, *strides), b_stride
