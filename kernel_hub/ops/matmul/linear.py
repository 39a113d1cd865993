"""The product of a linear layer with its epilogue (csrc/matmul/linear*.cu)."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..core import common
from ..core.activation import CODES, finish
from . import linear_fp8 as fp8
from .checks import check_results, check_weight
from .linear_launch import plan_launch
from .linear_plan import TABLE
from .product import ProductOp, launch

_OP = "linear"


def linear(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *,
    activation: str | None = None, residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    a_scale: torch.Tensor | None = None, b_scale: torch.Tensor | None = None,
    use_fast_accum: bool = False, deterministic: bool | Literal["batch"] = False,
    weights_ready: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Multiply rows by a weight matrix, add a bias, activate, add a residual.

        out = activation(a @ b.T + bias) + residual

    with fp32 sums, rounded once. The same inputs give the same bits on every run.

    a: (..., k) or (k,), fp16, bf16 or fp32, on the GPU or the CPU; the last dimension contiguous,
        the leading ones evenly spaced. Of fp16 and bf16 k is a multiple of 8, and rows begin at
        multiples of 16 bytes; fp32 is multiplied as three products of tf32, close to fp32's own
        rounding, quicker where its rows begin so too.
    b: (n, k), the weight, dtype and device of a; rows as those of a.
    bias: (n,), dtype of a, contiguous.
    activation: None, 'gelu' (with the error function), 'silu' or 'relu'. Where out is bf16, gelu is
        right to 2e-4 and silu to a relative 2e-4 before rounding; fp16: 6e-5 and 1e-5.
    residual: (..., n), dtype and device of out, the last dimension contiguous; may be out itself.
    out: (..., n), dtype out_dtype, device of a; must not overlap a, b or bias.
    out_dtype: the dtype of a (default; or that of out), or torch.float32.
    a_scale, b_scale: a and b are float8_e4m3fn (compute capability 9.0, or the CPU; k a multiple of
        16), each times its fp32 scales: None for 1; one element; one a row, (...) or (..., 1) for
        a, (n,) or (n, 1) for b; or of both one a block, (..., ceil(k / 128)) for 128 elements of a
        row of a, (ceil(n / 128), ceil(k / 128)) for 128 x 128 of b. out_dtype is then bfloat16
        (default), float16 or float32, and bias has that dtype too.
    use_fast_accum: of e4m3 without scales of blocks, sums stay in the tensor cores, which keep
        about 14 bits of them, over all of k. Else they leave them every 512 elements of k (with
        scales of blocks every 128).
    deterministic: "batch": a row's bits depend on it alone, not on how many there are (nor are sums
        of e4m3 fast). The same inputs give the same bits with any value.
    weights_ready: a promise that nothing ahead in the stream still writes b: what wrote it has
        ended, or a launch in between waits for all before it, as torch's own do. Then b may be read
        under the end of the launch before (compute capability 9.0, results of 16 bits): the same
        bits, sooner. Where that launch, or one that it did not wait for, does write b, what was
        there before may be read.

    Returns out. A CUDA tensor runs a shipped cubin on torch's current stream; a CPU tensor runs a
    reference in torch. No backward. Raises TensorError naming the argument that does not fit.
    """
    code = common.check_choice(_OP, "activation", activation, CODES)
    if use_fast_accum is not False:
        common.check_flag(_OP, "use_fast_accum", use_fast_accum)
    batch_invariant = deterministic is not False and common.is_batch(_OP, deterministic)
    if weights_ready is not False:
        common.check_flag(_OP, "weights_ready", weights_ready)
    dtype = getattr(a, "dtype", None)
    if dtype is fp8.DTYPE or a_scale is not None or b_scale is not None or use_fast_accum:
        scales = (a_scale, b_scale, use_fast_accum)
        return fp8.linear(
            a, b, bias, code, residual, out, out_dtype, *scales, batch_invariant=batch_invariant
        )
    if out_dtype is None:
        out_dtype = getattr(a if out is None else out, "dtype", None)
    inputs = (a, b, bias, code, residual, batch_invariant, bool(weights_ready))
    return _product.call(
        _cuda_into, _cpu_into, inputs, (a, b), (bias, residual, out), out, out_dtype
    )


