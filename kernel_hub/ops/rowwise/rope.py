"""Rotary position embedding of queries and keys in one launch (csrc/rowwise/rope.cu)."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError, TensorError
from ..core import bounds, common
from ..core.device import device_of
from ..core.launch import Launch, Plans
from ..core.rotary import check_rotation, rotated

_OP = "rope"
# A bare tuple of a launch: unpacking it takes 40 ns less.
_plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
_operands = common.Operands(_OP, "q k cos sin", "positions out_q out_k")
_writes = common.Writes(
    _OP, "out_q out_k q k cos sin positions", "out_q out_k", in_place="out_q=q out_k=k"
)
_empty_like = torch.empty_like
_MAX_THREADS = 512


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor | None = None, *, interleaved: bool = False,
    rotary_dim: int | None = None, out_q: torch.Tensor | None = None,
    out_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Rotate pairs of each head of `q` and `k` by angles that depend on the token's position.

    With c, s = cos[position], sin[position] and half = rotary_dim // 2:

        half-split:   out[j] = x[j] c[j] - x[half+j] s[j];  out[half+j] = x[half+j] c[j] + x[j] s[j]
        interleaved:  out[2j] = x[2j] c[j] - x[2j+1] s[j];    out[2j+1] = x[2j+1] c[j] + x[2j] s[j]
        out[rotary_dim:] = x[rotary_dim:]

    computed in fp32 and rounded once.

    q: (..., seqlen, num_heads, head_dim), fp16, bf16 or fp32, on the GPU or the CPU; any strides,
        the last dimension contiguous.
    k: (..., seqlen, num_kv_heads, head_dim), the leading dimensions, dtype and device of q.
    cos, sin: (max_position, rotary_dim // 2), fp32 or the dtype of q; rows evenly strided, the same
        for both (the halves of one cos_sin cache will do). Or, without positions, a row a token as
        transformers has them, (batch or 1, seqlen, rotary_dim), both halves alike: the second is
        not read. `kernel_hub.ops.rotary` makes either. gpt-oss' have one half alone: (batch or 1,
        seqlen, rotary_dim // 2), with rotary_dim given. Of Cohere's, whose neighbours are alike,
        pass such a half, `cos[..., ::2].contiguous()`.
    positions: int32 or int64, the leading dimensions of q, or (seqlen,) for all of them; None is
        0 .. seqlen - 1. A position outside the table gives NaN in what is rotated.
    interleaved: rotate neighbouring elements (GPT-J) instead of the two halves (GPT-NeoX, Llama).
    rotary_dim: None is 2 * cos.shape[-1], or cos.shape[-1] of a row a token.
    out_q, out_k: like q and k; where to write. `out_q=q, out_k=k` works in place.

    Returns (out_q, out_k). A CUDA tensor runs the shipped cubin on torch's current stream; a CPU
    tensor runs a reference in torch. No backward. Raises TensorError naming the argument that does
    not fit.
    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    if rotary_dim is None:
        rotary_dim = common.last_size(cos)
        if not rotary_dim or cos.dim() != 3:
            rotary_dim *= 2
    else:
        rotary_dim = common.check_count(_OP, "rotary_dim", rotary_dim)
    given = (q, k, cos, sin, positions, interleaved, rotary_dim)
    if not _operands.are_plain((q, k, cos, sin), (positions, out_q, out_k)):
        _check(*given, out_q, out_k)
        if out_q is None and out_k is None:
            found: tuple[torch.Tensor, torch.Tensor] = _registered.returning(*given)
            return found
        out_q = _empty_like(q) if out_q is None else out_q
        out_k = _empty_like(k) if out_k is None else out_k
        _registered.writing(*given, out_q, out_k)
        return out_q, out_k
    is_given = out_q is not None or out_k is not None
    try:
        out_q = _empty_like(q) if out_q is None else out_q
        out_k = _empty_like(k) if out_k is None else out_k
        (_cuda_into if q.is_cuda else _cpu_into)(*given, out_q, out_k, is_given)
    except common.FOREIGN:
        _operands.check_tensors((q, k, cos, sin), (positions, out_q, out_k))
        _check(*given, out_q, out_k)
        raise
    if is_given:
        common.written((out_q, out_k))
    return out_q, out_k


def _check(
    q: Any, k: Any, cos: Any, sin: Any, positions: Any, interleaved: Any, rotary_dim: Any,
    out_q: Any, out_k: Any,
) -> None:  # fmt: skip
    op = _OP
    for argument, value in (("q", q), ("k", k)):
        common.check_data(op, argument, value)
        if value.dim() < 3:
            raise common.refuse(op, argument, "shape (..., seqlen, num_heads, head_dim)", value)
    common.check_like(op, "k", k, (*q.shape[:-2], k.shape[-2], q.shape[-1]), q)
    common.check_tensor(op, "cos", cos)
    has_rows_a_token = cos.dim() == 3
    if has_rows_a_token:
        cos, sin = _rows_a_token(q, cos, sin, positions, rotary_dim)
    check_rotation(op, cos, sin, interleaved, rotary_dim, q.shape[-1], q)
    if positions is None:
        if not has_rows_a_token and cos.shape[0] < q.shape[-3]:
            raise common.refuse(op, "cos", f"at least seqlen = {q.shape[-3]} rows", cos)
    else:
        common.check_tensor(op, "positions", positions)
        shape = q.shape[-3:-2] if positions.dim() == 1 else q.shape[:-2]
        common.check_like(op, "positions", positions, shape, q, dtypes=(torch.int32, torch.int64))
        if not positions.is_contiguous():
            raise common.refuse(op, "positions", "a contiguous tensor", positions)
    for argument, out, x in (("out_q", out_q, q), ("out_k", out_k, k)):
        if out is not None:
            common.check_like(op, argument, out, x.shape, x)
            common.check_output(op, argument, out)


def _rows_a_token(q: Any, cos: Any, sin: Any, positions: Any, rotary_dim: Any) -> tuple[Any, Any]:
    """The first halves of transformers' tables, a row a token, as (rows, rotary_dim // 2)."""
    if positions is not None:
        raise common.refuse(_OP, "positions", "None where cos has a row a token", positions)
    batch, seqlen = q.shape[:-3].numel(), q.shape[-3]
    for argument, table in (("cos", cos), ("sin", sin)):
        common.check_tensor(_OP, argument, table)
        rows, tokens, columns = table.shape if table.dim() == 3 else (0, 0, 0)
        is_whole = columns == rotary_dim or 2 * columns == rotary_dim
        if not is_whole or tokens != seqlen or (rows != 1 and rows != batch):
            expected = (
                f"shape (max_position, rotary_dim // 2), or ({batch} or 1, {seqlen}, rotary_dim or "
                "half of it)"
            )
            raise common.refuse(_OP, argument, expected, table)
        even = (0, seqlen * table.stride(1))
        if table.shape[0] > 1 < seqlen and table.stride(0) not in even:
            raise common.refuse(_OP, argument, "evenly spaced rows (call .contiguous())", table)
    if sin.shape != cos.shape or sin.stride() != cos.stride():
        raise common.refuse(_OP, "sin", f"the shape and strides of cos ({common.say(cos)})", sin)
    half = rotary_dim // 2
    return cos.flatten(0, 1)[:, :half], sin.flatten(0, 1)[:, :half]


