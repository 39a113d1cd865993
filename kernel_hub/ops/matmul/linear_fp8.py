"""linear of e4m3 with scales (csrc/matmul/linear_fp8_sm90.cu): check -> plan -> launch."""

from __future__ import annotations

from typing import Any

import torch

from ..core import common
from ..core.activation import finish
from ..core.device import device_of
from .checks import check_results, check_weight, rows_and_strides
from .linear_fp8_plan import CUBIN, SCALE_BLOCK, TABLE, choose
from .linear_launch import LinearLaunch, operand_boxes, result_boxes
from .product import ProductOp, launch

DTYPE = torch.float8_e4m3fn
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OP = "linear"
# How sums are formed, as registered ops name it: bits.
_FAST, _BATCH_INVARIANT = 1, 2


def linear(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: int,
    residual: torch.Tensor | None, out: torch.Tensor | None, out_dtype: torch.dtype | None,
    a_scale: torch.Tensor | None, b_scale: torch.Tensor | None, use_fast_accum: bool, *,
    batch_invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """As ops.linear, which passes here what is of e4m3 or has scales."""
    if out_dtype is None:
        out_dtype = getattr(out, "dtype", torch.bfloat16)
    sums = _FAST * bool(use_fast_accum) | _BATCH_INVARIANT * batch_invariant
    inputs = (a, b, a_scale, b_scale, bias, activation, residual, sums)
    optional = (a_scale, b_scale, bias, residual, out)
    return _product.call(_cuda_into, _cpu_into, inputs, (a, b), optional, out, out_dtype)


def check(
    a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, activation: int, residual: Any,
    sums: int, out: Any, out_dtype: Any,
) -> bool:  # fmt: skip
    """Refuse what does not fit; whether scales are those of blocks."""
    for argument, value in (("a", a), ("b", b)):
        common.check_tensor(_OP, argument, value)
        if value.dtype != DTYPE:
            why = "as a is" if argument == "b" and a.dtype == DTYPE else "as there are scales"
            raise common.refuse(_OP, argument, f"dtype float8_e4m3fn, {why}", value)
        if value.device.type not in ("cuda", "cpu", "meta"):
            raise common.refuse(_OP, argument, "a CUDA or CPU tensor", value)
    if a.dim() == 0 or a.shape[-1] % 16 or not a.shape[-1]:
        raise common.refuse(_OP, "a", "a last dimension (k) that is a multiple of 16, not 0", a)
    if a.shape[-1] > 1 and a.stride(-1) != 1:
        raise common.refuse(_OP, "a", "a contiguous last dimension (call .contiguous() first)", a)
    k = a.shape[-1]
    check_weight(_OP, "b", b, k, a)
    n = b.shape[0]
    if max(n, k) > common.MAX_SIZE or a.numel() > common.MAX_SIZE * k:
        raise common.refuse(_OP, "b", f"sizes of at most {common.MAX_SIZE}", b)
    if out_dtype is None:
        raise common.refuse(_OP, "out_dtype", "torch.bfloat16, float16 or float32", out_dtype)
    common.check_dtype(_OP, "out_dtype", out_dtype, OUT_DTYPES)
    if bias is not None:
        common.check_like(_OP, "bias", bias, (n,), a, dtypes=(out_dtype,))
    check_results(_OP, (*a.shape[:-1], n), a, out_dtype, out, residual)
    has_blocks = _check_scales(a, b, a_scale, b_scale)
    if has_blocks and sums & _FAST:
        raise common.refuse(
            _OP, "use_fast_accum", "False with scales of blocks, which end its sums", True
        )
    return has_blocks


def _check_scales(a: Any, b: Any, a_scale: Any, b_scale: Any) -> bool:
    rows, n, blocks = tuple(a.shape[:-1]), b.shape[0], -(-a.shape[-1] // SCALE_BLOCK)
    fits = []
    for argument, scale, of_rows, of_blocks in (
        ("a_scale", a_scale, rows, (*rows, blocks)),
        ("b_scale", b_scale, (n,), (-(-n // SCALE_BLOCK), blocks)),
    ):
        if scale is None:
            fits.append((True, False))
            continue
        common.check_fp32(_OP, argument, scale, a)
        shape = tuple(scale.shape)
        fits.append((shape in ((), (1,), of_rows, (*of_rows, 1)), shape == of_blocks))
        if not any(fits[-1]):
            raise common.refuse(
                _OP, argument, f"one element, shape {of_rows} or {(*of_rows, 1)} for rows, or "
                f"{of_blocks} for blocks of {SCALE_BLOCK} elements of k", scale,
            )  # fmt: skip
    if fits[0][0] and fits[1][0]:
        return False
    if not (fits[0][1] and fits[1][1]):
        raise common.refuse(_OP, "b_scale", "scales of blocks where a_scale has, and only there",
                            "None" if b_scale is None else b_scale)  # fmt: skip
    return True


def _new_out(a: Any, b: Any, *more: Any) -> Any:
    """The last argument is its dtype."""
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=more[-1])


def _cuda_into(
    a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, activation: int, residual: Any,
    sums: int, out: Any, is_given: bool = True, out_dtype: Any = None,
) -> torch.Tensor:  # fmt: skip
    inputs = (a, b, a_scale, b_scale, bias, activation, residual, sums)
    more = (a_scale, b_scale, bias, residual)
    at = (a.data_ptr(), b.data_ptr(), *[x.data_ptr() for x in more if x is not None])
    key = (
        a.dtype, a.shape, a.stride(), a.get_device(), b.dtype, b.shape, b.stride(), b.get_device(),
        (at[0] | at[1]) & 15, activation, sums,
        out_dtype if out is None else (out.dtype, out.shape, out.stride()),
        *[None if x is None else (x.dtype, x.shape, x.stride()) for x in more],
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        found = _product.plan(key, inputs, (a, b, *more), out, out_dtype)
    return launch(found, at, (a, b, *more), out, is_given, residual)


def plan_launch(
    a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, residual: Any, out: Any,
    activation: int, has_blocks: bool, use_fast_accum: bool, batch_invariant: bool = False,
) -> LinearLaunch:  # fmt: skip
    """Choose the kernel and its numbers for tensors that were checked."""
    device = device_of(a.device)
    if not device.has_wgmma:
        raise common.refuse(
            _OP, "a", "a GPU of compute capability 9.0 (Hopper) for e4m3, which others do without",
            "compute capability {}.{}".format(*device.compute_capability),
        )  # fmt: skip
    if out.numel() == 0:
        return LinearLaunch(None)
    n, k = b.shape
    # One scale for each row of a, or none of its own.
    has_rows = a_scale is not None and (has_blocks or a_scale.numel() > 1)
    given = {"out": out}
    if has_rows:
        given["a_scale"] = a_scale
    if residual is not None:
        given["residual"] = residual
    m, (a_stride, out_stride, *more), b_stride = rows_and_strides(_OP, a, "b", b, **given)
    a_scale_stride = more[0] if has_rows else 0
    residual_stride = 0 if residual is None else more[-1]
    for argument, tensor, stride in (("a", a, a_stride), ("b", b, b_stride)):
        if stride < k:
            raise common.refuse(_OP, argument, "rows that do not overlap (copy it first)", tensor)
    b_scale_stride = 0
    if b_scale is not None and b_scale.dim() and (has_blocks or b_scale.numel() > 1):
        b_scale_stride = b_scale.stride(0)
    k_strides = (a_scale.stride(-1), b_scale.stride(1)) if has_blocks else (0, 0)
    choice = choose(
        device.num_sms, m, n, k, bool(use_fast_accum), device.name, has_blocks, batch_invariant
    )
    token = common.DTYPE_TOKENS[out.dtype]
    function = common.shipped(CUBIN, f"linear_fp8_{token}_{choice.variant}")
    numbers = (
        out_stride, residual_stride, a_scale_stride, k_strides[0], b_scale_stride, k_strides[1],
        m, n, k, activation, choice.group, choice.num_whole, choice.num_dealt, int(has_blocks),
    )  # fmt: skip
    sides = (m, k // 2, a_stride // 2), (n, k // 2, b_stride // 2)  # of pairs of elements
    boxes = operand_boxes(choice, *sides, torch.int16)
    out_boxes = residual_boxes = None
    if choice.out_box_rows and out.element_size() == 2:
        out_boxes, residual_boxes = result_boxes(choice, m, n, out_stride, residual_stride)
    how = {"programmatic": True}  # it begins under the end of the launch before
    return LinearLaunch(function, choice, numbers, boxes, out_boxes, residual_boxes, how)


def _plan(
    a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, activation: int, residual: Any,
    sums: int, out: Any,
) -> LinearLaunch:  # fmt: skip
    tensors = (a, b, a_scale, b_scale, bias, residual, out)
    has_blocks = _check_scales(*tensors[:4])
    how = bool(sums & _FAST), bool(sums & _BATCH_INVARIANT)
    return plan_launch(*tensors, activation, has_blocks, *how)


_product = ProductOp(
    _OP, "a b", "a_scale b_scale bias residual", "a b a_scale b_scale bias residual",
    in_place="out=residual", check=check, new=_new_out, plan=_plan,
)  # fmt: skip
_plans = _product.plans
TABLE.on_change(_plans.clear)


def dequantised(
    values: torch.Tensor, scale: torch.Tensor | None, has_blocks: bool, dtype: torch.dtype,
    block_rows: int = 1,
) -> torch.Tensor:  # fmt: skip
    """values * scale in `dtype`; a scale of blocks stands for SCALE_BLOCK elements of a row."""
    wide = values.to(dtype)
    if scale is None:
        return wide
    factors = scale.to(dtype)
    if has_blocks:
        factors = factors.repeat_interleave(SCALE_BLOCK, dim=-1)[..., : values.shape[-1]]
        if block_rows > 1:
            factors = factors.repeat_interleave(block_rows, dim=0)[: values.shape[0]]
    elif factors.numel() > 1 and factors.dim() < values.dim():
        factors = factors.unsqueeze(-1)
    elif factors.numel() == 1:
        factors = factors.reshape(())
    return wide * factors


@common.in_own_dtypes
def _cpu_into(
    a: Any, b: Any, a_scale: Any, b_scale: Any, bias: Any, activation: int, residual: Any,
    sums: int, out: Any, is_given: bool = True, out_dtype: Any = None,
) -> torch.Tensor:  # fmt: skip
    """The same on the CPU, by torch."""
    inputs = (a, b, a_scale, b_scale, bias, activation, residual, sums)
    tensors = (a, b, a_scale, b_scale, bias, residual)
    out = _product.on_cpu(inputs, tensors, out, is_given, out_dtype)
    has_blocks = _check_scales(a, b, a_scale, b_scale)
    rows = dequantised(a, a_scale, has_blocks, torch.float32)
    weights = dequantised(b, b_scale, has_blocks, torch.float32, SCALE_BLOCK)
    return out.copy_(finish(rows @ weights.T, bias, activation, residual))


_product.register(
    "linear_fp8",
    "Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, int activation, "
    "Tensor? residual, int sums",
    _cuda_into, _cpu_into,
)  # fmt: skip
