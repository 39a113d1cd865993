"""Draws from logits by torch, with the very numbers of csrc/sampling: the same ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

MASS_BITS = 40
_MOST = torch.finfo(torch.float32).max
_LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453
_POWER = (
    0.00015461447765119374, 0.0013390866806730628, 0.009618056938052177, 0.055503569543361664,
    0.24022650718688965, 0.6931471824645996, 1.0,
)  # fmt: skip
_WORD = (1 << 32) - 1


def random_bits(seed: int, offset: int, use: int = 0) -> int:
    """64 bits, others for each use: the first two words of Philox-4x32-10."""
    key = [seed & _WORD, seed >> 32 & _WORD]
    c = [offset & _WORD, offset >> 32 & _WORD, use, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b >> 32 ^ c[1] ^ key[0], b & _WORD, a >> 32 ^ c[3] ^ key[1], a & _WORD]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return c[1] << 32 | c[0]


def _split_power(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(2^part, whole) of x = whole + part, part in [-0.5, 0.5]."""
    rounded = x.round()
    part = (x - rounded).double()
    y = torch.full_like(x, _POWER[0])
    for term in _POWER[1:]:
        # Products of two floats are exact in doubles: a fused step but for one in 2^29.
        y = (y.double() * part + torch.tensor(term, dtype=torch.float32).double()).float()
    return y, rounded.int()


def masses_of(depth: torch.Tensor) -> torch.Tensor:
    y, whole = _split_power(depth.clamp(min=-60.0))
    bits = y.view(torch.int32)
    shift = 127 - (bits >> 23) - whole
    mantissa = ((bits & 0x7FFFFF) | 0x800000).long()
    return mantissa << (MASS_BITS - 23) >> shift.long()


def _capped(z: torch.Tensor, cap: float) -> torch.Tensor:
    ratio = z / cap
    e = _split_power((ratio.abs() * (-2.0 * _fp32(_LOG2E))).clamp(min=-120.0))
    e = torch.ldexp(*e)
    y = (1.0 - e) / (1.0 + e) * cap
    return torch.where(ratio > 0, y, torch.where(ratio < 0, -y, ratio))


