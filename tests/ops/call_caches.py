"""Calls of flash_attention over e4m3 caches, drawn by lot (call_cases.py)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from call_lot import Case, Lot

_HALF = (torch.float16, torch.bfloat16)
E4M3 = torch.float8_e4m3fn


def _flash_attention_e4m3_caches(lot: Lot) -> Case:
    dtype, q_shape = lot.one(*_HALF), (2, 5, 4, 16)
    if lot.one(True, False):
        kv_shape, tables = (7, 4, 2, 16), {"block_table": lot.ints(0, 2, 5, 3).view(2, 2)}
        tables["cache_seqlens"] = lot.ints(3, 7)
    else:
        kv_shape, tables = (2, 7, 2, 16), lot.maybe(("cache_seqlens", lot.ints(3, 7)))
    scale = lot.randn(2).abs() + 0.1
    tables |= lot.maybe(("k_scale", scale), ("v_scale", scale + 1), ("sinks", lot.randn(4)))
    tensors = {
        "q": lot.randn(*q_shape, dtype=dtype), "k": lot.randn(*kv_shape).to(E4M3),
        "v": lot.randn(*kv_shape).to(E4M3), **tables, "out": lot.randn(*q_shape, dtype=dtype),
    }  # fmt: skip
    options = {"causal": lot.one(True, False), "softcap": lot.one(0.0, 9.0)}
    return Case("flash_attention", tensors, options, outs=("out",), required=("q", "k", "v"))


CACHES: dict[str, Callable[[Lot], Case]] = {
    "flash_attention over e4m3": _flash_attention_e4m3_caches
}
