"""The linear layers of a mixture of experts in one launch (csrc/matmul/grouped_linear*.cu)."""

from __future__ import annotations

import itertools
from typing import Any, Literal

import torch

from ..core import bounds, common
from ..core.activation import CODES, finish
from ..core.device import device_of
from .checks import check_operand, check_results, check_weight
from .grouped_launch import GroupedLaunch, OperandLayout, check_rows, launch_of
from .grouped_plan import TABLES, GroupedProblem, choose, too_large
from .product import ProductOp, launch

_OP = "grouped_linear"


def grouped_linear(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, *, bias: torch.Tensor | None = None,
    activation: str | None = None, out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, deterministic: bool | Literal["batch"] = False,
) -> torch.Tensor:  # fmt: skip
    """Multiply the rows of each expert by its weight matrix, add its bias, activate.

        rows = slice(offsets[e], offsets[e + 1])
        out[rows] = activation(a[rows] @ b[e].T + bias[e])    for every expert e

    with fp32 sums, rounded once. The same inputs give the same bits on every run. The offsets are
    read on the device only: nothing waits for them, and a CUDA graph may replay with others.

    a: (total_tokens, k), fp16 or bf16, on the GPU or the CPU, rows sorted by expert; k a multiple
        of 8; the last dimension contiguous. Its rows begin at multiples of 16 bytes.
    b: (num_experts, n, k), the weights, dtype and device of a; rows as those of a.
    offsets: (num_experts + 1,), int32, contiguous, device of a; not descending, from 0 to
        total_tokens. An expert may have no rows. Rows before the first and behind the last offset
        are of no expert: they are not written. Offsets outside 0 .. total_tokens count as the
        nearest inside, an end before its beginning as no rows; where offsets descend, the values
        of rows are undefined, but nothing outside out is written.
    bias: (num_experts, n), dtype and device of a, the last dimension contiguous.
    activation: None, 'gelu' (with the error function), 'silu' or 'relu'.
    out: (total_tokens, n), dtype out_dtype, device of a, the last dimension contiguous; must not
        overlap the inputs.
    out_dtype: the dtype of a (default; or that of out), or torch.float32.
    deterministic: "batch": a row's bits depend on it and its expert alone.

    Returns out. A CUDA tensor runs a shipped cubin on torch's current stream; a CPU tensor runs a
    reference in torch. No backward. Raises TensorError naming the argument that does not fit.
    """
    code = common.check_choice(_OP, "activation", activation, CODES)
    if out_dtype is None:
        out_dtype = getattr(a if out is None else out, "dtype", None)
    batch_invariant = deterministic is not False and common.is_batch(_OP, deterministic)
    inputs = (a, b, offsets, bias, code, batch_invariant)
    return _product.call(
        _cuda_into, _cpu_into, inputs, (a, b, offsets), (bias, out), out, out_dtype
    )


def _check(
    a: Any, b: Any, offsets: Any, bias: Any, activation: int, batch_invariant: bool, out: Any,
    out_dtype: Any,
) -> None:  # fmt: skip
    k = check_operand(_OP, a)
    if a.dim() != 2:
        raise common.refuse(_OP, "a", "two dimensions (total_tokens, k)", a)
    check_weight(_OP, "b", b, k, a, "num_experts, n")
    total_tokens, (num_experts, n) = a.shape[0], b.shape[:2]
    common.check_like(_OP, "offsets", offsets, (num_experts + 1,), a, dtypes=(torch.int32,))
    if max(n, k, total_tokens) > common.MAX_SIZE:
        raise common.refuse(_OP, "b", f"sizes of at most {common.MAX_SIZE}", b)
    if (
        num_experts
        and total_tokens
        and too_large(GroupedProblem(_OP, num_experts, total_tokens, n, k))
    ):
        raise common.refuse(_OP, "b", "fewer experts or rows: too many tiles", b)
    if bias is not None:
        common.check_like(_OP, "bias", bias, (num_experts, n), a)
    common.check_dtype(_OP, "out_dtype", out_dtype, (a.dtype, torch.float32))
    check_results(_OP, (total_tokens, n), a, out_dtype or a.dtype, out)


