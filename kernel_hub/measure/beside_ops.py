"""What `kernel-hub bench OP` times: each op's sizes, its inputs, and who else computes the same.

A peer of an op is asked for once, on the first inputs, and imports what it needs then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import ops
from ..testing import reference
from .beside_op import Inputs, Op, Peer, Run, Sizes, Tensors
from .beside_rows import ROWS
from .demo import rotary_table


def _liger_norm() -> Run:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return lambda i: rms_norm_forward(i["x"], i["weight"], 1e-6, 0.0, "llama", True)[0]


def _flashinfer_norm() -> Run:
    from flashinfer.norm import rmsnorm

    return lambda i: rmsnorm(i["x"], i["weight"], 1e-6)


def _flashinfer_silu() -> Run:
    from flashinfer.activation import silu_and_mul

    return lambda i: silu_and_mul(i["x"])


def _flashinfer_gelu() -> Run:
    from flashinfer.activation import gelu_and_mul

    return lambda i: gelu_and_mul(i["x"])


def _gated(op: Any, activation: Any, flashinfer: Peer) -> Op:
    return Op(
        {"tokens": 8192, "intermediate": 14336},
        lambda s, t: {"x": t.normal(s["tokens"], 2 * s["intermediate"])},
        lambda i: op(i["x"]),
        lambda i: activation(i["x"].chunk(2, -1)[0]) * i["x"].chunk(2, -1)[1],
        {"flashinfer": flashinfer},
    )


def _clamped_gate(x: torch.Tensor) -> torch.Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def _flashinfer_merge() -> Run:
    from flashinfer.cascade import merge_state

    return lambda i: merge_state(i["out_a"], i["log2_a"], i["out_b"], i["log2_b"])[0]


def _sdpa(i: Inputs, causal: bool) -> torch.Tensor:
    q, k, v = (i[name].transpose(1, 2) for name in "qkv")
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    return out.transpose(1, 2)


def _backend(backend: SDPBackend, causal: bool) -> Peer:
    def run(i: Inputs) -> torch.Tensor:
        with sdpa_kernel(backend):
            return _sdpa(i, causal)

    return lambda: run


def _flash_attn(causal: bool) -> Peer:
    def make() -> Run:
        from flash_attn import flash_attn_func

        return lambda i: flash_attn_func(i["q"], i["k"], i["v"], causal=causal)

    return make


def _flash_attn_3(causal: bool) -> Peer:
    def make() -> Run:
        from flash_attn_interface import flash_attn_func

        def run(i: Inputs) -> Any:
            out = flash_attn_func(i["q"], i["k"], i["v"], causal=causal)
            return out[0] if isinstance(out, tuple) else out

        return run

    return make


def _attention_peers(causal: bool) -> dict[str, Peer]:
    return {
        "cudnn": _backend(SDPBackend.CUDNN_ATTENTION, causal),
        "flash": _backend(SDPBackend.FLASH_ATTENTION, causal),
        "flash-attn": _flash_attn(causal),
        "flash-attn-3": _flash_attn_3(causal),
    }


def _grouped_mm() -> Run:
    return lambda i: torch._grouped_mm(i["a"], i["b"].transpose(-1, -2), i["ends"])


def _each_group(i: Inputs) -> torch.Tensor:
    rows = i["a"].split(len(i["a"]) // len(i["b"]))
    return torch.cat([x @ w.T for x, w in zip(rows, i["b"], strict=True)])


def _rotated(x: torch.Tensor, i: Inputs) -> torch.Tensor:
    return reference.rope(x, i["cos"], i["sin"], i["positions"], dtype=x.dtype)


def _qkv(i: Inputs) -> tuple[torch.Tensor, ...]:
    heads, kv_heads, dim = i["num_heads"], i["num_kv_heads"], 2 * i["cos"].shape[-1]
    out = (i["x"] @ i["w"].T).unflatten(-1, (heads + 2 * kv_heads, dim))
    q, k, v = out.split((heads, kv_heads, kv_heads), -2)
    return _rotated(q, i), _rotated(k, i), v


def _append(i: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    for cache, new in ((i["k_cache"], i["k"]), (i["v_cache"], i["v"])):
        cache.flatten(0, 1)[i["slots"]] = new
    return i["k_cache"], i["v_cache"]


def _append_ours(i: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    ops.append_kv(i["k"], i["v"], i["k_cache"], i["v_cache"], slot_mapping=i["slots"])
    return i["k_cache"], i["v_cache"]


def _make_append(s: Sizes, t: Tensors) -> Inputs:
    new, pages = (s["tokens"], s["kv_heads"], s["head_dim"]), -(-4 * s["tokens"] // s["page"])
    caches = {f"{n}_cache": t.normal(pages, s["page"], *new[1:]) for n in "kv"}
    return {"k": t.normal(*new), "v": t.normal(*new), **caches, "slots": 3 * t.count(s["tokens"])}


def _make_attention(s: Sizes, t: Tensors) -> Inputs:
    heads = {"q": s["heads"], "k": s["kv_heads"], "v": s["kv_heads"]}
    return {n: t.normal(s["batch"], s["seqlen"], heads[n], s["head_dim"]) for n in "qkv"}


def _make_decode(s: Sizes, t: Tensors) -> Inputs:
    kv = {n: t.normal(s["batch"], s["seqlen"], s["kv_heads"], s["head_dim"]) for n in "kv"}
    q = t.normal(s["batch"], 1, s["heads"], s["head_dim"])
    return {"q": q, **kv, "lengths": t.full(s["batch"], s["seqlen"])}


def _make_mla(s: Sizes, t: Tensors) -> Inputs:
    q, kv = t.normal(s["batch"], 1, s["heads"], 576), t.normal(s["batch"], s["seqlen"], 576)
    return {"q": q, "kv": kv, "lengths": t.full(s["batch"], s["seqlen"])}


def _mla(i: Inputs) -> torch.Tensor:
    scores = i["q"][:, 0] @ i["kv"].transpose(1, 2) * 192**-0.5
    return (torch.softmax(scores, -1) @ i["kv"][..., :512])[:, None]


def _make_rope(s: Sizes, t: Tensors) -> Inputs:
    q, k = (t.normal(s["tokens"], s[n], s["head_dim"]) for n in ("heads", "kv_heads"))
    tables = rotary_table(s["tokens"], s["head_dim"], t.device)
    return {"q": q, "k": k, **tables, "positions": t.count(s["tokens"])}


def _make_qkv(s: Sizes, t: Tensors) -> Inputs:
    n = (s["heads"] + 2 * s["kv_heads"]) * s["head_dim"]
    return {
        "x": t.normal(s["tokens"], s["hidden"]), "w": t.weight(n, s["hidden"]),
        **rotary_table(s["tokens"], s["head_dim"], t.device), "positions": t.count(s["tokens"]),
        "num_heads": s["heads"], "num_kv_heads": s["kv_heads"],
    }  # fmt: skip


def _make_grouped(s: Sizes, t: Tensors) -> Inputs:
    each = max(1, s["tokens"] // s["groups"])
    ends = each * (t.count(s["groups"], torch.int32) + 1)
    return {
        "a": t.normal(each * s["groups"], s["k"]), "b": t.weight(s["groups"], s["n"], s["k"]),
        "ends": ends, "offsets": functional.pad(ends, (1, 0)),
    }  # fmt: skip


def _make_states(s: Sizes, t: Tensors) -> Inputs:
    made: Inputs = {}
    for side in "ab":
        made[f"out_{side}"] = t.normal(s["tokens"], s["heads"], s["head_dim"])
        lse = t.fp32(s["heads"], s["tokens"])
        made |= {f"lse_{side}": lse, f"log2_{side}": lse.T.contiguous() / math.log(2)}
    return made


def _states(run: Callable[..., Any], **more: Any) -> Run:
    return lambda i: run(i["out_a"], i["lse_a"], i["out_b"], i["lse_b"], **more)


_HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128}
_PRODUCT = {"m": 8192, "n": 4096, "k": 4096}


def _product_flops(s: Sizes) -> int:
    return 2 * s["m"] * s["n"] * s["k"]


def _causal_flops(s: Sizes) -> int:
    """Query i of a sequence sees i + 1 keys: two products for each pair."""
    pairs = s["seqlen"] * (s["seqlen"] + 1) // 2
    return 4 * s["batch"] * pairs * s["heads"] * s["head_dim"]


OPS: dict[str, Op] = {
    **ROWS,
    "rms_norm": Op(
        {"tokens": 8192, "hidden": 4096},
        lambda s, t: {"x": t.normal(s["tokens"], s["hidden"]), "weight": t.normal(s["hidden"])},
        lambda i: ops.rms_norm(i["x"], i["weight"]),
        lambda i: functional.rms_norm(i["x"], i["weight"].shape, i["weight"], 1e-6),
        {"liger": _liger_norm, "flashinfer": _flashinfer_norm},
    ),
    "layer_norm": Op(
        {"tokens": 8192, "hidden": 4096},
        lambda s, t: {
            "x": t.normal(s["tokens"], s["hidden"]), "weight": t.normal(s["hidden"]),
            "bias": t.normal(s["hidden"]),
        },
        lambda i: ops.layer_norm(i["x"], i["weight"], i["bias"]),
        lambda i: functional.layer_norm(i["x"], i["weight"].shape, i["weight"], i["bias"], 1e-5),
    ),
    "silu_and_mul": _gated(ops.silu_and_mul, functional.silu, _flashinfer_silu),
    "gelu": Op(
        {"tokens": 8192, "hidden": 14336},
        lambda s, t: {"x": t.normal(s["tokens"], s["hidden"])},
        lambda i: ops.gelu(i["x"]),
        lambda i: functional.gelu(i["x"]),
    ),
    "relu_squared": Op(
        {"tokens": 8192, "hidden": 14336},
        lambda s, t: {"x": t.normal(s["tokens"], s["hidden"])},
        lambda i: ops.relu_squared(i["x"]),
        lambda i: torch.relu(i["x"]).square(),
    ),
    "gelu_and_mul": _gated(ops.gelu_and_mul, functional.gelu, _flashinfer_gelu),
    "quantize_e4m3": Op(
        {"tokens": 8192, "hidden": 4096},
        # By powers of 2 that are given: all round alike.
        lambda s, t: {
            "x": t.normal(s["tokens"], s["hidden"]), "scale": t.fp32(s["tokens"]).fill_(2.0**-6)
        },
        lambda i: ops.quantize_e4m3(i["x"], i["scale"]),
        lambda i: (i["x"].float() / i["scale"][:, None]).clamp(-448, 448).to(torch.float8_e4m3fn),
    ),
    "swigluoai_and_mul": Op(
        {"tokens": 8192, "intermediate": 2880},
        lambda s, t: {"x": t.normal(s["tokens"], 2 * s["intermediate"])},
        lambda i: ops.swigluoai_and_mul(i["x"]),
        lambda i: _clamped_gate(i["x"]),
    ),
    "sample": Op(
        {"batch": 128, "vocabulary": 128256},
        # Greedy: draws differ from one to the other.
        lambda s, t: {
            "x": t.normal(s["batch"], s["vocabulary"]), "temperature": t.fp32(s["batch"]).zero_(),
            "seed": t.count(s["batch"]),
        },
        lambda i: ops.sample(i["x"], temperature=i["temperature"], seed=i["seed"]),
        lambda i: i["x"].argmax(-1),
    ),
    "rope": Op(
        {"tokens": 8192, **_HEADS},
        _make_rope,
        lambda i: ops.rope(i["q"], i["k"], i["cos"], i["sin"], i["positions"]),
        lambda i: (_rotated(i["q"], i), _rotated(i["k"], i)),
    ),
    "append_kv": Op(
        {"tokens": 8192, "kv_heads": 8, "head_dim": 128, "page": 16},
        _make_append, _append_ours, _append,
    ),
    "merge_states": Op(
        {"tokens": 8192, "heads": 32, "head_dim": 128},
        _make_states,
        lambda i: _states(ops.merge_states)(i)[0],
        lambda i: _states(reference.merge_states, dtype=i["out_a"].dtype)(i)[0],
        {"flashinfer": _flashinfer_merge},
    ),
    "flash_attention": Op(
        {"batch": 8, "seqlen": 1024, **_HEADS},
        _make_attention,
        lambda i: ops.flash_attention(i["q"], i["k"], i["v"], causal=True),
        lambda i: _sdpa(i, True),
        _attention_peers(True), _causal_flops,
    ),
    "flash_attention_qkvpacked": Op(
        {"batch": 8, "seqlen": 1024, "heads": 32, "head_dim": 128},
        lambda s, t: {"qkv": t.normal(s["batch"], s["seqlen"], 3, s["heads"], s["head_dim"])},
        lambda i: ops.flash_attention_qkvpacked(i["qkv"], causal=True),
        lambda i: _sdpa(dict(zip("qkv", i["qkv"].unbind(2), strict=True)), True),
        flops=_causal_flops,
    ),
    "decode_attention": Op(
        {"batch": 16, "seqlen": 8192, **_HEADS},
        _make_decode,
        lambda i: ops.decode_attention(i["q"], i["k"], i["v"], cache_seqlens=i["lengths"]),
        lambda i: _sdpa(i, False),
        _attention_peers(False),
    ),
    "mla_decode": Op(
        {"batch": 64, "seqlen": 4096, "heads": 16}, _make_mla,
        lambda i: ops.mla_decode(
            i["q"], i["kv"], cache_seqlens=i["lengths"], softmax_scale=192**-0.5
        ),
        _mla,
    ),
    "linear": Op(
        _PRODUCT,
        lambda s, t: {"a": t.normal(s["m"], s["k"]), "b": t.weight(s["n"], s["k"])},
        lambda i: ops.linear(i["a"], i["b"]),
        lambda i: functional.linear(i["a"], i["b"]),
        flops=_product_flops,
    ),
    "swiglu_linear": Op(
        {"m": 8192, "n": 28672, "k": 4096},
        lambda s, t: {"a": t.normal(s["m"], s["k"]), "b": t.weight(s["n"], s["k"])},
        lambda i: ops.swiglu_linear(i["a"], i["b"]),
        lambda i: reference.silu_and_mul(i["a"] @ i["b"].T, dtype=i["a"].dtype),
        flops=_product_flops,
    ),
    "gated_linear": Op(
        {"m": 8192, "n": 28672, "k": 3584},
        lambda s, t: {"a": t.normal(s["m"], s["k"]), "b": t.weight(s["n"], s["k"])},
        lambda i: ops.gated_linear(i["a"], i["b"], "gelu_tanh"),
        lambda i: reference.gelu_and_mul(
            i["a"] @ i["b"].T, approximate="tanh", dtype=i["a"].dtype
        ),
        flops=_product_flops,
    ),
    "qkv_linear": Op(
        {"tokens": 2048, "hidden": 4096, **_HEADS},
        _make_qkv,
        lambda i: ops.qkv_linear(
            i["x"], i["w"], None, i["cos"], i["sin"], i["positions"],
            num_heads=i["num_heads"], num_kv_heads=i["num_kv_heads"],
        ),
        _qkv,
        flops=lambda s: (
            2 * s["tokens"] * s["hidden"] * (s["heads"] + 2 * s["kv_heads"]) * s["head_dim"]
        ),
    ),
    "grouped_linear": Op(
        {"groups": 8, "tokens": 8192, "n": 4096, "k": 4096},
        _make_grouped,
        lambda i: ops.grouped_linear(i["a"], i["b"], i["offsets"]),
        _each_group,
        {"torch._grouped_mm": _grouped_mm},
        lambda s: 2 * s["tokens"] * s["n"] * s["k"],
    ),
    "batched_matmul": Op(
        {"batch": 64, "m": 512, "n": 512, "k": 128},
        lambda s, t: {"a": t.normal(s["batch"], s["m"], s["k"]),
                      "b": t.normal(s["batch"], s["n"], s["k"])},
        lambda i: ops.batched_matmul(i["a"], i["b"]),
        lambda i: i["a"] @ i["b"].transpose(-1, -2),
        flops=lambda s: s["batch"] * _product_flops(s),
    ),
}  # fmt: skip
