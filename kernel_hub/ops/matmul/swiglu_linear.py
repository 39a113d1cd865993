"""The gate and up products of a SwiGLU layer and what joins them
(csrc/matmul/swiglu_linear*.cu)."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError
from ..core import common
from ..core.device import device_of
from ..core.launch import Launch, Plans
from ..core.tensor_maps import Boxes
from .checks import check_operand, check_weight, rows_and_strides
from .paired_launch import launch_of, maps_of, row_boxes
from .paired_plan import GROUP_ROWS, TABLES, choose
from .tiles import BLOCK_K

_empty_like = torch.empty_like
_OP = "swiglu_linear"
_operands = common.Operands(_OP, "a b_gate_up", "out")
_writes = common.Writes(_OP, "out a b_gate_up", "out")
_plans: Plans[tuple[Launch, common.Spans, Any]] = Plans()
TABLES[_OP].on_change(_plans.clear)


def swiglu_linear(
    a: torch.Tensor, b_gate_up: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply rows by the gate and up weights of a SwiGLU layer, and join the two.

        out = silu(a @ gate.T) * (a @ up.T)        gate, up = b_gate_up.chunk(2)

    with fp32 until the end, rounded once. The same inputs give the same bits on every run.

    a: (..., k) or (k,), fp16 or bf16, on the GPU or the CPU; k a multiple of 8; the last dimension
        contiguous, the leading ones evenly spaced. Its rows begin at multiples of 16 bytes.
    b_gate_up: (2 * i, k), the rows of the gate, then those of up, as checkpoints have them; dtype
        and device of a; rows as those of a.
    out: (..., i), dtype and device of a; must not overlap a or b_gate_up.

    Returns out. A CUDA tensor runs a shipped cubin on torch's current stream; a CPU tensor runs a
    reference in torch. No backward. Raises TensorError naming the argument that does not fit.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    if not _operands.are_plain((a, b_gate_up), (out,)):
        _check(a, b_gate_up, out)
        return _registered.run((a, b_gate_up), out)
    try:
        into = _cuda_into if a.is_cuda else _cpu_into
        made = into(a, b_gate_up, out, out is not None)
    except common.FOREIGN:
        _operands.check_tensors((a, b_gate_up), (out,))  # names what has no memory
        _check(a, b_gate_up, out)
        raise
    if out is not None:
        common.written((out,))
    return made


def _check(a: Any, b: Any, out: Any = None) -> None:
    k = check_operand(_OP, a)
    check_weight(_OP, "b_gate_up", b, k, a, "2 * i")
    if b.shape[0] % 2:
        expected = f"shape (2 * i, {k}): as many rows of the gate as of up"
        raise common.refuse(_OP, "b_gate_up", expected, b)
    if max(*b.shape) > common.MAX_SIZE or a.numel() > common.MAX_SIZE * max(k, 1):
        raise common.refuse(_OP, "b_gate_up", f"sizes of at most {common.MAX_SIZE}", b)
    common.check_written(_OP, "out", out, (*a.shape[:-1], b.shape[0] // 2), a)


def _new_out(a: Any, b: Any) -> Any:
    return a.new_empty((*a.shape[:-1], b.shape[0] // 2))


def _plan(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Launch:
    """Check the tensors; choose the kernel, its tensor maps and its integer parameters."""
    _check(a, b, out)
    if out.numel() == 0:
        return Launch()
    k, columns = a.shape[-1], b.shape[0] // 2
    m, (a_stride, out_stride), b_stride = rows_and_strides(_OP, a, "b_gate_up", b, out)
    n = -(-columns // 8) * GROUP_ROWS
    # Rows that overlap, or an expanded one: pointers, no tensor maps.
    has_maps = columns % 8 == 0 and (m == 1 or a_stride >= k) and b_stride >= k
    choice = choose(_OP, device_of(a.device).gpu, m, n, k, has_maps)
    if choice.tile is None:
        return launch_of(_OP, choice, a, (out_stride, a_stride, b_stride, m, columns, k))
    share = choice.tile.b_share
    # 8 rows of the gate, the 8 of up beside them, the next 8 of the gate, ...
    b_boxes = Boxes(
        (1, columns // 8, 2, 8, k),
        (8 * b_stride, 8 * b_stride, columns * b_stride, b_stride, 1),
        (1, share // GROUP_ROWS, 2, 8, BLOCK_K),
    )
    numbers = (out_stride, m, columns, k, share, choice.group)
    return launch_of(_OP, choice, a, numbers, *row_boxes(choice, m, k, a_stride), b_boxes)


def _cuda_into(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, is_given: bool = True
) -> torch.Tensor:
    """Into out, or a new one. is_given: the caller gave it, and it may overlap the rest."""
    at_a, at_b = a.data_ptr(), b.data_ptr()
    key = (
        a.dtype, a.shape, a.stride(), a.get_device(), b.dtype, b.shape, b.stride(), b.get_device(),
        (at_a | at_b) & 15, None if out is None else (out.dtype, out.shape, out.stride()),
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        like = _new_out(a, b) if out is None else out
        plan, spans = _plan(a, b, like), _writes.spans(like, a, b)
        found = _plans.keep(key, (plan, spans, common.emptied(like) if out is None else None))
    (function, grid, block, shared_bytes, numbers, boxes, options), spans, like = found
    if out is None:
        out = _empty_like(like)
    addresses = (out.data_ptr(), at_a, at_b)
    maps = spans.apart.get(addresses)
    if maps is None:
        maps = spans.made(addresses, is_given, maps_of, boxes, a, b)
    if function is None:
        return out
    try:
        params = (out, *(maps or (a, b)), *numbers)
        function(grid, block, shared_bytes, None, params, **options)
    except KernelHubError:
        _check(a, b, out)  # names the devices that differ
        raise
    return out


def _cpu_into(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, is_given: bool = True
) -> torch.Tensor:
    """The same on the CPU, by torch."""
    _check(a, b, out)
    out = _new_out(a, b) if out is None else out
    if is_given:
        _writes.check(out, a, b)
    gate, up = (a.float() @ half.float().T for half in b.chunk(2))
    return out.copy_(torch.nn.functional.silu(gate) * up)


_registered = common.define_pair(
    _OP, "Tensor a, Tensor b_gate_up", new=_new_out, cuda=_cuda_into, cpu=_cpu_into, check=_check
)
