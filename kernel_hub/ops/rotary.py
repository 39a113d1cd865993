"""Makers of the tables that rotating ops take: of every rope_type of transformers, of several axes.

In torch, once a model or a forward, on any device; knows no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import TensorError
from .core import common

_OP = "rotary"
_ALIASES = {"mrope": "default", "su": "longrope"}  # older names in models' files


class Frequencies(NamedTuple):
    """How fast each pair of a head turns."""

    inv_freq: torch.Tensor  # (rotary_dim // 2,), fp32, radians a position
    attention_factor: float  # what cosines and sines are multiplied by


class _Problem(NamedTuple):
    """What each rope_type is computed from."""

    parameters: Mapping[str, Any]
    theta: float
    head_dim: int
    rotary_dim: int
    max_position_embeddings: int | None
    seqlen: int | None
    device: torch.device | str | None

    def number(self, name: str) -> float:
        return common.check_number(_OP, name, self.parameters.get(name))

    @property
    def longest(self) -> int:
        if self.max_position_embeddings is None:
            raise common.refuse(_OP, "max_position_embeddings", "a whole number", None)
        return self.max_position_embeddings

    @property
    def original(self) -> int:
        """Positions that the model was first trained on."""
        found = self.parameters.get("original_max_position_embeddings")
        return self.longest if found is None else found

    @property
    def factor(self) -> float:
        """How many times as many positions there are now."""
        if self.parameters.get("factor") is None:
            return self.longest / self.original
        return self.number("factor")

    def exponents(self, of: int, count: int) -> torch.Tensor:
        """2j / of for pairs j below count, in fp32."""
        return torch.arange(0, 2 * count, 2, device=self.device).float() / of

    def plain(self) -> torch.Tensor:
        """theta ** (-2j / rotary_dim)."""
        return 1.0 / self.theta ** self.exponents(self.rotary_dim, self.rotary_dim // 2)


# NOTE: in fp32 and in transformers' order: a last bit of inv_freq is 0.01 rad at position 100,000.


def _default(p: _Problem) -> Frequencies:
    return Frequencies(p.plain(), 1.0)


def _linear(p: _Problem) -> Frequencies:
    return Frequencies(p.plain() / p.number("factor"), 1.0)


def _dynamic(p: _Problem) -> Frequencies:
    """A greater theta for more positions than the model was made for ("NTK-aware")."""
    factor, longest = p.number("factor"), p.longest
    stretched = factor * max(p.seqlen or 0, longest) / longest - (factor - 1)
    theta = p.theta * stretched ** (p.rotary_dim / (p.rotary_dim - 2))
    return Frequencies(p._replace(theta=theta).plain(), 1.0)


def _mscale(factor: float, slope: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0


def _yarn(p: _Problem) -> Frequencies:
    """Fast pairs as they are, slow ones divided by the factor, a ramp between."""
    dim, factor, get = p.rotary_dim, p.factor, p.parameters.get
    attention_factor = get("attention_factor")
    if attention_factor is None:
        slopes = get("mscale"), get("mscale_all_dim")
        if slopes[0] and slopes[1]:
            attention_factor = _mscale(factor, slopes[0]) / _mscale(factor, slopes[1])
        else:
            attention_factor = _mscale(factor)
    # Pairs that turn beta_fast, and beta_slow times over the original positions.
    ends = [
        dim * math.log(p.original / (turns * 2 * math.pi)) / (2 * math.log(p.theta))
        for turns in (get("beta_fast") or 32, get("beta_slow") or 1)
    ]
    if get("truncate", True):
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], dim - 1)
    width = high - low if high != low else 0.001
    steps = torch.arange(dim // 2, dtype=torch.float32, device=p.device)
    as_it_is = 1 - ((steps - low) / width).clamp(0, 1)
    wavelengths = p.theta ** p.exponents(dim, dim // 2)
    divided = 1.0 / (factor * wavelengths)
    inv_freq = divided * (1 - as_it_is) + 1.0 / wavelengths * as_it_is
    return Frequencies(inv_freq, float(attention_factor))


def _longrope(p: _Problem) -> Frequencies:
    """A divisor for each pair, of two lists: to the original positions, and beyond."""
    factor, attention_factor = p.factor, p.parameters.get("attention_factor")
    if attention_factor is None:
        more = math.log(factor) / math.log(p.original) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + more)
    name = "long_factor" if p.seqlen and p.seqlen > p.original else "short_factor"
    divisors, pairs = p.parameters.get(name), p.rotary_dim // 2
    if not isinstance(divisors, Sequence) or len(divisors) != pairs:
        raise common.refuse(_OP, name, f"{pairs} numbers, one a pair", f"{divisors!r:.60}")
    divided = torch.tensor(divisors, dtype=torch.float32, device=p.device)
    inv_freq = 1.0 / (divided * p.theta ** p.exponents(p.rotary_dim, pairs))
    return Frequencies(inv_freq, float(attention_factor))


def _llama3(p: _Problem) -> Frequencies:
    """Short wavelengths as they are, long ones times the factor, between them a mixture."""
    factor, inv_freq = p.number("factor"), p.plain()
    low, high = p.number("low_freq_factor"), p.number("high_freq_factor")
    wavelengths = 2 * math.pi / inv_freq
    share = (p.original / wavelengths - low) / (high - low)
    mixed = (1 - share) * inv_freq / factor + share * inv_freq
    slow = torch.where(wavelengths > p.original / low, inv_freq / factor, mixed)
    return Frequencies(torch.where(wavelengths < p.original / high, inv_freq, slow), 1.0)


def _proportional(p: _Problem) -> Frequencies:
    """All of the head in the table, but of its pairs only the first part turns."""
    turning = int(p.parameters.get("partial_rotary_factor", 1.0) * p.head_dim // 2)
    inv_freq = torch.zeros(p.head_dim // 2, device=p.device)
    inv_freq[:turning] = 1.0 / p.theta ** p.exponents(p.head_dim, turning)
    factor = p.parameters.get("factor")
    return Frequencies(inv_freq if factor is None else inv_freq / factor, 1.0)


_KINDS: Mapping[str, Callable[[_Problem], Frequencies]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn,
    "longrope": _longrope, "llama3": _llama3, "proportional": _proportional,
}  # fmt: skip


def frequencies(
    parameters: Mapping[str, Any], head_dim: int, *, max_position_embeddings: int | None = None,
    seqlen: int | None = None, device: torch.device | str | None = None,
) -> Frequencies:  # fmt: skip
    """The frequencies of a model, equal to transformers' own to the last bit.

    parameters: a model's `rope_parameters` (transformers 5), or its `rope_scaling` with its
        `rope_theta` (4): `rope_type` (default, linear, dynamic, yarn, longrope, llama3 or
        proportional), `rope_theta`, `partial_rotary_factor` and what the type needs.
    max_position_embeddings: of the model; dynamic needs it, yarn and longrope where `parameters`
        lack the factor or the original positions.
    seqlen: of the longest sequence; dynamic and longrope turn otherwise beyond a length.

    Returns (inv_freq, attention_factor). Raises TensorError naming the parameter that does not fit.
    Source: Su et al., 2021; Peng et al., "YaRN", 2023; Ding et al., "LongRoPE", 2024; Grattafiori
    et al., "The Llama 3 Herd of Models", 2024.
    """
    if not isinstance(parameters, Mapping):
        raise common.refuse(_OP, "parameters", "a mapping", f"{parameters!r:.60}")
    head_dim = common.check_count(_OP, "head_dim", head_dim, least=2)
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = common.check_choice(_OP, "rope_type", _ALIASES.get(name, name), _KINDS)
    part = common.check_number(
        _OP, "partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0)
    )
    theta = common.check_number(_OP, "rope_theta", parameters.get("rope_theta"))
    rotary_dim = int(head_dim * part)
    return kind(
        _Problem(parameters, theta, head_dim, rotary_dim, max_position_embeddings, seqlen, device)
    )


def frequencies_of(
    config: Any, *, layer_type: str | None = None, seqlen: int | None = None,
    device: torch.device | str | None = None,
) -> Frequencies:  # fmt: skip
    """`frequencies` as a model's configuration of transformers says (4.53 to 5.24).

    layer_type: whose, where kinds of layers differ ("sliding_attention").
    """
    heads = getattr(config, "num_attention_heads", None)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    longest = getattr(config, "max_position_embeddings", None)
    found = getattr(config, "rope_parameters", None)
    if found is None:
        found = _parameters_of_4(config, longest)
    elif layer_type is not None:
        found = common.check_choice(_OP, "layer_type", layer_type, found)
    return frequencies(
        found, head_dim, max_position_embeddings=longest, seqlen=seqlen, device=device
    )


def _parameters_of_4(config: Any, longest: Any) -> dict[str, Any]:
    """Of a configuration of transformers 4, which takes some of them from elsewhere."""
    found = {
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": getattr(config, "partial_rotary_factor", 1.0),
        **(getattr(config, "rope_scaling", None) or {}),
    }
    name = found.get("rope_type") or found.get("type")
    if name == "longrope":
        found["original_max_position_embeddings"] = getattr(
            config, "original_max_position_embeddings", None
        )
    original = found.get("original_max_position_embeddings")
    if name in ("yarn", "longrope") and original is not None:
        found["factor"] = longest / original
    return found


def tables(
    found: Frequencies, max_position: int, *, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin (max_position, rotary_dim // 2), as `ops.rope` and its kin look positions up in."""
    max_position = common.check_count(_OP, "max_position", max_position)
    positions = torch.arange(max_position, device=found.inv_freq.device)
    return _turned(positions[:, None].float() * found.inv_freq, found, dtype)


