"""flash-attn 3's names on kernel_hub's kernels, whose 4th positional argument is softmax_scale.

`install()` lets programs that import flash_attn_interface get them unchanged. Formula, dtypes and
strides are those of `kernel_hub.ops.flash_attention`; a head_dim that is not a multiple of 8, or
below 16, is padded. In all of them:

softmax_scale: None is 1 / sqrt(head_dim). causal: aligned to the last key. window_size: (left,
    right), -1 is no bound. softcap: 0 and less is none. deterministic: of the backward.
q_descale, k_descale, v_descale: with e4m3 tensors, (batch_size, num_kv_heads), fp32; out is bf16.
qv, attention_chunk, seqused_q: must be None or 0.
num_splits (but in decode steps), pack_gqa, sm_margin, scheduler_metadata: hints how theirs should
    run, without influence on the result; ours choose.
return_attn_probs: also return lse, (batch_size, num_heads, seqlen) or (num_heads, total), fp32.

Raises TensorError naming the argument that does not fit, or that no kernel here knows.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import ops
from ..errors import TensorError
from ..flash_attn import mapping
from ..flash_attn.stand_in import StandIn
from ..ops.core import common

__version__ = "3.0.0"  # of the names
__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "install",
    "uninstall",
]

_stand_in = StandIn({"flash_attn_interface": __name__}, "flash-attn-3", __version__)


def install() -> None:
    """Let `import flash_attn_interface` resolve here, in this process, from now on.

    importlib.metadata finds a distribution `flash-attn-3`, which transformers asks for: call this
    before transformers is imported, as it remembers what it found.
    """
    _stand_in.install()


def uninstall() -> None:
    """Undo `install`; modules that imported the names meanwhile keep what they got."""
    _stand_in.uninstall()


def _check_scale(op: str, softmax_scale: Any) -> None:
    """Version 2's 4th positional argument is dropout_p, and programs pass 0.0."""
    if isinstance(softmax_scale, (int, float)) and softmax_scale == 0:
        expected = "None or a scale (dropout_p, in this place in version 2, is none of version 3's)"
        raise common.refuse(op, "softmax_scale", expected, softmax_scale)


