"""From flash-attn's arguments to kernel_hub's ops, for version 2's names and version 3's.

Refuses by name what no op does; knows no signature and no default of theirs.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..errors import TensorError
from ..ops.core import common

_HALF = (torch.float16, torch.bfloat16)
_MAX_PAGE = 256
_MAX_DECODE = 16  # new tokens a sequence that decode_attention takes
_pad = torch.nn.functional.pad
# What no op does: the value that asks for nothing, and what to do instead.
LACKING: dict[str, tuple[Any, str]] = {
    "dropout_p": (0.0, "there is no dropout: pass 0.0 (in training, set the model's attention "
                       "dropout to 0), or uninstall() and use flash-attn's own"),
    "cache_leftpad": (None, "move each sequence to the start of its cache"),
    "qv": (None, "the part of q for latent attention has no kernel here"),
    "attention_chunk": (0, "give each chunk a sequence of its own by cu_seqlens"),
    "seqused_q": (None, "give cu_seqlens_q the lengths that are used"),
}  # fmt: skip


def check_lacking(op: str, **given: Any) -> None:
    """Refuse what asks for anything that LACKING names."""
    for argument, value in given.items():
        neutral, advice = LACKING[argument]
        if isinstance(value, torch.Tensor) or value != neutral:
            shown = common.say(value) if isinstance(value, torch.Tensor) else f"{value!r:.60}"
            raise TensorError(f"{op}: {argument}: expected {neutral}, found {shown}: {advice}")


def check_tensors(op: str, **given: Any) -> None:
    """Each must be a torch tensor; the ops check the rest."""
    for argument, value in given.items():
        common.check_tensor(op, argument, value)


def check_one_head_dim(op: str, q: Any, v: Any, argument: str = "v") -> None:
    """Version 2 knows no head_dim of v's own."""
    check_tensors(op, **{"q": q, argument: v})
    if q.dim() and v.dim() and q.shape[-1] != v.shape[-1]:
        expected = f"q's head_dim {q.shape[-1]} (flash_attn_interface takes another)"
        raise common.refuse(op, argument, expected, v)


