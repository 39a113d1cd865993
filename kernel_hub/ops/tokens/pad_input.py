"""Packed sequences into padded batches, and out of them (csrc/tokens/pad_input.cu)."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.device import device_of
from ..core.launch import Launch, Plans

_PAD, _UNPAD = "pad_input", "unpad_input"
_THREADS = 256
# Units that a thread reads before it writes; threads of a multiprocessor that few rows have.
_AHEAD, _AT_ONCE = 4, 1024
_UNITS = (("vec", 16), ("word", 4), ("half_word", 2), ("byte", 1))
_Plan = tuple[tuple[Any, ...], common.Spans]


def pad_input(
    x: torch.Tensor, cu_seqlens: torch.Tensor, seqlen: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of packed sequences in a padded batch.

        out[b, s] = x[cu_seqlens[b] + s]  for s < cu_seqlens[b + 1] - cu_seqlens[b], else 0

    What a sequence has beyond seqlen is dropped, as are rows of no sequence.

    x: (total, ...), of any dtype, on the GPU or the CPU; the dimensions behind the first
        contiguous.
    cu_seqlens: (batch + 1,) int32, contiguous, device of x: from 0 to total, not falling
        (`ops.cu_seqlens` makes them of lengths). A sequence whose bounds fall or lie outside has no
        rows.
    seqlen: rows of each sequence in the batch.
    out: (batch, seqlen, ...), dtype and device of x, the dimensions behind the first two
        contiguous; must not overlap x or cu_seqlens. Not where a gradient is wanted.

    Returns out. A CUDA tensor runs the shipped cubin on torch's current stream, once, without a
    wait of the host; a CPU tensor runs a reference in torch. With KERNEL_HUB_DEBUG=1 each call
    waits, and refuses bounds that fall or lie outside. Differentiable in x: dx is
    unpad_input(dout). Raises TensorError naming the argument that does not fit.
    Source: Dao, flash-attention's bert_padding.py, 2022, where indices are in place of cu_seqlens.
    """
    return _pad(x, cu_seqlens, seqlen, out)


