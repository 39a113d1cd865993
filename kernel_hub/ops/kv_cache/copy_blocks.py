"""Pages of caches copied to other pages (csrc/kv_cache/copy_blocks.cu)."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.device import device_of
from ..core.launch import Launch, Plans

_OP = "copy_blocks"
_THREADS, _AHEAD = 256, 4  # of csrc/kv_cache/copy_blocks.cu
_INDICES = (torch.int32, torch.int64)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_plans: Plans[tuple[tuple[Any, ...], common.Spans]] = Plans()
_operands = common.Operands(_OP, "k_cache v_cache block_mapping")
_writes = common.Writes(_OP, "k_cache v_cache block_mapping", "k_cache v_cache")


def copy_blocks(k_cache: torch.Tensor, v_cache: torch.Tensor, block_mapping: torch.Tensor) -> None:
    """Copy pages of both caches to other pages of them.

        k_cache[block_mapping[i, 1]] = k_cache[block_mapping[i, 0]]  of every i; v_cache likewise

    as sequences need it that shared a page and now write to it, or beams that take over another's.
    Pairs are copied in no order: a page that one writes no other may read or write.

    k_cache, v_cache: (num_pages, ...), any dtype of 1, 2 or 4 bytes, on the GPU or the CPU, as
        `ops.append_kv` takes them; each page contiguous. v's pages may have another size than k's.
        Must not overlap anything.
    block_mapping: (num_pairs, 2), int32 or int64, contiguous, device of k_cache: from, to. A pair
        with a page below 0 is none, and one with a page that is not there is not copied.

    Writes into the caches and returns nothing. CUDA tensors run the shipped cubin on torch's
    current stream, once; CPU tensors run a reference in torch. With KERNEL_HUB_DEBUG=1 each call
    waits, and refuses pages that are not there. No backward. Raises TensorError naming the argument
    that does not fit.
    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", 2023, 4.4.
    """
    given = k_cache, v_cache, block_mapping
    is_plain = _operands.are_plain(given)
    try:
        if not is_plain:
            _check(*given)
            _op(*given)
            return
        (_cuda_into if k_cache.is_cuda else _cpu_into)(*given)
    except common.FOREIGN:
        _operands.check_tensors(given)
        _check(*given)
        raise
    common.written((k_cache, v_cache))


def _check(k_cache: Any, v_cache: Any, block_mapping: Any) -> None:
    for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        common.check_tensor(_OP, argument, cache)
        if cache.device.type not in ("cuda", "cpu", "meta"):
            raise common.refuse(_OP, argument, "a CUDA or CPU tensor", cache)
        if cache.dim() < 2 or cache.element_size() > 4:
            raise common.refuse(
                _OP, argument, "shape (num_pages, ...), of elements of 1, 2 or 4 bytes", cache
            )
        if cache.device != k_cache.device:
            raise common.refuse(_OP, argument, f"device {k_cache.device}", cache)
        if cache.shape[0] != k_cache.shape[0]:
            raise common.refuse(_OP, argument, f"{k_cache.shape[0]} pages, as k_cache", cache)
        if cache.shape[0] and not cache[0].is_contiguous():
            raise common.refuse(_OP, argument, "contiguous pages", cache)
        if max(cache.shape[0], cache[:1].numel() * cache.element_size()) > common.MAX_SIZE:
            raise common.refuse(_OP, argument, f"at most {common.MAX_SIZE} bytes of a page", cache)
        common.check_output(_OP, argument, cache)
    common.check_tensor(_OP, "block_mapping", block_mapping)
    pairs = block_mapping.shape[0] if block_mapping.dim() else 0
    common.check_like(_OP, "block_mapping", block_mapping, (pairs, 2), k_cache, dtypes=_INDICES)
    if not block_mapping.is_contiguous():
        raise common.refuse(_OP, "block_mapping", "a contiguous tensor", block_mapping)


def _plan(k_cache: Any, v_cache: Any, block_mapping: Any, low_bits: int) -> Launch:
    """Check the arguments; the kernel, the launch shape and the numbers."""
    _check(k_cache, v_cache, block_mapping)
    pairs, num_pages = block_mapping.shape[0], k_cache.shape[0]
    sizes, strides = [], []
    for cache in (k_cache, v_cache):
        sizes.append(cache[:1].numel() * cache.element_size())
        strides.append(cache.stride(0) * cache.element_size() if num_pages > 1 else 0)
    if pairs * max(sizes) == 0:
        return Launch()
    is_vec = not low_bits and common.is_aligned(common.VEC_BYTES, *sizes, *strides)
    unit = common.VEC_BYTES if is_vec else 1
    blocks = -(-max(sizes) // (unit * _THREADS * _AHEAD))
    numbers = (
        *[n // unit for n in strides], pairs, *[n // unit for n in sizes], num_pages,
        block_mapping.element_size(),
    )  # fmt: skip
    function = common.shipped(_OP, f"{_OP}_{'vec' if is_vec else 'byte'}")
    grid, block = (blocks, min(pairs, common.MAX_GRID_Y), 2), (_THREADS, 1, 1)
    options = device_of(k_cache.device).following
    return Launch(function, grid, block, numbers=numbers, options=options)


def _cuda_into(k_cache: Any, v_cache: Any, block_mapping: Any) -> None:
    """One launch."""
    tensors = (k_cache, v_cache, block_mapping)
    addresses = tuple([x.data_ptr() for x in tensors])
    low_bits = (addresses[0] | addresses[1]) & 15
    key = (low_bits, *[(x.dtype, x.shape, x.stride(), x.device) for x in tensors])
    found = _plans.get(key)
    if found is None:
        plan = tuple(_plan(*tensors, low_bits))
        found = _plans.keep(key, (plan, _writes.spans(*tensors)))
    (function, grid, block, shared_bytes, numbers, _, options), spans = found
    if addresses not in spans.apart:
        spans.check(addresses)
    try:
        params = (k_cache, v_cache, bounds.flag(_OP, k_cache), block_mapping, *numbers)
        function(grid, block, shared_bytes, None, params, **options)
    except KernelHubError:
        _check(*tensors)  # the launch checks devices and dtypes; this names them
        raise
    if common.is_debugging():
        bounds.report(k_cache)


def _cpu_into(k_cache: Any, v_cache: Any, block_mapping: Any) -> None:
    """The same on the CPU, by torch."""
    _check(k_cache, v_cache, block_mapping)
    _writes.check(k_cache, v_cache, block_mapping)
    pages = block_mapping.long()
    pages = pages[((pages >= 0) & (pages < k_cache.shape[0])).all(1)]
    for cache in (k_cache, v_cache):
        raw = cache.view(_WORDS[cache.element_size()])
        raw[pages[:, 1]] = raw[pages[:, 0]]


_op = common.define(
    "copy_blocks(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor block_mapping) -> ()",
    cuda=lambda *given: _cuda_into(*given), cpu=lambda *given: _cpu_into(*given), fake=_check,
)  # fmt: skip
