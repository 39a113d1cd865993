"""A decode step of multi-head latent attention (csrc/kv_cache/mla_decode.cu, ..._sm90.cu)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from ...errors import KernelHubError
from ..core import bounds, common, tensor_maps
from ..core.counters import counters
from ..core.device import device_of
from ..core.kv_cache import check_aligned, check_block_table, check_held
from ..core.launch import Launch, Plans
from . import mla_plan as plans
from .decode_plan import CUBIN, merge_stated
from .mla_plan import KEY_DIM, LATENT_DIM, MAX_SEQLEN_Q, MlaGiven


class MlaStep(NamedTuple):
    """A launch, the merge behind it where caches may be split, and what lies between.

    boxes: of the tensor map that the launch takes for the cache, if it does.
    num_tickets: counters by which a block knows that parts before its own are there, which it
        merges itself; then there is no launch behind.
    """

    main: Launch
    merge: Launch = Launch()
    partial_rows: int = 0
    boxes: tensor_maps.Boxes | None = None
    num_tickets: int = 0


_plans: Plans[tuple[MlaStep, common.Spans]] = Plans()
_OP = "mla_decode"
_MAX_TOKENS = 2**30
_REQUIRED, _OPTIONAL = "q kv_cache cache_seqlens", "block_table out"
_operands = common.Operands(_OP, _REQUIRED, _OPTIONAL)
_writes = common.Writes(_OP, f"{_REQUIRED} {_OPTIONAL}", "out")


def mla_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, *, cache_seqlens: torch.Tensor, softmax_scale: float,
    block_table: torch.Tensor | None = None, num_splits: int = 0, out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One decode step of multi-head latent attention with absorbed weights (DeepSeek-V2, V3):

        scores = softmax_scale (q[:512] . kv[:512] + q[512:] . kv[512:])
        out = sum over keys of softmax(scores) kv[:512]

    over a cache of one row a token, which all heads share: its latent (512), key and value at once,
    and its rotated key (64). Token i of seqlen_q sees the keys of its sequence up to its own
    (causal, aligned to the end), so with one new token all of them.

    q: (batch_size, seqlen_q, num_heads, 576), fp16 or bf16, 1 <= seqlen_q <= 16, on the GPU or the
        CPU: the query in the space of latents (q_nope W_uk), then its rotated part. Strides in
        multiples of 16 bytes, the last dimension contiguous; 16-byte aligned.
    kv_cache: (batch_size, max_seqlen, 576) or (batch_size, max_seqlen, 1, 576), or with block_table
        (num_pages, page_size, 576) or (num_pages, page_size, 1, 576); dtype of q, strides and
        alignment as q. Pages of any number of tokens (on Hopper those that are no multiple of 8
        go to the slower kernel).
    cache_seqlens: (batch_size,) int32, contiguous, read on the device, nothing waits for it: the
        keys of each sequence, those of the new tokens included. Below 0: a finished or padding row,
        of which nothing is read.
    softmax_scale: what scores are multiplied by. Not of q's width: DeepSeek's models have
        (128 + 64) ** -0.5, and where RoPE is stretched (yarn) its mscale squared besides.
    block_table: (batch_size, max_pages) int32: the page of each page_size tokens. Keys on a page
        that is not there count as zeros; KERNEL_HUB_DEBUG=1 names such entries, and waits for the
        device.
    num_splits: into how many parts each cache is cut for as many blocks; 0 chooses, and makes
        shares equal where lengths differ.
    out: (batch_size, seqlen_q, num_heads, 512), dtype of q, strides and alignment as q; where to
        write. Must not overlap anything.
    return_lse: also return log(sum(exp(scores))), (batch_size, num_heads, seqlen_q) fp32.

    Returns out, or (out, lse); W_uv is left to the caller. Rows without a key are 0, with lse -inf.
    Two runs give the same bits. A CUDA tensor runs the shipped cubin on torch's current stream (and
    a merge where caches are split) and can be captured in a CUDA graph, lengths changing between
    replays; a CPU tensor runs a reference in torch. No backward. Raises TensorError naming the
    argument that does not fit.
    Source: DeepSeek-AI, "DeepSeek-V2", 2024, 2.1 and appendix C.
    """
    if type(softmax_scale) is not float:
        softmax_scale = common.check_number(_OP, "softmax_scale", softmax_scale)
    num_splits = common.check_count(_OP, "num_splits", num_splits)
    tensors = (q, kv_cache, cache_seqlens, block_table)
    options = (softmax_scale, num_splits)
    is_eager = _operands.are_plain(tensors[:3], (block_table, out))
    is_debugging = common.is_debugging()
    if not is_eager or is_debugging:
        _check(MlaGiven(*tensors, *options, out))
    if is_eager and is_debugging:
        _check_values(MlaGiven(*tensors, *options, out))
    given = out
    try:
        if out is None:
            out = q.new_empty((*q.shape[:3], LATENT_DIM))
        lse = None
        if return_lse:
            lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
        if not is_eager:
            _op(*tensors, *options, out, lse)
        else:
            into = _cuda_into if q.is_cuda else _cpu_into
            into((*tensors, *options, out, lse), given is not None)
    except common.FOREIGN:
        _operands.check_tensors(tensors[:3], (block_table, given))  # names what has no memory
        _check(MlaGiven(*tensors, *options, given))
        common.check_flag(_OP, "return_lse", return_lse)
        raise
    if is_eager and given is not None:
        common.written((out,))
    return out if lse is None else (out, lse)