def unpad_input(
    x: torch.Tensor, cu_seqlens: torch.Tensor, total: int, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of a padded batch, packed.

        out[cu_seqlens[b] + s] = x[b, s]  for s < min(cu_seqlens[b + 1] - cu_seqlens[b], seqlen)

    Rows of out that none is for are 0: those behind the last sequence, where total is what there is
    room for, and those that a sequence has beyond seqlen.

    x: (batch, seqlen, ...), of any dtype, on the GPU or the CPU; the dimensions behind the first
        two contiguous.
    cu_seqlens: (batch + 1,) int32, contiguous, device of x: from 0 to at most total, not falling.
        A sequence whose bounds fall or lie outside has no rows.
    total: rows of out; cu_seqlens[-1] where the host knows it.
    out: (total, ...), dtype and device of x, the dimensions behind the first contiguous; must not
        overlap x or cu_seqlens. Not where a gradient is wanted.

    Returns out. Runs, reports and raises as `pad_input`. Differentiable in x: dx is
    pad_input(dout).
    Source: Dao, flash-attention's bert_padding.py, 2022, where a mask is in place of cu_seqlens.
    """
    return _unpad(x, cu_seqlens, total, out)


class _Copying:
    """One of both. rows: its argument, how many rows of out there are."""

    def __init__(self, op: str, rows: str) -> None:
        self.op, self.rows, self.pads = op, rows, op == _PAD
        self.lead = 1 if self.pads else 2  # dimensions of x before a row
        self.plans: Plans[_Plan] = Plans()
        self.operands = common.Operands(op, "x cu_seqlens", "out", has_backward=True)
        self.gradient = common.Operands(op, "dout", has_backward=True)
        self.writes = common.Writes(op, "out x cu_seqlens", "out")
        # By their names at each call: a test gives one another's.
        self.registered = common.define_pair(
            op, f"Tensor x, Tensor cu_seqlens, SymInt {rows}", new=self.new_out,
            cuda=lambda *given: _cuda_into(self, *given),
            cpu=lambda *given: _cpu_into(self, *given), check=self.check,
        )  # fmt: skip
        self.function = _function_of(self)

    def __call__(self, x: Any, cu_seqlens: Any, rows: Any, out: Any) -> torch.Tensor:
        common.check_count(self.op, self.rows, rows)
        is_plain = self.operands.are_plain((x, cu_seqlens), (out,))
        has_gradient = torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad
        if has_gradient and out is not None:
            raise common.gradient_refusal(f"{self.op} into out", "x")
        try:
            if not is_plain:
                self.check(x, cu_seqlens, rows, out)
                return self.registered.run((x, cu_seqlens, rows), out)
            if has_gradient:
                found: torch.Tensor = self.function.apply(x, cu_seqlens, rows)
                return found
            made: torch.Tensor = self.new_out(x, cu_seqlens, rows) if out is None else out
            into = _cuda_into if x.is_cuda else _cpu_into
            into(self, x, cu_seqlens, rows, made, out is not None)
        except common.FOREIGN:
            self.operands.check_tensors((x, cu_seqlens), (out,))
            self.check(x, cu_seqlens, rows, out)
            raise
        if out is not None:
            common.written((out,))
        return made

    def shape_of(self, x: Any, cu_seqlens: Any, rows: Any) -> tuple[Any, ...]:
        """That of out."""
        lead = (cu_seqlens.shape[0] - 1, rows) if self.pads else (rows,)
        return (*lead, *x.shape[self.lead :])

    def new_out(self, x: Any, cu_seqlens: Any, rows: Any) -> Any:
        """Uninitialised."""
        return x.new_empty(self.shape_of(x, cu_seqlens, rows))

    def check(self, x: Any, cu_seqlens: Any, rows: Any, out: Any = None) -> None:
        """Everything about the arguments but the addresses of tensors."""
        op = self.op
        common.check_tensor(op, "x", x)
        if x.device.type not in ("cuda", "cpu", "meta"):
            raise common.refuse(op, "x", "a CUDA or CPU tensor", x)
        if x.dim() < self.lead:
            expected = "shape (total, ...)" if self.pads else "shape (batch, seqlen, ...)"
            raise common.refuse(op, "x", expected, x)
        common.check_tensor(op, "cu_seqlens", cu_seqlens)
        batch = max(common.last_size(cu_seqlens) - 1, 0) if self.pads else x.shape[0]
        common.check_like(op, "cu_seqlens", cu_seqlens, (batch + 1,), x, dtypes=(torch.int32,))
        common.check_written(op, "out", out, self.shape_of(x, cu_seqlens, rows), x)
        sizes = (x.shape[0], batch * (rows if self.pads else x.shape[1]), rows)
        for argument, value, lead in (("x", x, self.lead), ("out", out, 3 - self.lead)):
            if value is None:
                continue
            if not _is_whole(value, lead):
                expected = "contiguous rows (call .contiguous() first)"
                raise common.refuse(op, argument, expected, value)
            row_bytes = math.prod(value.shape[lead:]) * value.element_size()
            if max(*sizes, row_bytes) > common.MAX_SIZE:
                expected = f"at most {common.MAX_SIZE} rows, and bytes of one"
                raise common.refuse(op, argument, expected, value)

    def plan(self, x: Any, cu_seqlens: Any, rows: Any, out: Any, low_bits: int) -> Launch:
        """Check the arguments; the kernel, the launch shape and the numbers."""
        self.check(x, cu_seqlens, rows, out)
        if out.numel() == 0:
            return Launch()
        packed, padded = (x, out) if self.pads else (out, x)
        batch, seqlen, total = padded.shape[0], padded.shape[1], packed.shape[0]
        size = x.element_size()
        row_bytes = math.prod(out.shape[3 - self.lead :]) * size
        strides = [
            t.stride(axis) * size if t.shape[axis] > 1 else 0
            for t, axis in ((packed, 0), (padded, 0), (padded, 1))
        ]
        spots = (low_bits, row_bytes, *strides)
        unit, width = next(each for each in _UNITS if not any(n % each[1] for n in spots))
        units = row_bytes // width
        out_rows, gpu = batch * seqlen if self.pads else total, device_of(x.device)
        numbers = (*[n // width for n in strides], batch, seqlen, total, units)
        threads, rows_a_block = _choose(units, out_rows, gpu.num_sms)
        grid = (-(-out_rows // rows_a_block), 1, 1)
        function = common.shipped(_PAD, f"{self.op}_{unit}")
        block = (threads, rows_a_block, 1)
        options = gpu.following
        return Launch(function, grid, block, numbers=numbers, options=options)

    def backward(self, dout: Any, cu_seqlens: Any, rows: int) -> torch.Tensor:
        """dx of as many rows: the other's."""
        other = _unpad if self.pads else _pad
        if not _is_whole(dout, 3 - self.lead):
            dout = dout.contiguous()
        if torch.is_grad_enabled() or not other.operands.are_plain((dout, cu_seqlens), (None,)):
            found: torch.Tensor = other.registered.returning(dout, cu_seqlens, rows)
            return found
        return other(dout, cu_seqlens, rows, None)


def _choose(units: int, rows: int, num_sms: int) -> tuple[int, int]:
    """(threads a row, rows a block): each thread with the least it can have of few rows, of many
    with all that it reads before it writes.
    """
    each = min(_AHEAD, -(-rows * units // (_AT_ONCE * num_sms)))
    lanes = -(-units // each)
    lanes = -(-lanes // -(-lanes // _THREADS))  # as many in each of a row's rounds
    # Whole lines of the cache, where a row has several.
    threads = min(_THREADS, 8 * -(-lanes // 8) if lanes > 8 else lanes)
    return threads, min(_THREADS // threads, rows)


def _is_whole(x: torch.Tensor, lead: int) -> bool:
    """Whether the dimensions behind the first `lead` are contiguous."""
    expected = 1
    for size, stride in zip(reversed(x.shape[lead:]), reversed(x.stride()[lead:]), strict=True):
        if size != 1 and stride != expected:
            return x.numel() == 0
        expected *= size
    return True


def _cuda_into(
    op: _Copying, x: Any, cu_seqlens: Any, rows: Any, out: Any, is_given: bool = True
) -> None:
    """One launch. is_given: the caller gave out."""
    tensors = (out, x, cu_seqlens)
    addresses = (out.data_ptr(), x.data_ptr(), cu_seqlens.data_ptr())
    low_bits = (addresses[0] | addresses[1]) & 15
    key = (low_bits, rows, *[(t.dtype, t.shape, t.stride(), t.device) for t in tensors])
    found = op.plans.get(key)
    if found is None:
        plan = tuple(op.plan(x, cu_seqlens, rows, out, low_bits))
        found = op.plans.keep(key, (plan, op.writes.spans(*tensors)))
    (function, grid, block, shared_bytes, numbers, _, options), spans = found
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    try:
        params = (out, bounds.flag(op.op, x), x, cu_seqlens, *numbers)
        function(grid, block, shared_bytes, None, params, **options)
    except KernelHubError:
        op.check(x, cu_seqlens, rows, out)  # the launch checks devices and dtypes; this names
        raise
    if common.is_debugging():
        bounds.report(x)


def _cpu_into(
    op: _Copying, x: Any, cu_seqlens: Any, rows: Any, out: Any, is_given: bool = True
) -> None:
    """The same on the CPU, by torch."""
    op.check(x, cu_seqlens, rows, out)
    if is_given:
        op.writes.check(out, x, cu_seqlens)
    if out.numel() == 0:
        return
    packed, padded = (x, out) if op.pads else (out, x)
    batch, seqlen, total = padded.shape[0], padded.shape[1], packed.shape[0]
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    counts = torch.where((starts >= 0) & (starts <= ends) & (ends <= total), ends - starts, 0)
    if op.pads:
        sequence = torch.arange(batch).repeat_interleave(seqlen)
        at = torch.arange(seqlen).repeat(batch)
    else:
        sequence = _last_beginning(starts, total)
        at = torch.arange(total) - (starts[sequence] if batch else 0)
    is_there = (at >= 0) & (at < seqlen)
    if batch:
        is_there &= at < counts[sequence]
    else:
        is_there[:] = False
    lead = 3 - op.lead
    found = torch.zeros((len(at), *out.shape[lead:]), dtype=out.dtype)
    sequence, at = sequence[is_there], at[is_there]
    # Bytes: not every dtype has an indexed copy.
    raw = found.view(len(found), -1).view(torch.uint8)
    from_rows = x.reshape(math.prod(x.shape[: op.lead]), math.prod(x.shape[op.lead :]))
    which = starts[sequence] + at if op.pads else sequence * seqlen + at
    raw[is_there] = from_rows.contiguous().view(torch.uint8)[which]
    out.copy_(found.view(out.shape))


def _last_beginning(starts: torch.Tensor, total: int) -> torch.Tensor:
    """Of each packed row, the sequence that the kernel finds: the last to begin at it or before."""
    row = torch.arange(total)
    low, high = torch.zeros_like(row), torch.full_like(row, max(len(starts) - 1, 0))
    while bool((low < high).any()):
        middle = (low + high + 1) // 2
        begins = starts[middle] <= row
        is_open = low < high
        low = torch.where(is_open & begins, middle, low)
        high = torch.where(is_open & ~begins, middle - 1, high)
    return low


def _function_of(op: _Copying) -> Any:
    """Eager calls that want a gradient, without torch's dispatcher."""

    class Copied(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, cu_seqlens: Any, rows: int) -> torch.Tensor:
            out: torch.Tensor = op.new_out(x, cu_seqlens, rows)
            (_cuda_into if x.is_cuda else _cpu_into)(op, x, cu_seqlens, rows, out, False)
            ctx.save_for_backward(cu_seqlens)
            ctx.set_materialize_grads(False)
            ctx.own_rows = x.shape[op.lead - 1]
            return out

        @staticmethod
        def backward(ctx: Any, dout: Any) -> tuple[Any, ...]:
            if dout is None:
                return None, None, None
            dout = op.gradient.in_memory(dout)
            (cu_seqlens,) = ctx.saved_tensors
            return op.backward(dout, cu_seqlens, ctx.own_rows), None, None

    return Copied


def _differentiate(op: _Copying) -> None:
    """The registered op, for torch's dispatcher."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.own_rows = inputs[0].shape[op.lead - 1]

    def grad(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        op.gradient.check_tangents(dout)
        (cu_seqlens,) = ctx.saved_tensors
        return op.backward(dout, cu_seqlens, ctx.own_rows), None, None

    torch.library.register_autograd(
        op.registered.returning.name(), grad, setup_context=setup, lib=common.LIBRARY
    )


_pad, _unpad = _Copying(_PAD, "seqlen"), _Copying(_UNPAD, "total")
for _each in (_pad, _unpad):
    _differentiate(_each)
