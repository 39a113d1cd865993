"""Merge of two attention states over disjoint keys (csrc/attention/merge_states.cu)."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError
from ..core import common
from ..core.device import device_of
from ..core.launch import Launch, Plans

_OP = "merge_states"
# A bare tuple of a launch: unpacking it takes 40 ns less.
_plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
_operands = common.Operands(_OP, "out_a lse_a out_b lse_b", "out out_lse")
_writes = common.Writes(
    _OP, "out out_lse out_a out_b lse_a lse_b", "out out_lse",
    in_place="out=out_a out=out_b out_lse=lse_a out_lse=lse_b",
)  # fmt: skip
_MAX_THREADS = 512


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, *,
    out: torch.Tensor | None = None, out_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention over two disjoint sets of keys from the attention over each.

        lse = log(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

    in fp32, rounded once. A side with lse = -inf has seen no key: the other is taken as it is,
    whatever the first holds; with neither, out is 0 and lse -inf.

    out_a, out_b: (batch, seqlen, num_heads, head_dim) or (total, num_heads, head_dim), fp16, bf16
        or fp32, on the GPU or the CPU; any strides, the last dimension contiguous.
    lse_a, lse_b: (batch, num_heads, seqlen) or (num_heads, total), fp32, natural logarithms, as
        flash_attention returns them; any strides. (FlashInfer's are (total, num_heads) and base 2:
        pass `(lse * math.log(2)).transpose(0, 1)`.)
    out, out_lse: like out_a and lse_a; where to write. Into either state works in place; no other
        overlap of what is written with anything else.

    Returns (out, lse). A CUDA tensor runs the shipped cubin on torch's current stream; a CPU tensor
    runs a reference in torch. The same bits every time; not for any order of merging. No backward.
    Raises TensorError naming the argument that does not fit.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    given = (out_a, lse_a, out_b, lse_b)
    if not _operands.are_plain(given, (out, out_lse)):
        _check(*given, out, out_lse)
        if out is None and out_lse is None:
            merged: tuple[torch.Tensor, torch.Tensor] = _registered.returning(*given)
            return merged
        out = torch.empty_like(out_a) if out is None else out
        out_lse = torch.empty_like(lse_a) if out_lse is None else out_lse
        _registered.writing(*given, out, out_lse)
        return out, out_lse
    is_given = out is not None or out_lse is not None
    try:
        out = torch.empty_like(out_a) if out is None else out
        out_lse = torch.empty_like(lse_a) if out_lse is None else out_lse
        (_cuda_into if out_a.is_cuda else _cpu_into)(*given, out, out_lse, is_given)
    except common.FOREIGN:
        _operands.check_tensors(given, (out, out_lse))  # names what has no memory
        _check(*given, out, out_lse)
        raise
    if is_given:
        common.written((out, out_lse))
    return out, out_lse


def _check(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, out: Any, out_lse: Any) -> None:
    op = _OP
    common.check_data(op, "out_a", out_a)
    if out_a.dim() not in (3, 4):
        expected = "shape (batch, seqlen, num_heads, head_dim) or (total, num_heads, head_dim)"
        raise common.refuse(op, "out_a", expected, out_a)
    common.check_like(op, "out_b", out_b, out_a.shape, out_a)
    # check_like wants a contiguous last dimension, which logarithms need not have.
    shape = (*out_a.shape[:-3], out_a.shape[-2], out_a.shape[-3])
    for argument, lse in (("lse_a", lse_a), ("lse_b", lse_b), ("out_lse", out_lse)):
        if argument == "out_lse" and lse is None:
            continue
        common.check_fp32(op, argument, lse, out_a)
        if tuple(lse.shape) != shape:
            raise common.refuse(op, argument, f"shape {shape}", lse)
    if out is not None:
        common.check_like(op, "out", out, out_a.shape, out_a)
        common.check_output(op, "out", out)
    if out_lse is not None:
        common.check_output(op, "out_lse", out_lse)
    tokens = out_a.shape[:-2].numel()
    if max(tokens, *out_a.shape) > common.MAX_SIZE:
        raise common.refuse(op, "out_a", f"at most {common.MAX_SIZE} tokens", out_a)


def _choose(width: int, heads: int, tokens: int) -> tuple[int, int, int]:
    """(heads a thread, heads a block, tokens a block) where a head takes `width` threads.

    Measured on an H200 (docs/notes/merge_states.md).
    """
    if tokens * heads <= 131072:
        per_thread, block_heads = 1, min(heads, max(1, 64 // width))
        threads = 128
    else:
        per_thread, block_heads = 2, min(-(-heads // 2), max(1, 256 // width))
        threads = 256
    block_tokens = max(1, threads // (width * block_heads))
    return per_thread, block_heads, min(block_tokens, 64)


def _plan(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor,
    out: torch.Tensor, out_lse: torch.Tensor, low_bits: int,
) -> Launch:  # fmt: skip
    """Check the tensors and choose the kernel, its launch shape and its integer parameters."""
    _check(out_a, lse_a, out_b, lse_b, out, out_lse)
    if out_a.shape[:-1].numel() == 0:
        return Launch()
    strides: list[int] = []
    states = (out, out_lse, out_a, out_b, lse_a, lse_b)
    for state in states:
        is_lse = state.dim() < out_a.dim()
        token, head = (-1, -2) if is_lse else (-3, -2)
        outer = state.stride(0) if out_a.dim() == 4 else 0
        strides += [outer, state.stride(token), state.stride(head)]
    heads, head_dim = out_a.shape[-2:]
    seqlen = out_a.shape[-3]
    tokens = out_a.shape[:-2].numel()
    elems = common.VEC_BYTES // out_a.element_size()
    aligned = (
        not low_bits
        and 0 < head_dim // elems <= _MAX_THREADS
        and common.is_aligned(elems, head_dim, *strides[:3], *strides[6:12])
    )
    width = head_dim // elems if aligned else max(1, min(32, head_dim))
    per_thread, block_heads, block_tokens = _choose(width, heads, tokens)
    if not aligned:
        per_thread = 1
    block_tokens = min(block_tokens, seqlen)
    blocks = -(-heads // (per_thread * block_heads))
    batch_size = out_a.shape[0] if out_a.dim() == 4 else 1
    if max(blocks, batch_size) > common.MAX_GRID_Y:
        most = common.MAX_GRID_Y
        expected = f"at most {most} sequences and {most * per_thread * block_heads} heads"
        raise common.refuse(_OP, "out_a", expected, out_a)
    variant = f"vec{per_thread}" if aligned else "scalar"
    if aligned and all(state.is_contiguous() for state in states):
        variant, strides = f"flat_{variant}", []
    function = common.shipped(_OP, f"{_OP}_{common.DTYPE_TOKENS[out_a.dtype]}_{variant}")
    grid = (-(-seqlen // block_tokens), blocks, batch_size)
    block = (width, block_heads, block_tokens)
    options = device_of(out_a.device).following
    return Launch(
        function, grid, block, numbers=(*strides, seqlen, heads, head_dim), options=options
    )


def _cuda_into(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor,
    out: torch.Tensor, out_lse: torch.Tensor, is_given: bool = True,
) -> None:  # fmt: skip
    """The merge in one launch. is_given: the caller gave out or out_lse."""
    tensors = (out, out_lse, out_a, out_b, lse_a, lse_b)
    addresses = tuple([tensor.data_ptr() for tensor in tensors])
    low_bits = (addresses[0] | addresses[2] | addresses[3]) & 15
    key = (out_a.dtype, low_bits, *[(t.shape, t.stride()) for t in tensors])
    found = _plans.get(key)
    if found is None:
        plan = _plan(out_a, lse_a, out_b, lse_b, out, out_lse, low_bits)
        found = _plans.keep(key, (tuple(plan), _writes.spans(*tensors)))
    (function, grid, block, shared_bytes, numbers, _, options), spans = found
    if is_given and addresses not in spans.apart:
        spans.check(addresses)
    try:
        function(grid, block, shared_bytes, None, (*tensors, *numbers), **options)
    except KernelHubError:
        # The launch checks devices and dtypes; this names them.
        _check(out_a, lse_a, out_b, lse_b, out, out_lse)
        raise


def _cpu_into(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor,
    out: torch.Tensor, out_lse: torch.Tensor, is_given: bool = True,
) -> None:  # fmt: skip
    """The same on the CPU, by torch."""
    _check(out_a, lse_a, out_b, lse_b, out, out_lse)
    if is_given:
        _writes.check(out, out_lse, out_a, out_b, lse_a, lse_b)
    lse = torch.logaddexp(lse_a, lse_b)
    merged = torch.zeros(out_a.shape, dtype=torch.float32)
    for state, own in ((out_a, lse_a), (out_b, lse_b)):
        weight = (own - lse).exp().transpose(-1, -2)[..., None]
        seen = (own != -torch.inf).transpose(-1, -2)[..., None]
        merged += torch.where(seen, weight * state.float(), 0.0)
    out.copy_(merged)
    out_lse.copy_(lse)


_registered = common.define_pair(
    _OP, "Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b", "out out_lse",
    new=lambda out_a, lse_a, *_: (torch.empty_like(out_a), torch.empty_like(lse_a)),
    cuda=_cuda_into, cpu=_cpu_into, check=_check,
)  # fmt: skip
