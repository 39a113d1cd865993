"""verify_draft: the tokens that torch computes, frequencies, drafts of every kind."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import sample, verify_draft
from kernel_hub.ops.sampling import verify_cpu
from kernel_hub.ops.sampling.verification import VerifyGiven
from kernel_hub.testing import reference
from kernel_hub.testing.guard import Guarded


def drawn(seed: int, *shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread


def by_torch(drafts: torch.Tensor, logits: torch.Tensor, **given: Any) -> tuple[Any, Any]:
    """What torch computes on the CPU."""
    fields: dict[str, Any] = dict.fromkeys(VerifyGiven._fields)
    fields |= {"draft_ids": drafts.cpu(), "target_logits": logits.cpu()}
    fields["out_ids"] = torch.empty(len(drafts), drafts.shape[1] + 1, dtype=torch.int64)
    fields["num_accepted"] = torch.empty(len(drafts), dtype=torch.int32)
    fields |= {name: x.cpu() for name, x in given.items()}
    found = VerifyGiven(**fields)
    verify_cpu.verify_into(found)
    return found.out_ids, found.num_accepted


def check(way: Way, drafts: torch.Tensor, logits: torch.Tensor, **given: Any) -> Any:
    """The kernel's tokens are torch's."""
    moved = {name: x.to(way.device) for name, x in given.items()}
    out = Guarded((len(drafts), drafts.shape[1] + 1), torch.int64, way.device)
    num = Guarded((len(drafts),), torch.int32, way.device)
    found = verify_draft(
        drafts.to(way.device), logits.to(way.device), **moved, out_ids=out.tensor,
        num_accepted=num.tensor,
    )  # fmt: skip
    assert found[0] is out.tensor and found[1] is num.tensor
    out.check("out_ids")
    num.check("num_accepted")
    ids, counts = by_torch(drafts, logits, **given)
    same_bits(out.tensor.cpu(), ids)
    same_bits(num.tensor.cpu(), counts)
    return ids, counts


def likely(logits: torch.Tensor, lot: random.Random) -> torch.Tensor:
    """Drafts, most of them what the target finds probable."""
    best = logits[:, :-1].float().topk(min(2, logits.shape[2]), -1).indices
    pick = [[lot.randrange(best.shape[2]) for _ in range(best.shape[1])] for _ in best]
    return best.gather(-1, torch.tensor(pick).view(*best.shape[:2], 1))[..., 0]


def seeds(batch: int, seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    both = torch.randint(-(2**62), 2**62, (2, batch), generator=made)
    return {"seed": both[0], "offset": both[1]}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 5, 33, 600, 1024])
def test_tokens_are_torchs(way: Way, size: int, dtype: torch.dtype) -> None:
    lot = random.Random(size)
    for drafts, spread in ((0, 1.0), (1, 3.0), (4, 0.0), (4, 6.0)):
        batch = 100 if way.is_gpu else 3
        logits = drawn(drafts, batch, drafts + 1, size, spread=spread).to(dtype)
        ids = likely(logits, lot) if drafts else torch.zeros(batch, 0, dtype=torch.int64)
        ids[drawn(7, *ids.shape) > 1.3] = -1
        temperature = torch.tensor([lot.choice((0.0, 0.7, 1.0, math.nan)) for _ in range(batch)])
        probs = (logits[:, :-1].float() + drawn(9, batch, drafts, size)).softmax(-1)
        check(way, ids, logits, **seeds(batch), temperature=temperature)
        check(way, ids, logits, **seeds(batch), temperature=temperature, draft_probs=probs)


def test_without_probabilities_the_tokens_are_those_of_sample(way: Way) -> None:
    logits = drawn(1, 6, 4, 50, spread=3.0).to(way.device)
    given = {name: x.to(way.device) for name, x in seeds(6).items()}
    seed, offset = given["seed"], given["offset"]
    plain = torch.stack([sample(logits[:, j], seed=seed, offset=offset + j) for j in range(4)], 1)
    drafts = plain[:, :3].clone()
    drafts[0, 1] = (drafts[0, 1] + 1) % 50
    drafts[1, 0] = -1
    ids, num = verify_draft(drafts, logits, **given)
    assert num.tolist() == [1, 0, 3, 3, 3, 3]
    for row, kept in enumerate(num.tolist()):
        assert ids[row].tolist() == [*plain[row, : kept + 1].tolist(), *[-1] * (3 - kept)]


def test_greedy_rows_keep_what_is_largest(way: Way) -> None:
    logits = drawn(2, 5, 4, 40).to(way.device)
    best = logits.argmax(-1)
    drafts = best[:, :3].clone()
    for row in range(3):
        drafts[row, row] = (drafts[row, row] + 1) % 40
    zero = torch.zeros(5, device=way.device)
    for probs in (None, torch.full((5, 3, 40), 1 / 40, device=way.device)):
        ids, num = verify_draft(drafts, logits, probs, temperature=zero)
        assert num.tolist() == [0, 1, 2, 3, 3]
        for row, kept in enumerate(num.tolist()):
            assert ids[row].tolist() == [*best[row, : kept + 1].tolist(), *[-1] * (3 - kept)]


def chi_square(counts: torch.Tensor, wanted: torch.Tensor, draws: int) -> float:
    """How many deviations off, by Wilson and Hilferty; what is rare stands together."""
    expected = wanted * draws
    assert bool((counts[wanted == 0] == 0).all())
    rare = (expected < 5) & (wanted > 0)
    groups = [(counts[~rare & (wanted > 0)], expected[~rare & (wanted > 0)])]
    groups += [(counts[rare].sum()[None], expected[rare].sum()[None])] if bool(rare.any()) else []
    seen, right = (torch.cat(each) for each in zip(*groups, strict=True))
    chi, freedom = float(((seen - right) ** 2 / right).sum()), len(right) - 1
    cube = (chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))
    return cube / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("has_probs", [False, True])
def test_frequencies_of_each_end(device: str, has_probs: bool) -> None:
    """Of one row of drafts, drawn often: how many are kept, with the token after them."""
    draws, size = (1_000_000, 40) if device == "cuda" else (4000, 7)
    logits, drafts = drawn(5, 3, size, spread=1.5), [2, 5]
    probs = drawn(6, 2, size).softmax(-1) if has_probs else None
    wanted = torch.stack(reference.verify_draft(drafts, logits, probs))
    torch.testing.assert_close(wanted.sum(), torch.tensor(1.0, dtype=torch.float64))
    many = {"draft_probs": probs[None].expand(draws, -1, -1).to(device)} if has_probs else {}  # type: ignore[index]
    if has_probs:
        many["draft_probs"] = many["draft_probs"].contiguous()
    ids, num = verify_draft(
        torch.tensor(drafts, device=device).repeat(draws, 1),
        logits.to(device).repeat(draws, 1, 1), **many,
        seed=torch.arange(draws, device=device), offset=torch.full((draws,), 77, device=device),
    )  # fmt: skip
    last = ids.gather(1, num.long()[:, None])[:, 0]
    counts = torch.bincount((num * size + last).cpu(), minlength=3 * size).double()
    assert abs(chi_square(counts, wanted.flatten(), draws)) < 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_drafts_of_a_model_do_not_change_what_the_target_draws(device: str) -> None:
    """Drafts drawn by sample from q: the first token is distributed as p."""
    draws, size = (1_000_000, 50) if device == "cuda" else (4000, 9)
    logits, draft_logits = drawn(7, 2, size, spread=2.0), drawn(8, size, spread=2.0)
    seed = torch.arange(draws, device=device)
    drafts = sample(draft_logits.to(device).expand(draws, -1), seed=seed + 10**9)
    probs = draft_logits.softmax(-1).to(device).repeat(draws, 1, 1)
    ids, num = verify_draft(
        drafts[:, None], logits.to(device).repeat(draws, 1, 1), probs, seed=seed
    )
    counts = torch.bincount(ids[:, 0].cpu(), minlength=size).double()
    assert abs(chi_square(counts, logits[0].double().softmax(-1), draws)) < 4
    # Kept as often as p and q agree.
    agreed = float(torch.minimum(logits[0].softmax(-1), draft_logits.softmax(-1)).sum())
    assert abs(float((num > 0).double().mean()) - agreed) < 5 * math.sqrt(0.25 / draws)


def test_odd_rows(way: Way) -> None:
    inf, nan, size = math.inf, math.nan, 12
    rows = torch.zeros(6, 2, size)
    rows[0], rows[1], rows[2, :, 3], rows[3, :, 4:] = nan, -inf, inf, -inf
    rows[4, :, :] = torch.tensor([1e30, -1e30, 3e38] * 4)
    drafts = torch.tensor([[0], [0], [3], [9], [2], [-1]])
    probs = torch.full((6, 1, size), 1 / size)
    probs[5] = nan
    for given in ({}, {"draft_probs": probs}, {"draft_probs": probs * 0}):
        ids, _ = check(way, drafts, rows, **seeds(6), **given)
        assert ids[0, 0] == ids[1, 0] == 0 and ids[2, 0] == 3 and ids[3, 0] < 4


def test_a_draft_that_the_target_excludes_is_never_kept(way: Way) -> None:
    logits = drawn(3, 40, 2, 16)
    logits[:, 0, 5] = -math.inf
    probs = torch.zeros(40, 1, 16)
    probs[:, 0, 5] = 1.0
    for given in ({}, {"draft_probs": probs}):
        ids, num = check(way, torch.full((40, 1), 5), logits, **seeds(40), **given)
        assert not num.any() and not (ids[:, 0] == 5).any()


def test_equal_models_keep_everything(way: Way) -> None:
    logits = drawn(4, 30, 3, 64)
    probs = logits[:, :2].softmax(-1)
    # A draft whose q is below p in the last bits, for certain.
    _, num = check(way, logits[:, :2].argmax(-1), logits, **seeds(30), draft_probs=probs * 0.999)
    assert (num == 2).all()


def test_layouts(way: Way) -> None:
    batch, size = 3, 72
    wide = drawn(5, batch, 4, 2 * size)
    drafts = torch.tensor([[1, 2, 3, 9]] * batch)[:, :3]
    for logits in (wide[..., :size], wide[..., 1 : size + 1], wide[..., : size - 1]):
        probs = drawn(6, batch, 3, 2 * logits.shape[2]).softmax(-1)[..., : logits.shape[2]]
        check(way, drafts, logits, **seeds(batch), draft_probs=probs)
        check(way, drafts, logits.half(), **seeds(batch))


def test_drawn_by_lot(way: Way) -> None:
    lot = random.Random(way.name)
    for number in range(60 if way.is_gpu else 12):
        size = round(2 ** lot.uniform(0, 17 if way.is_gpu else 11))
        batch, drafts = lot.randrange(1, 5), lot.randrange(0, 6)
        dtype = lot.choice(DTYPES)
        logits = drawn(number, batch, drafts + 1, size, spread=lot.choice((0.1, 2, 8))).to(dtype)
        ids = likely(logits, lot) if drafts else torch.zeros(batch, 0, dtype=torch.int64)
        given: dict[str, Any] = {"temperature": torch.rand(batch) * lot.choice((0, 1, 2))}
        if lot.random() < 0.6:
            given["draft_probs"] = logits[:, :-1].float().mul(0.8).softmax(-1)
        print(number, size, batch, drafts, dtype, sorted(given))
        check(way, ids, logits, **seeds(batch, number), **given)


def test_nothing_to_verify(way: Way) -> None:
    none = torch.zeros(0, 2, dtype=torch.int64, device=way.device)
    ids, num = verify_draft(none, way.randn(0, 3, 5))
    assert ids.shape == (0, 3) and num.shape == (0,)


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back() -> None:
    check_back_to_back("""
