"""What a model is, as data: Hugging Face's config.json to one description of its layers.

Knows names and numbers of checkpoints; holds no weights and runs nothing.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import MissingPackageError, ModelError, listed, nearest

# Role of each norm of a layer -> its name in checkpoints.
_BEFORE = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_AFTER = {
    "attn_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_BOTH = {
    "attn_norm": "input_layernorm", **_AFTER, "mlp_norm": "pre_feedforward_layernorm",
}  # fmt: skip
_EXPERTS = ("mlp.gate", *(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")))
_MIXTRAL = ("block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.w{n}" for n in (1, 3, 2)))
_KINDS = {"full_attention", "sliding_attention"}  # of layers
_FROM_SHORTER = ("llama3", "yarn", "longrope")  # rotations that know the length before
_GEMMA: dict[str, Any] = {
    "norms": _BOTH, "norm_offset": 1.0, "scales_embedding": True,
    "defaults": {
        "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 8192, "vocab_size": 256000,
    },
}  # fmt: skip
_GEMMA3: dict[str, Any] = {
    **_GEMMA, "qk_norm": "head", "full_every": 6,
    "sizes": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    "defaults": {
        **_GEMMA["defaults"], "vocab_size": 262208, "max_position_embeddings": 131072,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
}  # fmt: skip
_QWEN = {
    "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
_BIG = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN_SIZES = {
    **_BIG, "intermediate_size": 22016, "vocab_size": 151936, "max_position_embeddings": 32768,
}  # fmt: skip
# model_type -> what differs from Llama. full_every: of that many layers the last has no window;
# sizes: what models that see leave to transformers' class in their text_config.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"sizes": {
        **_BIG, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 2048,
    }},
    "mistral": {
        "full_every": 0, "defaults": {"num_key_value_heads": 8, "sliding_window": 4096},
        "sizes": {
            **_BIG, "intermediate_size": 14336, "vocab_size": 32000,
            "max_position_embeddings": 131072,
        },
    },
    "mixtral": {"full_every": 0, "moe_names": _MIXTRAL, "defaults": {
        "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    }},
    "qwen2": {"qkv_bias": True, "sizes": _QWEN_SIZES, "defaults": _QWEN},
    "qwen3": {"qk_norm": "head", "sizes": _QWEN_SIZES, "defaults": {**_QWEN, "head_dim": 128}},
    "qwen3_moe": {"qk_norm": "head", "moe_names": _EXPERTS, "defaults": {
        **_QWEN, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": False,
    }},
    "olmo2": {"norms": _AFTER, "qk_norm": "whole", "defaults": {"rms_norm_eps": 1e-5}},
    "gemma2": {**_GEMMA, "full_every": 2, "caps_attention": True, "defaults": {
        **_GEMMA["defaults"], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    }},
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
}  # fmt: skip

NAMED: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "qwen3", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 2048,
    },
    "llama-3-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rope_theta": 5e5, "max_position_embeddings": 131072,
    },
    "llama-3-70b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "rope_theta": 5e5, "max_position_embeddings": 131072,
    },
}  # fmt: skip


@dataclass(frozen=True)
class LayerKind:
    """What differs from layer to layer."""

    window: int  # keys before its own that a token sees; -1: all
    rope: str | None  # whose table turns it, where kinds of layers have their own
    is_moe: bool


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and rules of a decoder; see docs/engine.md for how a layer is made of them."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    layers: tuple[LayerKind, ...]
    norms: Mapping[str, str]
    norm_offset: float
    eps: float
    qk_norm: str | None  # "head": of each head; "whole": of all at once
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    activation: str  # "silu" or "gelu_tanh"
    softmax_scale: float
    attn_softcap: float
    final_softcap: float
    embed_scale: float
    is_tied: bool
    moe_names: tuple[str, ...]  # router, gate, up, down; none without experts
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    renormalises: bool
    eos_token_ids: frozenset[int]
    raw: SimpleNamespace  # what tables of rotation are made from

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a config.json. Raises ModelError naming what is not known or missing."""
        outer_eos = config.get("eos_token_id")
        is_inside = "text_config" in config
        if is_inside:  # whose outside says what is tied; Gemma 3's also in silence
            outer = config
            config = {"model_type": outer.get("model_type"), **outer["text_config"]}
            if outer.get("model_type") == "gemma3" or "tie_word_embeddings" in outer:
                config["tie_word_embeddings"] = outer.get("tie_word_embeddings", True)
        kind = config.get("model_type")
        if kind not in FAMILIES:
            known = listed(nearest(kind, FAMILIES))
            raise ModelError(f"model_type {kind!r} is not one the engine runs; those are {known}")
        family = FAMILIES[kind]
        sizes = family.get("sizes", {}) if is_inside else {}
        config = {**family.get("defaults", {}), **sizes, **config}
        try:
            return _described(cls, config, family, config.get("eos_token_id", outer_eos))
        except ModelError:
            raise
        except KeyError as error:
            raise ModelError(f"config.json of a {kind} model lacks {error}") from None
        except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
            raise ModelError(f"config.json of a {kind} model is no such one: {error}") from None

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Of a model's folder; its generation_config.json may name more tokens that end a text."""
        config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.is_file() and (eos := read_json(generation).get("eos_token_id")) is not None:
            config = {**config, "eos_token_id": eos}
            config.get("text_config", {}).pop("eos_token_id", None)
        return cls.from_dict(config)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a model's folder."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        folder = path.parent
        raise ModelError(
            f"{folder} is no model's folder: it has no {path.name}{how_to_get(folder)}"
        ) from None
    except ValueError as error:
        raise ModelError(f"{path}: no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def how_to_get(folder: str | Path) -> str:
    """What to add to an error where a name is rather one of the hub's than a folder's."""
    is_name = re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(folder)) and not Path(folder).exists()
    return f"; hf download {folder} --local-dir {Path(folder).name} brings one" * bool(is_name)