def embeddings(
    found: Frequencies, positions: torch.Tensor, *, mrope_section: Sequence[int] | None = None,
    mrope_interleaved: bool = False, dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """cos, sin (batch, seqlen, rotary_dim) of these positions, both halves alike: what models of
    transformers hand to their layers, and what `ops.rope` takes.

    positions: (batch, seqlen), or with several axes (num_axes, batch, seqlen), as Qwen2-VL's time,
        height and width.
    mrope_section: pairs of each axis, together rotary_dim // 2; with axes alone.
    mrope_interleaved: False: the first pairs turn by the first axis, the next by the second
        (Qwen2-VL); True: by turns, and by the first where another's are used up (Qwen3-VL).
    """
    common.check_tensor(_OP, "positions", positions)
    pairs = found.inv_freq.shape[0]
    if (positions.dim() == 2) != (mrope_section is None) or positions.dim() not in (2, 3):
        expected = (
            "(batch, seqlen), or (num_axes, batch, seqlen) with the mrope_section of each axis"
        )
        raise common.refuse(_OP, "positions", expected, positions)
    angles = positions[..., None].float() * found.inv_freq.to(positions.device)
    if mrope_section is not None:
        axes = _axes(mrope_section, positions.shape[0], pairs, mrope_interleaved)
        angles = angles[axes, ..., torch.arange(pairs)].movedim(0, -1)
    return _turned(torch.cat((angles, angles), -1), found, dtype)


def _axes(sections: Sequence[int], num_axes: int, pairs: int, interleaved: bool) -> torch.Tensor:
    """The axis that each pair turns by."""
    if len(sections) != num_axes or sum(sections) != pairs:
        raise TensorError(
            f"{_OP}: mrope_section: expected {num_axes} numbers, one an axis of positions, that "
            f"are together {pairs} = rotary_dim // 2, found {tuple(sections)}"
        )
    if not interleaved:
        return torch.repeat_interleave(torch.arange(num_axes), torch.tensor(sections))
    axes = torch.arange(pairs) % num_axes
    ends = num_axes * torch.tensor(sections)
    return torch.where(torch.arange(pairs) < ends[axes], axes, 0)


def _turned(
    angles: torch.Tensor, found: Frequencies, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    factor = found.attention_factor
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
