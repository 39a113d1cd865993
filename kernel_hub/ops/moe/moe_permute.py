"""Rows of tokens sorted by their experts (csrc/moe/moe_permute.cu)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.device import device_of
from ..core.launch import Launch, Plans

_OP = "moe_permute"
_operands = common.Operands(_OP, "x experts", "out offsets row_id_map")
_writes = common.Writes(_OP, "out offsets row_id_map x experts", "out offsets row_id_map")
_THREADS, _AHEAD = 256, 4  # of csrc/moe/moe_permute.cu
_MOST_EXPERTS = 1024
_MOST_SLOTS = 4096  # of a block, in shared memory beside the counts of 1024 experts
# From here on slots are counted once, in chunks, and not by every block.
_COUNTED_APART = 8192
_LEAST_CHUNK, _MOST_CHUNKS = 2048, 64
# From so many bytes read and written on a launch of its own moves rows; slots are placed
# ahead of it, from so many on counted apart, in chunks of so many.
_MUCH = 24 << 20
_PLACED_APART, _LEAST_PLACED, _MOST_PLACED = 16384, 512, 2048
_PLACERS, _PLACING_WARPS = 1024, 8  # of csrc/moe/moe_permute.cu
_UNITS = {16: "vec", 4: "word", 2: "half_word"}


class _Launches(NamedTuple):
    """What makes a permutation, in turn."""

    counting: tuple[Any, ...] | None  # None: the blocks count for themselves
    counts_size: int
    placing: tuple[Any, ...] | None  # None: what permutes finds out where rows go
    permute: tuple[Any, ...]


class _Permutation(NamedTuple):
    """The launches of calls of the same layouts."""

    launches: _Launches
    spans: common.Spans


_plans: Plans[_Permutation] = Plans()


def moe_permute(
    x: torch.Tensor, experts: torch.Tensor, num_experts: int, *, out: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None, row_id_map: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The row of each token once for each of its experts, sorted by expert.

        offsets[e] = how many slots have an expert below e
        row_id_map[t, j] = offsets[experts[t, j]] + how many slots before (t, j) have this expert
        out[row_id_map[t, j]] = x[t]

    A slot is a token and one of its k experts; they are in the order of tokens within an expert.
    `ops.grouped_linear` takes out and offsets as they are, without padding; `ops.moe_combine` takes
    row_id_map. Nothing is read on the host. The same inputs give the same bits on every run.

    x: (tokens, hidden_size), fp16, bf16 or fp32, on the GPU or the CPU; the last dimension
        contiguous.
    experts: (tokens, k), int32, contiguous, device of x, as `ops.moe_route` makes them. A slot
        whose expert is not one of 0 .. num_experts - 1 goes nowhere: its row_id_map is -1, and out
        has a row less, at its end, that is not written.
    num_experts: at most 1024; on a rank that has some of them, subtract its first from `experts`.
    out: (tokens * k, hidden_size), dtype of x, the last dimension contiguous; must not overlap
        anything else, as the others that are written.
    offsets: (num_experts + 1,), int32, contiguous.
    row_id_map: (tokens, k), int32, contiguous.

    Returns (out, offsets, row_id_map). A CUDA tensor runs the shipped cubin on torch's current
    stream, up to three times where there is much; a CPU tensor runs a reference in torch. With
    KERNEL_HUB_DEBUG=1 each call waits, and refuses experts that are neither -1 nor there. No
    backward. Raises TensorError naming the argument that does not fit.
    Source: Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022.
    """
    num_experts = common.check_count(_OP, "num_experts", num_experts, least=1)
    is_plain = _operands.are_plain((x, experts), (out, offsets, row_id_map))
    is_given = not (out is None and offsets is None and row_id_map is None)
    try:
        if not is_plain:
            _check(x, experts, num_experts, out, offsets, row_id_map)
            if not is_given:
                return _registered.returning(x, experts, num_experts)
        if out is None or offsets is None or row_id_map is None:
            made = _new(x, experts, num_experts)
            out = made[0] if out is None else out
            offsets = made[1] if offsets is None else offsets
            row_id_map = made[2] if row_id_map is None else row_id_map
        if not is_plain:
            _registered.writing(x, experts, num_experts, out, offsets, row_id_map)
            return out, offsets, row_id_map
        into = _cuda_into if x.is_cuda else _cpu_into
        into(x, experts, num_experts, out, offsets, row_id_map, is_given)
    except common.FOREIGN:
        _operands.check_tensors((x, experts), (out, offsets, row_id_map))
        _check(x, experts, num_experts, out, offsets, row_id_map)
        raise
    if is_given:
        common.written((out, offsets, row_id_map))
    return out, offsets, row_id_map


