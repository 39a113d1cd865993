"""verify_tree: the paths that torch computes, chains as verify_draft has them, frequencies."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from bits import same_bits
from test_verify_draft import chi_square, drawn, seeds
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import sample, verify_draft, verify_tree
from kernel_hub.ops.sampling import verify_cpu
from kernel_hub.ops.sampling.verification import VerifyGiven
from kernel_hub.testing import reference_tokens
from kernel_hub.testing.guard import Guarded

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def outputs(batch: int, drafts: int, device: str) -> dict[str, Guarded]:
    return {
        "out_ids": Guarded((batch, drafts + 1), torch.int64, device),
        "num_accepted": Guarded((batch,), torch.int32, device),
        "path": Guarded((batch, drafts), torch.int32, device),
    }


def check(
    way: Way, ids: torch.Tensor, parents: torch.Tensor, logits: torch.Tensor, **given: Any
) -> Any:
    """The kernel's paths are torch's."""
    outs = outputs(*ids.shape, way.device)
    moved = {name: x.to(way.device) for name, x in given.items()}
    tensors = {name: each.tensor for name, each in outs.items()}
    verify_tree(
        ids.to(way.device), parents.to(way.device), logits.to(way.device), **moved, **tensors
    )
    fields: dict[str, Any] = dict.fromkeys(VerifyGiven._fields)
    fields |= {"draft_ids": ids, "parents": parents, "target_logits": logits, **given}
    fields |= {name: torch.empty_like(x, device="cpu") for name, x in tensors.items()}
    verify_cpu.verify_into(VerifyGiven(**fields))
    for name, each in outs.items():
        each.check(name)
        same_bits(each.tensor.cpu(), fields[name], name=name)
    return fields["out_ids"], fields["num_accepted"], fields["path"]


def trees(lot: random.Random, batch: int, drafts: int) -> torch.Tensor:
    rows = [[lot.choice((-1, *range(c)[-3:])) for c in range(drafts)] for _ in range(batch)]
    return torch.tensor(rows, dtype=torch.int32).view(batch, drafts)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 5, 600])
def test_paths_are_torchs(way: Way, size: int, dtype: torch.dtype) -> None:
    lot = random.Random(size)
    longest = 0
    for drafts, spread in ((0, 1.0), (5, 0.0), (7, 4.0)):
        batch = 100 if way.is_gpu else 2
        logits = drawn(drafts, batch, drafts + 1, size, spread=spread).to(dtype)
        ids = torch.tensor(
            [[lot.randrange(min(size, 5)) for _ in range(drafts)] for _ in range(batch)]
        ).view(batch, drafts).long()  # fmt: skip
        ids[drawn(7, *ids.shape) > 1.8] = -1
        temperature = torch.tensor([lot.choice((0.0, 0.7, 1.0)) for _ in range(batch)])
        probs = drawn(9, batch, drafts, size, spread=2.0).softmax(-1)
        tree = trees(lot, batch, drafts)
        check(way, ids, tree, logits, **seeds(batch), temperature=temperature)
        found = check(way, ids, tree, logits, **seeds(batch, 1), draft_probs=probs)
        longest = max(longest, int(found[1].max()))
    assert longest > 1 or size > 5


def test_one_child_each_is_a_chain(way: Way) -> None:
    batch, drafts, size = 4, 4, 40
    logits = drawn(1, batch, drafts + 1, size, spread=3.0).to(way.device)
    ids = logits[:, :-1].argmax(-1)
    parents = torch.arange(-1, drafts - 1, device=way.device).int().repeat(batch, 1)
    probs = drawn(2, batch, drafts, size).softmax(-1).to(way.device)
    given = {name: x.to(way.device) for name, x in seeds(batch).items()}
    for of_drafts in (None, probs):
        tokens, num = verify_draft(ids, logits, of_drafts, **given)
        found, count, path = verify_tree(ids, parents, logits, of_drafts, **given)
        same_bits(found, tokens)
        same_bits(count, num)
        for row, kept in enumerate(num.tolist()):
            assert path[row].tolist() == [*range(kept), *[-1] * (drafts - kept)]


def test_the_same_in_any_batch(way: Way) -> None:
    logits, probs = drawn(3, 3, 6, 30, spread=2.0), drawn(4, 3, 5, 30).softmax(-1)
    ids, tree = torch.arange(15).view(3, 5) % 7, trees(random.Random(1), 3, 5)
    given = {"draft_probs": probs, **seeds(3)}
    whole = check(way, ids, tree, logits, **given)
    for row in range(3):
        one = slice(row, row + 1)
        alone = check(
            way, ids[one], tree[one], logits[one], **{n: x[one] for n, x in given.items()}
        )
        for found, wanted in zip(alone, whole, strict=True):
            same_bits(found, wanted[one])


@pytest.mark.parametrize("device", DEVICES)
def test_frequencies_of_each_end(device: str) -> None:
    """A tree of fixed drafts, verified often: which path is kept, with the token behind it."""
    draws, size = (1_000_000, 12) if device == "cuda" else (3000, 6)
    parents, ids = [-1, -1, 0, 0], [2, 4, 1, 3]
    logits, probs = drawn(5, 5, size, spread=1.5), drawn(6, 4, size).softmax(-1)
    wanted = reference_tokens.verify_tree(ids, parents, logits, probs)
    torch.testing.assert_close(wanted.sum(), torch.tensor(1.0, dtype=torch.float64))
    found, num, path = verify_tree(
        torch.tensor(ids, device=device).repeat(draws, 1),
        torch.tensor(parents, device=device, dtype=torch.int32).repeat(draws, 1),
        logits.to(device).repeat(draws, 1, 1), probs.to(device).repeat(draws, 1, 1),
        seed=torch.arange(draws, device=device), offset=torch.full((draws,), 5, device=device),
    )  # fmt: skip
    last = found.gather(1, num.long()[:, None])[:, 0]
    end = torch.where(num > 0, path.gather(1, (num.long() - 1).clamp(min=0)[:, None])[:, 0], -1)
    counts = torch.bincount(((end.long() + 1) * size + last).cpu(), minlength=5 * size).double()
    assert abs(chi_square(counts, wanted.flatten(), draws)) < 4


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_token_is_the_targets(device: str) -> None:
    """Siblings drawn by sample from q, each by itself: the first token is distributed as p."""
    draws, size = (1_000_000, 30) if device == "cuda" else (3000, 7)
    logits, draft_logits = drawn(7, 4, size, spread=2.0), drawn(8, size, spread=2.0)
    seed = torch.arange(draws, device=device)
    rows = draft_logits.to(device).expand(draws, -1)
    drafts = torch.stack([sample(rows, seed=seed + (n + 1) * 10**9) for n in range(3)], 1)
    tree = torch.full((draws, 3), -1, dtype=torch.int32, device=device)
    probs = draft_logits.softmax(-1).to(device).repeat(draws, 3, 1)
    ids, num, _ = verify_tree(drafts, tree, logits.to(device).repeat(draws, 1, 1), probs, seed=seed)
    counts = torch.bincount(ids[:, 0].cpu(), minlength=size).double()
    assert abs(chi_square(counts, logits[0].double().softmax(-1), draws)) < 4
    agreed = float(torch.minimum(logits[0].softmax(-1), draft_logits.softmax(-1)).sum())
    assert float((num > 0).double().mean()) > agreed  # more than one draft alone would be


def test_drafts_that_are_not_in_the_tree(way: Way) -> None:
    logits = torch.zeros(1, 5, 8)
    logits[:, :, 3] = 9.0
    zero = torch.zeros(1)
    for parents, ids, wanted in (
        ([1, -1, 1, 2], [3, 3, 3, 3], [1, 2, 3]),  # the first comes behind a later one
        ([-1, 9, -2, 0], [3, 3, 3, 3], [0, 3]),
        ([-1, 0, 1, 2], [3, -1, 3, 3], [0]),  # behind none
        ([-1, -1, 1, 1], [8, 3, 2, 3], [1, 3]),
    ):
        tree = torch.tensor([parents], dtype=torch.int32)
        _, num, path = check(way, torch.tensor([ids]), tree, logits, temperature=zero, **seeds(1))
        assert path[0, : int(num[0])].tolist() == wanted


X, IDS = torch.zeros(2, 4, 9), torch.zeros(2, 3, dtype=torch.int64)
TREE = torch.full((2, 3), -1, dtype=torch.int32)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"target_logits": X[0]}, r"target_logits: expected shape \(batch, num_drafts \+ 1"),
    ({"target_logits": X[:1, :1].expand(2, 200, 9)}, "target_logits: .*at most 128 drafts"),
    ({"draft_ids": IDS.int()}, "draft_ids: expected dtype int64"),
    ({"parents": TREE.long()}, "parents: expected dtype int32"),
    ({"parents": TREE[:, :2]}, r"parents: expected shape \(2, 3\)"),
    ({"draft_probs": X}, r"draft_probs: expected shape \(2, 3, 9\)"),
    ({"path": TREE.repeat(1, 2)[:, ::2]}, "path: expected a contiguous"),
]


@pytest.mark.parametrize("changes, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorError, match=f"verify_tree: {text}"):
        verify_tree(**{"draft_ids": IDS, "parents": TREE, "target_logits": X, **changes})


@pytest.mark.parametrize("device", DEVICES)
def test_the_registered_op_passes_opcheck(device: str) -> None:
    outs = [torch.empty(2, 4).long(), torch.empty(2).int(), torch.empty(2, 3).int()]
    given = [IDS, TREE, X, None, None, torch.arange(2), None, *outs]
    torch.library.opcheck(
        torch.ops.kernel_hub.verify_tree.default,
        tuple(x if x is None else x.clone().to(device) for x in given),
        test_utils=("test_schema", "test_faketensor"),
    )
