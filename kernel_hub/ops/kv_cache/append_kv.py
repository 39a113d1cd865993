"""Append of new keys and values to a KV cache, normed and rotated on the way
(csrc/kv_cache/append_kv.cu, append_kv_quantised.cu)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import bounds, common
from ..core.launch import Plans
from ..core.rotary import rotated
from . import append_checks as checks
from .append_checks import AppendGiven
from .append_plan import launch_of


class AppendPlan(NamedTuple):
    """What is known of appends of the same layouts."""

    launches: dict[bool, tuple[Any, ...]]  # by whether all addresses are aligned; see `_met`
    spans: common.Spans  # for each set of addresses that was met, its launch


_plans: Plans[AppendPlan] = Plans()
_OP = "append_kv"
_TABLES = "cache_seqlens block_table slot_mapping cu_seqlens"
_operands = common.Operands(
    _OP, "k v k_cache v_cache",
    f"{_TABLES} q cos sin positions k_scale v_scale out_q out_k q_norm_weight k_norm_weight "
    "k_scale_cache v_scale_cache",
)  # fmt: skip
_TENSORS = 20
_writes = common.Writes(
    _OP,
    f"k v k_cache v_cache {_TABLES} q cos sin positions k_scale v_scale out_q out_k "
    "q_norm_weight k_norm_weight k_scale_cache v_scale_cache",
    "k_cache v_cache out_q out_k k_scale_cache v_scale_cache", "out_q=q out_k=k",
)  # fmt: skip


def append_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *,
    cache_seqlens: torch.Tensor | None = None, block_table: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None,
    q: torch.Tensor | None = None, cos: torch.Tensor | None = None, sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None, interleaved: bool = False, rotary_dim: int | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    out_q: torch.Tensor | None = None, out_k: torch.Tensor | None = None,
    q_norm_weight: torch.Tensor | None = None, k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6, weight_offset: float = 0.0,
    k_scale_cache: torch.Tensor | None = None, v_scale_cache: torch.Tensor | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """Write `k`, normed and rotated, and `v` behind what a KV cache holds; the same of `q`.

        k_cache = rope(norm(k)),  v_cache = v,  out_q = rope(norm(q))
        norm(h) = h / sqrt(mean(h**2) + eps) * (weight + weight_offset)  of each head

    each part only where its arguments are given, in one launch, in fp32, rounded once. The token
    at index i of sequence b has the index n = cache_seqlens[b] + i in it. It goes to

        slot_mapping:  page, row = divmod(slot_mapping[token], page_size)
        block_table:   page, row = block_table[b, n // page_size], n % page_size
        neither:       row n of the cache of sequence b

    and nowhere where that is outside the cache (a slot of -1, say), or where the token is outside
    every sequence of cu_seqlens or of a sequence whose length is below 0, a finished or padding
    row. Two tokens must not go to one place.

    k, v: (batch, seqlen, num_kv_heads, head_dim), or (total, num_kv_heads, head_dim) with
        cu_seqlens or slot_mapping; fp16, bf16 or fp32, on the GPU or the CPU; any strides, the last
        dimension contiguous.
    k_cache, v_cache: (num_pages, page_size, num_kv_heads, head_dim), or without slot_mapping and
        block_table (batch, max_seqlen, num_kv_heads, head_dim); any strides, the last dimension
        contiguous; the dtype of k, or float8_e4m3fn or (beside 16 bits) int8, which take
        value / scale, rounded to nearest even, saturated.
    cache_seqlens: (batch,) int32, the tokens of each sequence before the append; None: none;
        below 0: nothing is done for its tokens.
    block_table: (batch, max_pages) int32. A contiguous cache whose sequences lie in another order
        is a paged one whose pages are sequences.
    slot_mapping: int32 or int64, one for each token; -1 skips it.
    cu_seqlens: (batch + 1,) int32, where each sequence of k starts and the last one ends.
    q: like k, with num_heads heads; normed and rotated into out_q, so only with cos or
        q_norm_weight.
    cos, sin: (max_position, rotary_dim // 2), fp32 or the dtype of k, as for `rope`; None: nothing
        is rotated.
    positions: int32 or int64, one for each token; None: n. One outside the table gives nan.
    interleaved: rotate neighbouring elements (GPT-J) instead of the two halves (GPT-NeoX, Llama).
    rotary_dim: None is 2 * cos.shape[-1].
    k_scale, v_scale: (num_kv_heads,) fp32, only with e4m3 and int8 caches; None: 1 of e4m3.
    out_q: like q, `out_q=q` works in place; None: a new tensor.
    out_k: like k, where to write the rotated keys besides (`out_k=k`: in place), for attention
        that reads them there; None: nowhere.
    q_norm_weight, k_norm_weight: (head_dim,), fp32 or the dtype of k, contiguous: every head of q,
        of k, is normed before it is rotated (Qwen 3, Gemma 3); None: it is not. A norm of all
        heads at once (OLMo 2) is `rms_norm` of the projection, before.
    eps: added to the mean of squares; at least 0.
    weight_offset: added to both weights; 1.0 for models that store weight - 1 (Gemma).
    k_scale_cache, v_scale_cache: like the caches without head_dim, fp32, in any strides, in place
        of k_scale and v_scale: the scale of each token and head is found, max(abs(k)) / 127 (e4m3:
        448), and written there, for `decode_attention` to read. A head of zeros has a scale of 0.
    Rows of out_q and out_k whose token is outside every sequence, or of one whose length is below
    0, are not written.

    Returns out_q, or None without q. A CUDA tensor runs the shipped cubin on torch's current
    stream, and nothing waits for the device, so cache_seqlens and the tables may change under a
    captured graph; a CPU tensor runs a reference in torch. With KERNEL_HUB_DEBUG=1 each call waits,
    and refuses tables that point outside the cache. No backward. Raises TensorError naming the
    argument that does not fit.
    Source: Su et al., "RoFormer", 2021; Kwon et al., "Efficient Memory Management for Large
    Language Model Serving with PagedAttention", 2023; Henry et al., "Query-Key Normalization for
    Transformers", 2020.
    """
    if rotary_dim is None:
        rotary_dim = 2 * common.last_size(cos)
    else:
        rotary_dim = common.check_count(_OP, "rotary_dim", rotary_dim)
    options = (
        cache_seqlens, block_table, slot_mapping, cu_seqlens, q, cos, sin, positions, k_scale,
        v_scale, out_q, out_k, q_norm_weight, k_norm_weight, k_scale_cache, v_scale_cache,
    )  # fmt: skip
    plain = _operands.are_plain((k, v, k_cache, v_cache), options)
    first = (k, v, k_cache, v_cache, *options[:8], interleaved, rotary_dim, k_scale, v_scale)
    norm: tuple[Any, ...] = ()  # behind the outputs
    if not (q_norm_weight is k_norm_weight is None):
        numbers = checks.norm_numbers(_OP, eps, weight_offset)
        norm = (q_norm_weight, k_norm_weight, *numbers)
    elif not (type(eps) is type(weight_offset) is float and eps == 1e-6 and weight_offset == 0.0):
        checks.norm_numbers(_OP, eps, weight_offset)
    if not (k_scale_cache is v_scale_cache is None):
        norm = (*(norm or (None, None, 1e-6, 0.0)), k_scale_cache, v_scale_cache)
    if not plain:
        checks.check(AppendGiven(*first, out_q, out_k, *norm))
    makes_q = out_q is None and q is not None
    try:
        if makes_q and q is not None:
            out_q = torch.empty_like(q)
        if not plain:
            _op(*AppendGiven(*first, out_q, out_k, *norm))
            return out_q
        (_cuda_into if k.is_cuda else _cpu_into)((*first, out_q, out_k, *norm), makes_q)
    except common.FOREIGN:
        _operands.check_tensors((k, v, k_cache, v_cache), options)  # names what has no memory
        checks.check(AppendGiven(*first, out_q, out_k, *norm))
        raise
    outputs = (*options[10:12], *options[14:])
    common.written((k_cache, v_cache, *[out for out in outputs if out is not None]))
    return out_q


def _met(given: AppendGiven, plan: AppendPlan, addresses: tuple[int, ...]) -> tuple[Any, ...]:
    """The launch at addresses that are new to the plan: a bare tuple, quicker to unpack."""
    plan.spans.refuse(addresses)
    low_bits = 0
    read = (given.k, given.v, given.q, given.cos, given.sin)
    weights = (given.q_norm_weight, given.k_norm_weight)
    for tensor in (given.out_q, given.out_k, *read, *weights):
        if tensor is not None:
            low_bits |= tensor.data_ptr()
    # A cache takes as many elements at a time as k, in perhaps fewer bytes.
    cache_bytes = common.VEC_BYTES * given.k_cache.element_size() // given.k.element_size()
    cache_bits = given.k_cache.data_ptr() | given.v_cache.data_ptr()
    is_aligned = low_bits % common.VEC_BYTES == 0 and cache_bits % cache_bytes == 0
    launch = plan.launches.get(is_aligned)
    if launch is None:
        launch = plan.launches[is_aligned] = tuple(launch_of(given, is_aligned))
    plan.spans.keep(addresses, launch)
    return launch


def _cuda_into(arguments: tuple[Any, ...], makes_q: bool = False, op: str = _OP) -> None:
    """The whole append in one launch.

    arguments: those of `AppendGiven`, as `_short` has them; makes_q: out_q is the op's own, with
        q's layout, and meets nothing; op: whose tables they are said to be where they lead outside.
    """
    (k, v, k_cache, v_cache, cache_seqlens, block_table, slot_mapping, cu_seqlens, q, cos, sin,
     positions, interleaved, rotary_dim, k_scale, v_scale, out_q, out_k,
     *norm) = arguments  # fmt: skip
    weights, numbers_behind, token_scales = norm[:2], norm[2:4], norm[4:]
    tensors = (
        k, v, k_cache, v_cache, cache_seqlens, block_table, slot_mapping, cu_seqlens, q, cos, sin,
        positions, k_scale, v_scale, None if makes_q else out_q, out_k, *weights, *token_scales,
    )  # fmt: skip
    addresses = tuple([x.data_ptr() for x in tensors if x is not None])
    key = (
        interleaved, rotary_dim, makes_q,
        *[None if x is None else (x.dtype, x.shape, x.stride()) for x in tensors],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        checks.check(AppendGiven(*arguments), op)
        plan = _plans.keep(
            key, AppendPlan({}, _writes.spans(*tensors, *[None] * (_TENSORS - len(tensors))))
        )
    launch = plan.spans.apart.get(addresses)
    if launch is None:
        launch = _met(AppendGiven(*arguments), plan, addresses)
    if is_debugging := common.is_debugging():
        checks.check_routing(AppendGiven(*arguments))
    function, grid, block, shared_bytes, numbers, _, options = launch
    try:
        function(
            grid, block, shared_bytes, None,
            (out_q, out_k, k_cache, v_cache, bounds.flag(op, k), q, k, v, cos, sin,
             positions, cache_seqlens, slot_mapping, block_table, cu_seqlens, k_scale,
             v_scale, *weights, *token_scales, *numbers, *numbers_behind),
            **options,
        )  # fmt: skip
    except KernelHubError:
        # The launch checks devices and dtypes; this names them.
        checks.check(AppendGiven(*arguments), op)
        raise
    if is_debugging:
        bounds.report(k)


def append_for(op: str, given: AppendGiven) -> None:
    """The append of another op, whose tables they are said to be."""
    _cuda_into(_short(given), op=op)


def _short(given: AppendGiven) -> tuple[Any, ...]:
    """Without the scales of tokens, and then the arguments of a norm, where there are none."""
    return given if given.k_scale_cache is not None else given[: 22 if given.is_normed else 18]


def _cuda_given(given: AppendGiven) -> None:
    _cuda_into(_short(given))


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
    norm = (given.eps, given.weight_offset)
    if q is not None:
        tokens.assign(out_q, rotated(checks.normed(_flat(q), given.q_norm_weight, *norm), *turn))
    keys = rotated(checks.normed(_flat(k), given.k_norm_weight, *norm), *turn)
    tokens.store(given.k_cache, keys, given.k_scale, given.k_scale_cache)
    tokens.store(given.v_cache, _flat(v), given.v_scale, given.v_scale_cache)
    if out_k is not None:
        tokens.assign(out_k, keys)


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


_op = common.define_given(
    "append_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? cache_seqlens, "
    "Tensor? block_table, Tensor? slot_mapping, Tensor? cu_seqlens, Tensor? q, Tensor? cos, "
    "Tensor? sin, Tensor? positions, bool interleaved, SymInt rotary_dim, Tensor? k_scale, "
    "Tensor? v_scale, Tensor(c!)? out_q, Tensor(d!)? out_k, Tensor? q_norm_weight=None, "
    "Tensor? k_norm_weight=None, float eps=1e-6, float weight_offset=0.0, "
    "Tensor(e!)? k_scale_cache=None, Tensor(f!)? v_scale_cache=None) -> ()",
    AppendGiven, cuda=_cuda_given, cpu=_cpu_into, check=checks.check, whole=checks.check_whole,
)  # fmt: skip
