"""sample's most probable tokens: those of a sort in fp64, from every path of the kernel."""

from __future__ import annotations

import importlib
import math
import random
from typing import Any

import pytest
import torch
from bits import same_bits
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import sample
from kernel_hub.testing import reference
from kernel_hub.testing.guard import Guarded

op: Any = importlib.import_module("kernel_hub.ops.sampling.sample")


def expected(
    row: torch.Tensor, n: int, greedy: bool, **given: Any
) -> tuple[list[int], list[float]]:
    """By a sort of (-value, index) in Python, over what the reference keeps."""
    if greedy:
        best = int(row.double().argmax())
        return [best][:n], [0.0][:n]
    wanted = reference.sample(row, **given)
    kept = [i for i in range(len(row)) if wanted[i] > 0]
    order = sorted(kept, key=lambda i: (-float(row[i]), i))[:n]
    return order, [math.log(float(wanted[i])) for i in order]


def check_top(way: Way, logits: torch.Tensor, n: int, top_n: list[int] | None = None,
              **given: Any) -> None:  # fmt: skip
    """given: what one row is drawn by, the same for all."""
    batch = len(logits)
    kinds = {"top_k": torch.int32}
    filled = {
        name: torch.full((batch,), x, dtype=kinds.get(name, torch.float32), device=way.device)
        for name, x in given.items()
    }
    ids = Guarded((batch, n), torch.int64, way.device)
    logprobs = Guarded((batch, n), torch.float32, way.device)
    filled["seed"] = torch.arange(batch, device=way.device)
    if top_n is not None:
        filled["top_n"] = torch.tensor(top_n, dtype=torch.int32, device=way.device)
    drawn, logprob = sample(
        logits.to(way.device), **filled, out_top_ids=ids.tensor, out_top_logprobs=logprobs.tensor,
        return_logprob=True,
    )  # fmt: skip
    ids.check("out_top_ids")
    logprobs.check("out_top_logprobs")
    same_bits(drawn, sample(logits.to(way.device), **{**filled, "top_n": None}))
    greedy = given.get("temperature", 1.0) <= 0
    for row in range(batch):
        asked = n if top_n is None else max(0, min(n, top_n[row]))
        right, logs = expected(logits[row].cpu(), asked, greedy, **given)
        found = ids.tensor[row].tolist()
        assert found == right + [-1] * (n - len(right)), (row, given)
        values = logprobs.tensor[row].tolist()
        torch.testing.assert_close(values[: len(logs)], logs, rtol=1e-4, atol=2e-4)
        assert all(x == -math.inf for x in values[len(logs) :])
        if int(drawn[row]) in right:  # the same number as that of the one that was drawn
            assert values[right.index(int(drawn[row]))] == float(logprob[row])


KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "greedy": {"temperature": 0.0}, "top_k": {"top_k": 20, "temperature": 0.7},
    "few": {"top_k": 3}, "top_p": {"top_p": 0.9}, "narrow": {"top_p": 0.05},
    "min_p": {"min_p": 0.3}, "many": {"top_k": 700, "top_p": 0.95},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [0.0, 0.01, 2.0])
def test_kinds_of_rows(way: Way, kind: str, spread: float) -> None:
    for size, n in ((40, 20), (900, 5), (3000, 32)):
        logits = way.randn(2, size, seed=size) * spread
        check_top(way, logits, n, **KINDS[kind])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_have_ties(way: Way, dtype: torch.dtype) -> None:
    logits = (way.randn(3, 2000, dtype=dtype) * 2).round()
    for given in way.some(KINDS.values(), len(KINDS) // 2, dtype):
        check_top(way, logits, 20, **given)


@pytest.mark.parametrize("parts", [2, 8])
def test_rows_in_parts(way: Way, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "runs_clusters", lambda _: False)
    monkeypatch.setattr(op, "choose_parts", lambda *_: parts)
    for given in KINDS.values():
        for spread in way.some((0.0, 2.0), 1, parts, sorted(given)):
            check_top(way, way.randn(2, 1500) * spread, 20, **given)


def test_each_row_asks_for_its_own(way: Way) -> None:
    for given in KINDS.values():
        check_top(way, way.randn(6, 700) * 2, 8, [0, 1, 8, 9, -3, 4], **given)


def test_drawn_by_lot(way: Way) -> None:
    lot = random.Random(way.name)
    for _ in range(60 if way.is_gpu else 12):
        size = round(2 ** lot.uniform(0, 17 if way.is_gpu else 12))
        given = dict(lot.choice(list(KINDS.values())))
        logits = way.randn(2, size, seed=lot.randrange(99)) * lot.choice((0.0, 0.5, 3.0))
        print(size, given)
        check_top(way, logits, lot.randrange(33), **given)


@pytest.mark.parametrize("kind", KINDS)
def test_by_torch_on_the_cpu(kind: str) -> None:
    way = Way("torch", "cpu")  # without the fixture, which puts the kernel in torch's place
    for spread in (0.0, 2.0):
        check_top(way, way.randn(3, 300) * spread, 20, [20, 3, 0], **KINDS[kind])


def test_either_output_alone(way: Way) -> None:
    logits, seed = way.randn(4, 300), torch.arange(4, device=way.device)
    ids = torch.empty(4, 6, dtype=torch.int64, device=way.device)
    both, logprobs, alone = ids.clone(), ids.float(), ids.float()
    sample(logits, seed=seed, out_top_ids=both, out_top_logprobs=logprobs)
    sample(logits, seed=seed, out_top_ids=ids)
    sample(logits, seed=seed, out_top_logprobs=alone)
    assert torch.equal(ids, both) and torch.equal(alone, logprobs)


X, IDS = torch.zeros(3, 40), torch.zeros(3, 5, dtype=torch.int64)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"out_top_ids": IDS[0]}, r"out_top_ids: expected shape \(3, 5\)"),
    ({"out_top_ids": IDS.int(), "out_top_logprobs": IDS.float()}, "out_top_ids: expected dtype"),
    ({"out_top_ids": IDS, "out_top_logprobs": X[:, :4].clone()}, "out_top_logprobs: expected"),
    ({"out_top_ids": IDS.repeat(1, 8), "out_top_logprobs": X.clone()}, "out_top_ids: expected at"),
    ({"out_top_ids": IDS.repeat(1, 2)[:, :5], "out_top_logprobs": IDS.float()},
     "out_top_ids: expected a contiguous tensor"),
]  # fmt: skip


@pytest.mark.parametrize("changes, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorError, match=f"sample: {text}"):
        sample(X, **changes)
