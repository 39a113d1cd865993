"""Attention over whole sequences, forward and backward (csrc/attention/flash_attention*.cu).

The public op: layouts become strides here. `checks` says what is refused, `eager` how a
call runs, `registered` what torch.compile and autograd know.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch

from ...errors import KernelHubError
from ..core import common
from . import checks as checks
from . import eager as run
from . import fp8 as fp8
from . import registered as registered
from .caches import widened as caches
from .problem import TABLES, Options

_OP, _PACKED = "flash_attention", "flash_attention_qkvpacked"
_PLAIN_TYPES = common.PLAIN_TYPES
_OPTIONAL = f"{' '.join(TABLES)} out"
_operands = common.Operands(_OP, "q k v", _OPTIONAL, has_backward=True)
_all_operands = common.Operands(
    _OP, "q k v", f"{_OPTIONAL} q_scale k_scale v_scale k_scale_cache v_scale_cache"
)
_packed_operands = common.Operands(
    _PACKED, "qkv", "alibi_slopes cu_seqlens sinks out", has_backward=True
)
_is_tracing = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_transform, _forward_ad = common.transform, common.forward_ad
_forward = run.forward
_differentiable, _alive = registered.attend, common.unwrap_if_dead
# `Options(...)`, 0.1 us quicker.
_options: Any = functools.partial(tuple.__new__, Options)


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False,
    softmax_scale: float | None = None, window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, block_table: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None = None, layout: str = "bshd",
    out: torch.Tensor | None = None, return_lse: bool = False,
    deterministic: bool | Literal["batch"] = False,
    q_scale: torch.Tensor | None = None, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    sinks: torch.Tensor | None = None, k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Attention of every query over the keys of its sequence, without the matrix of scores.

        scores = softmax_scale * q k^T;  with softcap: softcap * tanh(scores / softcap)
        scores[i, j] -= alibi_slope * |i + seqlen_k - seqlen_q - j|
        out = softmax(scores, over the keys seen) v;  lse = log(sum(exp(scores)))
        with sinks: exp(sink of the head) is in both sums of exponentials, and weighs no value

    accumulated in fp32 and rounded once. Query i stands at key i + seqlen_k - seqlen_q: the last
    query at the last key. A row that sees no key gives 0, and lse -inf.

    q: (batch_size, seqlen_q, num_heads, head_dim), fp16, bf16, fp32 or e4m3, on the GPU or the CPU;
        any strides, the last dimension contiguous; head_dim 16 to 256 in multiples of 8. fp32: to
        128, in three products of tf32, no gradients.
    k, v: (batch_size, seqlen_k, num_kv_heads, head_dim), dtype and device of q; num_kv_heads
        divides num_heads, and query head h reads head h * num_kv_heads // num_heads. v may have a
        head_dim of its own in the same range (DeepSeek's prefill: 192 and 128); out has v's.
        Beside a q of 16 bits both may be float8_e4m3fn or int8, a cache as append_kv writes it.
    causal: a query sees no key after its own place.
    softmax_scale: None is 1 / sqrt(head_dim).
    window_size: (left, right): how many keys before and after its place a query sees; -1 is all.
        causal makes right 0.
    softcap: 0 is none.
    alibi_slopes: (num_heads,) or (batch_size, num_heads), fp32.
    cu_seqlens_q: (batch_size + 1,) int32: q is (total_q, num_heads, head_dim), and sequence b its
        rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]; none where these fall or lie outside. Rows of
        out of no sequence are not written.
    cu_seqlens_k: the same of k and v, (total_k, num_kv_heads, head_dim).
    max_seqlen_q, max_seqlen_k: the longest sequence there is, or a bound of it; None is the total,
        which costs empty blocks. Lengths on the device are never waited for.
    block_table: (batch_size, max_pages) int32: k and v are pages (num_pages, page_size,
        num_kv_heads, head_dim), page_size 1 to 256, and row b lists those of sequence b in order.
        No backward. Entries past a sequence's end may be anything; other pages that are not there
        are zeros.
    cache_seqlens: (batch_size,) int32: how many keys each sequence has; None is all there are. Not
        with cu_seqlens_k.
    sinks: (num_heads,) fp32, bf16 or fp16: a logit a head beside the scores, which softmax_scale
        and softcap leave alone (gpt-oss). -inf is none; +inf takes all of a row (out 0, lse +inf);
        NaN makes the rows of its head that see a key NaN. A row that sees no key gives 0, and lse
        the sink, but of a sequence whose length is below 0: -inf. q, k and v have gradients beside
        them, they have none (one that requires grad is refused).
    layout: "bshd", or "bhsd": the tensors of four dimensions are (batch_size, heads, seqlen,
        head_dim), pages (num_pages, num_kv_heads, page_size, head_dim); and so is out.
    out: like q, with v's head_dim; where to write. No gradients then.
    return_lse: also return lse, fp32, (batch_size, num_heads, seqlen_q) or (num_heads, total_q),
        natural logarithm; no gradient flows through it.
    deterministic: True: the backward gives the same bits every time (the forward always does); on
        under torch.use_deterministic_algorithms. "batch": and the bits of a query's row depend on
        its own query and keys alone: not on the batch, nor on how many other queries of the
        sequence come in the call (Hopper's kernels: fp16 and bf16, no alibi_slopes, tensors aligned
        to 16 bytes, page_size a multiple of 8; few queries over many keys take longer; the CPU's
        reference only takes it). Each costs time.

    q_scale, k_scale, v_scale, out_dtype: with q, k and v of float8_e4m3fn alone, on a Hopper GPU
        (compute capability 9.0) or the CPU: q is q * q_scale, and so k and v; None is 1. Positive
        fp32 on the device of q, any strides:
            () or (1,): of the tensor
            (num_kv_heads,) or (batch_size, num_kv_heads): of heads; q's also by num_heads
            (batch_size, num_heads of the tensor, ceil(seqlen / 128)): of blocks of 128 tokens,
                counted from the start of each sequence (with cu_seqlens, of the longest: more is
                not read). Scales of blocks for k or v take kernels with blocks of 128 keys, which
                are slower.
        The sums are the tensor cores' (fp32 registers), probabilities are rounded to e4m3 for the
        product with v alone. out_dtype is torch.bfloat16 (None) or torch.float16, and out is of
        either. head_dim 16 to 256 in multiples of 16, v's too; no window, softcap, alibi,
        block_table, sinks or gradients.

    k_scale, v_scale: also with k and v alone of float8_e4m3fn or int8: what their bytes are
        multiplied by, fp32, () or (1,) or (num_kv_heads,); None is 1 (e4m3). All options but
        gradients and the packed form; head_dim (v's too) in multiples of 16, k and v aligned to 16
        bytes. The keys that a query may see are written once in q's dtype, rounded, fp16 above
        65,504 to inf (memory of the call's own: up to 512 MiB, or what one kv head needs), and
        attended to from there: for 16 queries or fewer `decode_attention` reads the bytes.
    k_scale_cache, v_scale_cache: in place of those, a scale for each token and head, as `append_kv`
        writes them: like k and v without head_dim, fp32, any strides.

    Packed tensors are slices: k, v = kv[:, :, 0], kv[:, :, 1].
    Returns out, or (out, lse). A CUDA tensor runs the shipped cubins on torch's current stream; a
    CPU tensor runs a reference in torch. KERNEL_HUB_DEBUG=1 checks lengths and page numbers too,
    waiting for the device. Raises TensorError naming the argument that does not fit.
    Source: Dao, "FlashAttention-2", 2023.
    """
    as_given = out
    if type(layout) is not str or layout != "bshd":
        checks.check_layout(_OP, layout)
    if type(window_size) is not tuple:
        window_size = common.check_window(_OP, window_size)
    batch_invariant = deterministic is not False and common.is_batch(_OP, deterministic)
    options: Options = _options((
        causal, softmax_scale, window_size, softcap, alibi_slopes, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, block_table, cache_seqlens, sinks, batch_invariant,
    ))  # fmt: skip
    try:
        if layout != "bshd":
            q, k, v, out = _tokens_first(q), _tokens_first(k), _tokens_first(v), _tokens_first(out)
        is_cache = caches.is_cache(q, k)
        if not (is_cache or k_scale_cache is v_scale_cache is None):
            caches.refuse_scales(k_scale_cache, v_scale_cache)
        if isinstance(q, torch.Tensor) and q.dtype is fp8.DTYPE:
            scales = fp8.Scales(q_scale, k_scale, v_scale)
            made, lse = fp8.attention(q, k, v, scales, out, out_dtype, return_lse, options)
        elif is_cache:
            fp8.check_unscaled(q_scale=q_scale, out_dtype=out_dtype)
            of_tokens = caches.tokens_first(layout, k_scale_cache, v_scale_cache)
            cache_scales = caches.CacheScales(k_scale, v_scale, *of_tokens)
            made, lse = caches.attention(q, k, v, cache_scales, out, return_lse, options)
        else:
            if not (q_scale is k_scale is v_scale is out_dtype is None):
                fp8.check_unscaled(
                    q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out_dtype=out_dtype
                )
            made, lse = _attend(q, k, v, out, return_lse, bool(deterministic), options)
        if as_given is not None:
            if not _is_tracing():
                common.written((as_given,))
            made = as_given
        elif layout != "bshd":
            made = _tokens_first(made)
        return (made, lse) if return_lse else made
    except common.FOREIGN as found:
        # Names what has no memory, or is no number.
        own = (q_scale, k_scale, v_scale, k_scale_cache, v_scale_cache)
        optional = (*options.tables, as_given, *own)
        _all_operands.check_tensors((q, k, v), optional)
        if isinstance(found, KernelHubError):
            raise
        common.check_flags(_OP, return_lse=return_lse, deterministic=deterministic)
        if isinstance(q, torch.Tensor) and q.dtype is fp8.DTYPE:
            checks.resolve(_OP, q, k, v, options, dtypes=(fp8.DTYPE,))
        elif caches.is_cache(q, k):
            checks.resolve(_OP, q, k, v, options, dtypes=common.HALF, cache_dtypes=(k.dtype,))
        else:
            checks.resolve(_OP, q, k, v, options)
        raise


