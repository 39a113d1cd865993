"""The product of a linear layer with its epilogue (csrc/matmul/linear*.cu)."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError
from ..core import common
from ..core.activation import CODES, finish
from ..core.launch import Plans
from . import linear_fp8 as fp8
from .checks import check_results, check_weight
from .linear_launch import LinearLaunch, plan_launch
from .linear_plan import TABLE

_OP = "linear"
_plans: Plans[tuple[LinearLaunch, common.Spans]] = Plans()
TABLE.on_change(_plans.clear)
_operands = common.Operands(_OP, "a b", "bias residual out")
_writes = common.Writes(_OP, "out a b bias residual", "out", in_place="out=residual")


def linear(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *,
    activation: str | None = None, residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    a_scale: torch.Tensor | None = None, b_scale: torch.Tensor | None = None,
    use_fast_accum: bool = False,
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

    Returns out. A CUDA tensor runs a shipped cubin on torch's current stream; a CPU tensor runs a
    reference in torch. No backward. Raises TensorError naming the argument that does not fit.
    """
    code = common.check_choice(_OP, "activation", activation, CODES)
    if use_fast_accum is not False:
        common.check_flag(_OP, "use_fast_accum", use_fast_accum)
    dtype = getattr(a, "dtype", None)
    if dtype is fp8.DTYPE or a_scale is not None or b_scale is not None or use_fast_accum:
        scales = (a_scale, b_scale, use_fast_accum)
        return fp8.linear(a, b, bias, code, residual, out, out_dtype, *scales)
    if out_dtype is None:
        out_dtype = getattr(a if out is None else out, "dtype", None)
    if not _operands.are_plain((a, b), (bias, residual, out)):
        _check(a, b, bias, residual, out, out_dtype)
        return _registered.run((a, b, bias, code, residual), out, out_dtype)
    is_given = out is not None
    try:
        if out is None:
            out = _new_out(a, b, out_dtype)
        elif out.dtype is not out_dtype:
            raise common.refuse(_OP, "out", f"dtype {out_dtype}, as out_dtype says", out)
        (_cuda_into if a.is_cuda else _cpu_into)(a, b, bias, code, residual, out, is_given)
    except common.FOREIGN:
        _operands.check_tensors((a, b), (bias, residual, out))  # names what has no memory
        _check(a, b, bias, residual, out, out_dtype)
        raise
    if is_given:
        common.written((out,))
    return out


def _check(
    a: Any, b: Any, bias: Any = None, residual: Any = None, out: Any = None, out_dtype: Any = None
) -> None:
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


def _cuda_into(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: int,
    residual: torch.Tensor | None, out: torch.Tensor, is_given: bool = True,
) -> None:  # fmt: skip
    """is_given: the caller gave out, which may overlap the rest."""
    addresses: tuple[int, ...] = out.data_ptr(), a.data_ptr(), b.data_ptr()
    low_bits = (addresses[1] | addresses[2]) & 15
    added = None if residual is None else (residual.dtype, residual.shape, residual.stride())
    first = None if bias is None else (bias.dtype, bias.shape, bias.stride())
    key = (
        a.dtype, a.shape, a.stride(), b.dtype, b.shape, b.stride(), out.dtype, out.shape,
        out.stride(), first, added, activation, low_bits, a.device, b.device,
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        _check(a, b, bias, residual, out, out.dtype)
        plan = plan_launch(a, b, bias, activation, residual, out)
        found = _plans.keep(key, (plan, _writes.spans(out, a, b, bias, residual)))
    plan, spans = found
    if bias is not None:
        addresses = *addresses, bias.data_ptr()
    if residual is not None:
        addresses = *addresses, residual.data_ptr()
    maps = spans.apart.get(addresses)
    if maps is None:
        maps = spans.made(addresses, is_given, plan.maps, a, b, out, residual)
    if plan.function is not None:
        try:
            plan.run(maps, out, a, b, bias, residual)
        except KernelHubError:
            _check(a, b, bias, residual, out, out.dtype)  # names the devices that differ
            raise


def _cpu_into(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: int,
    residual: torch.Tensor | None, out: torch.Tensor, is_given: bool = True,
) -> None:  # fmt: skip
    """The same on the CPU, by torch."""
    _check(a, b, bias, residual, out, out.dtype)
    if is_given:
        _writes.check(out, a, b, bias, residual)
    out.copy_(finish(a.float() @ b.float().T, bias, activation, residual))


_registered = common.define_pair(
    _OP, "Tensor a, Tensor b, Tensor? bias, int activation, Tensor? residual",
    more="ScalarType out_dtype", new=_new_out, cuda=_cuda_into, cpu=_cpu_into,
    check=lambda a, b, bias, _, residual, out: _check(a, b, bias, residual, out, out.dtype),
)  # fmt: skip