def _new_out(a: Any, b: Any, *more: Any) -> Any:
    """The last argument is its dtype."""
    return a.new_empty((a.shape[0], b.shape[1]), dtype=more[-1])


def _plan(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None,
    activation: int, batch_invariant: bool, out: torch.Tensor,
) -> GroupedLaunch:  # fmt: skip
    """Choose the kernel and its integer parameters for tensors that were checked."""
    (total_tokens, k), (num_experts, n, _) = a.shape, b.shape
    if out.numel() == 0 or num_experts == 0:
        return GroupedLaunch(None)
    a_layout = OperandLayout(1, 1, total_tokens, k, 0, 0, a.stride(0))
    b_layout = OperandLayout(
        1, num_experts, n, k, 0, b.stride(0) if num_experts > 1 else 0, b.stride(1)
    )
    check_rows(_OP, "a", a, a_layout)
    check_rows(_OP, "b", b, b_layout)
    out_stride = out.stride(0) if total_tokens > 1 else 0
    out_layout = OperandLayout(1, 1, total_tokens, n, 0, 0, out_stride)
    bias_stride = 0 if bias is None else bias.stride(0)
    problem = GroupedProblem(_OP, num_experts, total_tokens, n, k)
    has_maps = a_layout.is_mappable and b_layout.is_mappable
    device = device_of(a.device)
    choice = choose(*device[:2], problem, has_maps, device.name, batch_invariant)
    sizes = (total_tokens, n, k, num_experts, activation)
    if choice.boxes is None:
        numbers: tuple[int, ...] = (
            out_stride, a.stride(0), b_layout.inner_stride, b.stride(1), bias_stride, *sizes
        )  # fmt: skip
    else:
        numbers = (out_stride, bias_stride, *sizes)
    return launch_of(_OP, choice, out, a, (out_layout, a_layout, b_layout), numbers)


_product = ProductOp(
    _OP, "a b offsets", "bias", "a b offsets bias", check=_check, new=_new_out, plan=_plan
)
_plans = _product.plans
TABLES[_OP].on_change(_plans.clear)


def _cuda_into(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None,
    activation: int, batch_invariant: bool, out: torch.Tensor | None, is_given: bool = True,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    inputs, tensors = (a, b, offsets, bias, activation, batch_invariant), (a, b, offsets, bias)
    at: tuple[int, ...] = (a.data_ptr(), b.data_ptr(), offsets.data_ptr())
    key = (
        a.dtype, a.shape, a.stride(), a.get_device(), b.dtype, b.shape, b.stride(), b.get_device(),
        (at[0] | at[1]) & 15, offsets.dtype, offsets.shape, offsets.stride(),
        None if bias is None else (bias.dtype, bias.shape, bias.stride()), activation,
        batch_invariant, out_dtype if out is None else (out.dtype, out.shape, out.stride()),
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        found = _product.plan(key, inputs, tensors, out, out_dtype)
    if bias is not None:
        at = (*at, bias.data_ptr())
    out = launch(found, at, tensors, out, is_given, None)
    if common.is_debugging():
        bounds.report(a)
    return out


@common.in_own_dtypes
def _cpu_into(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None,
    activation: int, batch_invariant: bool, out: torch.Tensor | None, is_given: bool = True,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same on the CPU, by torch."""
    inputs = (a, b, offsets, bias, activation, batch_invariant)
    out = _product.on_cpu(inputs, (a, b, offsets, bias), out, is_given, out_dtype)
    bounds = [min(max(int(at), 0), a.shape[0]) for at in offsets.tolist()]
    for expert, (first, end) in enumerate(itertools.pairwise(bounds)):
        if end > first:
            values = a[first:end].float() @ b[expert].float().T
            own = None if bias is None else bias[expert]
            out[first:end].copy_(finish(values, own, activation))
    return out


_product.register(
    _OP, "Tensor a, Tensor b, Tensor offsets, Tensor? bias, int activation, bool batch_invariant",
    _cuda_into, _cpu_into,
)  # fmt: skip