def _attend(
    q: Any, k: Any, v: Any, out: Any, return_lse: bool, deterministic: bool,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(out, lse or None) of layout bshd, in whichever way there is."""
    if (
        type(q) in _PLAIN_TYPES
        and type(k) in _PLAIN_TYPES
        and type(v) in _PLAIN_TYPES
        and not _is_tracing()
        and not q.is_meta
        and _transform() is None
        and _forward_ad._current_level < 0
        and not (q.is_neg() or k.is_neg() or v.is_neg())
        and (
            options.alibi_slopes is options.cu_seqlens_q is options.cu_seqlens_k
            is options.block_table is options.cache_seqlens is options.sinks is out is None
            or _operands.are_plain((q, k, v), (*options.tables, out))
        )
    ):  # fmt: skip
        needs_grad = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if needs_grad:
            plain = out is options.block_table is options.alibi_slopes is None
            if not plain or q.dtype not in common.HALF:
                _check_grad(q, k, v, out, options)
            deterministic, return_lse = _is_deterministic(deterministic), bool(return_lse)
            made = _differentiable(
                _alive(q), _alive(k), _alive(v), deterministic, return_lse, options
            )
            return made if return_lse else (made, None)
        return _forward(_OP, q, k, v, out, return_lse, options)
    _operands.are_plain((q, k, v), (*options.tables, out))  # refuses what the op would drop
    return _dispatch(q, k, v, out, return_lse, deterministic, options)


def flash_attention_qkvpacked(
    qkv: torch.Tensor, *, num_heads: int | None = None, num_kv_heads: int | None = None,
    causal: bool = False, softmax_scale: float | None = None, window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None, max_seqlen: int | None = None,
    out: torch.Tensor | None = None, return_lse: bool = False,
    deterministic: bool | Literal["batch"] = False,
    sinks: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """`flash_attention` of q, k and v that lie in one tensor; so does their gradient.

    qkv: (batch_size, seqlen, 3, num_heads, head_dim); or with num_heads and num_kv_heads given
        (batch_size, seqlen, num_heads + 2 * num_kv_heads, head_dim), the heads of q, then k, then
        v, as one projection gives them. With cu_seqlens, (total, ...) of either.
    cu_seqlens, max_seqlen: those of queries and keys alike.
    The others, what is returned and raised: see `flash_attention`; out is (batch_size, seqlen,
    num_heads, head_dim) or (total, num_heads, head_dim).
    """
    if type(window_size) is not tuple:
        window_size = common.check_window(_PACKED, window_size)
    batch_invariant = deterministic is not False and common.is_batch(_PACKED, deterministic)
    options = Options(
        causal, softmax_scale, window_size, softcap, alibi_slopes, cu_seqlens, cu_seqlens,
        max_seqlen, max_seqlen, sinks=sinks, batch_invariant=batch_invariant,
    )  # fmt: skip
    try:
        return _attend_packed(
            qkv, num_heads, num_kv_heads, out, return_lse, bool(deterministic), options
        )
    except common.FOREIGN:
        _packed_operands.check_tensors((qkv,), (alibi_slopes, cu_seqlens, sinks, out))
        raise


def _attend_packed(
    qkv: Any, num_heads: Any, num_kv_heads: Any, out: Any, return_lse: bool, deterministic: bool,
    options: Options,
) -> Any:  # fmt: skip
    op = _PACKED
    alibi_slopes, cu_seqlens = options.alibi_slopes, options.cu_seqlens_q
    plain = _packed_operands.are_plain((qkv,), (alibi_slopes, cu_seqlens, options.sinks, out))
    leading = 2 if cu_seqlens is None else 1
    tokens = "batch_size, seqlen" if cu_seqlens is None else "total"
    if num_heads is None and num_kv_heads is None:
        if qkv.dim() != leading + 3 or qkv.shape[leading] != 3:
            expected = f"shape ({tokens}, 3, num_heads, head_dim), or num_heads and num_kv_heads"
            raise common.refuse(op, "qkv", expected, qkv)
        num_heads = num_kv_heads = qkv.shape[-2]
        joined = qkv.stride(-3) == num_heads * qkv.stride(-2)
        q, k, v = qkv.unbind(-3) if not joined else (None, None, None)
        qkv = qkv.flatten(-3, -2) if joined else qkv
    else:
        joined = True
        if num_heads is None or num_kv_heads is None:
            argument = "num_heads" if num_kv_heads is not None else "num_kv_heads"
            raise common.refuse(
                op, argument, "both num_heads and num_kv_heads, or neither",
                f"num_heads={num_heads!r:.60}, num_kv_heads={num_kv_heads!r:.60}",
            )  # fmt: skip
        num_heads = common.check_count(op, "num_heads", num_heads)
        num_kv_heads = common.check_count(op, "num_kv_heads", num_kv_heads)
        if qkv.dim() != leading + 2 or qkv.shape[-2] != num_heads + 2 * num_kv_heads:
            heads = f"num_heads + 2 * num_kv_heads = {num_heads + 2 * num_kv_heads}"
            raise common.refuse(op, "qkv", f"shape ({tokens}, {heads}, head_dim)", qkv)
        q = k = v = None
    if joined:
        q, k, v = registered.split_packed(qkv, num_heads, num_kv_heads)
    if out is None and joined and _is_grad_enabled() and qkv.requires_grad:
        # One op, so that one gradient comes back instead of three to be put together.
        _check_grad(q, k, v, None, options)
        common.check_flags(op, return_lse=return_lse, deterministic=deterministic)
        deterministic = _is_deterministic(deterministic)
        if not plain:
            checks.resolve(op, q, k, v, options)
            out, lse = registered.packed_op(
                qkv, num_heads, num_kv_heads, *options, deterministic, True
            )
        else:
            return registered.PackedAttention.apply(
                qkv, num_heads, num_kv_heads, deterministic, bool(return_lse), options
            )
        return (out, lse.detach()) if return_lse else out
    given = options._asdict()
    how: Any = "batch" if given.pop("batch_invariant") else deterministic
    return flash_attention(q, k, v, **given, out=out, return_lse=return_lse, deterministic=how)


def _tokens_first(x: Any) -> Any:
    """(batch_size, heads, seqlen, head_dim) -> (batch_size, seqlen, heads, head_dim), and back."""
    return x.transpose(1, 2) if isinstance(x, torch.Tensor) and x.dim() == 4 else x


def _is_deterministic(asked: bool) -> bool:
    return bool(asked) or torch.are_deterministic_algorithms_enabled()


def _dispatch(
    q: Any, k: Any, v: Any, out: Any, return_lse: bool, deterministic: bool, options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Through torch's dispatcher: while tracing, for fake and meta tensors, and with gradients."""
    op = _OP
    common.check_flags(op, return_lse=return_lse, deterministic=deterministic)
    checks.resolve(op, q, k, v, options)
    needs_grad = _is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if needs_grad:
        _check_grad(q, k, v, out, options)
    if out is not None:
        checks.check_out(op, q, k, v, out, options)
        return out, registered.forward_out_op(q, k, v, *options, return_lse, out)
    out, lse = registered.forward_op(
        q, k, v, *options, _is_deterministic(deterministic), return_lse or needs_grad
    )
    return out, lse.detach()


def _check_grad(q: Any, k: Any, v: Any, out: Any, options: Options) -> None:
    """What cannot be differentiated."""
    checks.check_has_gradient(_OP, q)
    if out is not None:
        for argument, x in (("q", q), ("k", k), ("v", v)):
            if x.requires_grad:
                raise common.gradient_refusal(f"{_OP} into out", argument)
    registered.check_gradients(_OP, True, options.block_table, options.alibi_slopes)
