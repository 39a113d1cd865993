"""sample: the ids that torch computes, kept sets of sorts in fp64, frequencies, odd values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from sample_cases import INF, NAN, arguments, check, generator, hard_row, more, op
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import sample
from kernel_hub.ops.sampling import cpu
from kernel_hub.testing import reference

SIZES = [1, 2, 31, 33, 256, 1000, 2048, 5000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_rows(way: Way, dtype: torch.dtype, size: int) -> None:
    batch = 200 if way.is_gpu else 10
    for seed, spread in enumerate([0.0, 1.0, 5.0]):
        logits = (way.randn(batch, size, seed=seed) * spread).to(dtype)
        check(way, logits, **arguments(batch, seed))


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("size", [1, 65, 1000, 5000])
def test_rows_in_parts(way: Way, size: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "runs_clusters", lambda _: False)
    monkeypatch.setattr(op, "choose_parts", lambda *_: parts)
    batch = 200 if way.is_gpu else 6
    for seed, spread in enumerate([0.0, 1.0, 5.0]):
        check(way, way.randn(batch, size, seed=seed) * spread, **arguments(batch, seed))


def test_parts_that_one_block_cannot_end(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "runs_clusters", lambda _: False)
    monkeypatch.setattr(op, "choose_parts", lambda *_: 8)
    size = 5000
    ties = torch.cat([torch.full((1, 2500), 2.0), way.randn(1, 2500).cpu()], 1)
    rising = torch.arange(size, dtype=torch.float32)[None] / 100
    for logits in (ties, ties.flip(1), rising, rising.flip(1), torch.zeros(1, size)):
        for k in way.some((1, 50, 200, 300), 2, str(logits[0, :9])):
            given = {"top_k": torch.tensor([k], dtype=torch.int32), "top_p": torch.tensor([0.9])}
            check(way, logits, **given, **arguments(1, k, "min_p"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_changes_logits(way: Way, dtype: torch.dtype) -> None:
    batch = 100 if way.is_gpu else 6
    for size in (33, 700):
        logits, changes = way.randn(batch, size, dtype=dtype) * 3, more(batch, size)
        sets = [{name: changes[name]} for name in ("bias", "token_bitmask")]
        for softcap in (0.0, 2.5):
            for given in way.some((*sets, changes, {}), 2, dtype, size, softcap):
                check(way, logits, softcap, **given, **arguments(batch))
        shared = {"bias": changes["bias"][0], "token_bitmask": changes["token_bitmask"]}
        check(way, logits, **shared, **arguments(batch))


def test_penalties_are_those_of_the_formula(way: Way) -> None:
    # Greedy, so that what is drawn is what is largest.
    logits = torch.tensor([[4.0, 3.0, 2.0, -1.0]] * 4)
    counts = torch.tensor([[1, 0, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]]).int()
    prompt = torch.tensor([[0], [0], [1], [0]], dtype=torch.int32)
    given = {
        "temperature": torch.zeros(4), "output_counts": counts, "prompt_bitmask": prompt,
        "repetition_penalty": torch.tensor([1.0, 1.0, 2.0, 1.0]),
        "presence_penalty": torch.tensor([1.5, 0.0, 0.0, 6.0]),
        "frequency_penalty": torch.tensor([0.0, 0.4, 0.0, 0.0]),
    }  # fmt: skip
    assert check(way, logits, **given).tolist() == [1, 1, 1, 3]


@pytest.mark.parametrize("stride, shift", [(136, 0), (129, 0), (136, 1), (128, 3), (0, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_and_unaligned_rows(way: Way, dtype: torch.dtype, stride: int, shift: int) -> None:
    logits = way.randn(600, dtype=dtype).as_strided((3, 128), (stride, 1), shift)
    check(way, logits, **arguments(3))


NOT_NUMBERS = [
    ([NAN, 1.0, 2.0], 2), ([NAN] * 3, 0), ([-INF] * 3, 0), ([INF, 1.0, NAN], 0),
    ([-INF, -INF, -5.0], 2), ([-INF, NAN, -INF], 0), ([1.0, INF, -INF], 1),
]  # fmt: skip


@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_no_number(way: Way, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "runs_clusters", lambda _: False)
    monkeypatch.setattr(op, "choose_parts", lambda *_: parts)
    for dtype in DTYPES:
        for values, wanted in NOT_NUMBERS:
            row = torch.tensor([values * 43], dtype=dtype)
            for names in ((), ("top_k",), ("top_p",), ("temperature",)):
                for seed in way.some(range(3), 1, parts, dtype, str(values), names):
                    given = arguments(1, seed, *names)
                    ids = check(way, row, **given)
                    if not all(value == -INF or value != value for value in values):
                        assert ids[0] % 3 == wanted
                    else:
                        assert ids[0] == 0


@pytest.mark.parametrize("parts", [1, 4])
def test_nothing_allowed(way: Way, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "runs_clusters", lambda _: False)
    monkeypatch.setattr(op, "choose_parts", lambda *_: parts)
    logits, mask = way.randn(3, 300), torch.zeros(3, 10, dtype=torch.int32)
    mask[1, 4] = 1 << 5
    ids = check(way, logits, token_bitmask=mask, **arguments(3, 0, "top_k", "top_p"))
    assert ids.tolist() == [int(logits[0].argmax()), 133, int(logits[2].argmax())]


def test_extreme_temperatures(way: Way) -> None:
    temperatures = [1e-45, 1e-38, 1e-6, 1e6, 3e38, INF]
    for scale in (1.0, 1e30, 3e38, 1e-40):
        given = {"temperature": torch.tensor(temperatures), **arguments(6, 3, "top_p")}
        check(way, way.randn(6, 130).clamp(-1, 1) * scale, **given)


@pytest.mark.parametrize("kind", ["flat", "ties", "rising", "peaked", "one", "scales"])
def test_searches(way: Way, kind: str) -> None:
    """What candidates alone do not end."""
    row = hard_row(way, kind)
    ks, ps = [0, 257, 1000, 2999, 10**9], [0.5, 0.99, 1.0]
    batch = [(k, p, m) for k in ks for p in ps for m in (0.0, 0.02)]
    k, p, m = (torch.tensor(each) for each in zip(*batch, strict=True))
    given = {"top_k": k.int(), "top_p": p, "min_p": m}
    check(way, row.expand(len(batch), len(row)), **arguments(len(batch), 1, "temperature"), **given)


ADVERSARIAL = {
    "ties": [1.0, 3.0, 3.0, 2.0, 2.0, 2.0, 1.0, 0.0, -4.0],
    "equal": [0.5] * 9,
    "two": [5.0, 5.0, -INF, -INF, -3.0],
    "zeros": [0.0, -0.0, 0.0, -0.0, -1.0, -1.0],
    "neighbours": [1.0, 1.0000001, 1.0000002, 1.0, 0.9999999],
    "steps": [float(i // 3) for i in range(24)],
}


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_kept_sets_are_those_of_a_sort_in_fp64(way: Way, name: str) -> None:
    row = torch.tensor(ADVERSARIAL[name])
    cases = [
        (t, k, p, m)
        for t in (0.5, 1.0, 3.0) for k in (0, 1, 2, 3, 5, 100)
        for p in (0.01, 0.37, 0.61, 0.93, 1.0) for m in (0.0, 0.031, 0.43, 1.0)
    ]  # fmt: skip
    for t, k, p, m in way.some(cases[:: 7 if way.is_gpu else 37], 5, name):
        wanted = reference.sample(row, temperature=t, top_k=k, top_p=p, min_p=m)
        draws = 512 if way.is_gpu else 8
        filled = {
            "temperature": torch.full((draws,), t), "top_p": torch.full((draws,), p),
            "top_k": torch.full((draws,), k, dtype=torch.int32), "min_p": torch.full((draws,), m),
        }  # fmt: skip
        found = op.cpu.weigh(
            op.SampleGiven(row[None], *[x[:1] for x in (
                filled["temperature"], filled["top_k"], filled["top_p"], filled["min_p"])],
                *[None] * 10, 0.0, *[None] * 4)
        )  # fmt: skip
        assert found.kept[0].tolist() == (wanted > 0).tolist(), (t, k, p, m)
        ids = check(way, row.expand(draws, -1), **filled, **arguments(draws, 5, "seed_only"))
        assert bool((wanted[ids] > 0).all()), (t, k, p, m)
        expected = wanted * draws
        # Whatever would be drawn 20 times and more is drawn.
        assert set(torch.nonzero(expected > 20).flatten().tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_frequencies(device: str) -> None:
    """Chi-square of draws with one seed and following offsets."""
    draws, size = (1_000_000, 64) if device == "cuda" else (5000, 24)
    row = torch.randn(size, generator=generator(3)) * 1.5
    sets: list[dict[str, Any]] = [
        {}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.2, "temperature": 2.0}
    ]  # fmt: skip
    for given in sets:
        wanted = reference.sample(row, **given)
        filled = {name: torch.full((draws,), value, device=device) for name, value in given.items()}
        if "top_k" in filled:
            filled["top_k"] = filled["top_k"].int()
        seed = torch.full((draws,), 1234, device=device)
        offset = torch.arange(draws, device=device)
        ids = sample(row.to(device).expand(draws, -1), **filled, seed=seed, offset=offset)
        counts = torch.bincount(ids.cpu(), minlength=size).double()
        kept = wanted > 0
        assert bool((counts[~kept] == 0).all())
        expected = wanted[kept] * draws
        chi = float(((counts[kept] - expected) ** 2 / expected).sum())
        freedom = int(kept.sum()) - 1
        # Wilson and Hilferty: about a normal variable.
        cube = (chi / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))
        assert abs(cube / math.sqrt(2 / (9 * freedom))) < 4, (given, chi, freedom)


def test_a_row_draws_the_same_anywhere(way: Way) -> None:
    batch, size = (64, 8200) if way.is_gpu else (5, 1032)
    logits, given = way.randn(batch, size) * 3, arguments(batch, 2, "top_k", "top_p")
    given = {name: x.to(way.device) for name, x in given.items()}
    whole = sample(logits, **given)
    back = torch.arange(batch - 1, -1, -1, device=way.device)
    moved = sample(logits[back], **{name: x[back] for name, x in given.items()})
    same_bits(moved[back], whole)
    for row in range(0, batch, 3):
        one = {name: x[row : row + 1] for name, x in given.items()}
        same_bits(sample(logits[row : row + 1], **one), whole[row : row + 1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype, size", list(zip((*DTYPES, torch.float32), [50257, 128256, 300000, 128256], strict=True))
)
def test_vocabularies_of_models(dtype: torch.dtype, size: int) -> None:
    way = Way("gpu", "cuda")
    for batch, spread in ((2, 3.0), (5, 1.0), (9, 8.0)):
        logits = (way.randn(batch, size) * spread).to(dtype)
        check(way, logits, **arguments(batch, size))


@pytest.mark.gpu
def test_back_to_back() -> None:
    check_back_to_back(
        "seed = torch.arange(300, device='cuda')\n"
        "k = (seed % 3 * 40).int()\n"
        "cases = [partial(ops.sample, randn(b, v), top_k=k[:b], seed=seed[:b])"
        " for b, v in itertools.product((1, 7, 60, 300), (100, 50257, 128256))]"
    )


def test_seeds_of_torch(way: Way) -> None:
    logits = way.randn(40, 33)
    torch.manual_seed(3)
    first = sample(logits)
    assert not torch.equal(sample(logits), first)
    torch.manual_seed(3)
    same_bits(sample(logits), first)


def test_philox_is_the_published_one() -> None:
    # Random123's known answer to zeros.
    assert cpu.random_bits(0, 0) == 0xE169C58D_6627E8D5


def test_nothing_to_do(way: Way) -> None:
    assert sample(way.randn(0, 5)).shape == (0,)


X, ROW = torch.zeros(3, 40), torch.zeros(3)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logits": None}, "logits: expected a torch tensor"),
    ({"logits": X.long()}, "logits: expected dtype float16, bfloat16 or float32"),
    ({"logits": X[0]}, "logits: expected shape \\(batch, vocab_size\\)"),
    ({"logits": X[:, :0]}, "logits: expected shape"),
    ({"logits": X.T}, "logits: expected a contiguous last dimension"),
    ({"temperature": ROW.half()}, "temperature: expected dtype float32"),
    ({"temperature": 0.5}, "temperature: expected a torch tensor"),
    ({"top_k": ROW}, "top_k: expected dtype int32"),
    ({"top_p": ROW[:2]}, r"top_p: expected shape \(3,\)"),
    ({"seed": ROW.int()}, "seed: expected dtype int64"),
    ({"bias": X[:, :39]}, r"bias: expected shape \(3, 40\)"),
    ({"token_bitmask": X.int()}, r"token_bitmask: expected shape \(3, 2\)"),
    ({"presence_penalty": ROW}, "presence_penalty: expected output_counts with it"),
    ({"repetition_penalty": ROW}, "repetition_penalty: expected output_counts with it"),
    ({"softcap": -1.0}, "softcap: expected at least 0"),
    ({"out": ROW.int()}, "out: expected dtype int64"),
    ({"out_logprob": ROW[:2]}, r"out_logprob: expected shape \(3,\)"),
]


@pytest.mark.parametrize("changes, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorError, match=f"sample: {text}"):
        sample(**{"logits": X.clone(), **changes})