def _check(
    a: Any, b: Any, bias: Any, activation: int, residual: Any, batch_invariant: bool,
    weights_ready: bool, out: Any, out_dtype: Any,
) -> None:  # fmt: skip
    common.check_tensor(_OP, "a", a)
    if a.is_floating_point() and a.dtype.itemsize == 1:  # e4m3 is not for here
        expected = "dtype float16, bfloat16, float32 or float8_e4m3fn (a.to(torch.float8_e4m3fn))"
        raise common.refuse(_OP, "a", expected, a)
    common.check_data(_OP, "a", a)
    k = a.shape[-1]
    if k % 8 and a.dtype in common.HALF:
        raise common.refuse(_OP, "a", "a last dimension (k) that is a multiple of 8", a)
    check_weight(_OP, "b", b, k, a)
    n = b.shape[0]
    if max(n, k) > common.MAX_SIZE or a.numel() > common.MAX_SIZE * max(k, 1):
        raise common.refuse(_OP, "b", f"sizes of at most {common.MAX_SIZE}", b)
    if bias is not None:
        common.check_like(_OP, "bias", bias, (n,), a)
    common.check_dtype(_OP, "out_dtype", out_dtype, (a.dtype, torch.float32))
    check_results(_OP, (*a.shape[:-1], n), a, out_dtype or a.dtype, out, residual)


def _new_out(a: Any, b: Any, *more: Any) -> Any:
    """The last argument is its dtype."""
    return a.new_empty((*a.shape[:-1], b.shape[0]), dtype=more[-1])


_product = ProductOp(
    _OP, "a b", "bias residual", "a b bias residual", in_place="out=residual",
    check=_check, new=_new_out, plan=plan_launch,
)  # fmt: skip
_plans = _product.plans
TABLE.on_change(_plans.clear)


def _cuda_into(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: int,
    residual: torch.Tensor | None, batch_invariant: bool, weights_ready: bool,
    out: torch.Tensor | None, is_given: bool = True, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    inputs = (a, b, bias, activation, residual, batch_invariant, weights_ready)
    tensors = (a, b, bias, residual)
    at: tuple[int, ...] = (a.data_ptr(), b.data_ptr())
    key = (
        a.dtype, a.shape, a.stride(), a.get_device(), b.dtype, b.shape, b.stride(), b.get_device(),
        (at[0] | at[1]) & 15, activation, batch_invariant, weights_ready,
        None if bias is None else (bias.dtype, bias.shape, bias.stride()),
        None if residual is None else (residual.dtype, residual.shape, residual.stride()),
        out_dtype if out is None else (out.dtype, out.shape, out.stride()),
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        found = _product.plan(key, inputs, tensors, out, out_dtype)
    if not bias is residual is None:
        at = (*at, *[x.data_ptr() for x in (bias, residual) if x is not None])
    return launch(found, at, tensors, out, is_given, residual)


@common.in_own_dtypes
def _cpu_into(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: int,
    residual: torch.Tensor | None, batch_invariant: bool, weights_ready: bool,
    out: torch.Tensor | None, is_given: bool = True, out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same on the CPU, by torch, whose products may depend on the batch."""
    inputs = (a, b, bias, activation, residual, batch_invariant, weights_ready)
    out = _product.on_cpu(inputs, (a, b, bias, residual), out, is_given, out_dtype)
    return out.copy_(finish(a.float() @ b.float().T, bias, activation, residual))


_product.register(
    _OP,
    "Tensor a, Tensor b, Tensor? bias, int activation, Tensor? residual, bool batch_invariant, "
    "bool weights_ready",
    _cuda_into, _cpu_into,
)  # fmt: skip
