"""Attention of a few new tokens over a KV cache, with what surrounds it in a decode step fused in
(csrc/kv_cache/decode_attention.cu)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from ...errors import KernelHubError
from ..attention import forward_sm90
from ..core import bounds, common
from ..core.device import device_of
from ..core.launch import Launch, Plans
from . import decode_checks as checks
from . import decode_plan as plans
from . import decode_short as short
from . import decode_sm90 as sm90
from .decode_batch import decode_alone
from .decode_cpu import decode_attention as _reference
from .decode_plan import DecodeGiven
from .decode_plan import given_of as _given


class DecodePlan(NamedTuple):
    """What is known of steps of the same layouts."""

    steps: dict[tuple[bool, bool], Step]  # by what addresses are aligned; see `_met`
    spans: common.Spans  # for each set of addresses that was met, its step


class Step(NamedTuple):
    """A launch, the merge behind it where caches may be split, and what lies between.

    partials: like their out and lse. maps: tensor maps where main is one of `decode_sm90`, which
    has all of that in it. is_scaled: main takes scales of tokens behind its numbers.
    """

    main: Launch
    merge: Launch = Launch()
    partials: tuple[torch.Tensor, ...] = ()
    maps: tuple[bytes, ...] = ()
    is_scaled: bool = False


_plans: Plans[DecodePlan] = Plans()
_empty_like, _CONTIGUOUS = torch.empty_like, torch.contiguous_format
_OP = "decode_attention"
_REQUIRED = "q k_cache v_cache cache_seqlens"
_OPTIONAL = (
    "k v block_table cos sin qkv_bias k_scale v_scale alibi_slopes sinks tree_mask out "
    "k_scale_cache v_scale_cache"
)
_operands = common.Operands(_OP, _REQUIRED, _OPTIONAL)
# Caches are written where there are new tokens.
_LIE = f"{_REQUIRED} {_OPTIONAL}"
_REQUIRED_TENSORS = len(_REQUIRED.split())
_TENSORS = len(_LIE.split()) - 3  # of `DecodeGiven`, before its numbers
_appends = common.Writes(_OP, _LIE, "k_cache v_cache out")
_reads = common.Writes(_OP, _LIE, "out")


def decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    k: torch.Tensor | None = None, v: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None, interleaved: bool = False, rotary_dim: int | None = None,
    qkv_bias: torch.Tensor | None = None, softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, num_splits: int = 0, out: torch.Tensor | None = None,
    return_lse: bool = False, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, sinks: torch.Tensor | None = None,
    deterministic: bool | Literal["batch"] = False, k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None, tree_mask: torch.Tensor | None = None,
    cache_ready: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One decode step of 1 to 16 new tokens a sequence, in one launch (and a merge where split):

        q', k' = rope(q + bias), rope(k + bias);  v' = v + bias
        cache[length + i] = k'_i, v'_i
        out = softmax(softcap(softmax_scale q' K^T) + alibi, masked) V

    each part only where its arguments are given. Token i sees the keys of its sequence up to its
    own (causal, aligned to the end), so with one new token all of them.

    q: (batch_size, seqlen_q, num_heads, head_dim), fp16, bf16 or fp32, 1 <= seqlen_q <= 16,
        head_dim 16 to 256 (fp32: 128, products of tf32 in three) in multiples of 8; any strides,
        the last dimension contiguous (a slice of a packed projection will do). On the GPU or the
        CPU.
    k_cache, v_cache: (batch_size, max_seqlen, num_kv_heads, head_dim) in any strides, the last
        dimension contiguous: a cache with the heads before the tokens is passed as
        `cache.transpose(1, 2)`. With block_table (num_pages, page_size, num_kv_heads, head_dim),
        1 <= page_size <= 256. Of the dtype of q or, beside 16 bits, float8_e4m3fn or int8 (head_dim
        then a multiple of 16); 16-byte aligned.
    cache_seqlens: (batch_size,) int32, read on the device, nothing waits for it: with k, the tokens
        in the cache before this step; without, all valid ones, the query's own included. Below 0:
        a finished or padding row, of which nothing is read or appended.
    k, v: (batch_size, seqlen_q, num_kv_heads, head_dim) of the new tokens, strides as q; they are
        written to the caches in place. Tokens past the end of a cache are dropped.
    block_table: (batch_size, max_pages) int32: the page of each page_size tokens. Keys and
        values on a page that is not there count as zeros, new tokens there are dropped;
        KERNEL_HUB_DEBUG=1 names such entries, and waits for the device.
    cos, sin: (max_position, rotary_dim // 2), fp32 or the dtype of q: q and k are rotated at the
        position of their token in the sequence. A position outside the table gives NaN.
    interleaved: rotate neighbouring elements (GPT-J) instead of the two halves (Llama).
    rotary_dim: None is 2 * cos.shape[-1].
    qkv_bias: ((num_heads + 2 * num_kv_heads) * head_dim,) in the dtype of q, added to q, k, v.
    softmax_scale: None is 1 / sqrt(head_dim).
    window_size: (left, right): a token sees `left` keys before its own; -1: all. There are none on
        its right.
    softcap: 0: none; else scores become softcap * tanh(scores / softcap).
    alibi_slopes: (num_heads,) or (batch_size, num_heads) fp32; adds -slope * distance.
    num_splits: into how many parts each cache is cut for as many blocks; 0 gives every block of the
        GPU an equal share of the work, from the lengths found on the device.
    out: like q; where to write.
    return_lse: also return log(sum(exp(scores))), (batch_size, num_heads, seqlen_q) fp32.
    k_scale, v_scale: (num_kv_heads,) fp32, what the bytes of e4m3 and int8 caches are multiplied
        by; None: 1 (e4m3). New tokens are divided by it, rounded to nearest even, and saturate.
    sinks: (num_heads,) fp32, bf16 or fp16: a logit a head beside the scores, which softmax_scale
        and softcap leave alone: exp(sink) joins each row's sum of exponentials and weighs no value
        (gpt-oss). -inf is none; +inf takes all of a row (out 0, lse +inf); NaN makes the rows of
        its head that see a key NaN.
    deterministic: "batch": by `flash_attention`, and the bits of a token's row are those that it
        has alone or in a prompt; neither with k, cos, qkv_bias, num_splits or tree_mask, nor of
        bytes.
    k_scale_cache, v_scale_cache: in place of those, a scale for each token and head, as `append_kv`
        writes them: like the caches without head_dim, fp32, any strides. Not with k.
    tree_mask: (seqlen_q,) or (batch_size, seqlen_q) int32 or int64, read on the device: new token i
        sees new token j where bit j of word i is set, instead of those up to its own, and all keys
        before the new ones. Its sequence are those, in their order: it is rotated, and window and
        ALiBi count, as if it were appended behind the others of them; without a bit, as the first
        new one. Drafts of a tree: `ops.trees.tree_mask(parents)`.
    cache_ready: a promise that nothing ahead in the stream still writes cache_seqlens, block_table,
        or of the caches more than each sequence's last seqlen_q tokens: the others may be read
        before the launch ahead, or those that it has not waited for yet, have ended.

    Returns out, or (out, lse). Rows without a key are 0, with lse -inf, or of a row that is not
    finished the sink. Two runs give the same bits. A CUDA tensor runs the shipped cubin on torch's
    current stream and can be captured in a CUDA graph, lengths changing between replays; a CPU
    tensor runs a reference in torch. No backward. Raises TensorError naming what does not fit.
    Source: Dao et al., "Flash-Decoding for long-context inference", 2023.
    """
    if rotary_dim is None:
        rotary_dim = 0 if cos is None else 2 * common.last_size(cos)
    else:
        rotary_dim = common.check_count(_OP, "rotary_dim", rotary_dim)
    left = right = -1
    if not (type(window_size) is tuple and window_size == (-1, -1)):
        left, right = common.check_window(_OP, window_size)
    # As the kernels take them; whether they are finite, or too many, is checked with the shapes.
    if type(softmax_scale) is not float and softmax_scale is not None:
        softmax_scale = common.check_number(_OP, "softmax_scale", softmax_scale)
    if type(softcap) is not float:
        softcap = common.check_number(_OP, "softcap", softcap)
    if type(num_splits) is not int:
        num_splits = common.check_count(_OP, "num_splits", num_splits)
    tensors = (
        q, k_cache, v_cache, cache_seqlens, k, v, block_table, cos, sin, qkv_bias, k_scale,
        v_scale, alibi_slopes, sinks, tree_mask,
    )  # fmt: skip
    options = (interleaved, rotary_dim, softmax_scale, left, softcap, num_splits)
    both = (k_scale_cache, v_scale_cache)
    if cache_ready is not False:
        common.check_flag(_OP, "cache_ready", cache_ready)
    is_plain = k_scale_cache is v_scale_cache is None and not cache_ready
    more = () if is_plain else (*both, bool(cache_ready))
    is_eager = _operands.are_plain(tensors[:4], (*tensors[4:], out, *both))
    is_debugging = common.is_debugging()
    if not is_eager or is_debugging:
        checks.check(_given(*tensors, *options, out, None, *more), right)
    if is_eager and is_debugging:
        checks.check_values(_given(*tensors, *options, out, None, *more))
    if deterministic is not False and common.is_batch(_OP, deterministic):
        step = _given(*tensors, *options, out, None, *more)
        return decode_alone(step, right, return_lse, bool(is_eager))
    given = out
    try:
        if out is None:
            out = _empty_like(q, memory_format=_CONTIGUOUS)
        lse = None
        if return_lse:
            lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        if not is_eager:
            _op(*_given(*tensors, *options, out, lse, *more))
        else:
            into = _cuda_into if q.is_cuda else _cpu_into
            into((*tensors, *options, out, lse, *more), given is not None)
    except common.FOREIGN:
        _operands.check_tensors(tensors[:4], (*tensors[4:], given, *both))  # names what has none
        checks.check(_given(*tensors, *options, given, None, *more), right)
        common.check_flag(_OP, "return_lse", return_lse)
        raise
    if is_eager and k is not None:
        common.written((k_cache, v_cache) if given is None else (k_cache, v_cache, out))
    elif is_eager and given is not None:
        common.written((out,))
    return out if lse is None else (out, lse)


