"""The calls of plan_lots.py that write and read KV caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from plan_lot import E4M3, HALF, Lot, cache_of, heads_of


def append(lot: Lot) -> tuple[Any, ...]:
    """Of append_kv, rotated or not."""
    dtype, (heads, kv_heads, dim) = lot.one(*HALF, torch.float32), heads_of(lot)
    batch, seqlen = lot.one((1, lot.log(1, 2048)), (lot.log(1, 64), 1), (3, 17))
    k, v = (lot.rows(batch, seqlen, kv_heads, dim, dtype=dtype) for _ in range(2))
    options = cache_of(lot, kv_heads, dim, lot.one(dtype, E4M3))
    if lot.one(True, False):
        options |= lot.tables(8192, dim, dtype)
        options["q"] = lot.rows(batch, seqlen, heads, dim, dtype=dtype)
    options["slot_mapping"] = torch.arange(batch * seqlen)
    return (k, v, options.pop("k_cache"), options.pop("v_cache")), options


def append_normed(lot: Lot) -> tuple[Any, ...]:
    """The same of heads that are normed."""
    given, options = append(lot)
    weight = torch.empty(given[0].shape[-1], dtype=lot.one(given[0].dtype, torch.float32))
    options["k_norm_weight"] = weight
    if "q" in options:
        options["q_norm_weight"] = weight
    return given, options


def decode(lot: Lot) -> tuple[Any, ...]:
    """Of decode_attention: pages, appending or not."""
    dtype, (heads, kv_heads, dim) = lot.one(*HALF), heads_of(lot)
    batch, seqlen = lot.log(1, 256), lot.one(1, 1, 2, 4, 16)
    q = lot.rows(batch, seqlen, heads, dim, dtype=dtype)
    options = cache_of(lot, kv_heads, dim, lot.one(dtype, E4M3))
    pages, size = options["k_cache"].shape[:2]
    used = min(pages, lot.log(1, pages))
    options["block_table"] = torch.zeros(batch, used, dtype=torch.int32)
    lengths = torch.full((batch,), used * size - seqlen, dtype=torch.int32)
    options |= {"softcap": lot.one(0.0, 30.0), "return_lse": lot.one(True, False)}
    if lot.one(True, False):
        options |= {n: lot.rows(batch, seqlen, kv_heads, dim, dtype=dtype) for n in "kv"}
        if lot.one(True, False):
            options |= lot.tables(1 << 17, dim, dtype)
    options["cache_seqlens"] = lengths
    return (q, options.pop("k_cache"), options.pop("v_cache")), options


def _of_tokens(options: dict[str, Any]) -> dict[str, Any]:
    """The same with scales of tokens."""
    size = options["k_cache"].shape[:3]
    options.pop("k_scale"), options.pop("v_scale")
    return options | {name: torch.empty(size) for name in ("k_scale_cache", "v_scale_cache")}


def append_quantised(lot: Lot) -> tuple[Any, ...]:
    """Into int8, with scales of heads or tokens, or e4m3 with scales of tokens."""
    (k, v, *_), options = lot.one(append, append_normed)(lot)
    while k.dtype == torch.float32:
        (k, v, *_), options = lot.one(append, append_normed)(lot)
    options = {x: y for x, y in options.items() if x not in ("k_scale", "v_scale")}
    caches = _quantised(lot, k.shape[-2], k.shape[-1])
    return (k, v, caches.pop("k_cache"), caches.pop("v_cache")), options | caches


def _quantised(lot: Lot, kv_heads: int, dim: int) -> dict[str, Any]:
    of_tokens = lot.one(True, False)
    kind = lot.one(torch.int8, E4M3) if of_tokens else torch.int8
    found = cache_of(lot, kv_heads, dim, kind)
    return _of_tokens(found) if of_tokens else found


def decode_quantised(lot: Lot) -> tuple[Any, ...]:
    """Over such caches, by a tree's mask or none."""
    (q, *_), options = decode(lot)
    head_dim, kv_heads = q.shape[-1], lot.one(*(n for n in (1, 2, 4, 8) if q.shape[2] % n == 0))
    caches = _quantised(lot, kv_heads, head_dim)
    pages = min(options["block_table"].shape[1], caches["k_cache"].shape[0])
    options = {
        x: y for x, y in options.items() if x in ("cache_seqlens", "softcap", "return_lse")
    }  # fmt: skip
    options["block_table"] = torch.zeros(q.shape[0], pages, dtype=torch.int32)
    if lot.one(True, False):
        options["tree_mask"] = torch.zeros(q.shape[:2], dtype=lot.one(torch.int32, torch.int64))
    return (q, caches.pop("k_cache"), caches.pop("v_cache")), options | caches


def decode_trees(lot: Lot) -> tuple[Any, ...]:
    """As `decode`, by a tree's mask."""
    (q, *caches), options = decode(lot)
    shape = lot.one(q.shape[:2], q.shape[1:2])
    mask = torch.zeros(shape, dtype=lot.one(torch.int32, torch.int64))
    return (q, *caches), {**options, "tree_mask": mask}


def attention_over_bytes(lot: Lot) -> tuple[Any, ...]:
    """Of flash_attention: queries of 16 bits over caches in pages or not."""
    dtype, (heads, kv_heads, dim) = lot.one(*HALF), heads_of(lot)
    batch, seqlen = lot.one(1, 2, 7), lot.log(17, 8192)
    options = cache_of(lot, kv_heads, dim, lot.one(E4M3, torch.int8))
    if lot.one(True, False):
        options = _of_tokens(options)
    k, v = options.pop("k_cache"), options.pop("v_cache")
    if lot.one(True, False):
        options["block_table"] = torch.zeros(batch, lot.log(1, 64), dtype=torch.int32)
    else:
        k, v = k[:batch], v[:batch]
        options = {n: x[:batch] if n.endswith("_cache") else x for n, x in options.items()}
    q = lot.rows(batch, seqlen, heads, dim, dtype=dtype)
    lengths = torch.ones(batch, dtype=torch.int32)
    return (q, k, v), {**options, "causal": lot.one(True, False), "cache_seqlens": lengths}


DRAWN: dict[str, tuple[str, Callable[[Lot], tuple[Any, ...]]]] = {
    "append_kv": ("append_kv", append), "append_kv normed": ("append_kv", append_normed),
    "append_kv quantised": ("append_kv", append_quantised),
    "decode_attention": ("decode_attention", decode),
    "decode_attention quantised": ("decode_attention", decode_quantised),
    "decode_attention trees": ("decode_attention", decode_trees),
    "flash_attention over bytes": ("flash_attention", attention_over_bytes),
}  # fmt: skip