def length(value: Any) -> Any:
    """A max_seqlen, which programs also give as a tensor of one element (waits for the device)."""
    return int(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def scores(
    q: torch.Tensor, softmax_scale: Any, softcap: Any, window_size: Any, **rest: Any
) -> dict[str, Any]:
    """The options of an op that say how scores are made: theirs, of the head_dim before padding."""
    if softmax_scale is None:
        softmax_scale = max(common.last_size(q), 1) ** -0.5
    if isinstance(softcap, (int, float)) and softcap <= 0:
        softcap = 0.0
    if isinstance(window_size, torch.Tensor):
        window_size = tuple(window_size.tolist()) if window_size.dim() == 1 else window_size
    return {
        "softmax_scale": softmax_scale, "softcap": softcap, "window_size": window_size, **rest
    }  # fmt: skip


def padded(*tensors: Any) -> list[Any]:
    """With a head_dim that there are kernels for, and the elements of a head side by side."""
    made = []
    for x in tensors:
        is_known = x.dim() > 0 and x.dtype in _HALF  # the ops name what is not
        missing = max(16 - x.shape[-1], -x.shape[-1] % 8) if is_known else 0
        x = _pad(x, (0, missing)) if missing else x
        made.append(x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous())
    return made


def attend(
    op: str, q: Any, k: Any, v: Any, options: dict[str, Any], block_table: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of `ops.flash_attention`; with block_table, cu_seqlens_k says the lengths."""
    check_tensors(op, q=q, k=k, v=v)
    head_dim = common.last_size(v)
    q, k, v = padded(q, k, v)
    if block_table is not None:
        check_tensors(op, block_table=block_table)
        bounds = options.pop("cu_seqlens_k", None)
        if bounds is not None:
            check_tensors(op, cu_seqlens_k=bounds)
            options["cache_seqlens"] = bounds.diff()
        k, v, block_table = _paged(op, k, v, block_table)
    out, lse = ops.flash_attention(q, k, v, **options, block_table=block_table, return_lse=True)
    return out[..., :head_dim], lse


def attend_packed(op: str, qkv: Any, options: dict[str, Any], **heads: Any) -> tuple[Any, Any]:
    """(out, lse) of `ops.flash_attention_qkvpacked`."""
    check_tensors(op, qkv=qkv)
    head_dim = common.last_size(qkv)
    (qkv,) = padded(qkv)
    out, lse = ops.flash_attention_qkvpacked(qkv, **options, **heads, return_lse=True)
    return out[..., :head_dim], lse


def halves(op: str, kv: Any, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v of a packed tensor, whose gradient comes back as one."""
    check_tensors(op, kv=kv)
    if kv.dim() != place + 3 or kv.shape[place] != 2:
        tokens = "batch_size, seqlen" if place == 2 else "total_k"
        raise common.refuse(op, "kv", f"shape ({tokens}, 2, num_kv_heads, head_dim)", kv)
    k, v = kv.unbind(place)
    return k, v


def _paged(op: str, k: Any, v: Any, table: Any) -> tuple[Any, Any, Any]:
    """Pages of a size that there are kernels for: large ones cut, or copied if they lie apart."""
    for argument, x in (("k", k), ("v", v)):
        if x.dim() != 4:
            shape = "(num_pages, page_size, num_kv_heads, head_dim) with block_table"
            raise common.refuse(op, argument, f"shape {shape}", x)
    if table.dim() != 2 or table.dtype != torch.int32:
        raise common.refuse(op, "block_table", "shape (batch_size, max_pages), int32", table)
    num_pages, page_size = k.shape[:2]
    if page_size <= _MAX_PAGE:
        return k, v, table
    if all(x.stride(0) == page_size * x.stride(1) for x in (k, v)):
        size = next(n for n in range(_MAX_PAGE, 0, -1) if page_size % n == 0)
        parts = page_size // size
        within = torch.arange(parts, dtype=torch.int32, device=table.device)
        table = (table[..., None] * parts + within).flatten(1)
        cut = (x.view(num_pages * parts, size, *x.shape[2:]) for x in (k, v))
        return *cut, table
    at = table.long().clamp(0, max(num_pages - 1, 0))
    return k[at].flatten(1, 2), v[at].flatten(1, 2), None


def attend_cached(
    op: str, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, rotary: tuple[Any, Any, bool],
    cache_seqlens: Any, cache_batch_idx: Any, block_table: Any, options: dict[str, Any],
    num_splits: Any, cu_seqlens_k_new: Any = None, rotary_seqlens: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, lse) of queries over a cache that k and v are written to first, where given.

    By one launch of `ops.decode_attention` where that takes the call, else `append_kv` and
    `flash_attention`. rotary: cos, sin, interleaved; from the places rotary_seqlens on, where
    they are not cache_seqlens. options: those of `flash_attention`.
    """
    check_tensors(op, q=q, k_cache=k_cache, v_cache=v_cache)
    bounds: Any = options.get("cu_seqlens_q")
    is_ragged = bounds is not None
    _check_cached(op, q, k_cache, v_cache, k, v, rotary, cache_seqlens, is_ragged)
    batch_size = bounds.numel() - 1 if is_ragged else q.shape[0]
    table = block_table
    if block_table is not None:
        check_tensors(op, block_table=block_table)
    if cache_batch_idx is not None:
        check_tensors(op, cache_batch_idx=cache_batch_idx)
        if block_table is not None:
            raise common.refuse(op, "cache_batch_idx", "None beside a block_table", "a tensor")
        if cache_batch_idx.shape != (batch_size,) or cache_batch_idx.dtype != torch.int32:
            expected = f"shape ({batch_size},), int32"
            raise common.refuse(op, "cache_batch_idx", expected, cache_batch_idx)
        table = cache_batch_idx[:, None]
    if isinstance(cache_seqlens, int):
        common.check_count(op, "cache_seqlens", cache_seqlens)
        room = k_cache.shape[1] * (1 if table is None else table.shape[-1])
        new = 0 if k is None or k.dim() != 4 else k.shape[1]
        if cache_seqlens + new > room:
            expected = f"at most {room - new}, as {room} tokens and {new} new ones have room"
            raise common.refuse(op, "cache_seqlens", expected, cache_seqlens)
        cache_seqlens = torch.full((batch_size,), cache_seqlens, dtype=torch.int32, device=q.device)
    head_dim, caches = v_cache.shape[-1], (k_cache, v_cache)
    q, k_cache, v_cache = padded(q, k_cache, v_cache)
    if k is not None:
        k, v = padded(k, v)
    keys, values, pages = k_cache, v_cache, table
    if table is not None:
        keys, values, pages = _paged(op, k_cache, v_cache, table)
    is_copy = table is not None and pages is None
    seqlen_q = 0 if is_ragged else q.shape[1]
    cos, sin, is_interleaved = rotary
    if cos is None or rotary_seqlens is cache_seqlens:
        rotary_seqlens = None
    decodes = (
        rotary_seqlens is None
        and q.shape[-1] == v_cache.shape[-1]
        and 1 <= seqlen_q <= _MAX_DECODE
        and q.dtype in _HALF
        and (options["causal"] or seqlen_q == 1)
        and (k is None or (k.dim() == 4 and k.shape[1] == seqlen_q and not is_copy))
    )
    if decodes:
        if cache_seqlens is None:
            room = keys.shape[1] * (1 if pages is None else pages.shape[1])
            cache_seqlens = torch.full((batch_size,), room, dtype=torch.int32, device=q.device)
        left, _ = common.check_window(op, options["window_size"])
        own: Any = {
            name: options.get(name) for name in ("softmax_scale", "softcap", "alibi_slopes")
        }
        out, lse = ops.decode_attention(
            q, keys, values, cache_seqlens=cache_seqlens, k=k, v=v, block_table=pages, cos=cos,
            sin=sin, interleaved=is_interleaved, window_size=(left, -1), num_splits=num_splits,
            return_lse=True, **own,
        )  # fmt: skip
    else:
        common.check_count(op, "num_splits", num_splits)
        lengths = cache_seqlens
        if k is not None:
            turn = {"cos": cos, "sin": sin, "interleaved": is_interleaved}
            positions = None
            if cos is not None:
                starts = lengths if rotary_seqlens is None else rotary_seqlens
                q = _rotated(op, q, starts, options, turn)
                if rotary_seqlens is not None:
                    positions = _places(op, "k", k, starts)
            ops.append_kv(
                k, v, k_cache, v_cache, cache_seqlens=lengths, block_table=table,
                cu_seqlens=cu_seqlens_k_new, positions=positions, **turn,
            )  # fmt: skip
            if is_copy:
                keys, values, _ = _paged(op, k_cache, v_cache, table)
            new = k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
            lengths = lengths + new
        out, lse = ops.flash_attention(
            q, keys, values, cache_seqlens=lengths, block_table=pages, return_lse=True, **options
        )
    for cache, wide in zip(caches, (k_cache, v_cache), strict=True):
        if k is not None and wide is not cache:
            cache.copy_(wide[..., : cache.shape[-1]])
    return out[..., :head_dim], lse


def _places(op: str, argument: str, x: torch.Tensor, starts: Any) -> torch.Tensor:
    """(batch_size, tokens of x): where each stands, the first of a sequence at `starts`."""
    if x.dim() != 4:
        expected = "shape (batch_size, seqlen, heads, head_dim) with rotary_cos"
        raise common.refuse(op, argument, expected, x)
    if starts.shape != x.shape[:1] or starts.dtype != torch.int32:
        raise common.refuse(op, "rotary_seqlens", f"shape ({x.shape[0]},), int32", starts)
    steps = torch.arange(x.shape[1], dtype=torch.int32, device=x.device)
    return starts[:, None] + steps


def _rotated(
    op: str, q: torch.Tensor, starts: Any, options: dict[str, Any], turn: dict[str, Any]
) -> torch.Tensor:
    """q at the places of its tokens; all at the first, where no mask tells them apart."""
    check_tensors(op, cache_seqlens=starts)
    places = _places(op, "q", q, starts)
    window = common.check_window(op, options["window_size"])
    if not options["causal"] and window == (-1, -1):
        places = starts[:, None].expand_as(places).contiguous()
    cos, sin, is_interleaved = turn.values()
    turned, _ = ops.rope(q, q[:, :, :1], cos, sin, places, interleaved=is_interleaved)
    return turned


def _check_cached(
    op: str, q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, rotary: tuple[Any, Any, bool],
    cache_seqlens: Any, is_ragged: bool,
) -> None:  # fmt: skip
    if q.dim() != (3 if is_ragged else 4):
        tokens = "total_q" if is_ragged else "batch_size, seqlen_q"
        raise common.refuse(op, "q", f"shape ({tokens}, num_heads, head_dim)", q)
    for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or cache.stride(-1) != 1:
            expected = "4 dimensions, the last contiguous"
            raise common.refuse(op, argument, expected, cache)
    if torch.is_grad_enabled():
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v}
        for argument, x in given.items():
            if isinstance(x, torch.Tensor) and x.requires_grad:
                raise TensorError(
                    f"{op}: {argument}: requires grad, and attention over a cache has no backward: "
                    "call it under torch.no_grad()"
                )
    if (k is None) != (v is None):
        missing, there = ("k", "v") if k is None else ("v", "k")
        raise TensorError(f"{op}: {missing}: expected a tensor, as {there} is one, found None")
    if k is None:
        if rotary[0] is not None or rotary[1] is not None:
            raise common.refuse(op, "rotary_cos", "None where there is no new k", "a table")
        return
    check_tensors(op, k=k, v=v)
    if cache_seqlens is None:
        raise common.refuse(op, "cache_seqlens", "lengths, as k is to be written there", None)
