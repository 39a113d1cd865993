"""The weighted sum of what experts made of each token (csrc/moe/moe_combine.cu)."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.device import device_of
from ..core.launch import Launch, Plans

_OP = "moe_combine"
_plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
_operands = common.Operands(_OP, "rows row_id_map weights", "residual out")
_writes = common.Writes(_OP, "out rows row_id_map weights residual", "out", "out=residual")
_THREADS = (128, 64, 32)  # of a block
_GROUP_UNITS = 2**31 - 128  # vectors of a group of tokens: of whole blocks fewer than 2^31
_AT_ONCE = 1024  # elements of a multiprocessor that a thread each takes, where no vectors fit
_RUN = 256  # columns of a warp, else


def moe_combine(
    rows: torch.Tensor, row_id_map: torch.Tensor, weights: torch.Tensor, *,
    residual: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Each token's sum of its experts' rows, weighted: `ops.moe_permute` undone.

        out[t] = sum over j of weights[t, j] * rows[row_id_map[t, j]]  (+ residual[t])

    in fp32, in the order of j, rounded once. A slot of row -1 counts nothing.

    rows: (num_rows, hidden_size), fp16, bf16 or fp32, on the GPU or the CPU, as
        `ops.grouped_linear` makes them of what `ops.moe_permute` sorted; the last dimension
        contiguous.
    row_id_map: (tokens, k), int32, contiguous, device of rows. Rows that are not there count
        nothing.
    weights: (tokens, k), fp32, contiguous, device of rows.
    residual: (tokens, hidden_size), dtype and device of rows, the last dimension contiguous: what
        is added besides, such as a shared expert's output.
    out: likewise; may be the residual itself, no other overlap.

    Returns out. A CUDA tensor runs the shipped cubin on torch's current stream; a CPU tensor runs a
    reference in torch. With KERNEL_HUB_DEBUG=1 each call waits, and refuses rows that are neither
    -1 nor there. No backward. Raises TensorError naming the argument that does not fit.
    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017.
    """
    if not _operands.are_plain((rows, row_id_map, weights), (residual, out)):
        _check(rows, row_id_map, weights, residual, out)
        return _registered.run((rows, row_id_map, weights, residual), out)
    is_given = out is not None
    try:
        if out is None:
            out = _new(rows, row_id_map)
        into = _cuda_into if rows.is_cuda else _cpu_into
        into(rows, row_id_map, weights, residual, out, is_given)
    except common.FOREIGN:
        _operands.check_tensors((rows, row_id_map, weights), (residual, out))
        _check(rows, row_id_map, weights, residual, out)
        raise
    if is_given:
        common.written((out,))
    return out


def _check(rows: Any, row_id_map: Any, weights: Any, residual: Any = None, out: Any = None) -> None:
    common.check_data(_OP, "rows", rows)
    if rows.dim() != 2:
        raise common.refuse(_OP, "rows", "two dimensions (num_rows, hidden_size)", rows)
    common.check_tensor(_OP, "row_id_map", row_id_map)
    if row_id_map.dim() != 2:
        raise common.refuse(_OP, "row_id_map", "two dimensions (tokens, k)", row_id_map)
    slots = tuple(row_id_map.shape)
    common.check_like(_OP, "row_id_map", row_id_map, slots, rows, dtypes=(torch.int32,))
    common.check_like(_OP, "weights", weights, slots, rows, dtypes=(torch.float32,))
    for argument, value in (("row_id_map", row_id_map), ("weights", weights)):
        if not value.is_contiguous():
            raise common.refuse(_OP, argument, "a contiguous tensor", value)
    if max(*rows.shape, slots[0] * slots[1], slots[0]) > common.MAX_SIZE:
        raise common.refuse(_OP, "rows", f"sizes of at most {common.MAX_SIZE}", rows)
    shape = (slots[0], rows.shape[1])
    if residual is not None:
        common.check_like(_OP, "residual", residual, shape, rows)
    common.check_written(_OP, "out", out, shape, rows)


def _new(rows: torch.Tensor, row_id_map: torch.Tensor, *_: Any) -> torch.Tensor:
    return rows.new_empty((row_id_map.shape[0], rows.shape[1]))


def _rows_at_once(k: int) -> int:
    """How many rows a thread reads at once."""
    return max(2, min(8, k + k % 2))