def _check(
    x: Any, experts: Any, num_experts: Any, out: Any = None, offsets: Any = None,
    row_id_map: Any = None,
) -> None:  # fmt: skip
    common.check_data(_OP, "x", x)
    if x.dim() != 2:
        raise common.refuse(_OP, "x", "two dimensions (tokens, hidden_size)", x)
    common.check_tensor(_OP, "experts", experts)
    k = experts.shape[1] if experts.dim() == 2 else 1
    common.check_like(_OP, "experts", experts, (x.shape[0], k), x, dtypes=(torch.int32,))
    if k > _MOST_SLOTS:
        raise common.refuse(_OP, "experts", f"at most {_MOST_SLOTS} of a token", experts)
    if max(x.shape[0] * k, x.shape[1]) > common.MAX_SIZE:
        raise common.refuse(_OP, "experts", f"at most {common.MAX_SIZE} of all tokens", experts)
    common.check_count(_OP, "num_experts", num_experts, least=1)
    if num_experts > _MOST_EXPERTS:
        raise common.refuse(_OP, "num_experts", f"at most {_MOST_EXPERTS}", num_experts)
    common.check_written(_OP, "out", out, (x.shape[0] * k, x.shape[1]), x)
    whole = (torch.int32,)
    common.check_written(_OP, "offsets", offsets, (num_experts + 1,), x, whole)
    common.check_written(_OP, "row_id_map", row_id_map, experts.shape, x, whole)
    for argument, value in (("experts", experts), ("row_id_map", row_id_map)):
        if value is not None and not value.is_contiguous():
            raise common.refuse(_OP, argument, "a contiguous tensor", value)


def _new(x: Any, experts: Any, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        x.new_empty((x.shape[0] * experts.shape[1], x.shape[1])),
        x.new_empty((num_experts + 1,), dtype=torch.int32),
        x.new_empty(experts.shape, dtype=torch.int32),
    )


