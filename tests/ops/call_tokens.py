"""The calls of call_cases.py of tokens as rows, of pages, and of a cache of latents."""

from __future__ import annotations

from collections.abc import Callable

import torch
from call_lot import Case, Lot

_DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def _embedding(lot: Lot) -> Case:
    tokens, hidden, rows = lot.one(1, 3, 5), lot.one(8, 20), lot.one(2, 9)
    weight = lot.randn(rows, hidden, dtype=lot.one(*_DTYPES))
    kind = lot.one(torch.int32, torch.int64)
    ids = lot.ints(*(lot.random.randrange(rows) for _ in range(tokens)), dtype=kind)
    tensors = {"ids": ids, "weight": weight, "out": weight.new_empty(tokens, hidden)}
    if lot.one(True, False):
        tensors["position_weight"] = lot.randn(tokens, hidden, dtype=weight.dtype)
        tensors |= lot.maybe(("positions", lot.ints(*range(tokens), dtype=kind)))
    options = {"scale": lot.one(None, 2.5)}
    return Case("embedding", tensors, options, ("out",), required=("ids", "weight"))


def _cu_seqlens(lot: Lot) -> Case:
    batch, tokens = lot.one(1, 3, 5), lot.one(1, 6)
    lengths = lot.ints(*(lot.random.randrange(-1, 3) for _ in range(batch)))
    tensors = {"lengths": lengths, "out": lot.ints(*range(batch + 1))}
    outs, options = ["out"], {}
    if lot.one(True, False):
        tensors["cache_seqlens"] = lot.ints(*range(batch))
    for name in ("out_positions", "out_slots"):
        if lot.one(True, False):
            tensors[name] = lot.ints(*range(tokens), dtype=torch.int64)
            outs.append(name)
    if "out_slots" in tensors:
        tensors["block_table"] = lot.ints(*range(2 * batch)).view(batch, 2)
        options["page_size"] = lot.one(4, 16)
    return Case("cu_seqlens", tensors, options, tuple(outs), required=("lengths",))


def _copy_blocks(lot: Lot) -> Case:
    dtype, shape = lot.one(*_DTYPES), (6, lot.one(8, 20, 64))
    kind, pairs = lot.one(torch.int32, torch.int64), lot.one((0, 3), (0, 3, 1, 4), (5, 5))
    caches = ("k_cache", "v_cache")
    tensors = {name: lot.randn(*shape, dtype=dtype) for name in caches}
    tensors["block_mapping"] = lot.ints(*pairs, dtype=kind).view(-1, 2)
    return Case("copy_blocks", tensors, caches=caches, required=tuple(tensors))


def _mla_decode(lot: Lot) -> Case:
    dtype, batch, seqlen, heads = lot.one(torch.float16, torch.bfloat16), 2, lot.one(1, 2), 4
    tensors = {
        "q": lot.randn(batch, seqlen, heads, 576, dtype=dtype),
        "kv_cache": lot.randn(batch, 8, *lot.one((), (1,)), 576, dtype=dtype),
        "cache_seqlens": lot.ints(3, 5),
        "out": lot.randn(batch, seqlen, heads, 512, dtype=dtype),
        **lot.maybe(("block_table", lot.ints(1, 0).view(batch, 1))),
    }
    options = {"softmax_scale": 0.1, "num_splits": lot.one(0, 2)}
    required = ("q", "kv_cache", "cache_seqlens")
    return Case("mla_decode", tensors, options, outs=("out",), required=required)


def _pad_input(lot: Lot) -> Case:
    dtype, hidden, seqlen = lot.one(*_DTYPES), lot.one(8, 20), lot.one(1, 2, 4)
    bounds = lot.ints(0, 2, 2, 5)
    tensors = {
        "x": lot.randn(6, hidden, dtype=dtype), "cu_seqlens": bounds,
        "out": lot.randn(3, seqlen, hidden, dtype=dtype),
    }  # fmt: skip
    return Case(
        "pad_input", tensors, {"seqlen": seqlen}, ("out",), required=("x", "cu_seqlens"),
        differentiable=("x",),
    )  # fmt: skip


def _unpad_input(lot: Lot) -> Case:
    case = _pad_input(lot)
    tensors = {**case.tensors, "x": case.tensors["out"], "out": case.tensors["x"]}
    return Case(
        "unpad_input", tensors, {"total": 6}, ("out",), required=("x", "cu_seqlens"),
        differentiable=("x",),
    )  # fmt: skip


TOKENS: dict[str, Callable[[Lot], Case]] = {
    "copy_blocks": _copy_blocks,
    "cu_seqlens": _cu_seqlens,
    "embedding": _embedding,
    "mla_decode": _mla_decode,
    "pad_input": _pad_input,
    "unpad_input": _unpad_input,
}