def package(name: str, what: str) -> Any:
    """A package of the extra `engine`. Raises MissingPackageError saying what it is for."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        how = f"pip install {name} (or 'kernel_hub[engine]')"
        raise MissingPackageError(f"{what} by {name}: {how}") from error


def _described(cls: Any, config: dict[str, Any], family: dict[str, Any], eos: Any) -> Any:
    get, heads = config.get, config["num_attention_heads"]
    activation = get("hidden_activation") or get("hidden_act") or "silu"
    kinds = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if activation not in kinds:
        raise ModelError(f"activation {activation!r}: the engine knows {listed(kinds)}")
    moe = family.get("moe_names", ())
    head_dim = get("head_dim") or config["hidden_size"] // heads
    num_experts = (get("num_local_experts") or config["num_experts"]) if moe else 0
    has_o_bias = bool(get("attention_bias", False)) and not family.get("qkv_bias")
    scale = get("query_pre_attn_scalar") or head_dim
    if get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention: the engine's attention is causal")
    layers, longest = _layers(config, family), config["max_position_embeddings"]
    rope = config["rope_parameters"]
    if (rope.get("rope_type") or rope.get("type")) == "yarn":  # often in a file of the short model
        first = rope.get("original_max_position_embeddings") or 0
        longest = max(longest, int(float(rope.get("factor") or 1) * first))
    return cls(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        num_heads=heads,
        num_kv_heads=get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_position=longest,
        layers=layers,
        norms=family.get("norms", _BEFORE),
        norm_offset=family.get("norm_offset", 0.0),
        eps=float(get("rms_norm_eps", 1e-6)),
        qk_norm=family.get("qk_norm"),
        qkv_bias=family.get("qkv_bias", False) or has_o_bias,
        o_bias=has_o_bias,
        mlp_bias=bool(get("mlp_bias", False)),
        activation=kinds[activation],
        softmax_scale=scale**-0.5,
        # Gemma 3's own code looks past what its files may say of it.
        attn_softcap=float(get("attn_logit_softcapping") or 0.0) * family.get("caps_attention", 0),
        final_softcap=float(get("final_logit_softcapping") or 0.0),
        embed_scale=math.sqrt(config["hidden_size"]) if family.get("scales_embedding") else 1.0,
        is_tied=bool(get("tie_word_embeddings", False)),
        moe_names=moe,
        num_experts=num_experts,
        experts_per_token=config["num_experts_per_tok"] if moe else 0,
        moe_intermediate_size=get("moe_intermediate_size") or config["intermediate_size"],
        renormalises=bool(get("norm_topk_prob", True)),
        eos_token_ids=frozenset([eos] if isinstance(eos, int) else eos or ()),
        raw=SimpleNamespace(**config),
    )


def _layers(config: dict[str, Any], family: dict[str, Any]) -> tuple[LayerKind, ...]:
    """Windows, tables and experts of every layer; fills in rope_parameters of older files."""
    get, count = config.get, config["num_hidden_layers"]
    window = get("sliding_window") if get("use_sliding_window", True) else None
    first, every = count, family.get("full_every")  # the first layer with a window
    if every is not None:
        every, first = get("sliding_window_pattern") or get("_sliding_window_pattern") or every, 0
    elif get("use_sliding_window"):
        first = get("max_window_layers", 0) if config["model_type"] != "qwen3_moe" else 0
    types = get("layer_types") or [
        "sliding_attention" if i >= first and not (every and (i + 1) % every == 0)
        else "full_attention"
        for i in range(count)
    ]  # fmt: skip
    if not isinstance(types, list) or len(types) < count or set(types) - _KINDS:
        raise ModelError(
            f"layer_types: expected {count} of {listed(sorted(_KINDS))}, found {types}"
        )
    # Of an older file its own factor counts, which transformers 4 reckoned from two lengths.
    rope, theta = get("rope_parameters"), {"rope_theta": get("rope_theta") or 1e4}
    if not rope or get("rope_scaling"):  # the older one first, as in transformers
        rope, local = {**theta, **(get("rope_scaling") or {})}, get("rope_local_base_freq")
        if local:
            rope = {
                "full_attention": {"rope_type": "default", **rope},
                "sliding_attention": {"rope_theta": local},
            }
    own_tables = "full_attention" in rope
    if not own_tables:  # what stands outside counts too, and of two first lengths that one
        rope, name = {**theta, **rope}, rope.get("rope_type") or rope.get("type") or "default"
        part, first = get("partial_rotary_factor"), get("original_max_position_embeddings")
        if part is not None and name != "default":
            rope.setdefault("partial_rotary_factor", part)
        if first is not None and name in _FROM_SHORTER:
            rope["original_max_position_embeddings"] = first
    config["rope_parameters"] = rope
    dense, step = get("mlp_only_layers") or (), get("decoder_sparse_step", 1)
    return tuple(
        LayerKind(
            window - 1 if window and kind == "sliding_attention" else -1,
            kind if own_tables else None,
            "moe_names" in family and i not in dense and (i + 1) % step == 0,
        )
        for i, kind in enumerate(types[:count])
    )
