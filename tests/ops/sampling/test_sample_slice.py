"""sample_slice and sample_slices: the ids of `sample` of the whole vocabulary, whatever slices it
is in; what a rank says, to the bit as torch computes it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bits import same_bits
from sample_cases import INF, NAN, arguments, generator, more
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import sample, sample_slice
from kernel_hub.ops.sampling.slices import SUMMARY_INTS
from kernel_hub.ops.vocab_slices import CUT, EXACT, NEAR, OTHER, sample_slices
from kernel_hub.testing.guard import Guarded

OF_SLICES = ("temperature", "seed", "offset", "softcap")


def slices_of(
    way: Way, logits: torch.Tensor, world_size: int, given: dict[str, Any]
) -> torch.Tensor:
    """What all ranks say, each held against torch on the CPU."""
    size = logits.shape[1]
    part = -(-size // world_size // 32) * 32
    said = []
    for first in range(0, size, part):
        tokens, words = slice(first, first + part), slice(first // 32, (first + part) // 32)
        own = {name: given[name] for name in OF_SLICES if name in given}
        for name, x in given.items():
            if "penalty" in name:
                own[name] = x
            elif name in ("bias", "output_counts"):
                own[name] = x[:, tokens]
            elif "bitmask" in name:
                own[name] = x[:, words]
        moved = {
            name: x.to(way.device) if isinstance(x, torch.Tensor) else x for name, x in own.items()
        }
        out = Guarded((len(logits), SUMMARY_INTS), torch.int32, way.device)
        found = sample_slice(logits[:, tokens].to(way.device), first, **moved, out=out.tensor)
        assert found is out.tensor
        out.check()
        wanted = sample_slice(logits[:, tokens].cpu(), first, **own)
        same_bits(found.cpu(), wanted)
        said.append(found)
    return torch.stack(said)


def rows(lot: random.Random, batch: int, size: int, seed: int) -> torch.Tensor:
    made = generator(seed)
    x = torch.randn(batch, size, generator=made) * lot.choice((0.0, 0.5, 3.0, 3.0, 10.0))
    kind = lot.choice(("", "", "ties", "few", "nan", "inf", "last"))
    if kind == "ties":
        x = (x * 2).round() / 2
    elif kind == "few":
        x[torch.rand(x.shape, generator=made) < 0.98] = -INF
    elif kind == "nan":
        x[torch.rand(x.shape, generator=made) < 0.3] = NAN
    elif kind == "inf":
        x[:, lot.randrange(size)] = INF
    elif kind == "last":
        x[:, size - size // 8 :] += 20
    return x


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_as_of_the_whole_vocabulary(way: Way, world_size: int) -> None:
    lot = random.Random(f"{way.name} {world_size}")
    seen = dict.fromkeys((EXACT, NEAR, OTHER, CUT), 0)
    for turn in range(60 if way.is_gpu else 12):
        batch = 40 if way.is_gpu else 4
        size = 32 * world_size * lot.choice((1, 3, 9, 40, 130) if way.is_gpu else (1, 9, 40))
        logits = rows(lot, batch, size, turn).to(lot.choice(DTYPES))
        given: dict[str, Any] = arguments(batch, turn)
        changes = more(batch, size, turn) if lot.random() < 0.4 else {}
        if changes and lot.random() < 0.3:
            changes["token_bitmask"][::2] = 0
        softcap = lot.choice((0.0, 0.0, 5.0))
        print(turn, size, logits.dtype, sorted(changes), softcap)
        said = slices_of(way, logits, world_size, {**given, **changes, "softcap": softcap})
        moved = {name: x.to(way.device) for name, x in given.items()}
        ids, status, logprob = sample_slices(said, size, **moved, return_logprob=True)
        wanted = sample(logits, **given, **changes, softcap=softcap, return_logprob=True)
        ids, status, logprob = ids.cpu(), status.cpu(), logprob.cpu()
        assert ((ids >= 0) & (ids < size)).all()
        alike = status <= NEAR
        same_bits(ids[alike], wanted[0][alike])
        torch.testing.assert_close(logprob[alike], wanted[1][alike], rtol=1e-4, atol=1e-4)
        for each in seen:
            seen[each] += int((status == each).sum())
    assert seen[EXACT] > 2 * (seen[OTHER] + seen[CUT]), seen


def test_what_is_exact(way: Way) -> None:
    """Rows as engines have them, of a vocabulary that lists do not hold."""
    batch, size = 6, 2400
    logits = way.randn(batch, size).cpu() * 3
    given = {
        "temperature": torch.tensor([0.0, 0.8, 1.0, 0.7, 1.0, 1.0]),
        "top_k": torch.tensor([0, 50, 0, 0, 0, 1000]).int(),
        "top_p": torch.tensor([1.0, 0.9, 1.0, 0.8, 1.0, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.2, 0.0, 0.0, 0.0]),
        "seed": torch.arange(batch),
    }
    said = slices_of(way, logits, 2, given)
    moved = {name: x.to(way.device) for name, x in given.items()}
    ids, status = sample_slices(said, size, **moved)
    assert status.tolist() == [EXACT, EXACT, EXACT, NEAR, OTHER, CUT]
    same_bits(ids[:4].cpu(), sample(logits, **given)[:4])


def test_other_draws_have_the_distribution(way: Way) -> None:
    """Of a row of which all is kept, by the tokens that are listed and eight parts of the rest."""
    batch, size = 40000 if way.is_gpu else 3000, 640
    row = torch.randn(size, generator=generator(3)) / 2
    logits = row.expand(batch, size)
    given = {"seed": torch.arange(batch), "offset": torch.arange(batch) * 7}
    own = {name: x.to(way.device) for name, x in given.items()}
    said = torch.stack(
        [
            sample_slice(logits[:, first : first + 320].to(way.device), first, **own)
            for first in (0, 320)
        ]
    )
    ids, status = sample_slices(said, size, **own)
    assert (status == OTHER).all()
    parts = torch.arange(size) // 40
    parts[row.topk(8).indices] = 16 + torch.arange(8)
    counts = torch.bincount(parts[ids.cpu()], minlength=24).double()
    expected = torch.zeros(24, dtype=torch.float64)
    expected.index_add_(0, parts, row.double().softmax(0) * batch)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 60, chi_square  # 23 degrees of freedom: one in 30,000


def test_refusals(way: Way) -> None:
    logits = way.randn(2, 64)
    seed = torch.zeros(2, dtype=torch.int64, device=way.device)
    said = sample_slice(logits, 0, seed=seed)[None]
    with pytest.raises(TensorError, match="first_token"):
        sample_slice(logits, -1)
    with pytest.raises(TensorError, match="bias"):
        sample_slice(logits, 0, bias=logits[:, :32])
    with pytest.raises(TensorError, match="out"):
        sample_slice(logits, 0, out=said[0, :, :10])
    with pytest.raises(TensorError, match="summaries"):
        sample_slices(said[0], 64, seed=seed)
    with pytest.raises(TensorError, match="vocab_size"):
        sample_slices(said, 0, seed=seed)
    with pytest.raises(TensorError, match="top_k"):
        sample_slices(said, 64, seed=seed, top_k=seed)
    with pytest.raises(TensorError, match="seed"):
        sample_slices(said, 64, seed=None)  # type: ignore[arg-type]