seed = torch.arange(40, device="cuda")
def run(batch, size, has_probs):
    logits, ids = randn(batch, 4, size), torch.arange(3 * batch, device="cuda").view(batch, 3)
    probs = logits[:, :3].float().softmax(-1) if has_probs else None
    return partial(ops.verify_draft, ids % size, logits, probs, seed=seed[:batch])
cases = [run(*each) for each in itertools.product((1, 7, 40), (100, 50257), (False, True))]
""")


X, IDS = torch.zeros(3, 3, 40), torch.zeros(3, 2, dtype=torch.int64)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"draft_ids": IDS.int()}, "draft_ids: expected dtype int64"),
    ({"draft_ids": IDS[:, :1]}, r"draft_ids: expected shape \(3, 2\), one less than target_logits"),
    ({"target_logits": X[0]}, r"target_logits: expected shape \(batch, num_drafts"),
    ({"target_logits": X.long()}, "target_logits: expected dtype"),
    ({"target_logits": X.repeat(1, 2, 1)[:, :3]}, "target_logits: expected evenly spaced rows"),
    ({"draft_probs": X}, r"draft_probs: expected shape \(3, 2, 40\)"),
    ({"draft_probs": X[:, :2]}, "draft_probs: expected evenly spaced rows"),
    ({"draft_probs": X[:, 1:].half()}, "draft_probs: expected dtype float32"),
    ({"temperature": torch.zeros(2)}, r"temperature: expected shape \(3,\)"),
    ({"seed": torch.zeros(3)}, "seed: expected dtype int64"),
    ({"out_ids": IDS}, r"out_ids: expected shape \(3, 3\)"),
    ({"num_accepted": IDS[:, 0]}, "num_accepted: expected dtype int32"),
]


@pytest.mark.parametrize("changes, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorError, match=f"verify_draft: {text}"):
        verify_draft(**{"draft_ids": IDS, "target_logits": X.clone(), **changes})
