"""What replaced modules do: the same as their classes' forwards, by ops.

Each falls back to the forward of its class where the ops do not go: gradients (they have no
backward), autocast, another dtype than the weights'. Knows nothing of which modules are replaced.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from ...ops import (
    gated_linear,
    gelu_and_mul,
    linear,
    qkv_linear,
    rms_norm,
    rope,
    silu_and_mul,
    swiglu_linear,
)
from . import counts
from .families import CACHES
from .fused import Fused

STATE = "_kernel_hub"
# Gates as gelu_and_mul names its GELU -> as gated_linear does.
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}


@dataclass
class Replaced:
    """What the forward of a replaced module knows."""

    op: str
    fused: tuple[Fused, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


def state_of(module: torch.nn.Module) -> Replaced:
    """What `accelerate` left with a module that it replaced."""
    return module.__dict__[STATE]


def reason_to_pass(
    module: Any, x: torch.Tensor, weight: torch.Tensor, state: Replaced
) -> str | None:
    """Why this call is not for the ops; None: it is."""
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return "gradients"
    if torch.is_autocast_enabled("cuda" if x.is_cuda else x.device.type):
        return "autocast"
    if x.dtype is not weight.dtype or x.device != weight.device:
        return f"x of {x.dtype} on {x.device}, weights of {weight.dtype} on {weight.device}"
    if x.numel() == 0:
        return "no tokens"
    for fused in state.fused:
        if not fused.is_current():
            return "weights that were moved since accelerate()"
    return None


def original(module: Any, reason: str, *args: Any, **kwargs: Any) -> Any:
    """The forward of its class; counts why."""
    counts.passed(type(module).__name__, reason)
    return type(module).forward(module, *args, **kwargs)


def norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """RMSNorm of every family: weight (+ 1) times rows over their root mean square."""
    state, weight = state_of(self), self.weight  # once: a module looks for it in three tables
    reason = reason_to_pass(self, hidden_states, weight, state)
    if reason is not None:
        return original(self, reason, hidden_states)
    counts.took("rms_norm")
    return rms_norm(even_rows(hidden_states, 2), weight, **state.details)


def linear_forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    """torch.nn.Linear."""
    weight = self.weight
    reason = reason_to_pass(self, input, weight, state_of(self))
    if reason is not None:
        return original(self, reason, input)
    counts.took("linear")
    return linear(even_rows(input), weight, self.bias)


def mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A gated MLP: down_proj(act_fn(gate_proj(x)) * up_proj(x))."""
    state = state_of(self)
    reason = reason_to_pass(self, x, self.gate_proj.weight, state)
    if reason is not None:
        return original(self, reason, x)
    counts.took(state.op)
    (fused,) = state.fused
    if state.op == "swiglu_linear":
        joined = swiglu_linear(even_rows(x), fused.weight)
    elif state.op == "gated_linear":
        joined = gated_linear(even_rows(x), fused.weight, _GELUS[state.details["gate"]])
    else:
        joined = gated(linear(even_rows(x), fused.weight, fused.bias), state.details["gate"])
    return self.down_proj(joined)


def gated(joined: torch.Tensor, gate: str) -> torch.Tensor:
    """The activation `gate` of the first half of each row times the second; "silu" or a way to
    approximate GELU."""
    if gate == "silu":
        return silu_and_mul(joined)
    return gelu_and_mul(joined, approximate=gate)


