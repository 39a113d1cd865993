"""Mixtures of experts: what the forwards of routers, experts and whole blocks do instead."""

from __future__ import annotations

from typing import Any

import torch

from ...ops import grouped_linear, linear, moe_combine, moe_permute, moe_route
from . import counts
from .forwards import even_rows, gated, original, reason_to_pass, state_of

OPS = "moe_permute, grouped_linear, moe_combine"
_LAYERS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def layers_of(expert: Any) -> tuple[str, str, str] | None:
    """The names of an expert's gate, up and down layers; None: not known."""
    return next((names for names in _LAYERS if all(hasattr(expert, n) for n in names)), None)


def unfit_sizes(gate_up: torch.Tensor, down: torch.Tensor) -> str | None:
    """Why weights are not those of gated experts, (experts, 2 * size, hidden_size) and (experts,
    hidden_size, size); None: they are."""
    experts, rows, hidden_size = gate_up.shape
    if down.shape != (experts, hidden_size, rows // 2) or rows % 2:
        return f"weights of {tuple(gate_up.shape)} and {tuple(down.shape)}"
    if hidden_size % 8 or (rows // 2) % 8:
        return f"sizes {hidden_size} and {rows // 2}: multiples of 8 are taken"
    return None


def unlike(groups: tuple[list[Any], ...]) -> str | None:
    """Why layers of experts cannot be one matrix a group; None: they can."""
    for layers in groups:
        kinds = {(x.in_features, x.out_features, x.weight.dtype, x.weight.device) for x in layers}
        if len(kinds) > 1:
            return "experts differ in sizes, dtype or device"
    return None


def router_forward(self: Any, hidden_states: torch.Tensor) -> Any:
    """Logits, weights and experts of each token."""
    state = state_of(self)
    reason = reason_to_pass(self, hidden_states, self.weight, state)
    if reason is not None:
        return original(self, reason, hidden_states)
    counts.took("moe_route")
    logits = linear(even_rows(hidden_states.reshape(-1, self.hidden_dim)), self.weight)
    weights, experts = moe_route(logits, self.top_k, renormalise=state.details["renormalise"])
    return logits, weights, experts


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts."""
    state = state_of(self)
    reason = reason_to_pass(self, hidden_states, self.gate_up_proj, state)
    if reason is not None:
        return original(self, reason, hidden_states, top_k_index.long(), top_k_weights)
    counts.took("moe_permute")
    return _mixed(
        hidden_states, top_k_weights, top_k_index, self.gate_up_proj, self.down_proj,
        state.details["gate"],
    )  # fmt: skip


def block_forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Router and experts, as transformers before 5 has them; also the router's logits."""
    state = state_of(self)
    gate_up, down = state.fused
    reason = reason_to_pass(self, hidden_states, gate_up.linears[0].weight, state)
    if reason is None and self.training and getattr(self, "jitter_noise", 0):
        reason = "jitter of the router"
    if reason is not None:
        return original(self, reason, hidden_states)
    counts.took("moe_route")
    counts.took("moe_permute")
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = self.gate(x)
    weights, experts = moe_route(logits, self.top_k, renormalise=state.details["renormalise"])
    count = len(self.experts)
    out = _mixed(
        x, weights, experts, gate_up.weight.view(count, -1, x.shape[-1]),
        down.weight.view(count, x.shape[-1], -1), state.details["gate"],
    )  # fmt: skip
    return out.view(hidden_states.shape), logits


def _mixed(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor, gate: str,
) -> torch.Tensor:  # fmt: skip
    """Rows sorted by expert, both products, and each token's weighted sum."""
    rows, offsets, row_id_map = moe_permute(even_rows(x), experts.int(), gate_up.shape[0])
    inner = gated(grouped_linear(rows, gate_up, offsets), gate)
    found = grouped_linear(inner, down, offsets)
    return moe_combine(found, row_id_map, weights.float())