def _choose(width: int, heads: int, tokens: int) -> tuple[int, int, int]:
    """(heads a thread, heads a block, tokens a block) where a head takes `width` threads.

    Measured on an H200 (docs/notes/rope.md): few tokens want every load in flight at once.
    """
    rounds = 1
    if tokens <= 256:
        per_thread = 1 if width * heads <= 320 else 2
    elif heads <= 40:
        per_thread = 4
    else:
        per_thread, rounds = 2, -(-heads // 24)
    block_heads = min(-(-heads // (per_thread * rounds)), _MAX_THREADS // width)
    block_tokens = 1 if tokens <= 256 else max(1, 160 // (width * block_heads))
    return per_thread, block_heads, min(block_tokens, 64)


def _choose_flat(width: int, heads: int, tokens: int) -> tuple[int, int, int]:
    """The same for contiguous tensors, whose heads need not all be one block's.

    Few tokens want blocks of a few heads each, a head a thread.
    """
    if tokens <= 256:
        per_thread, block_heads = 1, -(-heads // -(-heads // 18))
    else:
        per_thread = 4 if heads <= 40 and tokens <= 2048 else 2
        block_heads = -(-heads // per_thread)
    block_heads = min(block_heads, _MAX_THREADS // width)
    block_tokens = 1 if tokens <= 256 else max(1, 160 // (width * block_heads))
    return per_thread, block_heads, min(block_tokens, 64)


def _plan(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor | None, interleaved: bool, rotary_dim: int, out_q: torch.Tensor,
    out_k: torch.Tensor, low_bits: int,
) -> Launch:  # fmt: skip
    """Check the tensors and choose the kernel, its launch shape and its integer parameters."""
    _check(q, k, cos, sin, positions, interleaved, rotary_dim, out_q, out_k)
    if q.numel() + k.numel() == 0:
        return Launch()
    tensors = (out_q, out_k, q, k)
    leading = q.shape[:-2]
    lead_strides = [tensor.stride()[:-2] for tensor in tensors]
    positions_stride = 0
    own_rows = cos.dim() == 3 and cos.shape[0] > 1 and cos.stride(0) != 0
    if own_rows or (positions is not None and positions.dim() == len(leading)):
        # Every token has a position, or a row of the table, of its own: all leading dimensions may
        # merge.
        (batch, tokens), pairs = common.collapse(
            "rope", leading, [*lead_strides, q.new_empty(leading, device="meta").stride()]
        )
        *pairs, (positions_stride, _) = pairs
    else:
        (batch,), columns = common.collapse(
            "rope", leading[:-1], [stride[:-1] for stride in lead_strides], groups=1
        )
        tokens = leading[-1]
        pairs = [
            [column[0], stride[-1]] for column, stride in zip(columns, lead_strides, strict=True)
        ]
    if batch > common.MAX_GRID_Y or batch * tokens > common.MAX_GRID_X:
        raise TensorError(
            f"rope: {batch} x {tokens} tokens: at most {common.MAX_GRID_Y} separately strided "
            "batches and 2**31 - 1 tokens are supported; call .contiguous() first, or give every "
            "token its position"
        )
    strides = [
        stride
        for tensor, (batch_stride, token_stride) in zip(tensors, pairs, strict=True)
        for stride in (batch_stride, token_stride, tensor.stride(-2))
    ]
    head_dim, table_stride, table_rows = q.shape[-1], cos.stride(-2), cos.shape[:-1].numel()
    num_heads, num_kv_heads = q.shape[-2], k.shape[-2]
    elems = common.VEC_BYTES // q.element_size()
    half = rotary_dim // 2
    # Pairs a thread takes at once, and the table entries that go with them.
    pairs_at_once = elems // 2 if interleaved else elems
    table_elems = min(common.VEC_BYTES // cos.element_size(), pairs_at_once)
    aligned = (
        not low_bits
        and half % pairs_at_once == 0
        and table_stride % table_elems == 0
        and half // pairs_at_once <= _MAX_THREADS
        and common.is_aligned(elems, head_dim, *strides)
    )
    width = max(1, half // pairs_at_once if aligned else min(32, half))
    is_flat = (
        aligned
        and batch == 1
        and rotary_dim == head_dim
        and table_stride <= common.MAX_SIZE
        and all(tensor.is_contiguous() for tensor in tensors)
    )
    heads = num_heads + num_kv_heads
    choose = _choose_flat if is_flat else _choose
    per_thread, block_heads, block_tokens = choose(width, heads, batch * tokens)
    token = common.DTYPE_TOKENS[q.dtype]
    table = "_table32" if cos.dtype != q.dtype else ""
    layout = "interleaved" if interleaved else "half"
    variant = f"vec{per_thread}" if aligned else "scalar"
    if is_flat:
        variant = f"flat_{variant}"
    function = common.shipped("rope", f"rope_{token}{table}_{layout}_{variant}")
    block = (width, block_heads, block_tokens)
    blocks = -(-tokens // block_tokens)
    sizes = (tokens, num_heads, num_kv_heads, head_dim)
    last = (table_rows, 0 if positions is None else positions.element_size())
    if is_flat:
        grid = (blocks, -(-heads // (per_thread * block_heads)), 1)
        numbers: tuple[int, ...] = (table_stride, *sizes, *last)
    else:
        grid = (blocks, batch, 1)
        numbers = (*strides, table_stride, positions_stride, *sizes, rotary_dim, *last)
    options = device_of(q.device).following
    return Launch(function, grid, block, numbers=numbers, options=options)


def _cuda_into(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor | None, interleaved: bool, rotary_dim: int, out_q: torch.Tensor,
    out_k: torch.Tensor, is_given: bool = True,
) -> None:  # fmt: skip
    """Both rotations in one launch. is_given: the caller gave out_q or out_k."""
    tensors = (out_q, out_k, q, k, cos, sin)
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    out_q_at, out_k_at, q_at, k_at, cos_at, sin_at = addresses
    low_bits = (out_q_at | out_k_at | q_at | k_at | cos_at | sin_at) & 15
    layout = [(tensor.shape, tensor.stride()) for tensor in tensors]
    where = None if positions is None else (positions.dtype, positions.shape, positions.stride())
    key = (q.dtype, cos.dtype, low_bits, interleaved, rotary_dim, where, *layout)
    found = _plans.get(key)
    if found is None:
        plan = _plan(q, k, cos, sin, positions, interleaved, rotary_dim, out_q, out_k, low_bits)
        found = _plans.keep(key, (tuple(plan), _writes.spans(*tensors, positions)))
    (function, grid, block, shared_bytes, numbers, _, options), spans = found
    if is_given:
        if positions is not None:
            addresses = (*addresses, positions.data_ptr())
        if addresses not in spans.apart:
            spans.check(addresses)
    try:
        flag = bounds.flag("rope", q)
        params = (out_q, out_k, flag, q, k, cos, sin, positions, *numbers)
        function(grid, block, shared_bytes, None, params, **options)
    except KernelHubError:
        # The launch checks devices and dtypes; this names them.
        _check(q, k, cos, sin, positions, interleaved, rotary_dim, out_q, out_k)
        raise
    if common.is_debugging():
        bounds.report(q)


def _cpu_into(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    positions: torch.Tensor | None, interleaved: bool, rotary_dim: int, out_q: torch.Tensor,
    out_k: torch.Tensor, is_given: bool = True,
) -> None:  # fmt: skip
    """The same on the CPU, by torch."""
    _check(q, k, cos, sin, positions, interleaved, rotary_dim, out_q, out_k)
    if is_given:
        _writes.check(out_q, out_k, q, k, cos, sin, positions)
    if q.numel() + k.numel() == 0:
        return
    if positions is None:
        positions = torch.arange(q.shape[-3], device=q.device)
    if cos.dim() == 3:
        if cos.shape[0] > 1:
            positions = torch.arange(q.shape[:-2].numel(), device=q.device).view(q.shape[:-2])
        cos, sin = _rows_a_token(q, cos, sin, None, rotary_dim)
    turn = (cos, sin, positions, interleaved, rotary_dim)
    out_q.copy_(rotated(q, *turn))
    out_k.copy_(rotated(k, *turn))


_registered = common.define_pair(
    _OP,
    "Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor? positions, bool interleaved, "
    "SymInt rotary_dim",
    "out_q out_k", new=lambda q, k, *_: (_empty_like(q), _empty_like(k)),
    cuda=_cuda_into, cpu=_cpu_into, check=_check,
)  # fmt: skip