def _scales(op: str, q: Any, q_descale: Any, k_descale: Any, v_descale: Any) -> dict[str, Any]:
    """The scales of e4m3 tensors; others have none."""
    mapping.check_tensors(op, q=q)
    given = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    if q.dtype is torch.float8_e4m3fn:
        return {f"{name[0]}_scale": scale for name, scale in given.items()}
    for name, scale in given.items():
        if scale is not None:
            raise TensorError(
                f"{op}: {name}: expected None where q is {q.dtype}, which needs no scale, found a "
                f"{type(scale).__name__}"
            )
    return {}


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor, softmax_scale: float | None = None, causal: bool = False,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of (batch_size, seqlen, 3, num_heads, head_dim) to itself.

    With num_heads_q, (batch_size, seqlen, num_heads_q + 2 * num_kv_heads, head_dim). Not of e4m3:
    pass its slices to `flash_attn_func`.
    """
    op = "flash_attn_qkvpacked_func"
    mapping.check_lacking(op, attention_chunk=attention_chunk)
    _check_scale(op, softmax_scale)
    _scales(op, qkv, q_descale, k_descale, v_descale)
    options = mapping.scores(
        qkv, softmax_scale, softcap, window_size, causal=causal,
        deterministic=deterministic,
    )  # fmt: skip
    heads = {}
    if num_heads_q is not None:
        common.check_count(op, "num_heads_q", num_heads_q)
        kv_heads, odd = divmod((qkv.shape[-2] if qkv.dim() == 4 else 0) - num_heads_q, 2)
        if kv_heads < 1 or odd:
            heads_there = f"{num_heads_q} + 2 * num_kv_heads"
            expected = f"shape (batch_size, seqlen, {heads_there}, head_dim) with num_heads_q"
            raise common.refuse(op, "qkv", expected, qkv)
        heads = {"num_heads": num_heads_q, "num_kv_heads": kv_heads}
    made = mapping.attend_packed(op, qkv, options, **heads)
    return made if return_attn_probs else made[0]


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None = None,
    causal: bool = False, qv: torch.Tensor | None = None, q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    num_splits: int = 1, pack_gqa: bool | None = None, deterministic: bool = False,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of q (batch_size, seqlen_q, num_heads, head_dim) over k and v.

    k, v: (batch_size, seqlen_k, num_kv_heads, head_dim); v, and then out, may have another
        head_dim, here and in the others that take v apart. Returns out, like q.
    """
    op = "flash_attn_func"
    mapping.check_lacking(op, qv=qv, attention_chunk=attention_chunk)
    _check_scale(op, softmax_scale)
    options = mapping.scores(
        q, softmax_scale, softcap, window_size, causal=causal,
        deterministic=deterministic, **_scales(op, q, q_descale, k_descale, v_descale),
    )  # fmt: skip
    made = mapping.attend(op, q, k, v, options)
    return made if return_attn_probs else made[0]


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None, seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention of ragged q (total_q, num_heads, head_dim) over k and v.

    k, v: (total_k, num_kv_heads, head_dim); or with cu_seqlens_k None (batch_size, seqlen_k,
        num_kv_heads, head_dim), of which seqused_k, (batch_size,) int32, says the lengths.
    cu_seqlens_q, cu_seqlens_k: (batch_size + 1,) int32, where each sequence starts.
    max_seqlen_q, max_seqlen_k: the longest.
    """
    op = "flash_attn_varlen_func"
    mapping.check_lacking(op, qv=qv, attention_chunk=attention_chunk, seqused_q=seqused_q)
    mapping.check_tensors(op, cu_seqlens_q=cu_seqlens_q)
    has_lengths = cu_seqlens_k is not None or seqused_k is not None
    options = mapping.scores(
        q, softmax_scale, softcap, window_size, causal=causal,
        deterministic=deterministic, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        cache_seqlens=seqused_k, max_seqlen_q=mapping.length(max_seqlen_q),
        max_seqlen_k=mapping.length(max_seqlen_k) if has_lengths else None,
        **_scales(op, q, q_descale, k_descale, v_descale),
    )  # fmt: skip
    made = mapping.attend(op, q, k, v, options)
    return made if return_attn_probs else made[0]


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from the attention over disjoint parts of them.

    out_partial: (num_splits, batch_size, seqlen, num_heads, head_dim), or without batch_size.
    lse_partial: (num_splits, batch_size, seqlen, num_heads), fp32. out: where to write. out_dtype:
    None is that of out_partial. Returns (out, lse), lse (batch_size, seqlen, num_heads).
    """
    op = "flash_attn_combine"
    mapping.check_tensors(op, out_partial=out_partial, lse_partial=lse_partial)
    is_like = out_partial.dim() in (4, 5) and out_partial.shape[:-1] == lse_partial.shape
    if not is_like or not out_partial.shape[0]:
        raise TensorError(
            f"{op}: lse_partial: expected the shape of out_partial without head_dim, with at least "
            f"one split, found {tuple(lse_partial.shape)} beside {tuple(out_partial.shape)}"
        )
    if lse_partial.dtype != torch.float32:
        raise common.refuse(op, "lse_partial", "dtype float32", lse_partial)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise common.refuse(op, "out_dtype", "a torch.dtype", repr(out_dtype))
    if out is not None:
        mapping.check_tensors(op, out=out)
        if out.shape != out_partial.shape[1:]:
            raise common.refuse(op, "out", f"shape {tuple(out_partial.shape[1:])}", out)
    made, *outs = out_partial.unbind(0)
    lse, *lses = lse_partial.transpose(-1, -2).unbind(0)
    for each in zip(outs, lses, strict=True):
        made, lse = ops.merge_states(made, lse, *each)
    wanted = out_dtype or (made.dtype if out is None else out.dtype)
    made = made.to(wanted, copy=not outs)
    return (made if out is None else out.copy_(made)), lse.transpose(-1, -2)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k: torch.Tensor | None = None,
    v: torch.Tensor | None = None, qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None, rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None, cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None, page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None, k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """As `kernel_hub.flash_attn.flash_attn_with_kvcache`, with the pages' table as page_table.

    cu_seqlens_q, max_seqlen_q: q is ragged, (total_q, num_heads, head_dim), and not rotated.
    cu_seqlens_k_new: so are k and v.
    rotary_seqlens: (batch_size,) int32: where rotation starts, if not at cache_seqlens.
    cache_leftpad: must be None.
    Returns out, or (out, lse, and two empty tensors, as theirs are without splits).
    """
    op = "flash_attn_with_kvcache"
    mapping.check_lacking(
        op, qv=qv, attention_chunk=attention_chunk, cache_leftpad=cache_leftpad,
    )  # fmt: skip
    options = mapping.scores(
        q, softmax_scale, softcap, window_size, causal=causal,
        **_scales(op, q, q_descale, k_descale, v_descale),
    )  # fmt: skip
    if cu_seqlens_q is not None:
        mapping.check_tensors(op, cu_seqlens_q=cu_seqlens_q)
        options |= {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": mapping.length(max_seqlen_q)}
    out, lse = mapping.attend_cached(
        op, q, k_cache, v_cache, k, v, (rotary_cos, rotary_sin, rotary_interleaved), cache_seqlens,
        cache_batch_idx, page_table, options, num_splits, cu_seqlens_k_new, rotary_seqlens,
    )  # fmt: skip
    empty = lse.new_empty(0)
    return (out, lse, empty, empty) if return_softmax_lse else out


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int,
    headdim: int, cache_seqlens: torch.Tensor, qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None, cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, has_softcap: bool = False,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> torch.Tensor:  # fmt: skip
    """An empty int32 tensor: nothing is worked out ahead, lengths are read as the kernels run."""
    mapping.check_tensors("get_scheduler_metadata", cache_seqlens=cache_seqlens)
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
