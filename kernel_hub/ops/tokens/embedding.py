"""Rows of a table by ids (csrc/tokens/embedding.cu)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.device import device_of
from ..core.launch import GIVEN, Launch, Plans, call_first

_OP = "embedding"
_INDICES = (torch.int32, torch.int64)
_THREADS, _AHEAD = 256, 4  # of csrc/tokens/embedding.cu
_ELEMENTS_AHEAD, _LONG = 16, 512  # where no vectors fit, of rows of so many
_FEW_TOKENS, _FEW_ACCESSES = 256, 1 << 18


class EmbeddingGiven(NamedTuple):
    """The arguments of the registered ops."""

    ids: Any
    weight: Any
    scale: float | None
    position_weight: Any
    positions: Any
    first_id: int
    vocab_size: int | None

    def tensors(self, out: Any) -> tuple[Any, ...]:
        """In the order of `_writes`."""
        return out, self.ids, self.weight, self.position_weight, self.positions


_plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
_plain_plans: Plans[Any] = Plans()
_is_quick = common.is_quick
_operands = common.Operands(_OP, "ids weight", "position_weight positions out")
_writes = common.Writes(_OP, "out ids weight position_weight positions", "out")


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, *, scale: float | None = None,
    position_weight: torch.Tensor | None = None, positions: torch.Tensor | None = None,
    first_id: int = 0, vocab_size: int | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The row of a table for each id.

        out[t] = weight[ids[t] - first_id]
        out[t] = scale * weight[ids[t] - first_id] + position_weight[positions[t]]

    the first with the same bits, the second in fp32, rounded once. The rows of an id that `weight`
    has not are zeros, without a position's: of ranks that have a slice of the vocabulary each, the
    sum is the whole.

    ids: (...), int32 or int64, on the GPU or the CPU, in one evenly spaced group. One that is none
        of 0 .. vocab_size - 1 gives zeros.
    weight: (num_rows, hidden_size), fp16, bf16 or fp32, device of ids; rows of any stride, the last
        dimension contiguous.
    scale: what rows are multiplied by, as fp32; None: nothing. (Gemma's is sqrt(hidden_size)
        rounded to the dtype of weight.)
    position_weight: (max_position, hidden_size), dtype of weight, the last dimension contiguous:
        learned embeddings of positions.
    positions: int32 or int64, contiguous, the shape of ids or its last dimension alone; None is
        0 .. seqlen - 1. A position that position_weight has not gives NaN.
    first_id: the id of weight's first row: of a slice of the vocabulary.
    vocab_size: of all slices; None: weight's last row is the last.
    out: (..., hidden_size), dtype of weight, the leading dimensions evenly spaced together with
        those of ids; must not overlap anything.

    Returns out. A CUDA tensor runs the shipped cubin on torch's current stream; a CPU tensor runs a
    reference in torch. With KERNEL_HUB_DEBUG=1 each call waits, and refuses ids of no vocabulary
    and positions of no row. No backward. Raises TensorError naming the argument that does not fit.
    Source: Vaswani et al., "Attention Is All You Need", 2017, 3.4; Shoeybi et al., "Megatron-LM",
    2019, for slices of the vocabulary.
    """
    if (
        scale is position_weight is positions is vocab_size is out is None
        and type(first_id) is int
        and first_id == 0
        and _is_quick(weight)
        and _is_quick(ids)
        and not common.is_debugging()
    ):
        try:
            return _cuda_plain(ids, weight)
        except common.FOREIGN:
            _operands.check_tensors((ids, weight), (None, None, None))
            _check(ids, weight, None, None, None, 0, None)
            raise
    scale = None if scale is None else common.check_number(_OP, "scale", scale)
    first_id = common.check_count(_OP, "first_id", first_id)
    if vocab_size is not None:
        vocab_size = common.check_count(_OP, "vocab_size", vocab_size)
    given = EmbeddingGiven(ids, weight, scale, position_weight, positions, first_id, vocab_size)
    is_given = out is not None
    try:
        if not _operands.are_plain((ids, weight), (position_weight, positions, out)):
            _check(*given, out)
            return _registered.run(given, out)
        if out is None:
            out = _new(*given)
        (_cuda_into if weight.is_cuda else _cpu_into)(*given, out, is_given)
    except common.FOREIGN:
        _operands.check_tensors((ids, weight), (position_weight, positions, out))
        _check(*given, out)
        raise
    if is_given:
        common.written((out,))
    return out