def _fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def _has_bit(words: torch.Tensor, size: int) -> torch.Tensor:
    found = words[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1
    return found.flatten(1)[:, :size].bool()


def _column(x: torch.Tensor) -> torch.Tensor:
    return x[:, None]


def values_of(given: Any, masked: bool) -> torch.Tensor:
    """What rows are drawn from, before the temperature; excluded are -inf."""
    z = given.logits.float()
    size = z.shape[1]
    if given.softcap:
        z = _capped(z, _fp32(given.softcap))
    if given.bias is not None:
        z = z + given.bias
    counts = given.output_counts
    if counts is not None or given.prompt_bitmask is not None:
        old = torch.zeros_like(z, dtype=torch.bool) if counts is None else counts > 0
        if given.prompt_bitmask is not None:
            old = old | _has_bit(given.prompt_bitmask, size)
        if given.repetition_penalty is not None:
            penalty = _column(given.repetition_penalty)
            z = torch.where(old, torch.where(z > 0, z / penalty, z * penalty), z)
        if counts is not None and given.frequency_penalty is not None:
            less = z - _column(given.frequency_penalty) * counts.float()
            z = torch.where(counts > 0, less, z)
        if counts is not None and given.presence_penalty is not None:
            z = torch.where(counts > 0, z - _column(given.presence_penalty), z)
    z = torch.where(z.isnan(), -torch.inf, z)
    if masked and given.token_bitmask is not None:
        z = torch.where(_has_bit(given.token_bitmask, size), z, -torch.inf)
    return z


def depths(
    z: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, greedy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log2 of probabilities to the row's largest, (batch, size), and what a logit is there."""
    scale = (torch.tensor(_LOG2E) / temperature).clamp(max=_MOST)
    scale = _column(torch.where(greedy, 1.0, scale))
    most = _column(largest).clamp(-_MOST, _MOST)
    return (z.clamp(max=_MOST) - most).clamp(min=-_MOST) * scale, scale


def least_depth(min_p: torch.Tensor) -> torch.Tensor:
    """Below which min_p keeps nothing; -inf where it keeps all."""
    return torch.where(min_p > 0, min_p.clamp(max=1).double().log2().float(), -torch.inf)


class Drawn(NamedTuple):
    """What rows are drawn by."""

    values: torch.Tensor
    greedy: torch.Tensor  # (batch,)
    depth: torch.Tensor  # log2 of probabilities to the largest
    masses: torch.Tensor  # int64; 0 of what is not kept
    kept: torch.Tensor


def weigh(given: Any) -> Drawn:
    """The values of rows, and which are kept."""
    z = values_of(given, True)
    size = z.shape[1]
    nothing = (z == -torch.inf).all(1)
    z = torch.where(_column(nothing), values_of(given, False), z)
    none = torch.zeros(len(z))
    temperature = none + 1 if given.temperature is None else given.temperature
    greedy = ~(temperature > 0) | nothing
    depth, _ = depths(z, z.amax(1), temperature, greedy)
    min_p = none if given.min_p is None else given.min_p
    least = least_depth(min_p)
    kept = (z > -torch.inf) & (depth >= _column(least))
    masses = torch.where(kept, masses_of(depth), 0)

    ascending, order = z.sort(1)
    place = torch.searchsorted(ascending, z, right=True)
    if given.top_k is not None:
        k = _column(given.top_k)
        kept &= (k <= 0) | (k >= size) | (size - place < k)
    if given.top_p is not None:
        p = _column(given.top_p)
        total = torch.where(kept, masses, 0).sum(1, keepdim=True)
        needed = (p.double() * total.double()).ceil().clamp(1, 2.0**62)
        after = masses.gather(1, order).flip(1).cumsum(1).flip(1)
        above = torch.nn.functional.pad(after, (0, 1)).gather(1, place)
        kept &= ~(p < 1) | (above < needed.nan_to_num(nan=1.0).long())
    return Drawn(z, greedy, depth, torch.where(kept, masses, 0), kept)


def _write_top(given: Any, row: int, logprobs: torch.Tensor, order: torch.Tensor) -> None:
    """The most probable of a row: order, of all that is kept."""
    n = given.out_top_ids.shape[1]
    if given.top_n is not None:
        n = min(n, max(int(given.top_n[row]), 0))
    best = order[:n]
    given.out_top_ids[row], given.out_top_logprobs[row] = -1, -torch.inf
    given.out_top_ids[row, : len(best)] = best
    given.out_top_logprobs[row, : len(best)] = logprobs[best]


def sample_into(given: Any) -> None:
    """Write the ids, and log probabilities where they are asked for."""
    drawn = weigh(given)
    places = torch.arange(drawn.values.shape[1])
    first = torch.where(drawn.values == drawn.values.amax(1, keepdim=True), places, 1 << 62)
    sums = drawn.masses.cumsum(1)
    for row in range(len(sums)):
        if drawn.greedy[row]:
            found, logprob = int(first[row].min()), 0.0
            kept, logprobs = torch.tensor([found]), torch.zeros(sums.shape[1])
        else:
            seed, offset = (
                0 if each is None else int(each[row]) for each in (given.seed, given.offset)
            )
            total = int(sums[row, -1])
            number = total * random_bits(seed, offset) >> 64
            found = int(torch.searchsorted(sums[row], number, right=True))
            of_largest = torch.tensor(float(total)) / 2.0**MASS_BITS
            logprobs = drawn.depth[row] * _fp32(_LN2) - of_largest.log()
            logprob = float(logprobs[found])
            kept = drawn.values[row].sort(descending=True, stable=True).indices
            kept = kept[drawn.kept[row][kept]]
        given.out[row] = found
        if given.out_logprob is not None:
            given.out_logprob[row] = logprob
        if given.out_top_ids is not None:
            _write_top(given, row, logprobs, kept)
