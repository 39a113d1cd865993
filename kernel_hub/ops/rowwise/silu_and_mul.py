"""The gated activation of SwiGLU layers (csrc/rowwise/silu_and_mul.cu)."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError
from ..core import common
from ..core.launch import Launch, Plans

_OP = "silu_and_mul"
# A bare tuple of a launch: unpacking it takes 40 ns less.
_plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
_operands = common.Operands(_OP, "x", "out")
_writes = common.Writes(_OP, "out x", "out")
_PLAIN_TYPES = common.PLAIN_TYPES
_is_tracing = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_transform, _forward_ad = common.transform, common.forward_ad
_empty = torch.empty


def silu_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply the second half of each row by the SiLU of the first.

        out[..., j] = silu(x[..., j]) * x[..., size + j],  silu(g) = g / (1 + exp(-g))

    computed in fp32 and rounded once.

    x: (..., 2 * size), fp16, bf16 or fp32, on the GPU or the CPU; last dimension contiguous, the
        leading ones in at most two separately strided groups.
    out: (..., size), dtype and device of x, strides of its own; must not overlap x.

    Returns out. A CUDA tensor runs the shipped cubin on torch's current stream; a CPU tensor runs a
    reference in torch. No backward. Raises TensorError naming the argument that does not fit.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    try:
        if (
            out is None
            and not _is_tracing()
            and type(x) in _PLAIN_TYPES
            and x.is_cuda
            # What `Operands` asks of every other call.
            and _transform() is None
            and _forward_ad._current_level < 0
            and not x.is_neg()
            and not (_is_grad_enabled() and x.requires_grad)
        ):
            return _cuda(x)
    except RuntimeError:
        _check(x)  # names what has no memory or no strides
        raise
    if not _operands.are_plain((x,), (out,)):
        _check(x, out)
        if out is None:
            return _op(x)
        _op_out(x, out)
        return out
    try:
        if out is None:
            return (_cuda if x.is_cuda else _cpu)(x)
        (_cuda_into if x.is_cuda else _cpu_into)(x, out)
    except common.FOREIGN:
        _operands.check_tensors((x,), (out,))  # names what has no memory
        _check(x, out)
        raise
    common.written((out,))
    return out


def _check(x: Any, out: Any = None) -> None:
    common.check_data(_OP, "x", x)
    if x.shape[-1] % 2:
        raise common.refuse(_OP, "x", "an even last dimension (gate, then up)", x)
    if x.shape[-1] > common.MAX_SIZE:
        raise common.refuse(_OP, "x", f"a last dimension of at most {common.MAX_SIZE}", x)
    if out is not None:
        common.check_like(_OP, "out", out, (*x.shape[:-1], x.shape[-1] // 2), x)
        common.check_output(_OP, "out", out)


def _new_out(x: torch.Tensor) -> torch.Tensor:
    shape = x.shape
    return _empty((*shape[:-1], shape[-1] // 2), dtype=x.dtype, device=x.device)


def _threads(vecs: int, rows: int) -> int:
    """Threads a block, each with one 16-byte vector of output, for rows of `vecs` of them.

    Measured on an H200 (docs/notes/silu_and_mul.md): few rows want many small blocks, many rows as
    few blocks a row as there can be.
    """
    most = 128 if rows <= 256 else 1024
    blocks = -(-vecs // most)
    return 32 * -(-vecs // (32 * blocks))


def _plan(x: torch.Tensor, out: torch.Tensor, low_bits: int) -> Launch:
    """Check the tensors and choose the kernel, its launch shape and its integer parameters."""
    _check(x, out)
    if out.numel() == 0:
        return Launch()
    size = out.shape[-1]
    outer, rows, pairs = common.split_rows(_OP, x.shape[:-1], [out.stride()[:-1], x.stride()[:-1]])
    strides = [stride for outer_stride, stride in pairs for stride in (stride, outer_stride)]
    elems = common.VEC_BYTES // x.element_size()
    if low_bits or not common.is_aligned(elems, size, *strides):
        variant, threads, span = "scalar", 256, 256
    else:
        threads = _threads(size // elems, rows * outer)
        variant, span = "vec", threads * elems
    numbers = (*strides, rows, size)
    # Contiguous rows take fewer parameters and no stride arithmetic.
    if variant == "vec" and x.is_contiguous() and out.is_contiguous() and rows <= common.MAX_GRID_Y:
        variant, numbers = "flat", (size,)
    name = f"{_OP}_{common.DTYPE_TOKENS[x.dtype]}_{variant}"
    function = common.shipped(_OP, name)
    grid = (-(-size // span), min(rows, common.MAX_GRID_Y), outer)
    return Launch(function, grid, (threads, 1, 1), numbers=numbers)


def _cuda(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 0 or x.shape[-1] % 2:
        _check(x)
    out = _new_out(x)
    _cuda_into(x, out, False)
    return out


def _cuda_into(x: torch.Tensor, out: torch.Tensor, is_given: bool = True) -> None:
    """is_given: the caller gave out, which may overlap x."""
    addresses = out.data_ptr(), x.data_ptr()
    low_bits = (addresses[0] | addresses[1]) & 15
    key = (x.dtype, x.shape, x.stride(), out.shape, out.stride(), low_bits)
    found = _plans.get(key)
    if found is None:
        launch = tuple(_plan(x, out, low_bits))
        found = _plans.keep(key, (launch, _writes.spans(out, x)))
    (function, grid, block, shared_bytes, numbers, _, _), spans = found
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    if function is not None:
        try:
            function(grid, block, shared_bytes, None, (out, x, *numbers))
        except KernelHubError:
            _check(x, out)  # the launch checks devices and dtypes; this names them
            raise


def _cpu_into(x: torch.Tensor, out: torch.Tensor, is_given: bool = True) -> None:
    _check(x, out)
    if is_given:
        _writes.check(out, x)
    gate, up = x.float().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def _cpu(x: torch.Tensor) -> torch.Tensor:
    _check(x)
    out = _new_out(x)
    _cpu_into(x, out, False)
    return out


def _fake(x: torch.Tensor) -> torch.Tensor:
    _check(x)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


_op = common.define("silu_and_mul(Tensor x) -> Tensor", cuda=_cuda, cpu=_cpu, fake=_fake)
_op_out = common.define(
    "silu_and_mul_out(Tensor x, Tensor(a!) out) -> ()",
    cuda=_cuda_into, cpu=_cpu_into, fake=_check,
)  # fmt: skip
