"""One call of every public op, drawn by lot: its tensors by name, and which of them it writes.

`draw(name, seed)` gives a `Case`; `CASES` must hold every op of `ops.__all__` (the tests that use
it ask), so that no new op stays outside what they ask of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from call_caches import CACHES, append_kv, decode_attention, tables
from call_gated import GATED
from call_lot import Case as Case
from call_lot import Lot as Lot
from call_moe import MOE
from call_sample import call_sample, call_slice, call_tree, call_verify
from call_softmax import SOFTMAX
from call_tokens import TOKENS

from kernel_hub import ops

E4M3 = torch.float8_e4m3fn
_HALF = [torch.float16, torch.bfloat16]
_ANY = [*_HALF, torch.float32]


def _rms_norm(lot: Lot) -> Case:
    if lot.one(True, False):
        case = _layer_norm(lot)
        tensors = {**case.tensors, "weight": lot.randn(case.tensors["x"].shape[-1])}
        tensors.pop("bias", None)  # may be of another dtype
        return replace(case, op="rms_norm", tensors=tensors, required=("x",))
    dtype, shape = lot.one(*_ANY), (lot.one(1, 2, 3), lot.one(2, 5), 8 * lot.one(1, 2, 5))
    tensors = {"x": lot.randn(*shape, dtype=dtype), "weight": lot.randn(shape[-1], dtype=dtype)}
    outs = {"out": torch.empty_like(tensors["x"])}
    if lot.one(True, False):
        tensors["residual"] = lot.randn(*shape, dtype=dtype)
        outs["residual_out"] = torch.empty_like(tensors["x"])
    pairs = {(out, x) for out in outs for x in ("x", "residual") if x in tensors}
    return Case(
        "rms_norm", {**tensors, **outs}, {"eps": lot.one(0.0, 1e-6), "weight_offset": 1.0},
        outs=tuple(outs), in_place=frozenset(pairs), required=("x",),
    )  # fmt: skip


def _layer_norm(lot: Lot) -> Case:
    dtype, shape = lot.one(*_ANY), (lot.one(1, 2, 3), lot.one(2, 5), 8 * lot.one(1, 2, 5))
    parameters, kind = lot.one(dtype, torch.float32), lot.one(dtype, E4M3, torch.int8)
    x = lot.randn(*shape, dtype=dtype)
    weights = [(name, lot.randn(shape[-1], dtype=parameters)) for name in ("weight", "bias")]
    tensors = {"x": x, **lot.maybe(*weights)}
    options, outs = {"eps": lot.one(0.0, 1e-5)}, {"out": torch.empty_like(x, dtype=kind)}
    if kind is not dtype:
        outs["out_scale"] = x.new_empty(shape[:-1], dtype=torch.float32)
    if how := lot.one("", "before", "after"):
        tensors["residual"] = lot.randn(*shape, dtype=dtype)
        if how == "before" or kind is not dtype:
            outs["residual_out"] = torch.empty_like(x)
        options["adds_after"] = "residual_out" not in outs
    like = [out for out in outs if outs[out].dtype == dtype and out != "out_scale"]
    pairs = frozenset((out, y) for out in like for y in ("x", "residual") if y in tensors)
    tensors, options["out_dtype"] = {**tensors, **outs}, kind
    return Case("layer_norm", tensors, options, tuple(outs), (), pairs, ("x",))


def _gated(op: str, lot: Lot, options: dict[str, Any], parts: int = 2) -> Case:
    dtype, rows, size = lot.one(*_ANY), lot.one(1, 3, 7), lot.one(8, 16, 24)
    kind, x = lot.one(dtype, E4M3), lot.randn(rows, parts * size, dtype=dtype)
    outs = {"out": lot.randn(rows, size).to(kind)}
    if kind == E4M3:
        outs["out_scale"] = lot.randn(rows)
    options["out_dtype"] = kind
    in_place = frozenset({("out", "x")} if parts == 1 and kind == dtype else ())
    return Case(op, {"x": x, **outs}, options, tuple(outs), (), in_place, ("x",))


def _silu_and_mul(lot: Lot) -> Case:
    return _gated("silu_and_mul", lot, {})


def _gelu(lot: Lot) -> Case:
    return _gated("gelu", lot, {"approximate": lot.one("none", "tanh")}, parts=1)


def _gelu_and_mul(lot: Lot) -> Case:
    return _gated("gelu_and_mul", lot, {"approximate": lot.one("none", "tanh")})


def _swigluoai_and_mul(lot: Lot) -> Case:
    return _gated("swigluoai_and_mul", lot, {"interleaved": lot.one(True, False), "limit": 1.0})


def _quantize_e4m3(lot: Lot) -> Case:
    per, rows, size = lot.one("tensor", "row", "1x128", "128x128"), lot.one(1, 3, 130), 136
    x = lot.randn(rows, size, dtype=lot.one(*_ANY))
    shapes = {"tensor": (1,), "row": (rows,), "1x128": (rows, 2), "128x128": (-(-rows // 128), 2)}
    name, scale = lot.one("scale", "out_scale"), lot.randn(*shapes[per]).abs() + 0.1
    outs = ("out", "out_scale") if name == "out_scale" else ("out",)
    tensors = {"x": x, "out": x.to(E4M3), name: scale}
    return Case("quantize_e4m3", tensors, {"per": per}, outs, required=("x",))


def _rope(lot: Lot) -> Case:
    dtype, tokens, dim = lot.one(*_ANY), lot.one(1, 3, 5), lot.one(8, 16, 32)
    lead = lot.one((tokens,), (2, tokens))
    q = lot.randn(*lead, lot.one(2, 4), dim, dtype=dtype)
    k = lot.randn(*lead, lot.one(1, 2), dim, dtype=dtype)
    index = lot.one(torch.int32, torch.int64)
    places = lot.ints(*(lot.random.randrange(9) for _ in range(tokens)), dtype=index)
    return Case(
        "rope",
        {
            "q": q, "k": k, **tables(lot, 9, lot.one(dim, dim // 2), dtype),
            **lot.maybe(("positions", places)),
            "out_q": torch.empty_like(q), "out_k": torch.empty_like(k),
        },
        {"interleaved": lot.one(True, False)},
        outs=("out_q", "out_k"), in_place=frozenset({("out_q", "q"), ("out_k", "k")}),
        required=("q", "k", "cos", "sin"),
    )  # fmt: skip


def _merge_states(lot: Lot) -> Case:
    dtype, (b, s, h, d) = lot.one(*_ANY), (lot.one(1, 2), lot.one(1, 3), lot.one(1, 2), 8)
    tensors = {
        "out_a": lot.randn(b, s, h, d, dtype=dtype), "lse_a": lot.randn(b, h, s),
        "out_b": lot.randn(b, s, h, d, dtype=dtype), "lse_b": lot.randn(b, h, s),
        "out": lot.randn(b, s, h, d, dtype=dtype), "out_lse": lot.randn(b, h, s),
    }  # fmt: skip
    pairs = {("out", "out_a"), ("out", "out_b"), ("out_lse", "lse_a"), ("out_lse", "lse_b")}
    return Case(
        "merge_states", tensors, outs=("out", "out_lse"), in_place=frozenset(pairs),
        required=("out_a", "lse_a", "out_b", "lse_b"),
    )  # fmt: skip


def _linear(lot: Lot) -> Case:
    dtype, m, n, k = lot.one(*_ANY), lot.one(1, 3, 7), lot.one(8, 16), lot.one(8, 16, 64)
    to = lot.one(dtype, torch.float32)
    return Case(
        "linear",
        {
            "a": lot.randn(m, k, dtype=dtype), "b": lot.randn(n, k, dtype=dtype),
            **lot.maybe(("bias", lot.randn(n, dtype=dtype)),
                        ("residual", lot.randn(m, n, dtype=to))),
            "out": lot.randn(m, n, dtype=to),
        },
        {"activation": lot.one(None, "gelu", "silu", "relu"), "out_dtype": to},
        outs=("out",), in_place=frozenset({("out", "residual")}), required=("a", "b"),
    )  # fmt: skip


def _linear_fp8(lot: Lot) -> Case:
    m, n, k = lot.one(1, 3, 7), lot.one(8, 16), lot.one(16, 64)
    to = lot.one(*_ANY)
    scales = lot.one(
        {}, {"a_scale": lot.randn(m), "b_scale": lot.randn(1)},
        {"a_scale": lot.randn(m, 1), "b_scale": lot.randn(1, 1)}, {"b_scale": lot.randn(n)},
    )  # fmt: skip
    return Case(
        "linear",
        {
            "a": lot.randn(m, k).to(E4M3), "b": lot.randn(n, k).to(E4M3), **scales,
            **lot.maybe(("bias", lot.randn(n, dtype=to)), ("residual", lot.randn(m, n, dtype=to))),
            "out": lot.randn(m, n, dtype=to),
        },
        {"activation": lot.one(None, "relu"), "out_dtype": to},
        outs=("out",), in_place=frozenset({("out", "residual")}), required=("a", "b"),
    )  # fmt: skip


def _batched_matmul(lot: Lot) -> Case:
    dtype, m, n, k = lot.one(*_HALF), lot.one(1, 3, 7), lot.one(8, 16), lot.one(8, 32)
    tensors = {
        "a": lot.randn(3, m, k, dtype=dtype),
        "b": lot.randn(*lot.one((3,), (1,), ()), n, k, dtype=dtype),
        "out": lot.randn(3, m, n, dtype=dtype),
    }
    return Case("batched_matmul", tensors, outs=("out",), required=("a", "b"))


def _grouped_linear(lot: Lot) -> Case:
    dtype, m, n, k = lot.one(*_HALF), lot.one(4, 9), lot.one(8, 16), lot.one(8, 32)
    return Case(
        "grouped_linear",
        {
            "a": lot.randn(m, k, dtype=dtype), "b": lot.randn(3, n, k, dtype=dtype),
            "offsets": lot.ints(0, 1, 1, m), **lot.maybe(("bias", lot.randn(3, n, dtype=dtype))),
            "out": lot.randn(m, n, dtype=dtype),
        },
        {"activation": lot.one(None, "silu")},
        outs=("out",), required=("a", "b", "offsets"),
    )  # fmt: skip


def _qkv_linear(lot: Lot) -> Case:
    dtype, heads, kv_heads, dim, k = lot.one(*_HALF), lot.one(2, 4), lot.one(1, 2), 32, 16
    batch, seqlen = lot.one(1, 2), lot.one(1, 3)
    rows = (heads + 2 * kv_heads) * dim
    tensors = {
        "x": lot.randn(batch, seqlen, k, dtype=dtype), "w_qkv": lot.randn(rows, k, dtype=dtype),
        **lot.maybe(("bias", lot.randn(rows, dtype=dtype))),
        "out_q": lot.randn(batch, seqlen, heads, dim, dtype=dtype),
    }  # fmt: skip
    if lot.one(True, False):
        tensors |= tables(lot, 20, lot.one(16, 32), dtype)
        places = lot.ints(*range(batch * seqlen), dtype=torch.int64)
        tensors |= lot.maybe(("positions", places))
    outs: tuple[str, ...] = ("out_q",)
    caches: tuple[str, ...] = ()
    if lot.one(True, False):
        tensors |= lot.maybe(("q_norm_weight", lot.randn(dim)), ("k_norm_weight", lot.randn(dim)))
        caches = ("k_cache", "v_cache")
        tensors |= {name: lot.randn(3, 8, kv_heads, dim, dtype=dtype) for name in caches}
        tensors |= lot.one(
            {"slot_mapping": lot.ints(*range(batch * seqlen), dtype=torch.int64)},
            {"block_table": lot.ints(*range(batch)).view(batch, 1)},
        )
        tensors |= lot.maybe(("cache_seqlens", lot.ints(*[2] * batch)))
    else:
        outs += ("out_k", "out_v")
        shape = (batch, seqlen, kv_heads, dim)
        tensors |= {name: lot.randn(*shape, dtype=dtype) for name in ("out_k", "out_v")}
    return Case(
        "qkv_linear", tensors,
        {"num_heads": heads, "num_kv_heads": kv_heads, "interleaved": lot.one(True, False)},
        outs=outs, caches=caches, required=("x", "w_qkv"),
    )  # fmt: skip


def _flash_attention(lot: Lot) -> Case:
    dtype, heads, dim = lot.one(*_HALF), 4, lot.one(16, 32)
    dim_v = lot.one(dim, 16, 24)
    layout = "bshd"
    if lot.one(True, False):  # lengths on the device
        q_shape, kv_shape = (9, heads, dim), (11, 2, dim)
        tables = {"cu_seqlens_q": lot.ints(0, 4, 9), "cu_seqlens_k": lot.ints(0, 6, 11)}
    else:
        layout = lot.one("bshd", "bhsd")
        q_shape, kv_shape = (2, 5, heads, dim), (2, 7, 2, dim)
        if layout == "bhsd":
            q_shape, kv_shape = (2, heads, 5, dim), (2, 2, 7, dim)
        tables = lot.maybe(("cache_seqlens", lot.ints(3, 7)))
    sinks = lot.randn(heads, dtype=lot.one(*_ANY))
    tables |= lot.maybe(("alibi_slopes", lot.randn(heads)), ("sinks", sinks))
    return Case(
        "flash_attention",
        {
            "q": lot.randn(*q_shape, dtype=dtype), "k": lot.randn(*kv_shape, dtype=dtype),
            "v": lot.randn(*kv_shape[:-1], dim_v, dtype=dtype), **tables,
            "out": lot.randn(*q_shape[:-1], dim_v, dtype=dtype),
        },
        {"causal": lot.one(True, False), "layout": layout, "return_lse": lot.one(True, False)},
        outs=("out",), required=("q", "k", "v"), differentiable=("q", "k", "v"),
    )  # fmt: skip


def _flash_attention_fp8(lot: Lot) -> Case:
    q, kv = (2, 5, 4, 16), (2, 7, 2, 16)
    tensors = {name: lot.randn(*shape).to(E4M3) for name, shape in (("q", q), ("k", kv), ("v", kv))}
    scale = lot.randn(1).abs() + 0.1
    tensors |= lot.maybe(("q_scale", scale), ("k_scale", scale + 1), ("v_scale", scale + 2))
    tensors["out"] = lot.randn(*q, dtype=lot.one(*_HALF))
    return Case("flash_attention", tensors, outs=("out",), required=("q", "k", "v"))


def _flash_attention_qkvpacked(lot: Lot) -> Case:
    dtype, heads, kv_heads, dim = lot.one(*_HALF), 4, 2, 16
    lead, tables = lot.one(((2, 5), {}), ((9,), {"cu_seqlens": lot.ints(0, 4, 9)}))
    options: dict[str, Any] = {"causal": lot.one(True, False)}
    if lot.one(True, False):
        qkv = lot.randn(*lead, heads + 2 * kv_heads, dim, dtype=dtype)
        options |= {"num_heads": heads, "num_kv_heads": kv_heads}
    else:
        qkv = lot.randn(*lead, 3, heads, dim, dtype=dtype)
    return Case(
        "flash_attention_qkvpacked",
        {"qkv": qkv, **tables,
         **lot.maybe(("alibi_slopes", lot.randn(heads)), ("sinks", lot.randn(heads))),
         "out": lot.randn(*lead, heads, dim, dtype=dtype)},
        options, outs=("out",), required=("qkv",), differentiable=("qkv",),
    )  # fmt: skip


# By the name of the op, or of a second way through it.
CASES: dict[str, Callable[[Lot], Case]] = {
    **CACHES,
    **GATED,
    **MOE,
    **SOFTMAX,
    **TOKENS,
    "append_kv": append_kv,
    "batched_matmul": _batched_matmul,
    "decode_attention": decode_attention,
    "flash_attention": _flash_attention,
    "flash_attention fp8": _flash_attention_fp8,
    "flash_attention_qkvpacked": _flash_attention_qkvpacked,
    "gelu": _gelu,
    "gelu_and_mul": _gelu_and_mul,
    "grouped_linear": _grouped_linear,
    "linear": _linear,
    "linear fp8": _linear_fp8,
    "merge_states": _merge_states,
    "qkv_linear": _qkv_linear,
    "layer_norm": _layer_norm,
    "quantize_e4m3": _quantize_e4m3,
    "relu_squared": lambda lot: _gated("relu_squared", lot, {}, parts=1),
    "rms_norm": _rms_norm,
    "rope": _rope,
    "sample": call_sample,
    "sample_slice": call_slice,
    "silu_and_mul": _silu_and_mul,
    "swigluoai_and_mul": _swigluoai_and_mul,
    "verify_draft": call_verify,
    "verify_tree": call_tree,
}
# An op without a case fails wherever these are asked.
NAMES = sorted({*ops.__all__, *CASES})


def draw(name: str, seed: int, device: str = "cpu") -> Case:
    """The call of this name and seed, the same each time."""
    return CASES[name](Lot(name, seed, device))
