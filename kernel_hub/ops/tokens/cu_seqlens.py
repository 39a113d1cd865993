"""Where the tokens of packed sequences lie (csrc/tokens/cu_seqlens.cu)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.device import device_of
from ..core.launch import Launch, Plans

_OP = "cu_seqlens"
_THREADS = 256
_MOST_SEQUENCES = 8192  # their bounds lie in shared memory


class SeqlensGiven(NamedTuple):
    """The arguments of the registered op."""

    lengths: Any
    cache_seqlens: Any
    block_table: Any
    page_size: int
    out: Any
    out_positions: Any
    out_slots: Any

    @property
    def tensors(self) -> tuple[Any, ...]:
        """In the order of `_writes`."""
        return (*self[:3], *self[4:])


_plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
_NAMES = "cache_seqlens block_table out out_positions out_slots"
_operands = common.Operands(_OP, "lengths", _NAMES)
_writes = common.Writes(_OP, f"lengths {_NAMES}", "out out_positions out_slots")


def cu_seqlens(
    lengths: torch.Tensor, *, cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, page_size: int = 0, out: torch.Tensor | None = None,
    out_positions: torch.Tensor | None = None, out_slots: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Where packed sequences begin, from their lengths, and on request the place of each token.

        out[b] = sum over a < b of max(lengths[a], 0)
        of token t of sequence b:  out_positions[t] = cache_seqlens[b] + t - out[b]
        out_slots[t] = block_table[b, position // page_size] * page_size + position % page_size

    so that an engine's step knows its bounds, the rows of its rotary tables and its slots of the
    cache (`ops.append_kv`) without the host. A length below 0 is a finished or padding row.

    lengths: (batch,) int32, contiguous, on the GPU or the CPU; batch at most 8192. Their sum stays
        below 2**31.
    cache_seqlens: (batch,) int32, contiguous: what of each sequence is cached before; None: 0.
        Below 0: its tokens have no place.
    block_table: (batch, max_pages) int32, the last dimension contiguous; needed for out_slots. A
        page below 0, or behind the last column, is none.
    page_size: tokens of a page.
    out: (batch + 1,) int32, contiguous; must not overlap anything, as the others.
    out_positions, out_slots: (num_tokens,) int64, contiguous; num_tokens is as many as there may
        be: those behind the last have position 0 and slot -1, as those without a place.

    Returns out. A CUDA tensor runs the shipped cubin on torch's current stream, once; a CPU tensor
    runs a reference in torch. With KERNEL_HUB_DEBUG=1 each call waits, and refuses positions behind
    the last column of block_table. No backward. Raises TensorError naming the argument that does
    not fit.
    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023.
    """
    page_size = common.check_count(_OP, "page_size", page_size)
    given = SeqlensGiven(
        lengths, cache_seqlens, block_table, page_size, out, out_positions, out_slots
    )
    optional = given.tensors[1:]
    is_plain = _operands.are_plain((lengths,), optional)
    written = [x for x in (out, out_positions, out_slots) if x is not None]
    try:
        if not is_plain:
            _check(given)
        if out is None:
            out = torch.empty(lengths.shape[0] + 1, dtype=torch.int32, device=lengths.device)
            given = given._replace(out=out)
        if not is_plain:
            _op(*given)
        else:
            (_cuda_into if lengths.is_cuda else _cpu_into)(given, bool(written))
    except common.FOREIGN:
        _operands.check_tensors((lengths,), optional)
        _check(given)
        raise
    if written and is_plain:
        common.written(tuple(written))
    return out


def _check(given: SeqlensGiven) -> None:
    """Everything about the arguments but the addresses of tensors."""
    lengths, whole = given.lengths, (torch.int32,)
    common.check_data(_OP, "lengths", lengths, whole)
    if lengths.dim() != 1:
        raise common.refuse(_OP, "lengths", "one dimension (batch,)", lengths)
    batch = lengths.shape[0]
    if batch > _MOST_SEQUENCES:
        raise common.refuse(_OP, "lengths", f"at most {_MOST_SEQUENCES} sequences", lengths)
    if given.cache_seqlens is not None:
        common.check_like(_OP, "cache_seqlens", given.cache_seqlens, (batch,), lengths)
    common.check_count(_OP, "page_size", given.page_size)
    if given.block_table is None and given.out_slots is not None:
        raise common.refuse(_OP, "out_slots", "block_table with it", "None of it")
    if given.block_table is not None:
        table = given.block_table
        common.check_tensor(_OP, "block_table", table)
        shape = (batch, common.last_size(table))
        common.check_like(_OP, "block_table", table, shape, lengths)
        if given.page_size < 1:
            raise common.refuse(_OP, "page_size", "at least 1 with block_table", given.page_size)
    common.check_written(_OP, "out", given.out, (batch + 1,), lengths)
    tokens = None
    for argument in ("out_positions", "out_slots"):
        value = getattr(given, argument)
        if value is not None:
            tokens = common.last_size(value) if tokens is None else tokens
            common.check_written(_OP, argument, value, (tokens,), lengths, (torch.int64,))
            if tokens > common.MAX_SIZE:
                raise common.refuse(_OP, argument, f"at most {common.MAX_SIZE} tokens", value)


