"""The products of two batches of matrices (csrc/matmul/batched_matmul*.cu)."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core import common
from ..core.device import device_of
from .checks import turned
from .grouped_launch import GroupedLaunch, OperandLayout, check_rows, launch_of
from .grouped_plan import TABLES, GroupedProblem, choose, too_large
from .product import ProductOp, launch

_OP = "batched_matmul"
_DTYPES = (torch.float16, torch.bfloat16)


def batched_matmul(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """Multiply matrices by transposed ones, batch by batch.

        out = a @ b.transpose(-1, -2)

    with fp32 sums, rounded once. The same inputs give the same bits on every run.

    a: (..., m, k), fp16 or bf16, on the GPU or the CPU; k a multiple of 8; the last dimension
        contiguous. Its rows begin at multiples of 16 bytes.
    b: (..., n, k), dtype and device of a; rows as those of a. The leading dimensions (the batch) of
        a and b are broadcast; they may have any strides, as long as they fold into two.
    out: (..., m, n), of the broadcast batch, dtype out_dtype, device of a, the last dimension
        contiguous; must not overlap the inputs.
    out_dtype: the dtype of a (default; or that of out), or torch.float32.

    Returns out. A CUDA tensor runs a shipped cubin on torch's current stream; a CPU tensor runs a
    reference in torch. No backward. Raises TensorError naming the argument that does not fit.
    """
    if out_dtype is None:
        out_dtype = getattr(a if out is None else out, "dtype", None)
    return _product.call(_cuda_into, _cpu_into, (a, b), (a, b), (out,), out, out_dtype)


def _batch_of(a: Any, b: Any) -> tuple[int, ...]:
    if a.shape[:-2] == b.shape[:-2]:
        return tuple(a.shape[:-2])
    try:
        return tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    except RuntimeError:
        wanted = f"leading dimensions that broadcast with {tuple(a.shape[:-2])}"
        raise common.refuse(_OP, "b", wanted, b) from None


def _check(a: Any, b: Any, out: Any, out_dtype: Any) -> None:
    common.check_data(_OP, "a", a, _DTYPES)
    if a.dim() < 2:
        raise common.refuse(_OP, "a", "at least two dimensions (..., m, k)", a)
    m, k = a.shape[-2:]
    if k % 8:
        raise common.refuse(_OP, "a", "a last dimension (k) that is a multiple of 8", a)
    common.check_tensor(_OP, "b", b)
    if b.dim() < 2:
        raise common.refuse(_OP, "b", "at least two dimensions (..., n, k)", b)
    n = b.shape[-2]
    if b.shape[-1] != k == n:
        raise common.refuse(_OP, "b", f"shape (..., n, {k}){turned('b', b)}", b)
    common.check_like(_OP, "b", b, (*b.shape[:-1], k), a)
    batch = _batch_of(a, b)
    num_matrices = math.prod(batch)
    if max(m, n, k, num_matrices) > common.MAX_SIZE:
        raise common.refuse(_OP, "b", f"sizes of at most {common.MAX_SIZE}", b)
    if num_matrices and m and n and too_large(GroupedProblem(_OP, num_matrices, m, n, k)):
        raise common.refuse(_OP, "b", "fewer or smaller matrices: too many tiles", b)
    common.check_dtype(_OP, "out_dtype", out_dtype, (a.dtype, torch.float32))
    if out is not None:
        dtypes = (out_dtype or a.dtype,)
        common.check_like(_OP, "out", out, (*batch, m, n), a, dtypes=dtypes)
        common.check_output(_OP, "out", out)


def _new_out(a: Any, b: Any, out_dtype: Any) -> Any:
    return a.new_empty((*_batch_of(a, b), a.shape[-2], b.shape[-2]), dtype=out_dtype)


def _plan(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> GroupedLaunch:
    """Choose the kernel and its integer parameters for tensors that were checked."""
    if out.numel() == 0:
        return GroupedLaunch(None)
    batch, (m, n), k = out.shape[:-2], out.shape[-2:], a.shape[-1]
    tensors = (out, a.expand(*batch, m, k), b.expand(*batch, n, k))
    (outer, inner), strides = common.collapse(_OP, batch, [x.stride()[:-2] for x in tensors])
    rows = [x.stride(-2) for x in tensors]
    # One b for all of the batch: rows of a and out that are evenly spaced make one product.
    is_shared = outer == 1 and inner > 1 and m > 1 and strides[2][1] == 0
    if is_shared and all(strides[i][1] == m * rows[i] for i in (0, 1)):
        m, inner, strides = m * inner, 1, [[0, 0]] * 3
    sizes = ((m, n), (m, k), (n, k))
    layouts = [
        OperandLayout(outer, inner, *size, pair[0], pair[1], stride if size[0] > 1 else 0)
        for size, pair, stride in zip(sizes, strides, rows, strict=True)
    ]
    out_layout, a_layout, b_layout = layouts
    check_rows(_OP, "a", a, a_layout)
    check_rows(_OP, "b", b, b_layout)
    problem = GroupedProblem(_OP, outer * inner, m, n, k, out.element_size())
    has_maps = a_layout.is_mappable and b_layout.is_mappable
    device = device_of(a.device)
    choice = choose(*device[:2], problem, has_maps, device.name)
    given = layouts if choice.boxes is None else layouts[:1]
    numbers = [x for at in given for x in (at.outer_stride, at.inner_stride, at.stride)]
    return launch_of(
        _OP, choice, out, a, (out_layout, a_layout, b_layout),
        (*numbers, outer * inner, inner, m, n, k),
    )  # fmt: skip


_product = ProductOp(_OP, "a b", "", "a b", check=_check, new=_new_out, plan=_plan)
_plans = _product.plans
TABLES[_OP].on_change(_plans.clear)


def _cuda_into(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, is_given: bool = True,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    at = (a.data_ptr(), b.data_ptr())
    key = (
        a.dtype, a.shape, a.stride(), a.get_device(), b.dtype, b.shape, b.stride(), b.get_device(),
        (at[0] | at[1]) & 15,
        out_dtype if out is None else (out.dtype, out.shape, out.stride()),
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        found = _product.plan(key, (a, b), (a, b), out, out_dtype)
    return launch(found, at, (a, b), out, is_given, None)


@common.in_own_dtypes
def _cpu_into(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, is_given: bool = True,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same on the CPU, by torch."""
    out = _product.on_cpu((a, b), (a, b), out, is_given, out_dtype)
    return out.copy_(a.float() @ b.float().transpose(-1, -2))


_product.register(_OP, "Tensor a, Tensor b", _cuda_into, _cpu_into)
