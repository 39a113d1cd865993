"""Which of transformers' classes are known, and how to tell that one is still what it was.

Knows names and shapes of modules; launches nothing and changes nothing.
"""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any

import torch

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ATTENTION = frozenset(
    f"{family}{version}"
    for family, versions in {
        "Gemma": ("", "2", "3"),
        "Llama": ("",),
        "Mistral": ("",),
        "Mixtral": ("",),
        "Olmo": ("2",),
        "Qwen": ("2", "3", "3Moe"),
    }.items()
    for version in versions
)
NORMS = frozenset(f"{stem}RMSNorm" for stem in _ATTENTION)
ATTENTIONS = frozenset(f"{stem}Attention" for stem in _ATTENTION)
MLPS = frozenset(f"{stem}MLP" for stem in _ATTENTION - {"Mixtral"})
MOE_BLOCKS = frozenset({"MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock"})
# What forwards call the cache, newest transformers first: since 5.24, before it, until 4.56.
CACHES = ("cache", "past_key_values", "past_key_value")
NORM_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Their norms are of weight + 1.
_OFFSET_NORMS = frozenset({"GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm"})
# They give attention the window of the model's configuration, others their own.
_CONFIG_WINDOW = frozenset({"MistralAttention", "MixtralAttention"})
_PARTS_OF_INTEREST = ("Norm", "Attention", "MLP", "Mlp", "Experts", "MoeBlock", "Linear")

# Every name that forwards of these classes use, in transformers 4.53 to 5.24: a forward with
# another one does something that is not known here.
_KNOWN_NAMES = {
    "norm": """_norm dtype eps float float32 mean pow rsqrt to torch type_as variance_epsilon
    weight""",
    "mlp": """act_fn down_proj gate_proj up_proj w1 w2 w3""",
    "attention": """ALL_ATTENTION_FUNCTIONS _attn_implementation apply_rotary_pos_emb
    attention_dropout attn_logit_softcapping config contiguous eager_attention_forward get_interface
    getattr head_dim k_norm k_proj layer_idx o_proj q_norm q_proj reshape scaling shape
    sliding_window training transpose update v_proj view""",
    "moe_block": """gate experts view shape reshape training jitter_noise torch empty_like uniform_
    F softmax float topk top_k sum to dtype zeros device nn functional one_hot num_experts
    permute greater nonzero where index_add_ squeeze norm_topk_prob""",
    "experts": """torch zeros_like no_grad nn functional one_hot num_experts permute greater sum
    nonzero where linear gate_up_proj chunk act_fn down_proj index_add_ to dtype""",
    "router": """reshape hidden_dim F linear weight torch nn functional softmax float dtype topk
    top_k norm_topk_prob sum to""",
}  # fmt: skip
_GATES = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "none",
    "PytorchGELUTanh": "tanh", "GELUTanh": "tanh",
}  # fmt: skip


def code_of(module: torch.nn.Module) -> CodeType | None:
    """The code of the forward of its class, without decorators."""
    function = inspect.unwrap(type(module).forward)
    return getattr(function, "__code__", None)


def stranger(module: torch.nn.Module, kind: str) -> str | None:
    """Why `module`, whose class has a known name, is not what that name stood for; None: it is."""
    cls = type(module)
    if not cls.__module__.startswith("transformers.models."):
        return f"class of {cls.__module__}, not of transformers.models"
    if "forward" in vars(module):
        return "its forward is replaced by something else already"
    code = code_of(module)
    if code is None:
        return "its forward is no Python function"
    unknown = sorted(set(code.co_names).difference(_KNOWN_NAMES[kind].split()))
    if unknown:
        return f"its forward uses {', '.join(unknown)}, which this version does not know"
    return None


def weight_offset(module: torch.nn.Module) -> float:
    """What a norm adds to its weight."""
    return 1.0 if type(module).__name__ in _OFFSET_NORMS else 0.0


def eps_of(norm: Any) -> float | None:
    """Epsilon of a norm, under either of its names."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return eps if isinstance(eps, float) else None


def window_from_config(module: torch.nn.Module) -> bool:
    """Whether its window is that of the model's configuration."""
    return type(module).__name__ in _CONFIG_WINDOW


def is_of_interest(module: torch.nn.Module) -> bool:
    """Whether a user would ask why it was left alone."""
    name = type(module).__name__
    return any(part in name for part in _PARTS_OF_INTEREST)


def gate_of(activation: Any) -> str | None:
    """An MLP's activation, torch's or transformers' class of it: "silu", or as gelu_and_mul names
    its GELU, "tanh" or "none"; None where it is another."""
    if isinstance(activation, torch.nn.GELU):
        return activation.approximate
    return _GATES.get(type(activation).__name__)


def unfit_weight(
    name: str, weight: Any, dtypes: tuple[torch.dtype, ...], shared: set[int]
) -> str | None:
    """Why a weight is not taken; None: it is a plain one of `dtypes` on a GPU or the CPU.

    shared: addresses of memory that more than one parameter has.
    """
    if type(weight) is not torch.nn.Parameter or type(weight.data) is not torch.Tensor:
        return f"{name}: {type(weight).__name__}: sharded, quantised or no plain parameter"
    if weight.device.type not in ("cuda", "cpu"):
        return f"{name} on {weight.device}: sharded or offloaded"
    if weight.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = str(weight.dtype).removeprefix("torch.")
        return f"dtype {found} of {name}: {names} are taken"
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return f"{name} is not contiguous at a multiple of 16 bytes"
    if weight.untyped_storage().data_ptr() in shared:
        return f"{name} is tied: another parameter has its memory"
    return None


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether something wants to see the calls of a module."""
    return any(getattr(module, hooks, None) for hooks in _HOOKS)


def unfit_norm(norm: Any, shared: set[int]) -> str | None:
    """Why a norm is not taken; None: its class, epsilon and weight are known ones."""
    reason = stranger(norm, "norm")
    if reason is None and eps_of(norm) is None:
        reason = "it has no epsilon of a known name"
    return reason or unfit_weight("weight", norm.weight, NORM_DTYPES, shared)


def unfit_linear(
    name: str, linear: Any, dtypes: tuple[torch.dtype, ...], shared: set[int]
) -> str | None:
    """Why a linear layer is not taken; None: it is torch's own, with a weight that is.

    name: what its parent calls it; empty where the reason is said of itself.
    """
    layer, prefix = name or "it", f"{name}." if name else ""
    if type(linear) is not torch.nn.Linear:
        return f"{layer} is a {type(linear).__name__}: quantised or an adapter"
    if "forward" in vars(linear):
        return f"{prefix}forward is replaced by something else already"
    if has_hooks(linear):
        return f"{layer} has hooks"
    if linear.in_features % 8:
        return f"{layer} has {linear.in_features} inputs: multiples of 8 are taken"
    reason = unfit_weight(f"{prefix}weight", linear.weight, dtypes, shared)
    if reason is None and linear.bias is not None:
        reason = unfit_weight(f"{prefix}bias", linear.bias, dtypes, shared)
        if reason is None and linear.bias.dtype is not linear.weight.dtype:
            reason = f"bias and weight of {layer} differ in dtype"
    return reason


def shared_memory(model: torch.nn.Module) -> set[int]:
    """Addresses of memory that more than one name of `model`'s parameters has."""
    seen: set[int] = set()
    shared: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        if type(parameter.data) is torch.Tensor and parameter.device.type in ("cuda", "cpu"):
            address = parameter.untyped_storage().data_ptr()
            (shared if address in seen else seen).add(address)
    return shared
