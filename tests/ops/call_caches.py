"""The calls of call_cases.py that write and read KV caches, bytes with their scales among them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from call_lot import Case, Lot

_HALF = (torch.float16, torch.bfloat16)
_ANY = (*_HALF, torch.float32)
E4M3 = torch.float8_e4m3fn


def tables(lot: Lot, rows: int, rotary_dim: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Cosines and sines."""
    dtype = lot.one(dtype, torch.float32)
    return {name: lot.randn(rows, rotary_dim // 2, dtype=dtype) for name in ("cos", "sin")}


def _scales(lot: Lot, dtype: torch.dtype, shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    if dtype != torch.float32 and lot.one(True, False):
        return {name: lot.randn(*shape).abs() for name in ("k_scale_cache", "v_scale_cache")}
    return {name: lot.randn(shape[-1]).abs() + 0.1 for name in ("k_scale", "v_scale")}


def append_kv(lot: Lot) -> Case:
    """Any dtype into any cache, rotated and normed or not."""
    dtype, batch, seqlen, heads, dim = lot.one(*_ANY), lot.one(1, 2), lot.one(1, 3), 2, 16
    cache_dtype = lot.one(dtype, E4M3, *[torch.int8] * (dtype != torch.float32))
    tensors = {name: lot.randn(batch, seqlen, heads, dim, dtype=dtype) for name in ("k", "v")}
    outs: tuple[str, ...] = ()
    if lot.one(True, False):
        tensors |= tables(lot, 20, lot.one(8, 16), dtype)
        tensors |= {
            "q": lot.randn(batch, seqlen, 4, dim, dtype=dtype),
            "out_q": lot.randn(batch, seqlen, 4, dim, dtype=dtype),
            "out_k": lot.randn(batch, seqlen, heads, dim, dtype=dtype),
        }
        places = lot.ints(*range(batch * seqlen), dtype=lot.one(torch.int32, torch.int64))
        tensors |= lot.maybe(("positions", places))
        outs = ("out_q", "out_k")
    if lot.one(True, False):
        kind = lot.one(dtype, torch.float32)
        names = ("q_norm_weight", "k_norm_weight") if outs else ("k_norm_weight",)
        tensors |= {name: lot.randn(dim, dtype=kind) for name in names}
    caches: tuple[str, ...] = ("k_cache", "v_cache")
    tensors |= {name: lot.randn(3, 8, heads, dim).to(cache_dtype) for name in caches}
    if cache_dtype != dtype:
        scales = _scales(lot, dtype, (3, 8, heads))
        tensors |= scales
        caches += tuple(name for name in scales if name.endswith("_cache"))
    tensors |= lot.one(
        {"slot_mapping": lot.ints(*range(batch * seqlen), dtype=torch.int64)},
        {"block_table": lot.ints(*range(batch)).view(batch, 1)},
    )
    tensors |= lot.maybe(("cache_seqlens", lot.ints(*[2] * batch)))
    return Case(
        "append_kv", tensors, {"interleaved": lot.one(True, False)}, outs=outs, caches=caches,
        in_place=frozenset({("out_q", "q"), ("out_k", "k")}),
        required=("k", "v", "k_cache", "v_cache"),
    )  # fmt: skip


def decode_attention(lot: Lot) -> Case:
    """Any dtype over any cache, appending or not."""
    dtype, batch, seqlen, heads, kv_heads, dim = lot.one(*_ANY), 2, lot.one(1, 2), 4, 2, 16
    cache_dtype = dtype if dtype == torch.float32 else lot.one(dtype, E4M3, torch.int8)
    tensors = {
        "q": lot.randn(batch, seqlen, heads, dim, dtype=dtype),
        "cache_seqlens": lot.ints(3, 5),
        "out": lot.randn(batch, seqlen, heads, dim, dtype=dtype),
        **lot.maybe(("alibi_slopes", lot.randn(heads)), ("sinks", lot.randn(heads)),
                    ("block_table", lot.ints(1, 0).view(batch, 1)),
                    ("tree_mask", lot.ints(*range(1, 1 + seqlen)))),
    }  # fmt: skip
    tensors |= {n: lot.randn(2, 8, kv_heads, dim).to(cache_dtype) for n in ("k_cache", "v_cache")}
    if cache_dtype != dtype:
        tensors |= _scales(lot, dtype, (2, 8, kv_heads))
    caches: tuple[str, ...] = ()
    if "k_scale_cache" not in tensors and lot.one(True, False):
        tensors |= {
            name: lot.randn(batch, seqlen, kv_heads, dim, dtype=dtype) for name in ("k", "v")
        }
        tensors |= lot.maybe(("qkv_bias", lot.randn((heads + 2 * kv_heads) * dim, dtype=dtype)))
        caches = ("k_cache", "v_cache")
        if lot.one(True, False):
            tensors |= tables(lot, 20, lot.one(8, 16), dtype)
    return Case(
        "decode_attention", tensors, {"softcap": lot.one(0.0, 30.0)}, outs=("out",), caches=caches,
        required=("q", "k_cache", "v_cache", "cache_seqlens"),
    )  # fmt: skip


def _over_bytes(lot: Lot) -> Case:
    dtype, q_shape, kind = lot.one(*_HALF), (2, 5, 4, 16), lot.one(E4M3, torch.int8)
    if lot.one(True, False):
        kv_shape, where = (7, 4, 2, 16), {"block_table": lot.ints(0, 2, 5, 3).view(2, 2)}
        where["cache_seqlens"] = lot.ints(3, 7)
    else:
        kv_shape, where = (2, 7, 2, 16), lot.maybe(("cache_seqlens", lot.ints(3, 7)))
    scales = _scales(lot, dtype, kv_shape[:-1])
    if kind == E4M3 and "k_scale" in scales:
        scales = lot.maybe(*scales.items())
    tensors = {
        "q": lot.randn(*q_shape, dtype=dtype), "k": lot.randn(*kv_shape).to(kind),
        "v": lot.randn(*kv_shape).to(kind), **where, **scales,
        **lot.maybe(("sinks", lot.randn(4))), "out": lot.randn(*q_shape, dtype=dtype),
    }  # fmt: skip
    options = {"causal": lot.one(True, False), "softcap": lot.one(0.0, 9.0)}
    return Case("flash_attention", tensors, options, outs=("out",), required=("q", "k", "v"))


CACHES: dict[str, Callable[[Lot], Case]] = {"flash_attention over bytes": _over_bytes}