def _element_units(tokens: int, hidden_size: int, num_sms: int) -> int:
    """Threads of a token by the element: one each of few, else whole warps."""
    if tokens * hidden_size <= _AT_ONCE * num_sms:
        return hidden_size
    return 32 * -(-hidden_size // _RUN)


def _plan(rows: Any, row_id_map: Any, residual: Any, out: Any, low_bits: int) -> Launch:
    """Choose the kernel, its launch shape and its integer parameters, for checked arguments."""
    (tokens, k), (num_rows, hidden_size) = row_id_map.shape, rows.shape
    if tokens * hidden_size == 0:
        return Launch()
    strides = [
        0 if t is None or t.shape[0] <= 1 else t.stride(0) for t in (out, rows, residual)
    ]  # fmt: skip
    elems = common.VEC_BYTES // rows.element_size()
    is_vec = not low_bits and common.is_aligned(elems, hidden_size, *strides)
    gpu = device_of(rows.device)
    row_units = hidden_size // elems if is_vec else _element_units(tokens, hidden_size, gpu.num_sms)
    group = max(1, min(tokens, _GROUP_UNITS // row_units))
    groups, units = -(-tokens // group), group * row_units
    if groups > common.MAX_GRID_Y:
        most = common.MAX_GRID_Y * group
        raise common.refuse(_OP, "row_id_map", f"at most {most} tokens of such rows", row_id_map)
    threads = next((n for n in _THREADS if units >= n * gpu.num_sms), _THREADS[-1])
    grid = (-(-units // threads), groups, 1)
    variant = f"vec{_rows_at_once(k)}" if is_vec else "scalar"
    function = common.shipped(_OP, f"{_OP}_{common.DTYPE_TOKENS[rows.dtype]}_{variant}")
    numbers = (*strides, tokens, group, k, num_rows, row_units, hidden_size)
    return Launch(function, grid, (threads, 1, 1), numbers=numbers, options=gpu.following)


def _cuda_into(
    rows: Any, row_id_map: Any, weights: Any, residual: Any, out: Any, is_given: bool = True
) -> None:
    """One launch. is_given: the caller gave out."""
    tensors = (out, rows, row_id_map, weights, residual)
    addresses = tuple([t.data_ptr() for t in tensors if t is not None])
    low_bits = (addresses[0] | addresses[1] | (0 if residual is None else addresses[4])) & 15
    key = (
        low_bits,
        *[None if t is None else (t.dtype, t.shape, t.stride(), t.device) for t in tensors],
    )
    found = _plans.get(key)
    if found is None:
        _check(rows, row_id_map, weights, residual, out)
        plan = _plan(rows, row_id_map, residual, out, low_bits)
        found = _plans.keep(key, (tuple(plan), _writes.spans(*tensors)))
    (function, grid, block, shared_bytes, numbers, _, options), spans = found
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    try:
        params = (out, bounds.flag(_OP, rows), rows, row_id_map, weights, residual, *numbers)
        function(grid, block, shared_bytes, None, params, **options)
    except KernelHubError:
        # The launch checks devices and dtypes; this names them.
        _check(rows, row_id_map, weights, residual, out)
        raise
    if common.is_debugging():
        bounds.report(rows)


def _cpu_into(
    rows: Any, row_id_map: Any, weights: Any, residual: Any, out: Any, is_given: bool = True
) -> None:
    """The same on the CPU, by torch."""
    _check(rows, row_id_map, weights, residual, out)
    if is_given:
        _writes.check(out, rows, row_id_map, weights, residual)
    sums = torch.zeros(out.shape)
    for j in range(row_id_map.shape[1]):
        places = row_id_map[:, j].long()
        tokens = ((places >= 0) & (places < rows.shape[0])).nonzero()[:, 0]
        sums[tokens] += weights[tokens, j, None] * rows[places[tokens]].float()
    out.copy_(sums if residual is None else sums + residual.float())


# By their names at each call: a test gives one another's.
_registered = common.define_pair(
    _OP, "Tensor rows, Tensor row_id_map, Tensor weights, Tensor? residual", new=_new,
    cuda=lambda *given: _cuda_into(*given), cpu=lambda *given: _cpu_into(*given), check=_check,
)  # fmt: skip
