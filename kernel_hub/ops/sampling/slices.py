"""What a rank says of its slice of the vocabulary, by torch on the CPU, with the very numbers of
csrc/sampling/sample_slice.cu."""

from __future__ import annotations

from typing import Any

import torch

from . import cpu

LISTED = 256  # values of a row, and as many tokens
HEAD = 10  # ints before them
SUMMARY_INTS = HEAD + 2 * LISTED
# Of the head: floats by their bits; the last two are the words of a mass.
NUM, BOUND, LARGEST, FIRST, MOST, FIRST_OF_ALL, DRAWN, _, REST_LOW, REST_HIGH = range(HEAD)
_USE = 1 << 31  # of random bits: `sample` uses 0


def sum_up(given: Any, first_token: int) -> None:
    """Write given.out."""
    out, z = given.out, cpu.values_of(given, True)
    batch, size = z.shape
    top = z.topk(min(LISTED + 1, size), 1).values
    bound = top[:, LISTED] if size > LISTED else torch.full((batch,), -torch.inf)
    listed = z > bound[:, None]
    out[:] = 0
    out[:, DRAWN] = -1
    out[:, NUM] = listed.sum(1)
    # Of -0 there is none.
    out[:, BOUND] = (bound + 0.0).view(torch.int32)
    nothing = (z == -torch.inf).all(1, keepdim=True)
    of_all = torch.where(nothing, cpu.values_of(given, False), z)
    for values, at in ((z, LARGEST), (of_all, MOST)):
        largest, first = values.max(1)
        out[:, at] = (largest + 0.0).view(torch.int32)
        out[:, at + 1] = torch.where(largest > -torch.inf, first + first_token, -1)
    values = torch.full((batch, LISTED), -torch.inf)
    tokens = torch.full((batch, LISTED), -1, dtype=torch.int32)
    for row in range(batch):
        places = listed[row].nonzero()[:, 0]
        values[row, : len(places)] = z[row, places]
        tokens[row, : len(places)] = places.int() + first_token
    out[:, HEAD : HEAD + LISTED] = values.view(torch.int32)
    out[:, HEAD + LISTED :] = tokens
    _draw_from_rest(given, z, z <= bound[:, None], first_token)


def _draw_from_rest(given: Any, z: torch.Tensor, is_rest: torch.Tensor, first_token: int) -> None:
    temperature = torch.ones(len(z)) if given.temperature is None else given.temperature
    greedy = ~(temperature > 0)
    masses = cpu.masses_of(cpu.depths(z, z.amax(1), temperature, greedy)[0])
    sums = torch.where(is_rest & ~greedy[:, None], masses, 0).cumsum(1)
    for row, rest in enumerate(sums[:, -1].tolist()):
        given.out[row, REST_LOW] = (rest & 0xFFFFFFFF) - (rest << 1 & 1 << 32)
        given.out[row, REST_HIGH] = rest >> 32
        if rest:
            seed, offset = (0 if x is None else int(x[row]) for x in (given.seed, given.offset))
            number = rest * cpu.random_bits(seed, offset, _USE | first_token) >> 64
            found = int(torch.searchsorted(sums[row], number, right=True))
            given.out[row, DRAWN] = first_token + found
