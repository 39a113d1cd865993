"""Draws where each of several ranks has a slice of the vocabulary: after an exchange of what
`ops.sample_slice` says of each, by `ops.sample`, of what is listed, and torch."""

from __future__ import annotations

from typing import Any

import torch

from .core import common
from .sampling import cpu, slices
from .sampling.given import SampleGiven, check_one
from .sampling.sample import sample

# How a draw lies to that of `ops.sample` of all logits; see `sample_slices`.
EXACT, NEAR, OTHER, CUT = range(4)

_OP = "sample_slices"
_BATCH = ("temperature", "top_k", "top_p", "min_p", "seed", "offset")


def sample_slices(
    summaries: torch.Tensor, vocab_size: int, *, seed: torch.Tensor,
    temperature: torch.Tensor | None = None, top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None, min_p: torch.Tensor | None = None,
    offset: torch.Tensor | None = None, return_logprob: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Draw a token of each row from what every rank has said of its slice of the vocabulary by
    `ops.sample_slice`: the same ids on every rank that calls it alike.

    summaries: (world_size, batch, 522) int32, contiguous: what `sample_slice` returned of every
        slice, in the order of their tokens, as an all-gather leaves it.
    vocab_size: of all slices together.
    seed, offset, temperature, top_k, top_p, min_p: (batch,), as `sample` takes them; seed,
        offset and temperature as `sample_slice` had them.

    Returns (ids, status), int64 and int32, and with return_logprob the logs of the probabilities
    with which they were drawn, fp32. status says of each row how its draw lies to that of
    `sample(all logits, ...)`:

        0   the same id and log: what is kept before top_p is listed. So of greedy rows; of top_k
            up to 256, with any min_p and top_p, unless as many equal the smallest that is kept
            that some of them are not listed; of a min_p that lets through what is listed alone;
            of slices of up to 256 tokens that may be drawn.
        1   the same but for rounding: of top_p without top_k and min_p, where what it keeps is
            listed. The mass of the rest is known to 1e-6: where a token's place is nearer than
            that to top_p it may be kept by one and not by the other.
        2   the same distribution, to 1e-6, by other numbers: all is kept, and a token that is not
            listed is the one that its rank has drawn.
        3   cut: more is kept than is listed (top_k above 256, a top_p or min_p that keeps more):
            drawn from what is listed alone, or, where not even the largest is, from all. To have
            such rows as `sample` draws them, gather their logits.

    CUDA tensors: some thirty launches of torch's and one of `sample`, without a wait of the host;
    a CUDA graph may hold them. Raises TensorError naming the argument that does not fit.
    """
    tensors = temperature, top_k, top_p, min_p, seed, offset
    common.check_flag(_OP, "return_logprob", return_logprob)
    _check(summaries, vocab_size, *tensors)
    drawn = _draw(summaries, vocab_size, *tensors)
    return drawn if return_logprob else drawn[:2]


def _check(summaries: Any, vocab_size: Any, *tensors: Any) -> None:
    common.check_tensor(_OP, "summaries", summaries)
    if summaries.dim() != 3 or summaries.shape[2] != slices.SUMMARY_INTS or not len(summaries):
        expected = f"shape (world_size, batch, {slices.SUMMARY_INTS}), at least one slice"
        raise common.refuse(_OP, "summaries", expected, summaries)
    if summaries.dtype != torch.int32 or not summaries.is_contiguous():
        raise common.refuse(_OP, "summaries", "a contiguous tensor of dtype int32", summaries)
    common.check_whole(_OP, "vocab_size", vocab_size, least=1)
    given = SampleGiven(summaries, **dict(zip(_BATCH, tensors, strict=True)))
    for name in _BATCH:
        check_one(_OP, given, name, (summaries.shape[1],))
    if given.seed is None:
        raise common.refuse(_OP, "seed", "seeds that all ranks share", "None")


def _draw(
    summaries: torch.Tensor, vocab_size: int, temperature: torch.Tensor | None,
    top_k: torch.Tensor | None, top_p: torch.Tensor | None, min_p: torch.Tensor | None,
    seed: torch.Tensor, offset: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """ids, status and logs of probabilities, as `sample_slices` has them."""
    batch_size = summaries.shape[1]
    device = summaries.device
    heads = summaries[..., : slices.HEAD]
    floats = heads.view(torch.float32)
    z = _of_rows(summaries[..., slices.HEAD : -slices.LISTED].view(torch.float32))
    tokens = _of_rows(summaries[..., -slices.LISTED :])
    bound, largest = floats[..., slices.BOUND].amax(0), floats[..., slices.LARGEST].amax(0)
    nothing = largest == -torch.inf

    def given(x: torch.Tensor | None, none: float) -> torch.Tensor:
        return torch.full((batch_size,), none, device=device) if x is None else x

    t, p, m, k = given(temperature, 1.0), given(top_p, 1.0), given(min_p, 0.0), given(top_k, 0.0)
    greedy = ~(t > 0)
    has_p, has_m, has_k = p < 1, m > 0, (k > 0) & (k < vocab_size)
    depth, scale = cpu.depths(z, largest, t, greedy)
    # Of the largest, nearly: what a token weighs, what those do that are surely the largest, and
    # the rest of each slice.
    masses, is_above = depth.double().exp2(), z > bound[:, None]
    listed, above = masses.sum(1), torch.where(is_above, masses, 0.0).sum(1)
    rest = (heads[..., slices.REST_HIGH].long() << 32) + (
        heads[..., slices.REST_LOW].long() & 0xFFFFFFFF
    )
    below = cpu.depths(floats[..., slices.LARGEST].T, largest, t, greedy)[0]
    rests = rest.T.double() * (below.double() - cpu.MASS_BITS).exp2()  # (batch, world_size)
    of_bound = cpu.depths(bound[:, None], largest, t, greedy)[0][:, 0]
    exact = (
        greedy | nothing | (bound == -torch.inf) | (has_k & (is_above.sum(1) >= k))
        | (of_bound < cpu.least_depth(m))
    )  # fmt: skip
    total = listed + rests.sum(1)
    is_free = ~exact & ~has_k & ~has_m
    hidden = ~exact & (bound >= largest)
    near = is_free & has_p & ~hidden & (above >= p.double() * total)
    whole = (is_free & ~has_p) | hidden
    status = torch.where(
        exact, EXACT, torch.where(near, NEAR, torch.where(whole & ~hidden, OTHER, CUT))
    )

    # The rest of a rank as one more token, where it is to be drawn from.
    of_rests = largest[:, None] + (rests.log2() / scale.double()).float()
    of_rests = torch.where(whole[:, None] & (rests > 0), of_rests, -torch.inf)
    of_listed = (p.double() * (total / listed)).float()  # what top_p of all is
    drawn = sample(
        torch.cat([z, of_rests], 1), temperature=t,
        top_k=torch.where(has_k & ~whole, k, 0).int(),
        top_p=torch.where(near, of_listed, torch.where(whole, 1.0, p)),
        min_p=torch.where(whole, 0.0, m), seed=seed, offset=offset,
        return_logprob=True,
    )  # fmt: skip
    of_places = torch.cat([tokens, heads[..., slices.DRAWN].T], 1)
    found = of_places.gather(1, drawn[0][:, None].clamp(0, of_places.shape[1] - 1))[:, 0]
    at = torch.where(nothing, slices.MOST, slices.LARGEST)
    first = _first_of_largest(heads, floats, at)
    ids = torch.where(greedy | nothing, first, found.long())
    logprob = torch.where(greedy | nothing, 0.0, drawn[1])
    return ids, status, logprob


def _of_rows(x: torch.Tensor) -> torch.Tensor:
    """(world_size, batch, n) -> (batch, world_size * n)."""
    return x.transpose(0, 1).flatten(1)


def _first_of_largest(heads: torch.Tensor, floats: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """The first token of the largest of all slices; 0 where there is none. at: (batch,), where in
    a head the largest is; its token is behind it."""
    place = at.expand(len(heads), -1)[..., None]
    values, firsts = floats.gather(2, place)[..., 0], heads.gather(2, place + 1)[..., 0]
    rank = (values == values.amax(0)).int().argmax(0, keepdim=True)
    return firsts.gather(0, rank)[0].clamp(min=0).long()
