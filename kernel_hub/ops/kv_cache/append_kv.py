"""Append of new keys and values to a KV cache, rotated on the way (csrc/kv_cache/append_kv.cu)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.kv_cache import batch_and_seqlen
from ..core.launch import Launch, Plans
from ..core.rotary import rotated
from . import append_checks as checks
from .append_checks import AppendGiven


class AppendPlan(NamedTuple):
    """What is known of appends of the same layouts."""

    launches: dict[bool, tuple[Any, ...]]  # by whether all addresses are aligned; see `_met`
    spans: common.Spans  # for each set of addresses that was met, its launch


_plans: Plans[AppendPlan] = Plans()
_OP = "append_kv"
_TABLES = "cache_seqlens block_table slot_mapping cu_seqlens"
_operands = common.Operands(
    _OP, "k v k_cache v_cache", f"{_TABLES} q cos sin positions k_scale v_scale out_q out_k"
)
_writes = common.Writes(
    _OP, f"k v k_cache v_cache {_TABLES} q cos sin positions k_scale v_scale out_q out_k",
    "k_cache v_cache out_q out_k", "out_q=q out_k=k",
)  # fmt: skip
_MAX_THREADS = 256


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out_q: torch.Tensor | None = None,
    out_k: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Write `k`, rotated, and `v` behind what a KV cache holds; rotate `q` too. One launch.

    The token at index i of sequence b has the index n = cache_seqlens[b] + i in it. It goes to

        slot_mapping:  page, row = divmod(slot_mapping[token], page_size)
        block_table:   page, row = block_table[b, n // page_size], n % page_size
        neither:       row n of the cache of sequence b

    and nowhere where that is outside the cache (a slot of -1, say), or where the token is outside
    every sequence of cu_seqlens. Two tokens must not go to one place.

    k, v: (batch, seqlen, num_kv_heads, head_dim), or (total, num_kv_heads, head_dim) with
        cu_seqlens or slot_mapping; fp16, bf16 or fp32, on the GPU or the CPU; any strides, the last
        dimension contiguous.
    k_cache, v_cache: (num_pages, page_size, num_kv_heads, head_dim), or without slot_mapping and
        block_table (batch, max_seqlen, num_kv_heads, head_dim); any strides, the last dimension
        contiguous; the dtype of k, or float8_e4m3fn, which takes value / scale, saturated.
    cache_seqlens: (batch,) int32, the tokens of each sequence before the append; None: none.
    block_table: (batch, max_pages) int32. A contiguous cache whose sequences lie in another order
        is a paged one whose pages are sequences.
    slot_mapping: int32 or int64, one for each token; -1 skips it.
    cu_seqlens: (batch + 1,) int32, where each sequence of k starts and the last one ends.
    q: like k, with num_heads heads; rotated into out_q.
    cos, sin: (max_position, rotary_dim // 2), fp32 or the dtype of k, as for `rope`; None: nothing
        is rotated.
    positions: int32 or int64, one for each token; None: n. One outside the table gives nan.
    interleaved: rotate neighbouring elements (GPT-J) instead of the two halves (GPT-NeoX, Llama).
    rotary_dim: None is 2 * cos.shape[-1].
    k_scale, v_scale: (num_kv_heads,) fp32, only with e4m3 caches; None: 1.
    out_q: like q, `out_q=q` works in place; None: a new tensor.
    out_k: like k, where to write the rotated keys besides (`out_k=k`: in place), for attention
        that reads them there; None: nowhere.
    Rows of out_q and out_k whose token is outside every sequence are not written.

    Returns out_q, or None without q. A CUDA tensor runs the shipped cubin on torch's current
    stream, and nothing waits for the device, so cache_seqlens and the tables may change under a
    captured graph; a CPU tensor runs a reference in torch. With KERNEL_HUB_DEBUG=1 each call waits,
    and refuses tables that point outside the cache. No backward. Raises TensorError naming the
    argument that does not fit.
    Source: Su et al., "RoFormer", 2021; Kwon et al., "Efficient Memory Management for Large
    Language Model Serving with PagedAttention", 2023.
    """
    if rotary_dim is None:
        rotary_dim = 2 * common.last_size(cos)
    options = (
        cache_seqlens, block_table, slot_mapping, cu_seqlens, q, cos, sin, positions, k_scale,
        v_scale, out_q, out_k,
    )  # fmt: skip
    plain = _operands.are_plain((k, v, k_cache, v_cache), options)
    first = (k, v, k_cache, v_cache, *options[:8], interleaved, rotary_dim, k_scale, v_scale)
    if not plain:
        checks.check(AppendGiven(*first, out_q, out_k))
    makes_q = out_q is None and q is not None
    try:
        if makes_q and q is not None:
            out_q = torch.empty_like(q)
        if not plain:
            _op(*first, out_q, out_k)
            return out_q
        (_cuda_into if k.is_cuda else _cpu_into)((*first, out_q, out_k), makes_q)
    except common.FOREIGN:
        _operands.check_tensors((k, v, k_cache, v_cache), options)  # names what has no memory
        checks.check(AppendGiven(*first, out_q, out_k))
        raise
    common.written((k_cache, v_cache, *[out for out in options[10:] if out is not None]))
    return out_q


