"""Calls of every op as models have them, drawn by lot, for record_plans.py.

Nothing is computed: most tensors hold nothing, the others what an op reads on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from plan_caches import DRAWN as CACHES
from plan_lot import E4M3, HALF
from plan_lot import Lot as Lot
from plan_lot import cache_of as _cache
from plan_lot import heads_of as _heads


def _norm(lot: Lot) -> tuple[Any, ...]:
    dtype, size = lot.one(*HALF, torch.float32), lot.one(64, 100, 896, 4096, 5120, 8192, 12288)
    x = lot.rows(lot.log(1, 20000), size, dtype=dtype, aligned=False)
    residual = lot.one(None, torch.empty_like(x))
    return (x, torch.empty(size, dtype=dtype)), {"residual": residual}


def _layer_norm(lot: Lot) -> tuple[Any, ...]:
    (x, weight), options = _norm(lot)
    kind = lot.one(None, E4M3, torch.int8)
    bias = lot.one(None, torch.empty_like(weight))
    return (x, weight, bias), {**options, "out_dtype": kind}


def _silu(lot: Lot) -> tuple[Any, ...]:
    dtype, size = lot.one(*HALF, torch.float32), lot.one(64, 100, 4864, 11008, 14336, 28672)
    return (lot.rows(lot.log(1, 8000), 2 * size, dtype=dtype, aligned=False),), {}


def _softmax(lot: Lot) -> tuple[Any, ...]:
    dtype = lot.one(*HALF, torch.float32)
    if lot.one(True, False):  # rows of a vocabulary, else scores of attention
        size = lot.one(32000, 50257, 128256, 151936, 262144)
        return (lot.rows(lot.log(1, 4096), size, dtype=dtype, aligned=False),), {}
    batch, heads, size = lot.one(1, 2, 7), lot.one(8, 32), lot.log(1, 8192)
    x = torch.empty(batch, heads, lot.log(1, 512), size, dtype=dtype)
    truth = torch.empty(batch, 1, 1, size, dtype=torch.bool)
    mask = lot.one(None, truth, torch.empty(x.shape[-2:], dtype=dtype))
    return (x,), {"mask": mask, "scale": 0.125}


def _gelu(lot: Lot) -> tuple[Any, ...]:
    options = {"approximate": lot.one("none", "tanh"), "out_dtype": lot.one(None, E4M3)}
    return _silu(lot)[0], options


def _quantize(lot: Lot) -> tuple[Any, ...]:
    dtype, size = lot.one(*HALF, torch.float32), lot.one(64, 100, 4096, 7168, 14336)
    x = lot.rows(lot.log(1, 8000), size, dtype=dtype, aligned=False)
    return (x,), {"per": lot.one("tensor", "row", "1x128", "128x128")}


def _swigluoai(lot: Lot) -> tuple[Any, ...]:
    options = {"interleaved": lot.one(True, False), "out_dtype": lot.one(None, E4M3)}
    return _silu(lot)[0], options


def _sample(lot: Lot, *first: int) -> tuple[Any, ...]:
    batch, size = lot.log(1, 1000), lot.one(32000, 50257, 128256, 151936, 262144)
    logits = lot.rows(batch, size, dtype=lot.one(*HALF, torch.float32), aligned=False)
    sets = {"top_k": torch.empty(batch, dtype=torch.int32), "top_p": torch.empty(batch)}
    given = {} if first else sets
    bias = lot.one(None, torch.empty(size))
    return (logits, *first), {**given, "seed": torch.empty(batch, dtype=torch.int64), "bias": bias}


def _rope(lot: Lot) -> tuple[Any, ...]:
    dtype, dim, tokens = lot.one(*HALF, torch.float32), lot.one(64, 80, 96, 128), lot.log(1, 8000)
    q = lot.rows(tokens, lot.one(8, 14, 32), dim, dtype=dtype, aligned=False)
    k = lot.rows(tokens, lot.one(1, 2, 8), dim, dtype=dtype, aligned=False)
    options = {
        "interleaved": lot.one(True, False),
        **lot.tables(8192, lot.one(dim, dim // 2), dtype),
    }
    if lot.one(True, False):
        options["positions"] = torch.zeros(tokens, dtype=lot.one(torch.int32, torch.int64))
    return (q, k), options


def _merge(lot: Lot) -> tuple[Any, ...]:
    dtype, (s, h) = lot.one(*HALF, torch.float32), (lot.log(1, 4000), lot.one(8, 14, 32))
    out, lse = (torch.empty(1, s, h, lot.one(64, 80, 128), dtype=dtype), torch.empty(1, h, s))
    return (out, lse, torch.empty_like(out), lse.clone()), {}


def _route(lot: Lot) -> tuple[Any, ...]:
    num_experts, k = lot.one((8, 2), (60, 4), (128, 8), (160, 6), (256, 8), (512, 10))
    dtype = lot.one(*HALF, torch.float32)
    logits = lot.rows(lot.log(1, 20000), num_experts, dtype=dtype, aligned=False)
    options = {"scoring": lot.one("softmax", "sigmoid"), "renormalise": lot.one(True, False)}
    return (logits, k), options


def _verify(lot: Lot) -> tuple[Any, ...]:
    batch, drafts, size = lot.log(1, 200), lot.one(1, 3, 5, 8), lot.one(32000, 50257, 128256)
    logits = lot.rows(batch, drafts + 1, size, dtype=lot.one(*HALF, torch.float32), aligned=False)
    options = {"draft_probs": lot.one(None, torch.empty(batch, drafts, size))}
    seed = torch.empty(batch, dtype=torch.int64)
    return (torch.zeros(batch, drafts, dtype=torch.int64), logits), {**options, "seed": seed}


def _tree(lot: Lot) -> tuple[Any, ...]:
    (ids, logits), options = _verify(lot)
    return (ids, ids.int(), logits), options


def _bounds(lot: Lot) -> tuple[Any, ...]:
    batch, tokens = lot.log(1, 2000), lot.log(1, 20000)
    options: dict[str, Any] = {"out_positions": torch.empty(tokens, dtype=torch.int64)}
    if lot.one(True, False):
        options |= {"block_table": torch.zeros(batch, lot.one(8, 100), dtype=torch.int32)}
        options |= {"out_slots": torch.empty(tokens, dtype=torch.int64), "page_size": 16}
    return (torch.ones(batch, dtype=torch.int32),), options


def _copies(lot: Lot) -> tuple[Any, ...]:
    _, kv_heads, dim = _heads(lot)
    caches = _cache(lot, kv_heads, dim, lot.one(*HALF, E4M3))
    pairs = torch.arange(2 * lot.log(1, 60)).view(-1, 2)
    return (caches["k_cache"], caches["v_cache"], pairs), {}


def _embedding(lot: Lot) -> tuple[Any, ...]:
    dtype, hidden = lot.one(*HALF, torch.float32), lot.one(896, 2304, 4096, 5120, 7168, 100)
    weight = lot.rows(1000, hidden, dtype=dtype, aligned=False)
    tokens = lot.log(1, 20000)
    options = {"scale": lot.one(None, 2.5), "first_id": lot.one(0, 1000)}
    if lot.one(True, False):
        options["position_weight"] = lot.rows(tokens, hidden, dtype=dtype)
    return (torch.zeros(tokens, dtype=lot.one(torch.int32, torch.int64)), weight), options


def _padding(lot: Lot, pads: bool) -> tuple[Any, ...]:
    sizes = (lot.log(1, 9000),) if pads else (lot.log(1, 60), lot.log(1, 400))
    x = lot.rows(*sizes, lot.one(1, 100, 896, 4096), dtype=lot.one(*HALF), aligned=False)
    bounds = torch.zeros(1 + (lot.log(1, 60) if pads else sizes[0]), dtype=torch.int32)
    return (x, bounds), {"seqlen": lot.log(1, 400)} if pads else {"total": lot.log(1, 9000)}


def _moe_rows(lot: Lot) -> tuple[int, int, int, torch.dtype]:
    """(tokens, experts of each, a row's elements, their dtype)."""
    k, hidden = lot.one((2, 4096), (8, 2048), (8, 7168), (6, 5120), (4, 2880), (3, 100))
    return lot.log(1, 8000), k, hidden, lot.one(*HALF, torch.float32)


def _permute(lot: Lot) -> tuple[Any, ...]:
    tokens, k, hidden, dtype = _moe_rows(lot)
    x = lot.rows(tokens, hidden, dtype=dtype, aligned=False)
    return (x, torch.zeros(tokens, k, dtype=torch.int32), lot.one(8, 64, 128, 256)), {}


def _combine(lot: Lot) -> tuple[Any, ...]:
    tokens, k, hidden, dtype = _moe_rows(lot)
    rows = lot.rows(tokens * k, hidden, dtype=dtype, aligned=False)
    options = {"residual": lot.one(None, torch.empty(tokens, hidden, dtype=dtype))}
    places = torch.arange(tokens * k, dtype=torch.int32).view(tokens, k)
    return (rows, places, torch.empty(tokens, k)), options


def _product(lot: Lot) -> tuple[int, int, int]:
    m = lot.one(lot.log(1, 16384), lot.log(1, 256))
    return m, *lot.one(
        (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1152, 896), (896, 4864),
        (5120, 5120), (27648, 5120), (1280, 8192), (8192, 3584), (3072, 768), (768, 768),
        (128256, 4096), (7168, 2048), (1000, 1000), (40, 72),
    )  # fmt: skip


def _linear(lot: Lot) -> tuple[Any, ...]:
    dtype, (m, n, k) = lot.one(*HALF), _product(lot)
    to = lot.one(dtype, dtype, torch.float32)
    options: dict[str, Any] = {"activation": lot.one(None, None, "gelu", "silu"), "out_dtype": to}
    if lot.one(True, False):
        options["bias"] = torch.empty(n, dtype=dtype)
    if lot.one(True, False, False):
        options["residual"] = torch.empty(m, n, dtype=to)
    return (lot.rows(m, k, dtype=dtype), lot.rows(n, k, dtype=dtype)), options


def _linear_fp8(lot: Lot) -> tuple[Any, ...]:
    m, n, k = _product(lot)
    k = max(k // 128 * 128, 128)
    blocks = (torch.empty(m, k // 128), torch.empty(-(-n // 128), k // 128))
    scales = lot.one((None, None), (torch.empty(m), torch.empty(n)), (torch.empty(1),) * 2, blocks)
    to = lot.one(*HALF, torch.float32)
    options = {"a_scale": scales[0], "b_scale": scales[1], "out_dtype": to}
    if lot.one(True, False):
        options["bias"] = torch.empty(n, dtype=to)
    return (torch.empty(m, k, dtype=E4M3), torch.empty(n, k, dtype=E4M3)), options


def _swiglu(lot: Lot) -> tuple[Any, ...]:
    dtype, (m, n, k) = lot.one(*HALF), _product(lot)
    return (lot.rows(m, k, dtype=dtype), lot.rows(2 * n, k, dtype=dtype)), {}


def _gated_linear(lot: Lot) -> tuple[Any, ...]:
    (a, weight), _ = _swiglu(lot)
    kind = lot.one("silu", "gelu", "gelu_tanh", "swigluoai")
    return (a, weight, kind), {"interleaved": lot.one(True, False)}


def _batched(lot: Lot) -> tuple[Any, ...]:
    dtype, (m, n, k), batch = lot.one(*HALF), _product(lot), lot.one(1, 3, 16)
    n = min(n, 8192)
    b_batch = lot.one((batch,), (1,), ())
    return (lot.rows(batch, m, k, dtype=dtype), torch.empty(*b_batch, n, k, dtype=dtype)), {}


def _grouped(lot: Lot) -> tuple[Any, ...]:
    dtype, (m, n, k), groups = lot.one(*HALF), _product(lot), lot.one(3, 8, 64)
    n, k = min(n, 8192), min(k, 8192)
    offsets = torch.linspace(0, m, groups + 1).to(torch.int32)
    options: dict[str, Any] = {"activation": lot.one(None, "silu", "gelu")}
    if lot.one(True, False):
        options["bias"] = torch.empty(groups, n, dtype=dtype)
    a, b = lot.rows(m, k, dtype=dtype), torch.empty(groups, n, k, dtype=dtype)
    return (a, b, offsets), options


def _qkv(lot: Lot) -> tuple[Any, ...]:
    dtype, (heads, kv_heads, dim) = lot.one(*HALF), _heads(lot)
    dim, k = dim // 32 * 32, lot.one(896, 4096, 5120)
    batch, seqlen = lot.one((1, lot.log(1, 4096)), (lot.log(1, 64), 1), (3, 17))
    rows = (heads + 2 * kv_heads) * dim
    x, w = lot.rows(batch, seqlen, k, dtype=dtype), torch.empty(rows, k, dtype=dtype)
    options: dict[str, Any] = {"num_heads": heads, "num_kv_heads": kv_heads}
    if lot.one(True, False):
        options["bias"] = torch.empty(rows, dtype=dtype)
    if lot.one(True, False):
        options |= lot.tables(8192, dim, dtype) | {"interleaved": lot.one(True, False)}
    if lot.one(True, False):
        for name in ("k_cache", "v_cache"):
            options[name] = torch.empty(
                batch * -(-seqlen // 16) + 1, 16, kv_heads, dim, dtype=dtype
            )
        options["slot_mapping"] = torch.arange(batch * seqlen)
    return (x, w), options


def _mla(lot: Lot) -> tuple[Any, ...]:
    dtype, batch, seqlen = lot.one(*HALF), lot.log(1, 256), lot.one(1, 1, 2, 4)
    q = lot.rows(batch, seqlen, lot.one(16, 32, 64, 128), 576, dtype=dtype)
    size = lot.one(1, 16, 64, 128)
    cache = torch.empty(600, size, *lot.one((), (1,)), 576, dtype=dtype)
    table = torch.zeros(batch, lot.log(1, 600), dtype=torch.int32)
    lengths = torch.full((batch,), table.shape[1] * size, dtype=torch.int32)
    options = {"cache_seqlens": lengths, "block_table": table, "softmax_scale": 0.1}
    return (q, cache), {**options, "return_lse": lot.one(True, False)}


def _attention(lot: Lot) -> tuple[Any, ...]:
    dtype, (heads, kv_heads, dim) = lot.one(*HALF), _heads(lot)
    dim = lot.one(dim, lot.one(16, 40, 72, 112, 160, 224))
    options: dict[str, Any] = {"causal": lot.one(True, False), "softcap": lot.one(0.0, 0.0, 30.0)}
    if lot.one(True, False, False):
        options["window_size"] = (lot.log(1, 4096), lot.one(0, -1))
    if lot.one(True, False, False, False):
        options["alibi_slopes"] = torch.empty(heads)
    batch, seqlen_q = lot.one(1, 2, 7), lot.log(1, 8192)
    seqlen_k = seqlen_q + lot.one(0, 0, lot.log(1, 8192))
    if lot.one(True, False):
        starts = [torch.arange(batch + 1, dtype=torch.int32) * n for n in (seqlen_q, seqlen_k)]
        options |= {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1],
                    "max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}  # fmt: skip
        shapes = (batch * seqlen_q, heads, dim), (batch * seqlen_k, kv_heads, dim)
    else:
        shapes = (batch, seqlen_q, heads, dim), (batch, seqlen_k, kv_heads, dim)
    q, k = (lot.rows(*shape, dtype=dtype) for shape in shapes)
    own = lot.one(dim, dim, 128, lot.one(16, 40, 72, 192, 256))  # of v
    return (q, k, lot.rows(*shapes[1][:-1], own, dtype=dtype)), options


def _attention_fp8(lot: Lot) -> tuple[Any, ...]:
    heads, kv_heads, dim = _heads(lot)
    batch, seqlen = lot.one(1, 2, 7), lot.log(1, 8192)
    shapes = (batch, seqlen, heads, dim), (batch, seqlen, kv_heads, dim)
    q, k, v = (torch.empty(shapes[i > 0], dtype=E4M3) for i in range(3))
    scales = {n: lot.one(None, torch.empty(1)) for n in ("q_scale", "k_scale", "v_scale")}
    return (q, k, v), {"causal": lot.one(True, False), **scales}


DRAWN: dict[str, tuple[str, Callable[[Lot], tuple[Any, ...]]]] = {
    "rms_norm": ("rms_norm", _norm), "layer_norm": ("layer_norm", _layer_norm),
    "sample": ("sample", _sample), "sample_slice": ("sample_slice", lambda lot: _sample(lot, 7)),
    "silu_and_mul": ("silu_and_mul", _silu), "gelu": ("gelu", _gelu),
    "relu_squared": ("relu_squared", _silu), "gelu_and_mul": ("gelu_and_mul", _gelu),
    "quantize_e4m3": ("quantize_e4m3", _quantize), "softmax": ("softmax", _softmax),
    "log_softmax": ("log_softmax", _softmax),
    "swigluoai_and_mul": ("swigluoai_and_mul", _swigluoai),
    "verify_draft": ("verify_draft", _verify), "verify_tree": ("verify_tree", _tree),
    "copy_blocks": ("copy_blocks", _copies), "cu_seqlens": ("cu_seqlens", _bounds),
    "pad_input": ("pad_input", lambda lot: _padding(lot, True)),
    "unpad_input": ("unpad_input", lambda lot: _padding(lot, False)), "rope": ("rope", _rope),
    "merge_states": ("merge_states", _merge), "moe_route": ("moe_route", _route),
    "moe_permute": ("moe_permute", _permute), "moe_combine": ("moe_combine", _combine),
    "linear": ("linear", _linear), "linear fp8": ("linear", _linear_fp8),
    "swiglu_linear": ("swiglu_linear", _swiglu), "gated_linear": ("gated_linear", _gated_linear),
    "batched_matmul": ("batched_matmul", _batched), "grouped_linear": ("grouped_linear", _grouped),
    "qkv_linear": ("qkv_linear", _qkv), "mla_decode": ("mla_decode", _mla),
    "embedding": ("embedding", _embedding), "flash_attention": ("flash_attention", _attention),
    "flash_attention backward": ("flash_attention", _attention),
    "flash_attention fp8": ("flash_attention", _attention_fp8), **CACHES,
}  # fmt: skip