def attention_forward(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, Any]:
    """Projections, norms of queries and keys, rotation, the cache, attention as configured."""
    state = state_of(self)
    names = state.details["parameters"]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    hidden_states = given["hidden_states"]
    cos, sin = given.get("position_embeddings") or (None, None)
    reason = reason_to_pass(self, hidden_states, self.q_proj.weight, state)
    if reason is None and (cos is None or not _rotates_whole(cos, hidden_states, self.head_dim)):
        reason = "another rotation"
    if reason is None and any(name in kwargs and name not in names for name in CACHES):
        reason = "a cache by the name of another transformers"
    if reason is not None:
        return original(self, reason, *args, **kwargs)
    q, k, v = _projected(self, state, hidden_states, cos, sin)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    options = {name: value for name, value in given.items() if name not in names}
    cache = given.get(state.details["cache"])
    if cache is not None:
        more: tuple[Any, ...] = ()
        if state.details["cache_kwargs"]:
            more = ({"sin": sin, "cos": cos, "cache_position": given.get("cache_position")},)
        told = {"kwargs": {**options}} if state.details["cache"] == CACHES[0] else {}
        k, v = cache.update(k, v, self.layer_idx, *more, **told)
    window = state.details["window"]
    if window == "own":
        options["sliding_window"] = self.sliding_window
    elif window == "config":
        options["sliding_window"] = getattr(self.config, "sliding_window", None)
    if state.details["softcap"]:
        options["softcap"] = self.attn_logit_softcapping
    out, weights = _attention_of(self)(
        self, q, k, v, given.get("attention_mask"),
        dropout=self.attention_dropout if self.training else 0.0, scaling=self.scaling, **options,
    )  # fmt: skip
    return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


def _attention_of(module: Any) -> Any:
    """What config._attn_implementation names, as the class's own forward finds it."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = module.config._attn_implementation
    if name is None or name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _rotates_whole(cos: torch.Tensor, x: torch.Tensor, head_dim: int) -> bool:
    """Whether angles are (batch_size or 1, seqlen, head_dim): of whole heads, of every token."""
    return (
        cos.dim() == 3
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1:] == (x.shape[1], head_dim)
        and cos.dtype in (x.dtype, torch.float32)
        and x.dim() == 3
    )


def _projected(
    self: Any, state: Replaced, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, and values: (batch_size, seqlen, heads, head_dim) each."""
    heads = (*x.shape[:-1], -1, self.head_dim)
    if state.fused:
        (fused,) = state.fused
        sizes = [size // self.head_dim for size in fused.sizes]
        if state.op == "qkv_linear":
            counts.took("qkv_linear")
            half_cos, half_sin, positions = rotation_tables(cos, sin)
            norms: dict[str, Any] = {}
            if state.details["norm"] == "head":
                norms = {"q_norm_weight": self.q_norm.weight, "k_norm_weight": self.k_norm.weight}
            found: Any = qkv_linear(
                even_rows(x), fused.weight, num_heads=sizes[0], num_kv_heads=sizes[1],
                bias=fused.bias, cos=half_cos, sin=half_sin, positions=positions,
                **norms, **state.details["norm_details"],
            )  # fmt: skip
            return found
        counts.took("linear")
        q, k, v = linear(even_rows(x), fused.weight, fused.bias).split(fused.sizes, -1)
    else:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    if state.details["norm"] == "whole":
        q, k = self.q_norm(q), self.k_norm(k)
    q, k, v = q.view(heads), k.view(heads), v.view(heads)
    if state.details["norm"] == "head":
        q, k = self.q_norm(q), self.k_norm(k)
    counts.took("rope")
    q, k = rope(q, k, cos, sin)
    return q, k, v


def rotation_tables(
    cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(cos, sin, positions) as qkv_linear takes them, of a row a token and both halves."""
    rows, seqlen, head_dim = cos.shape
    half = head_dim // 2
    if rows == 1:
        return cos[0, :, :half], sin[0, :, :half], None
    positions = None if torch.compiler.is_compiling() else getattr(cos, "_kernel_hub_rows", None)
    if positions is None:
        numbers = torch.arange(rows * seqlen, dtype=torch.int32, device=cos.device)
        positions = numbers.view(rows, seqlen)
        if not torch.compiler.is_compiling():
            cos._kernel_hub_rows = positions  # once for all layers
    return cos.reshape(-1, head_dim)[:, :half], sin.reshape(-1, head_dim)[:, :half], positions


def even_rows(x: torch.Tensor, groups: int = 1) -> torch.Tensor:
    """x with rows as ops take them: the last dimension contiguous, the leading ones in at most
    `groups` that are evenly spaced."""
    if x.is_contiguous():
        return x
    if x.stride(-1) == 1:
        leading = [pair for pair in zip(x.shape, x.stride(), strict=True) if pair[0] != 1][:-1]
        breaks = sum(a[1] != b[0] * b[1] for a, b in itertools.pairwise(leading))
        if x.shape[-1] > 1 and breaks < groups:
            return x
    return x.contiguous()