def _choose(tokens: int, k: int, units: int, num_sms: int) -> tuple[int, int, int]:
    """(threads along a row, tokens a block, blocks along a row).

    Measured on an H200 (docs/notes/moe_permute.md).
    """
    width = min(_THREADS, 1 << (units - 1).bit_length())
    blocks_a_sm = 32 if tokens * k >= _COUNTED_APART else 8
    block_tokens = max(1, min(-(-tokens // (blocks_a_sm * num_sms)), _MOST_SLOTS // k))
    blocks = -(-tokens // block_tokens)
    splits = max(1, min(-(-units // width), 2 * num_sms // blocks))
    return width, block_tokens, splits


def _plan_apart(
    tokens: int, k: int, num_experts: int, units: int, strides: list[int], options: Any
) -> _Launches:
    """Slots are placed, then rows are moved."""
    slots = tokens * k
    chunk = min(_MOST_PLACED, max(_LEAST_PLACED, 1 << (-(-slots // _MOST_CHUNKS) - 1).bit_length()))
    chunks = -(-slots // chunk)
    counting = None
    if slots >= _PLACED_APART:
        function, numbers = common.shipped(_OP, f"{_OP}_count"), (slots, num_experts, chunk)
        counting = tuple(
            Launch(
                function, (chunks, 1, 1), (_THREADS, 1, 1), 4 * num_experts, numbers,
                options=options,
            )
        )  # fmt: skip
    placing = Launch(
        common.shipped(_OP, f"{_OP}_place"), (chunks, 1, 1), (_PLACERS, 1, 1),
        4 * (2 + _PLACING_WARPS) * num_experts, (slots, num_experts, chunk), options=options,
    )  # fmt: skip
    width = min(_THREADS, max(32, 1 << (-(-units // _AHEAD) - 1).bit_length()))
    at_once = _THREADS // width
    moving = Launch(
        common.shipped(_OP, f"{_OP}_rows_vec"), (-(-tokens // at_once), 1, 1), (width, at_once, 1),
        numbers=(*strides, tokens, k, units), options=options,
    )  # fmt: skip
    counts_size = 0 if counting is None else chunks * num_experts
    return _Launches(counting, counts_size, tuple(placing), tuple(moving))


def _plan(x: Any, experts: Any, num_experts: int, out: Any, low_bits: int) -> _Launches:
    """Choose the kernels and their launch shapes, for checked arguments."""
    (tokens, hidden_size), k = x.shape, experts.shape[1]
    slots, size = tokens * k, x.element_size()
    strides = [t.stride(0) if t.shape[0] > 1 else 0 for t in (out, x)]
    in_bytes = [size * n for n in (hidden_size, *strides)]
    is_vec = not low_bits and common.is_aligned(common.VEC_BYTES, *in_bytes)
    unit = common.VEC_BYTES if is_vec else size
    units = hidden_size * size // unit
    gpu = device_of(x.device)
    if is_vec and slots and (k + 1) * x.numel() * size >= _MUCH:
        unit_strides = [n * size // unit for n in strides]
        return _plan_apart(tokens, k, num_experts, units, unit_strides, gpu.following)
    width, block_tokens, splits = _choose(
        max(tokens, 1), max(k, 1), max(units, 1), gpu.num_sms
    )  # fmt: skip
    chunk = max(_LEAST_CHUNK, 1 << (-(-slots // _MOST_CHUNKS) - 1).bit_length()) if slots else 1
    count, chunks = None, 0
    if slots >= _COUNTED_APART:
        chunks = -(-slots // chunk)
        counting = common.shipped(_OP, f"{_OP}_count")
        grid = (chunks, 1, 1)
        count = tuple(
            Launch(
                counting, grid, (_THREADS, 1, 1), 4 * num_experts, (slots, num_experts, chunk),
                options=gpu.following,
            )
        )  # fmt: skip
    numbers = (
        *[n * size // unit for n in strides], tokens, k, num_experts, units, block_tokens, chunk
    )  # fmt: skip
    # One block where there are no tokens: the offsets are zeros.
    grid = (max(1, -(-tokens // block_tokens)), splits, 1)
    block = (width, _THREADS // width, 1)
    launch = Launch(
        common.shipped(_OP, f"{_OP}_{_UNITS[unit]}"), grid, block,
        4 * (2 * num_experts + block_tokens * k), numbers, options=gpu.following,
    )  # fmt: skip
    return _Launches(count, chunks * num_experts, None, tuple(launch))


def _run(launch: tuple[Any, ...], *tensors: Any) -> None:
    function, grid, block, shared_bytes, numbers, _, options = launch
    function(grid, block, shared_bytes, None, (*tensors, *numbers), **options)


def _cuda_into(
    x: Any, experts: Any, num_experts: int, out: Any, offsets: Any, row_id_map: Any,
    is_given: bool = True,
) -> None:  # fmt: skip
    """One launch, or up to three. is_given: the caller gave some of what is written."""
    tensors = (out, offsets, row_id_map, x, experts)
    addresses = tuple([t.data_ptr() for t in tensors])
    low_bits = (addresses[0] | addresses[3]) & 15
    key = (num_experts, low_bits, *[(t.dtype, t.shape, t.stride(), t.device) for t in tensors])
    plan = _plans.get(key)
    if plan is None:
        _check(x, experts, num_experts, out, offsets, row_id_map)
        launches = _plan(x, experts, num_experts, out, low_bits)
        plan = _plans.keep(key, _Permutation(launches, _writes.spans(*tensors)))
    if is_given and addresses not in plan.spans.apart:
        plan.spans.check(addresses)
    flag = bounds.flag(_OP, x)
    counting, counts_size, placing, permute = plan.launches
    counts = None
    try:
        if counting is not None:
            counts = experts.new_empty(counts_size)
            _run(counting, counts, experts)
        if placing is None:
            _run(permute, out, offsets, row_id_map, flag, x, experts, counts)
        else:
            _run(placing, offsets, row_id_map, flag, experts, counts)
            _run(permute, out, x, row_id_map)
    except KernelHubError:
        # The launch checks devices and dtypes; this names them.
        _check(x, experts, num_experts, out, offsets, row_id_map)
        raise
    if common.is_debugging():
        bounds.report(x)


def _cpu_into(
    x: Any, experts: Any, num_experts: int, out: Any, offsets: Any, row_id_map: Any,
    is_given: bool = True,
) -> None:  # fmt: skip
    """The same on the CPU, by torch."""
    _check(x, experts, num_experts, out, offsets, row_id_map)
    if is_given:
        _writes.check(out, offsets, row_id_map, x, experts)
    flat = experts.flatten().long()
    is_placed = (flat >= 0) & (flat < num_experts)
    counts = torch.bincount(flat[is_placed], minlength=num_experts)
    offsets[0] = 0
    offsets[1:] = counts.cumsum(0)
    order = torch.where(is_placed, flat, num_experts).argsort(stable=True)[: int(offsets[-1])]
    places = torch.full_like(flat, -1)
    places[order] = torch.arange(len(order))
    row_id_map.copy_(places.view(experts.shape))
    out[: len(order)] = x[order // max(experts.shape[1], 1)]


# By their names at each call: a test gives one another's.
_registered = common.define_pair(
    _OP, "Tensor x, Tensor experts, SymInt num_experts", "out offsets row_id_map", new=_new,
    cuda=lambda *given: _cuda_into(*given), cpu=lambda *given: _cpu_into(*given), check=_check,
)  # fmt: skip
