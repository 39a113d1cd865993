"""sample by clusters: the ids that torch computes, whatever number of blocks shares a row."""

from __future__ import annotations

import random

import pytest
import torch
from sample_cases import arguments, check, hard_row, more, op
from ways import DTYPES, Way

from kernel_hub.ops import sample
from kernel_hub.ops.sampling import cpu

TEAMS = [1, 2, 4, 8]


@pytest.fixture(params=TEAMS)
def team(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(op, "choose_team", lambda *_: request.param)
    return int(request.param)


@pytest.mark.parametrize("size", [1, 33, 5000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_rows(hopper_way: Way, dtype: torch.dtype, size: int, team: int) -> None:
    batch = 200 if hopper_way.is_gpu else 6
    for seed, spread in enumerate([0.0, 1.0, 5.0]):
        logits = (hopper_way.randn(batch, size, seed=seed) * spread).to(dtype)
        check(hopper_way, logits, **arguments(batch, seed + 10 * team))


def test_bounds_that_rise(hopper_way: Way, team: int) -> None:
    """Rows of many chunks, rising, falling and shuffled: what is listed, and what is too much."""
    if team == 8 and not hopper_way.is_gpu:
        pytest.skip("a row of 33 chunks of eight blocks takes the emulator half a minute")
    size = 36000 * team  # more than eight chunks of the cluster
    rising = torch.arange(size, dtype=torch.float32) / 1000
    shuffled = hopper_way.randn(size).cpu() * 2
    rows = torch.stack([rising, rising.flip(0), shuffled, shuffled.round()])
    for k in (1, 50, 160, 161):
        given = {"top_k": torch.full((4,), k, dtype=torch.int32)}
        check(hopper_way, rows, **given, **arguments(4, k, "top_p"))
    # What is listed early leaves no room for the second largest, of a tenth of the mass.
    crowded = rising - 50.0
    crowded[0], crowded[4:24], crowded[size - 8] = 10.0, 8.0, 9.0
    for i in range(4):
        given = {"top_p": torch.tensor([0.9]), "seed": torch.tensor([i])}
        check(hopper_way, crowded[None], **given)


def test_guesses_that_miss(hopper_way: Way, team: int) -> None:
    """Long rows of which a sample, or counts alone, say little of where the threshold is."""
    if team == 8 and not hopper_way.is_gpu:
        pytest.skip("as above")
    size = 36000 * team
    row = hopper_way.randn(size).cpu()
    late, hidden, outlier, half = row / 1000, row.clone(), row.clone(), row.clone()
    late[size - 3000 :] = row[size - 3000 :] * 2 + 5
    hidden[: size - 2000] = -torch.inf
    outlier[size // 2 + 1] = 300.0
    half[size // 2 :] = 1.5
    given = {
        "top_k": torch.tensor([0, 0, 5000, 300], dtype=torch.int32),
        "top_p": torch.tensor([0.5, 0.999, 0.7, 1.0]),
        "min_p": torch.tensor([0.0, 0.001, 0.0, 0.03]), "seed": torch.arange(4),
    }  # fmt: skip
    for each in hopper_way.some((late, hidden, outlier, half, row * 1e37, row.exp() ** 9), 3, team):
        check(hopper_way, each.expand(4, size), **given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_held(hopper_way: Way, dtype: torch.dtype, team: int) -> None:
    """Few elements a thread: a bound by groups of threads, and what it does not end."""
    size = 2000 * team
    shuffled = hopper_way.randn(size).cpu() * 2
    rising = torch.arange(size, dtype=torch.float32) / 100
    few = torch.full((size,), -torch.inf)
    few[size // 3 : size // 3 + 30] = shuffled[:30]
    rows = torch.stack([shuffled, rising, few, torch.zeros(size), few * 2, shuffled.abs().sqrt()])
    rows[4, size - 1] = torch.inf
    for k in (1, 50, 64, 65):
        given = {"top_k": torch.full((len(rows),), k, dtype=torch.int32)}
        given |= {"min_p": torch.full((len(rows),), 0.01)} if k == 64 else {}
        check(hopper_way, rows.to(dtype), **given, **arguments(len(rows), k, "top_p"))


def test_temperatures_without_end(hopper_way: Way, team: int) -> None:
    """At which all weigh the same, but what is excluded, and what there is not."""
    row = hopper_way.randn(700).cpu()
    row[::7] = -torch.inf
    for temperature in (1e30, 1e38, torch.inf):
        given = {
            "temperature": torch.full((4,), temperature), "seed": torch.arange(4),
            "top_k": torch.tensor([0, 0, 200, 20], dtype=torch.int32),
            "top_p": torch.tensor([0.9, 1.0, 0.7, 0.5]),
        }  # fmt: skip
        check(hopper_way, row.expand(4, 700), **given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_changes_logits(hopper_way: Way, dtype: torch.dtype, team: int) -> None:
    batch = 100 if hopper_way.is_gpu else 4
    for size in (33, 700):
        logits, changes = hopper_way.randn(batch, size, dtype=dtype) * 3, more(batch, size)
        sets = [{name: changes[name]} for name in ("bias", "token_bitmask")]
        for softcap in (0.0, 2.5):
            for given in (*sets, changes):
                check(hopper_way, logits, softcap, **given, **arguments(batch))


def test_neutral_penalties(hopper_way: Way, team: int) -> None:
    """Rows that a penalty of 1 or 0 leaves as they are, beside those it changes."""
    batch, size = 4, 1000
    changes = more(batch, size)
    changes["repetition_penalty"][:2] = 1.0
    changes["presence_penalty"][[0, 2]] = 0.0
    changes["frequency_penalty"][[0, 2]] = 0.0
    check(hopper_way, hopper_way.randn(batch, size), **changes, **arguments(batch))


def test_nothing_allowed(hopper_way: Way, team: int) -> None:
    logits, mask = hopper_way.randn(3, 300), torch.zeros(3, 10, dtype=torch.int32)
    mask[1, 4] = 1 << 5
    given = arguments(3, 0, "top_k", "top_p")
    ids = check(hopper_way, logits, token_bitmask=mask, **given)
    assert ids.tolist() == [int(logits[0].argmax()), 133, int(logits[2].argmax())]


@pytest.mark.parametrize("kind", ["flat", "ties", "rising", "peaked", "one", "scales"])
def test_searches(hopper_way: Way, kind: str, team: int) -> None:
    """What candidates alone do not end."""
    row = hard_row(hopper_way, kind)
    batch = [(k, p, m) for k in (0, 161, 1000, 2999) for p in (0.5, 0.99, 1.0) for m in (0.0, 0.02)]
    k, p, m = (torch.tensor(each) for each in zip(*batch, strict=True))
    given = {"top_k": k.int(), "top_p": p, "min_p": m}
    rows = row.expand(len(batch), len(row))
    check(hopper_way, rows, **arguments(len(batch), 1, "temperature"), **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_that_end_anywhere(hopper_way: Way, dtype: torch.dtype, team: int) -> None:
    """Plain rows that end before, at and behind what a warp weighs at once; the last is drawn."""
    for size in (4, 124, 252, 256, 260, 384, 508, 4092, 4100):
        logits = hopper_way.randn(3, size).cpu().sort(-1).values.to(dtype)
        given = {"top_p": torch.tensor([0.9, 0.999, 1.0]), "seed": torch.arange(3) + size}
        check(hopper_way, logits, **given)


def test_drawn_by_lot(hopper_way: Way) -> None:
    lot = random.Random(hopper_way.name)
    for turn in range(60 if hopper_way.is_gpu else 25):
        batch, size = (
            lot.randrange(1, 5),
            round(2 ** lot.uniform(0, 17 if hopper_way.is_gpu else 13)),
        )
        logits = hopper_way.randn(batch, size + 3, seed=turn, dtype=lot.choice(DTYPES))
        logits = logits[:, lot.randrange(4) :][:, :size] * lot.choice((0.0, 0.5, 3.0, 30.0))
        given = arguments(batch, turn)
        changes = more(batch, size, turn)
        given |= {name: x for name, x in changes.items() if lot.random() < 0.3 and "_p" not in name}
        print(turn, batch, size, sorted(given))
        check(hopper_way, logits, lot.choice((0.0, 0.0, 5.0)), **given)


KINDS = [{}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.9}, {"top_p": 0.05}, {"min_p": 0.3},
         {"top_k": 700, "top_p": 0.95}, {"temperature": 0.0}]  # fmt: skip


def test_the_most_probable(hopper_way: Way, team: int) -> None:
    """The same as what torch finds, of every path."""
    for given, spread in [(kind, x) for kind in KINDS for x in (0.0, 2.0)]:
        logits = hopper_way.randn(2, 1500) * spread
        filled = {
            name: torch.full((2,), x, dtype=torch.int32 if name == "top_k" else torch.float32)
            for name, x in given.items()
        }
        filled["seed"] = torch.arange(2)
        found, wanted = (
            (torch.empty(2, 20, dtype=torch.int64), torch.empty(2, 20)) for _ in range(2)
        )
        device = hopper_way.device
        outs = [x.to(device) for x in found]
        sample(
            logits, **{name: x.to(device) for name, x in filled.items()}, out_top_ids=outs[0],
            out_top_logprobs=outs[1],
        )  # fmt: skip
        given_to_torch = dict.fromkeys(op.SampleGiven._fields) | filled | {
            "logits": logits.cpu(), "softcap": 0.0, "out": torch.empty(2, dtype=torch.int64),
            "out_top_ids": wanted[0], "out_top_logprobs": wanted[1],
        }  # fmt: skip
        cpu.sample_into(op.SampleGiven(**given_to_torch))
        assert torch.equal(outs[0].cpu(), wanted[0]), (given, spread)
        torch.testing.assert_close(outs[1].cpu(), wanted[1], rtol=1e-5, atol=1e-5)