def _check(
    ids: Any, weight: Any, scale: Any, position_weight: Any, positions: Any, first_id: Any,
    vocab_size: Any, out: Any = None,
) -> None:  # fmt: skip
    tables = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in (ids, weight)]
    if tables == [True, False]:
        raise common.refuse(_OP, "ids", "whole numbers: the ids come first, then the table", ids)
    common.check_data(_OP, "weight", weight)
    if weight.dim() != 2:
        raise common.refuse(_OP, "weight", "two dimensions (num_rows, hidden_size)", weight)
    common.check_tensor(_OP, "ids", ids)
    _check_index("ids", ids, ids.shape, weight)
    if max(*weight.shape, ids.numel()) > common.MAX_SIZE:
        raise common.refuse(_OP, "ids", f"sizes of at most {common.MAX_SIZE}", ids)
    if scale is not None:
        common.check_number(_OP, "scale", scale)
    common.check_count(_OP, "first_id", first_id)
    if vocab_size is not None:
        common.check_count(_OP, "vocab_size", vocab_size)
    if position_weight is None:
        if positions is not None:
            raise common.refuse(_OP, "positions", "position_weight with them", "None of it")
    else:
        common.check_tensor(_OP, "position_weight", position_weight)
        rows = position_weight.shape[0] if position_weight.dim() else 0
        common.check_like(_OP, "position_weight", position_weight, (rows, weight.shape[1]), weight)
        seqlen = ids.shape[-1] if ids.dim() else 1
        if positions is None and rows < seqlen:
            expected = f"at least seqlen = {seqlen} rows"
            raise common.refuse(_OP, "position_weight", expected, position_weight)
    if positions is not None:
        common.check_tensor(_OP, "positions", positions)
        shape = ids.shape[-1:] if positions.dim() == 1 else ids.shape
        _check_index("positions", positions, shape, weight)
        if not positions.is_contiguous():
            raise common.refuse(_OP, "positions", "a contiguous tensor", positions)
    common.check_written(_OP, "out", out, (*ids.shape, weight.shape[1]), weight)


def _check_index(argument: str, value: Any, shape: Any, like: Any) -> None:
    """As check_like, of any stride."""
    if value.dtype not in _INDICES:
        raise common.refuse(_OP, argument, f"dtype {common.named(_INDICES)}", value)
    if value.device != like.device:
        raise common.refuse(_OP, argument, f"device {like.device}", value)
    if tuple(value.shape) != tuple(shape):
        raise common.refuse(_OP, argument, f"shape {tuple(shape)}", value)


def _new(ids: Any, weight: Any, *_: Any) -> torch.Tensor:
    return torch.empty(
        (*ids.shape, weight.shape[1]), dtype=weight.dtype, device=weight.device
    )  # fmt: skip