def _step(given: DecodeGiven, is_aligned: bool) -> Step:
    """Choose the kernel, its launch shape and its numbers, for arguments that were checked."""
    (q, k_cache, v_cache, _, k, v, block_table, cos, _, _, _, _, alibi_slopes, sinks, tree_mask,
     interleaved, rotary_dim, softmax_scale, window_left, softcap, _, out, *_) = given  # fmt: skip
    batch_size, seqlen_q, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    if q.numel() == 0:
        return Step(Launch())
    page_size = k_cache.shape[1]
    max_tokens = given.max_tokens
    items = batch_size * num_kv_heads
    device = device_of(q.device)
    split = plans.Split(1, items, items, 0)
    shape = short.shape_for(given)
    rows = seqlen_q * (num_heads // num_kv_heads)
    # Where those are launched, a first call does not read what the others state.
    if sm90.choice or not shape[0]:
        # A scale below 0 turns the order of scores round, which only the general kernel bears.
        is_general = (
            window_left >= 0 or softcap > 0.0 or alibi_slopes is not None or softmax_scale <= 0.0
        )
        variant = plans.choose_variant(
            head_dim, k_cache.element_size(), rows, is_general, device.has_wgmma, given.scaled
        )  # fmt: skip
        if sm90.applies(given, variant):
            return Step(sm90.plan(given))
    if not shape[0]:
        items *= -(-rows // variant.rows)
        wide = variant.is_sm90 and short.is_fast_memory(given)
        split = plans.split_of(given, variant, items, max_tokens, device.num_sms, wide)
    token = common.DTYPE_TOKENS[q.dtype]
    if shape[0]:
        functions = [common.shipped(short.cubin_of(given), short.name(given))]
    else:
        functions = [common.shipped(variant.cubin, variant.name(token))]
        if split.num_merges:
            merging = f"decode_attention_{token}_merge"
            functions.append(common.shipped(variant.merging_cubin, merging))
    common.load_ahead(q, *functions)
    strides = (*out.stride()[:3], *q.stride()[:3])
    new = [(0, 0, 0) if x is None else x.stride()[:3] for x in (k, v)]
    aligned = is_aligned and common.is_aligned(
        8, *strides, *new[0], *new[1], 0 if cos is None else cos.stride(0), rotary_dim // 2
    )
    sink_type = 0 if sinks is None else common.ELEMENT_TYPES.index(sinks.dtype)
    numbers = (
        *strides, *new[0], *new[1], *k_cache.stride()[:3], *v_cache.stride()[:3],
        0 if block_table is None else block_table.stride(0),
        0 if cos is None else cos.stride(0),
        alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
        *plans.mask_strides(tree_mask),
        batch_size, seqlen_q, num_heads, num_kv_heads, head_dim, k_cache.shape[0], page_size,
        max_tokens, rotary_dim, *((0, 0) if cos is None else (cos.shape[0], cos.element_size())),
        int(bool(interleaved)), int(aligned), split.num_splits, split.parallel,
        split.fine_units, device.num_sms, window_left, sink_type, softmax_scale, softcap,
    )  # fmt: skip
    how = {"programmatic": True} if device.overlaps_launches else {}
    if shape[0]:
        return Step(short.plan(given, max_tokens, shape, numbers))
    merge = Launch()
    if split.num_merges:
        merge_numbers = (
            *out.stride()[:3], batch_size, seqlen_q, 0 if k is None else seqlen_q, max_tokens,
            window_left, variant.unit, items // batch_size, split.num_splits, split.parallel,
            split.fine_units, device.num_sms, num_heads, num_kv_heads, head_dim, variant.rows,
            sink_type,
        )  # fmt: skip
        grid = plans.merge_grid(split, min(rows, variant.rows), head_dim)
        block = plans.merge_stated().block
        merge = Launch(functions[1], grid, block, numbers=merge_numbers, options=how)
    numbers = (*numbers, *given.scale_strides)
    main = Launch(functions[0], (split.num_blocks, 1, 1), *variant.stated[:2], numbers, options=how)
    partials: tuple[torch.Tensor, ...] = ()
    if split.num_merges:
        lse = torch.empty(split.num_blocks * variant.rows, dtype=torch.float32, device=q.device)
        partials = common.emptied(lse.new_empty((*lse.shape, head_dim))), common.emptied(lse)
    return Step(main, merge, partials, is_scaled=bool(given.scaled))


def _met(given: DecodeGiven, plan: DecodePlan, addresses: tuple[int, ...]) -> tuple[Any, ...]:
    """The step at addresses that are new to the plan: bare tuples, 0.1 us quicker to unpack.

    Vectors that are not aligned have the kernels read elements; so may an out, but for tensor maps.
    """
    plan.spans.refuse(addresses)
    if (given.k_cache.data_ptr() | given.v_cache.data_ptr()) % common.VEC_BYTES:
        checks.check(given)  # refuses them
    vectors = (given.q, given.k, given.v, given.cos, given.sin, given.qkv_bias)
    is_aligned = all(x is None or x.data_ptr() % common.VEC_BYTES == 0 for x in vectors)
    key = is_aligned, given.out.data_ptr() % common.VEC_BYTES == 0
    step = plan.steps.get(key)
    if step is None:
        step = plan.steps[key] = _step(given, is_aligned)
    bare: tuple[Any, ...] = (tuple(step.main), *step[1:])
    if step.main.maps:
        bare = step._replace(maps=sm90.maps(step.main, given))
    plan.spans.keep(addresses, bare)
    return bare


def _cuda_into(arguments: tuple[Any, ...], is_given: bool = True) -> None:
    """The step on the GPU: one launch, and the merge where something may be split.

    arguments: those of `DecodeGiven`; is_given: the caller gave out, which may overlap the rest.
    """
    (q, k_cache, v_cache, cache_seqlens, k, v, block_table, cos, sin, qkv_bias, k_scale, v_scale,
     alibi_slopes, sinks, tree_mask, interleaved, rotary_dim, softmax_scale, window_left, softcap,
     num_splits, out, lse, *more) = arguments  # fmt: skip
    *scales, is_ready = more or (False,)
    scales = [] if scales and scales[0] is scales[1] is None else scales
    at: tuple[int, ...] = (
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), cache_seqlens.data_ptr()
    )  # fmt: skip
    key: tuple[Any, ...] = (
        interleaved, rotary_dim, softmax_scale, window_left, softcap, num_splits, is_ready,
        q.get_device(),
        q.dtype, q.shape, q.stride(), k_cache.dtype, k_cache.shape, k_cache.stride(),
        v_cache.dtype, v_cache.shape, v_cache.stride(), cache_seqlens.dtype, cache_seqlens.shape,
        cache_seqlens.stride(),
    )  # fmt: skip
    # An out that the op made has q's layout and meets nothing.
    is_bare = k is v is cos is sin is qkv_bias is k_scale is v_scale is None and not scales
    if is_bare and alibi_slopes is sinks is tree_mask is None:
        if block_table is not None:
            at += (block_table.data_ptr(),)
            key += (block_table.dtype, block_table.shape, block_table.stride())
        if is_given:
            at += (out.data_ptr(),)
            key += (None, out.dtype, out.shape, out.stride())
    else:
        others = (*arguments[_REQUIRED_TENSORS:_TENSORS], out if is_given else None, *scales)
        at += tuple([x.data_ptr() for x in others if x is not None])
        key += tuple([None if x is None else (x.dtype, x.shape, x.stride()) for x in others])
    plan = _plans.get(key)
    if plan is None:
        bounds.begin(q)
        given = _given(*arguments)
        checks.check(given)
        writes = _reads if k is None else _appends
        spans = writes.spans(*given[:_TENSORS], out if is_given else None, *given.scales)
        plan = _plans.keep(key, DecodePlan({}, spans))
    step = plan.spans.apart.get(at)
    if step is None:
        step = _met(_given(*arguments), plan, at)
    main, merge, partials, maps, is_scaled = step
    function, grid, block, shared_bytes, numbers, _, how = main
    if is_scaled:
        numbers = (*numbers, *(scales or (None, None)))
    partial_out = partial_lse = None
    if partials:
        partial_out, partial_lse = _empty_like(partials[0]), _empty_like(partials[1])
    try:
        flag = bounds.flag(_OP, q)
        if maps:
            tables = (None, None, cache_seqlens, block_table, sinks)
            forward_sm90.run(main, maps, q, out, lse, flag, tables)
        else:
            function(
                grid, block, shared_bytes, None,
                (
                    out, lse, partial_out, partial_lse, flag, k_cache, v_cache, q, k, v,
                    cache_seqlens, block_table, cos, sin, qkv_bias, k_scale, v_scale,
                    alibi_slopes, sinks, tree_mask, *numbers,
                ),
                **how,
            )  # fmt: skip
        if partials:
            params = (out, lse, partial_out, partial_lse, cache_seqlens, sinks, *merge.numbers)
            merge.function(merge.grid, merge.block, 0, None, params, **how)
    except KernelHubError:
        # The launch checks devices and dtypes; this names them.
        checks.check(_given(*arguments))
        raise
    if common.is_debugging():
        bounds.report(q)


@common.in_own_dtypes
def _cpu_into(arguments: tuple[Any, ...], is_given: bool = True) -> None:
    """The same on the CPU, by torch."""
    given = _given(*arguments)
    checks.check(given)
    if is_given or given.k is not None:
        writes = _reads if given.k is None else _appends
        writes.check(*given[:_TENSORS], given.out, *given.scales)
    checks.check_values(given, is_strict=False)
    found, found_lse = _reference(given)
    given.out.copy_(found)
    if given.lse is not None:
        given.lse.copy_(found_lse)


_op = common.define_given(
    "decode_attention(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, "
    "Tensor? k, Tensor? v, Tensor? block_table, Tensor? cos, Tensor? sin, Tensor? qkv_bias, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? alibi_slopes, Tensor? sinks, Tensor? tree_mask, "
    "bool interleaved, SymInt rotary_dim, float softmax_scale, SymInt window_left, float softcap, "
    "int num_splits, Tensor(c!) out, Tensor(d!)? lse, Tensor? k_scale_cache=None, "
    "Tensor? v_scale_cache=None, bool cache_ready=False) -> ()",
    DecodeGiven, cuda=_cuda_into, cpu=_cpu_into, check=checks.check,
)  # fmt: skip