def _choose(width: int, num_heads: int, num_kv_heads: int, tokens: int) -> tuple[int, int, int]:
    """(query threads, key-and-value threads, tokens) of a block, a head taking `width` of each.

    Measured on an H200 (docs/notes/append_kv.md).
    """
    pairs = -(-num_heads // 2) + num_kv_heads
    room = max(1, _MAX_THREADS // width)
    rounds = max(1 if tokens <= 512 else 2, -(-pairs // room))
    q_threads, kv_threads = -(-num_heads // (2 * rounds)), -(-num_kv_heads // rounds)
    if q_threads + kv_threads > room:
        q_threads, kv_threads = (room - 1, 1) if num_heads else (0, room)
    block_tokens = 1 if tokens <= 512 else 96 // (width * (q_threads + kv_threads))
    return q_threads, kv_threads, min(max(1, block_tokens), 64)


def _strides(tensor: Any) -> tuple[int, int, int]:
    """(outer, row, head) strides; (total, heads, head_dim) has no outer one."""
    if tensor is None:
        return 0, 0, 0
    outer = tensor.stride(0) if tensor.dim() == 4 else 0
    return outer, tensor.stride(-3), tensor.stride(-2)


def _launch(given: AppendGiven, is_aligned: bool) -> Launch:
    """Choose the kernel, its launch shape and its integer parameters, for checked arguments."""
    (k, v, k_cache, v_cache, _, block_table, slot_mapping, cu_seqlens, q, cos, _, positions,
     interleaved, rotary_dim, _, _, out_q, out_k) = given  # fmt: skip
    batch_size, seqlen = batch_and_seqlen(k.shape[:-2], cu_seqlens)
    num_tokens = k.shape[:-2].numel()
    num_heads = 0 if q is None else q.shape[-2]
    num_kv_heads, head_dim = k.shape[-2:]
    if num_tokens * (num_heads + num_kv_heads) * head_dim == 0 or batch_size == 0:
        return Launch()
    strides = [s for t in (out_q, out_k, k_cache, v_cache, q, k, v) for s in _strides(t)]
    elems = common.VEC_BYTES // k.element_size()
    layout = "plain" if cos is None else "interleaved" if interleaved else "half"
    unit = 2 * elems if layout == "half" else elems
    aligned = (
        is_aligned
        and head_dim % unit == rotary_dim % unit == 0
        and head_dim // unit <= _MAX_THREADS // 2
        and common.is_aligned(elems, *strides)
    )
    if cos is not None:
        pairs_at_once = elems // 2 if interleaved else elems
        table_elems = min(common.VEC_BYTES // cos.element_size(), pairs_at_once)
        aligned = aligned and cos.stride(0) % table_elems == 0
    width = head_dim // unit if aligned else min(32, head_dim)
    q_threads, kv_threads, block_tokens = _choose(width, num_heads, num_kv_heads, num_tokens)
    table = "" if cos is None or cos.dtype == k.dtype else "_table32"
    cache = "" if k_cache.dtype == k.dtype else "_to_e4m3"
    variant = "vec" if aligned else "scalar"
    function = common.shipped(
        "append_kv", f"append_kv_{common.DTYPE_TOKENS[k.dtype]}{table}_{layout}{cache}_{variant}"
    )
    page_size = k_cache.shape[1]
    numbers = (
        *strides,
        0 if cos is None else cos.stride(0),
        0 if block_table is None else block_table.stride(0),
        *(num_tokens, seqlen, batch_size, num_heads, num_kv_heads, head_dim, rotary_dim),
        0 if cos is None else cos.shape[0],
        # NOTE: a cache of no rows has no pages either; the kernel divides by page_size.
        *(k_cache.shape[0] if page_size else 0, max(1, page_size)),
        # NOTE: a table of no columns has no address either; -1 says that there is none.
        -1 if block_table is None else block_table.shape[1] if page_size else 0,
        0 if positions is None else positions.element_size(),
        0 if slot_mapping is None else slot_mapping.element_size(),
        q_threads,
    )
    grid = (-(-num_tokens // block_tokens), 1, 1)
    block = (width, q_threads + kv_threads, block_tokens)
    return Launch(function, grid, block, numbers=numbers)


def _met(given: AppendGiven, plan: AppendPlan, addresses: tuple[int, ...]) -> tuple[Any, ...]:
    """The launch at addresses that are new to the plan: a bare tuple, quicker to unpack."""
    plan.spans.refuse(addresses)
    low_bits = 0
    for tensor in (given.out_q, given.out_k, given.k, given.v, given.q, given.cos, given.sin):
        if tensor is not None:
            low_bits |= tensor.data_ptr()
    # A cache takes as many elements at a time as k, in perhaps fewer bytes.
    cache_bytes = common.VEC_BYTES * given.k_cache.element_size() // given.k.element_size()
    cache_bits = given.k_cache.data_ptr() | given.v_cache.data_ptr()
    is_aligned = low_bits % common.VEC_BYTES == 0 and cache_bits % cache_bytes == 0
    launch = plan.launches.get(is_aligned)
    if launch is None:
        launch = plan.launches[is_aligned] = tuple(_launch(given, is_aligned))
    plan.spans.keep(addresses, launch)
    return launch


def _cuda_into(arguments: tuple[Any, ...], makes_q: bool = False, op: str = _OP) -> None:
    """The whole append in one launch.

    arguments: those of `AppendGiven`; makes_q: out_q is the op's own, with q's layout, and meets
        nothing; op: whose tables they are said to be where they lead outside.
    """
    (k, v, k_cache, v_cache, cache_seqlens, block_table, slot_mapping, cu_seqlens, q, cos, sin,
     positions, interleaved, rotary_dim, k_scale, v_scale, out_q, out_k) = arguments  # fmt: skip
    tensors = (
        k, v, k_cache, v_cache, cache_seqlens, block_table, slot_mapping, cu_seqlens, q, cos, sin,
        positions, k_scale, v_scale, None if makes_q else out_q, out_k,
    )  # fmt: skip
    addresses = tuple([x.data_ptr() for x in tensors if x is not None])
    key = (
        interleaved, rotary_dim, makes_q,
        *[None if x is None else (x.dtype, x.shape, x.stride()) for x in tensors],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        checks.check(AppendGiven(*arguments))
        plan = _plans.keep(key, AppendPlan({}, _writes.spans(*tensors)))
    launch = plan.spans.apart.get(addresses)
    if launch is None:
        launch = _met(AppendGiven(*arguments), plan, addresses)
    if is_debugging := common.is_debugging():
        checks.check_routing(AppendGiven(*arguments))
    function, grid, block, shared_bytes, numbers, _, _ = launch
    if function is not None:
        try:
            function(
                grid, block, shared_bytes, None,
                (out_q, out_k, k_cache, v_cache, bounds.flag(op, k), q, k, v, cos, sin,
                 positions, cache_seqlens, slot_mapping, block_table, cu_seqlens, k_scale,
                 v_scale, *numbers),
            )  # fmt: skip
        except KernelHubError:
            # The launch checks devices and dtypes; this names them.
            checks.check(AppendGiven(*arguments))
            raise
        if is_debugging:
            bounds.report(k)


def append_for(op: str, given: AppendGiven) -> None:
    """The append of another op, whose tables they are said to be."""
    _cuda_into(given, op=op)


def _cpu_into(arguments: tuple[Any, ...], makes_q: bool = False) -> None:
    """The same on the CPU, by torch."""
    given = AppendGiven(*arguments)
    checks.check(given)
    _writes.check(*given.tensors)
    if common.is_debugging():
        checks.check_routing(given)
    k, v, q, out_q, out_k = given.k, given.v, given.q, given.out_q, given.out_k
    tokens = given.places
    turn = (given.cos, given.sin, tokens.position, given.interleaved, given.rotary_dim)
    if q is not None:
        tokens.assign(out_q, rotated(_flat(q), *turn))
    keys = rotated(_flat(k), *turn)
    tokens.store(given.k_cache, keys, given.k_scale)
    tokens.store(given.v_cache, _flat(v), given.v_scale)
    if out_k is not None:
        tokens.assign(out_k, keys)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, *x.shape[-2:])


_op = common.define_given(
    "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? cache_seqlens, "
    "Tensor? block_table, Tensor? slot_mapping, Tensor? cu_seqlens, Tensor? q, Tensor? cos, "
    "Tensor? sin, Tensor? positions, bool interleaved, SymInt rotary_dim, Tensor? k_scale, "
    "Tensor? v_scale, Tensor(c!)? out_q, Tensor(d!)? out_k) -> ()",
    AppendGiven, cuda=_cuda_into, cpu=_cpu_into, check=checks.check,
)  # fmt: skip