def _choose(units: int, tokens: int, is_vec: bool = True) -> tuple[int, int, int]:
    """(threads along a row, tokens a block, blocks along a row) for rows of `units` accesses.

    Not yet measured (docs/notes/embedding.md): few tokens want every access to be a thread's.
    """
    is_few = tokens <= _FEW_TOKENS and tokens * units <= _FEW_ACCESSES
    ahead = 1 if is_few else _AHEAD if is_vec or units < _LONG else _ELEMENTS_AHEAD
    width = -(-units // ahead)
    if width > 32:
        width = min(_THREADS, -(-width // 32) * 32)
    return width, _THREADS // width, -(-units // (width * ahead))


def _plan(given: EmbeddingGiven, out: Any, low_bits: int) -> Launch:
    """Choose the kernel, its launch shape and its parameters, for checked arguments."""
    ids, weight, scale, position_weight, positions, first_id, vocab_size = given
    (num_rows, hidden_size), tokens = weight.shape, ids.numel()
    if tokens * hidden_size == 0:
        return Launch()
    leading = [ids.stride(), out.stride()[:-1]]
    _, ((ids_stride,), (out_stride,)) = common.collapse(_OP, ids.shape, leading, groups=1)
    strides = [out_stride, weight.stride(0) if num_rows > 1 else 0]
    max_position, position_stride = 0, 0
    if position_weight is not None:
        max_position = position_weight.shape[0]
        position_stride = position_weight.stride(0) if max_position > 1 else 0
    elems = common.VEC_BYTES // weight.element_size()
    is_vec = not low_bits and common.is_aligned(elems, hidden_size, *strides, position_stride)
    width, block_tokens, blocks = _choose(
        hidden_size // elems if is_vec else hidden_size, tokens, is_vec
    )
    if blocks > common.MAX_GRID_Y:
        most = common.MAX_GRID_Y * _THREADS
        raise common.refuse(_OP, "weight", f"at most {most} elements of a row", weight)
    token, variant = common.DTYPE_TOKENS[weight.dtype], "vec" if is_vec else "scalar"
    is_whole = positions is not None and positions.shape == ids.shape
    period = tokens if is_whole or not ids.dim() else ids.shape[-1]
    numbers = (
        out_stride, ids_stride, strides[1], position_stride, tokens, hidden_size, num_rows,
        first_id, first_id + num_rows if vocab_size is None else vocab_size, max_position, period,
        ids.element_size(), 0 if positions is None else positions.element_size(),
        int(scale is not None), 1.0 if scale is None else scale,
    )  # fmt: skip
    function = common.shipped(_OP, f"{_OP}_{token}_{variant}")
    grid, block = (-(-tokens // block_tokens), blocks, 1), (width, block_tokens, 1)
    options = device_of(weight.device).following
    return Launch(function, grid, block, numbers=numbers, options=options)


def _cuda_plain(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows of a CUDA tensor into a new one: the quick way through eager calls."""
    key = (
        ids.dtype, ids.shape, ids.is_contiguous() or ids.stride(), weight.dtype, weight.shape,
        weight.is_contiguous() or weight.stride(), weight.data_ptr() & 15, weight.get_device(),
        ids.get_device(),
    )  # fmt: skip
    plan = _plain_plans.get(key)
    tensors = (bounds.flag(_OP, weight), ids, weight)
    if plan is not None:
        found: torch.Tensor = plan(*tensors)
        return found
    given = EmbeddingGiven(ids, weight, None, None, None, 0, None)
    _check(*given)
    new, one = _new(ids, weight), GIVEN
    launch = _plan(given, new, key[6])
    params = (one, one, one, None, None, *launch.numbers)
    return call_first(_plain_plans, key, launch, new, params, *tensors)


def _cuda_into(
    ids: Any, weight: Any, scale: Any, position_weight: Any, positions: Any, first_id: Any,
    vocab_size: Any, out: Any, is_given: bool = True,
) -> None:  # fmt: skip
    """One launch. is_given: the caller gave out."""
    given = EmbeddingGiven(ids, weight, scale, position_weight, positions, first_id, vocab_size)
    tensors = given.tensors(out)
    addresses = tuple([t.data_ptr() for t in tensors if t is not None])
    low_bits = (addresses[0] | addresses[2]) & 15
    if given.position_weight is not None:
        low_bits |= addresses[3] & 15
    key = (
        low_bits, given.scale, given.first_id, given.vocab_size,
        *[None if t is None else (t.dtype, t.shape, t.stride(), t.device) for t in tensors],
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        _check(*given, out)
        plan = _plan(given, out, low_bits)
        found = _plans.keep(key, (tuple(plan), _writes.spans(*tensors)))
    (function, grid, block, shared_bytes, numbers, _, options), spans = found
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    try:
        flag = bounds.flag(_OP, given.weight)
        params = (out, flag, *tensors[1:], *numbers)
        function(grid, block, shared_bytes, None, params, **options)
    except KernelHubError:
        # The launch checks devices and dtypes; this names them.
        _check(*given, out)
        raise
    if common.is_debugging():
        bounds.report(given.weight)


def _cpu_into(
    ids: Any, weight: Any, scale: Any, position_weight: Any, positions: Any, first_id: Any,
    vocab_size: Any, out: Any, is_given: bool = True,
) -> None:  # fmt: skip
    """The same on the CPU, by torch."""
    given = EmbeddingGiven(ids, weight, scale, position_weight, positions, first_id, vocab_size)
    _check(*given, out)
    if is_given:
        _writes.check(*given.tensors(out))
    if out.numel() == 0:
        return
    common.collapse(_OP, ids.shape, [ids.stride(), out.stride()[:-1]], groups=1)
    rows, places = weight.shape[0], ids.long() - first_id
    vocab_size = first_id + rows if vocab_size is None else vocab_size
    is_there = (ids >= 0) & (ids < vocab_size) & (places >= 0) & (places < rows)
    if rows:
        found = weight[torch.where(is_there, places, 0)]
    else:
        found = torch.zeros_like(out)
    if scale is not None or position_weight is not None:
        found = found.float() if scale is None else found.float() * _fp32(scale)
    if position_weight is not None:
        if positions is None:
            positions = torch.arange(ids.shape[-1] if ids.dim() else 1).expand(ids.shape)
        is_row = (positions >= 0) & (positions < position_weight.shape[0])
        added = torch.full((*positions.shape, weight.shape[1]), torch.nan)
        added[is_row] = position_weight[positions[is_row]].float()
        found = found + added
    out.copy_(torch.where(is_there[..., None], found.to(out.dtype), 0))


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


# By their names at each call: a test gives one another's.
_registered = common.define_pair(
    _OP,
    "Tensor ids, Tensor weight, float? scale, Tensor? position_weight, Tensor? positions, "
    "SymInt first_id, SymInt? vocab_size",
    new=_new, cuda=lambda *given: _cuda_into(*given), cpu=lambda *given: _cpu_into(*given),
    check=_check,
)  # fmt: skip