def _step(given: MlaGiven) -> MlaStep:
    """Choose the kernel, its launch shape and its numbers, for arguments that were checked."""
    q, kv_cache, _, block_table, softmax_scale, num_splits, out, _ = given
    batch_size, seqlen_q, num_heads = q.shape[:3]
    if q.numel() == 0:
        return MlaStep(Launch())
    device = device_of(q.device)
    variant = plans.choose_variant(given, device)
    block_m, tile = (variant.stated.sizes[size] for size in ("block_m", "block_n"))
    rows = seqlen_q * num_heads
    cluster = variant.cluster_of(rows)
    block_m *= cluster
    places = device.num_sms // cluster
    pages, page_size = kv_cache.shape[:2]
    max_tokens = page_size * (1 if block_table is None else block_table.shape[1])
    items = -(-rows // block_m)  # of a sequence
    line = plans.choose_line(batch_size * items, max_tokens, variant, num_splits, places, cluster)
    team = plans.choose_team(
        batch_size * items, max_tokens, variant, num_splits, device.num_sms, cluster
    )
    if team:
        variant, cluster, line = plans.TEAM, cluster * team, None
        places = batch_size * items
        split = plans.Split(team, 0, places, 0)
    elif line is None:
        held = batch_size if variant.is_sm90 else 0
        split = plans.choose_split(
            batch_size * items, max_tokens, tile, num_splits, places, held, variant.rows
        )
    else:
        split = plans.Split(0, line.even, line.uneven, 0)
    strides = (*out.stride()[:3], *q.stride()[:3])
    sizes = (
        batch_size, seqlen_q, num_heads, pages, page_size, max_tokens, split.num_splits,
        split.parallel, split.num_blocks,
    )  # fmt: skip
    table_stride = 0 if block_table is None else block_table.stride(0)
    boxes, grid = None, (split.num_blocks, 1, 1)
    numbers: tuple[int | float, ...]
    if variant.is_sm90:
        box_rows = tile if block_table is None else math.gcd(page_size, tile)
        # A stride along a single element says nothing; the TMA wants a valid one.
        steps = [
            s if n > 1 else KEY_DIM
            for s, n in zip(kv_cache.stride(), (pages, page_size), strict=False)
        ]
        boxes = tensor_maps.Boxes(
            (pages, 1, page_size, KEY_DIM), (steps[0], KEY_DIM, steps[1], 1), (1, 1, box_rows, 64),
            promotion=plans.promotion(variant),
        )  # fmt: skip
        blocks = split.num_blocks if line is None else line.most
        grid = (min(blocks, places) * cluster, 1, 1)
        numbers = (*strides, table_stride, *sizes, box_rows, softmax_scale)
    else:
        numbers = (*kv_cache.stride()[:2], *strides, table_stride, *sizes, softmax_scale)
    how: dict[str, Any] = {"programmatic": True} if device.overlaps_launches else {}
    token = common.DTYPE_TOKENS[q.dtype]
    merge = Launch()
    if split.num_merges:
        merge = Launch(
            common.shipped(CUBIN, f"{CUBIN}_{token}_merge"),
            plans.merge_grid(split, min(rows, block_m)), merge_stated().block,
            numbers=(
                *out.stride()[:3], batch_size, seqlen_q, 0, max_tokens, -1, tile, items,
                split.num_splits, split.parallel, split.fine_units, 1, num_heads, 1, LATENT_DIM,
                block_m, 0,
            ),
            options=how,
        )  # fmt: skip
    function = common.shipped(variant.cubin, variant.function(token))
    in_clusters = {"cluster": (cluster, 1, 1)} if cluster > 1 else {}
    main = Launch(function, grid, *variant.stated[:2], numbers, options={**how, **in_clusters})
    partials = split.num_blocks if line is None else line.partials
    num_tickets = 0 if line is None else line.partials * cluster
    return MlaStep(main, merge, partials * block_m, boxes, num_tickets)


def _met(given: MlaGiven, step: MlaStep, spans: common.Spans, addresses: tuple[int, ...]) -> Any:
    """What a launch takes for the cache at addresses that are new: a pointer, or a tensor map."""
    spans.refuse(addresses)
    if any(x.data_ptr() % common.VEC_BYTES for x in (given.q, given.kv_cache, given.out)):
        _check(given)  # refuses them
    made = tensor_maps.tensor_map(given.kv_cache, step.boxes) if step.boxes else ()
    spans.keep(addresses, made)
    return made


def _cuda_into(arguments: tuple[Any, ...], is_given: bool = True) -> None:
    """The step on the GPU: one launch, and the merge where something may be split.

    arguments: those of `MlaGiven`; is_given: the caller gave out, which may overlap the rest.
    """
    q, kv_cache, cache_seqlens, block_table, softmax_scale, num_splits, out, lse = arguments
    # An out that the op made has a layout that q's says, and meets nothing.
    tensors = (q, kv_cache, cache_seqlens, block_table, *((out,) if is_given else ()))
    addresses = tuple([x.data_ptr() for x in tensors if x is not None])
    key = (
        softmax_scale, num_splits, q.get_device(),
        *[None if x is None else (x.dtype, x.shape, x.stride()) for x in tensors],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        given = MlaGiven(*arguments)
        _check(given)
        plan = _plans.keep(
            key, (_step(given), _writes.spans(*tensors, *(() if is_given else (None,))))
        )
    step, spans = plan
    made = spans.apart.get(addresses)
    if made is None:
        made = _met(MlaGiven(*arguments), step, spans, addresses)
    main, merge, partial_rows, boxes, num_tickets = step
    function, grid, block, shared_bytes, numbers, _, how = main
    partial_out = partial_lse = None
    tickets: tuple[Any, ...] = ()
    if boxes is not None:
        tickets = (counters(q.device, num_tickets) if num_tickets else None,)
    if merge.numbers or num_tickets:
        count = partial_rows * LATENT_DIM
        partial_out = torch.empty(count + partial_rows, dtype=torch.float32, device=q.device)
        partial_lse = partial_out[count:]
    try:
        function(
            grid, block, shared_bytes, None,
            (
                out, lse, partial_out, partial_lse, bounds.flag(_OP, q), *tickets,
                made or kv_cache, q, cache_seqlens, block_table, *numbers,
            ),
            **how,
        )  # fmt: skip
        if merge.numbers:
            params = (out, lse, partial_out, partial_lse, cache_seqlens, None, *merge.numbers)
            merge.function(merge.grid, merge.block, 0, None, params, **merge.options)
    except KernelHubError:
        # The launch checks devices and dtypes; this names them.
        _check(MlaGiven(*arguments))
        raise
    if common.is_debugging():
        bounds.report(q)


@common.in_own_dtypes
def _cpu_into(arguments: tuple[Any, ...], is_given: bool = True) -> None:
    """The same on the CPU, by torch, in fp32: sequence by sequence."""
    given = MlaGiven(*arguments)
    _check(given)
    if is_given:
        _writes.check(*given[:4], given.out)
    _check_values(given)
    q, kv_cache, cache_seqlens, block_table, softmax_scale, _, out, lse = given
    seqlen_q = q.shape[1]
    for index, length in enumerate(cache_seqlens.tolist()):
        pages = kv_cache[index : index + 1] if block_table is None else kv_cache[
            block_table[index, : -(-max(length, 0) // kv_cache.shape[1])].long()
        ]  # fmt: skip
        keys = pages.reshape(-1, KEY_DIM)[: max(length, 0)].float()
        scores = q[index].float().transpose(0, 1) @ keys.T * softmax_scale
        last = length - seqlen_q + torch.arange(seqlen_q, device=q.device)
        unseen = torch.arange(len(keys), device=q.device) > last[:, None]
        scores = scores.masked_fill(unseen, -math.inf)
        found = torch.logsumexp(scores, -1) if len(keys) else scores.new_full(
            scores.shape[:2], -math.inf
        )  # fmt: skip
        weights = torch.exp(scores - found.masked_fill(found == -math.inf, 0.0)[..., None])
        out[index] = (weights @ keys[:, :LATENT_DIM]).transpose(0, 1).to(out.dtype)
        if lse is not None:
            lse[index] = found


def _check(given: MlaGiven) -> None:
    """Raise TensorError for whatever does not fit; of shapes alone."""
    q, kv_cache, cache_seqlens, block_table, softmax_scale, num_splits, out, _ = given
    common.check_data(_OP, "q", q, common.HALF)
    if q.dim() != 4:
        raise common.refuse(_OP, "q", f"shape (batch_size, seqlen_q, num_heads, {KEY_DIM})", q)
    batch_size, seqlen_q, num_heads, width = q.shape
    if width != KEY_DIM:
        raise common.refuse(_OP, "q", f"{KEY_DIM} columns ({LATENT_DIM} latent, then rotated)", q)
    if not 1 <= seqlen_q <= MAX_SEQLEN_Q:
        raise common.refuse(_OP, "q", f"1 to {MAX_SEQLEN_Q} tokens a sequence (seqlen_q)", q)
    if max(batch_size, seqlen_q * num_heads) > common.MAX_SIZE:
        raise common.refuse(_OP, "q", f"at most {common.MAX_SIZE} sequences, and heads", q)
    check_aligned(_OP, "q", q)
    common.check_tensor(_OP, "kv_cache", kv_cache)
    leading = tuple(kv_cache.shape[:2])
    if kv_cache.dim() not in (3, 4):
        first = "batch_size, max_seqlen" if block_table is None else "num_pages, page_size"
        raise common.refuse(_OP, "kv_cache", f"shape ({first}, {KEY_DIM})", kv_cache)
    if block_table is None:
        leading = (batch_size, leading[1])
    heads = (1,) if kv_cache.dim() == 4 else ()
    common.check_like(_OP, "kv_cache", kv_cache, (*leading, *heads, KEY_DIM), q)
    check_aligned(_OP, "kv_cache", kv_cache)
    common.check_like(_OP, "cache_seqlens", cache_seqlens, (batch_size,), q, dtypes=(torch.int32,))
    if batch_size > 1 and cache_seqlens.stride(0) != 1:
        raise common.refuse(_OP, "cache_seqlens", "a contiguous tensor", cache_seqlens)
    room = leading[1]
    if block_table is not None:
        check_block_table(_OP, block_table, batch_size, q)
        if not 1 <= room <= _MAX_TOKENS:
            raise common.refuse(_OP, "kv_cache", "a page_size of 1 token or more", kv_cache)
        room *= block_table.shape[1]
    if room > _MAX_TOKENS:
        raise common.refuse(_OP, "kv_cache", f"at most {_MAX_TOKENS} tokens a sequence", room)
    common.check_number(_OP, "softmax_scale", softmax_scale)
    common.check_count(_OP, "num_splits", num_splits)
    common.check_written(_OP, "out", out, (batch_size, seqlen_q, num_heads, LATENT_DIM), q)
    if out is not None:
        check_aligned(_OP, "out", out)


def _check_values(given: MlaGiven) -> None:
    """Lengths that fit the cache, and pages that exist, for which it waits; below 0 is a finished
    row."""
    check_held(_OP, given.kv_cache, given.cache_seqlens, given.block_table)


_op = common.define_given(
    "mla_decode(Tensor q, Tensor kv_cache, Tensor cache_seqlens, Tensor? block_table, "
    "float softmax_scale, int num_splits, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    MlaGiven, cuda=_cuda_into, cpu=_cpu_into, check=_check,
)  # fmt: skip
