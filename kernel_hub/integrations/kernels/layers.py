"""Forwards that kernels puts in the place of others': their `self` is the module replaced.

Each is a class without state, as kernels demands: no constructor, no member but these.
"""

from __future__ import annotations

from typing import Any

import torch

from ...errors import TensorError
from ...ops import linear, rms_norm, rope, silu_and_mul
from ..transformers.forwards import even_rows

_PRODUCT_DTYPES = (torch.float16, torch.bfloat16)


class RMSNorm(torch.nn.Module):  # type: ignore[misc]
    """`rms_norm` for modules with `weight` and `variance_epsilon` (or `eps`)."""

    can_torch_compile = True
    has_backward = False

    def forward(self: Any, hidden_states: Any) -> Any:
        """hidden_states: (..., hidden_size), dtype and device of the weight."""
        eps = getattr(self, "variance_epsilon", None)
        if eps is None:
            eps = getattr(self, "eps", None)
        if eps is None:
            raise TensorError(
                f"RMSNorm in place of {type(self).__name__}: expected variance_epsilon or eps, "
                "found neither"
            )
        return rms_norm(even_rows(hidden_states, 2), self.weight, eps)


class SiluAndMul(torch.nn.Module):  # type: ignore[misc]
    """`silu_and_mul`."""

    can_torch_compile = True
    has_backward = False

    def forward(self: Any, x: Any) -> Any:
        """x: (..., 2 * size), gate, then up."""
        return silu_and_mul(even_rows(x, 2))


class Linear(torch.nn.Module):  # type: ignore[misc]
    """`linear` for modules with `weight` and `bias` in fp16 or bf16, torch for others."""

    can_torch_compile = True
    has_backward = False

    def forward(self: Any, input: Any) -> Any:
        """input: (..., in_features)."""
        if self.weight.dtype not in _PRODUCT_DTYPES or self.weight.shape[1] % 8:
            return torch.nn.functional.linear(input, self.weight, self.bias)
        return linear(even_rows(input), self.weight, self.bias)


class SwiGLUMLP(torch.nn.Module):  # type: ignore[misc]
    """`linear` and `silu_and_mul` for modules with gate_proj, up_proj and down_proj."""

    can_torch_compile = True
    has_backward = False

    def forward(self: Any, x: Any) -> Any:
        """x: (..., hidden_size)."""
        gate, up = self.gate_proj, self.up_proj
        if gate.weight.dtype not in _PRODUCT_DTYPES or x.shape[-1] % 8:
            joined = torch.cat((gate(x), up(x)), -1)
        else:
            rows = even_rows(x)
            joined = rows.new_empty((*rows.shape[:-1], 2 * gate.weight.shape[0]))
            first, second = joined.chunk(2, -1)
            linear(rows, gate.weight, gate.bias, out=first)
            linear(rows, up.weight, up.bias, out=second)
        return self.down_proj(silu_and_mul(joined))


class RotaryPosEmb(torch.nn.Module):  # type: ignore[misc]
    """`rope` under the arguments of transformers' apply_rotary_pos_emb."""

    can_torch_compile = True
    has_backward = False

    def forward(self: Any, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        """q, k: (batch_size, heads, seqlen, head_dim), or with unsqueeze_dim 2 (batch_size, seqlen,
        heads, head_dim); cos, sin: (batch_size or 1, seqlen, head_dim), both halves alike, or
        (batch_size or 1, seqlen, head_dim // 2), one of them, for the halves of a head (gpt-oss).

        Halves cannot be told from tables of neighbours that turn together (openai_privacy_filter),
        nor from those of a part of the head: leave such models out."""
        rotary_dim = q.shape[-1]
        if unsqueeze_dim == 2:
            return rope(q, k, cos, sin, rotary_dim=rotary_dim)
        q, k = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, rotary_dim=rotary_dim)
        return q.transpose(1, 2), k.transpose(1, 2)