def _plan(given: SeqlensGiven) -> Launch:
    """Check the arguments; the launch shape and the numbers."""
    _check(given)
    batch, table = given.lengths.shape[0], given.block_table
    of_tokens = given.out_positions if given.out_slots is None else given.out_slots
    tokens = 0 if of_tokens is None else of_tokens.shape[0]
    stride, pages = (0, 0) if table is None else (table.stride(0), table.shape[1])
    numbers = (stride if batch > 1 else 0, batch, tokens, pages, given.page_size)
    grid = (max(1, -(-tokens // _THREADS)), 1, 1)
    function = common.shipped(_OP, _OP)
    options = device_of(given.lengths.device).following
    return Launch(function, grid, (_THREADS, 1, 1), 4 * (batch + 1), numbers, options=options)


def _cuda_into(given: SeqlensGiven, is_given: bool = True) -> None:
    """One launch. is_given: the caller gave some of what is written."""
    lengths, tensors = given.lengths, given.tensors
    addresses = tuple([x.data_ptr() for x in tensors if x is not None])
    key = (
        given.page_size,
        *[None if x is None else (x.dtype, x.shape, x.stride(), x.device) for x in tensors],
    )
    found = _plans.get(key)
    if found is None:
        plan = tuple(_plan(given))
        found = _plans.keep(key, (plan, _writes.spans(*tensors)))
    (function, grid, block, shared_bytes, numbers, _, options), spans = found
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    try:
        params = (*given[4:], bounds.flag(_OP, lengths), *given[:3], *numbers)
        function(grid, block, shared_bytes, None, params, **options)
    except KernelHubError:
        _check(given)  # the launch checks devices and dtypes; this names them
        raise
    if common.is_debugging():
        bounds.report(lengths)


def _cpu_into(given: SeqlensGiven, is_given: bool = True) -> None:
    """The same on the CPU, by torch."""
    _check(given)
    if is_given:
        _writes.check(*given.tensors)
    counts = given.lengths.clamp(min=0).long()
    ends = counts.cumsum(0)
    given.out[0] = 0
    given.out[1:] = ends.clamp(max=2**31 - 1)
    of_tokens = given.out_positions if given.out_slots is None else given.out_slots
    if of_tokens is None:
        return
    token = torch.arange(of_tokens.shape[0])
    sequence = torch.searchsorted(ends, token, right=True)
    is_any = sequence < len(ends)
    positions, slots = torch.zeros_like(token), torch.full_like(token, -1)
    sequence, token = sequence[is_any], token[is_any]
    cached = counts * 0 if given.cache_seqlens is None else given.cache_seqlens.long()
    has_place = cached[sequence] >= 0
    place = torch.where(has_place, cached[sequence] + token - given.out[sequence].long(), 0)
    positions[is_any] = place
    if given.out_positions is not None:
        given.out_positions.copy_(positions)
    if given.out_slots is not None:
        column = place // given.page_size
        is_page = has_place & (column < given.block_table.shape[1])
        pages = torch.full_like(column, -1)
        pages[is_page] = given.block_table[sequence[is_page], column[is_page]].long()
        found = pages * given.page_size + place % given.page_size
        slots[is_any] = torch.where(pages < 0, -1, found)
        given.out_slots.copy_(slots)


_op = common.define_given(
    "cu_seqlens(Tensor lengths, Tensor? cache_seqlens, Tensor? block_table, SymInt page_size, "
    "Tensor(a!) out, Tensor(b!)? out_positions, Tensor(c!)? out_slots) -> ()",
    lambda *arguments: SeqlensGiven(*arguments),
    cuda=lambda given: _cuda_into(given), cpu=lambda given: _cpu_into(given), check=_check,
)  # fmt: skip
