"""cu_seqlens against places found token by token: finished rows, pages that are none, lots."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import append_kv, cu_seqlens
from kernel_hub.testing import reference_tokens
from kernel_hub.testing.guard import Guarded


def int32(way: Way, *values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=way.device)


def check(
    way: Way, lengths: list[int], num_tokens: int, cached: list[int] | None = None,
    table: list[list[int]] | None = None, page_size: int = 1,
) -> None:  # fmt: skip
    """Every output is that of the reference, and nothing else was written."""
    outs = {"out": Guarded((len(lengths) + 1,), torch.int32, way.device)}
    outs["out_positions"] = Guarded((num_tokens,), torch.int64, way.device)
    given: dict[str, Any] = {"page_size": page_size}
    if cached is not None:
        given["cache_seqlens"] = int32(way, *cached)
    if table is not None:
        given["block_table"] = int32(way, *table)
        outs["out_slots"] = Guarded((num_tokens,), torch.int64, way.device)
    tensors = {name: each.tensor for name, each in outs.items()}
    found = cu_seqlens(int32(way, *lengths), **given, **tensors)
    assert found is tensors["out"]
    for name, each in outs.items():
        each.check(name)
    wanted = reference_tokens.cu_seqlens(lengths, num_tokens, cached, table, page_size)
    assert [x.tolist() for x in tensors.values()] == list(wanted[: len(tensors)])
    assert cu_seqlens(int32(way, *lengths)).tolist() == wanted[0]


@pytest.mark.parametrize(
    "lengths",
    [[], [0], [-1], [5], [3, 0, 4], [-1, 2, -7, 0, 1], [1] * 300, [0, 0, 257, 0]],
    ids=str,
)
def test_lengths(way: Way, lengths: list[int]) -> None:
    total = sum(max(each, 0) for each in lengths)
    for num_tokens in (0, 1, total, total + 9):
        check(way, lengths, num_tokens)
        check(way, lengths, num_tokens, [7 * i - 3 for i in range(len(lengths))])


def test_drawn_by_lot(way: Way) -> None:
    lot = random.Random(way.name)
    for number in range(100 if way.is_gpu else 25):
        batch = round(2 ** lot.uniform(0, 12 if way.is_gpu else 9))
        lengths = [lot.choice((-1, 0, 1, 1, 1, lot.randrange(60))) for _ in range(batch)]
        cached = [lot.choice((-2, 0, lot.randrange(90))) for _ in range(batch)]
        page_size, columns = lot.choice((1, 3, 16, 64)), lot.choice((1, 4, 9))
        table = [[lot.randrange(-1, 10**6) for _ in range(columns)] for _ in range(batch)]
        num_tokens = max(0, sum(max(x, 0) for x in lengths) + lot.randrange(-3, 9))
        print(number, batch, page_size, columns, num_tokens)
        check(way, lengths, num_tokens, cached, table, page_size)


def test_by_torch_on_the_cpu() -> None:
    way = Way("torch", "cpu")  # without the fixture, which puts the kernel in torch's place
    table = [[4, 5], [-1, 3], [0, 1], [2, 6]]
    for num_tokens in (0, 5, 20):
        check(way, [3, -1, 0, 9], num_tokens, [1, 2, 3, 6], table, 8)
        check(way, [3, 2, 4, 9], num_tokens, [-1, 2, 30, 6], table, 8)
        check(way, [3, 2, 4, 9], num_tokens)
    check(way, [], 4)


def test_a_step_appends_by_the_slots(way: Way) -> None:
    lengths, cached = [2, -1, 1, 3], [3, 5, 0, 4]
    table = int32(way, [0, 1], [2, 3], [4, 5], [6, 7])
    slots = torch.empty(8, dtype=torch.int64, device=way.device)
    bounds = cu_seqlens(
        int32(way, *lengths), cache_seqlens=int32(way, *cached), block_table=table, page_size=4,
        out_slots=slots,
    )  # fmt: skip
    k, v = way.randn(8, 1, 16), way.randn(8, 1, 16, seed=1)
    caches = [way.randn(8, 4, 1, 16, seed=seed) * 0 for seed in range(4)]
    append_kv(k, v, *caches[:2], slot_mapping=slots)
    append_kv(
        k, v, *caches[2:], cu_seqlens=bounds, cache_seqlens=int32(way, *cached), block_table=table
    )
    assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])
    assert int((caches[0] != 0).any(-1).sum()) == 6


X = torch.ones(3, dtype=torch.int32)
LONG = torch.ones(4, dtype=torch.int64)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lengths": X.long()}, "lengths: expected dtype int32"),
    ({"lengths": X[None]}, "lengths: expected one dimension"),
    ({"lengths": X[:1].expand(9000).contiguous()}, "lengths: expected at most 8192"),
    ({"cache_seqlens": X[:2]}, r"cache_seqlens: expected shape \(3,\)"),
    ({"out_slots": LONG}, "out_slots: expected block_table with it"),
    ({"block_table": X[:, None], "out_slots": LONG}, "page_size: expected at least 1 with"),
    ({"block_table": X[:2, None], "out_slots": LONG}, r"block_table: expected shape \(3, 1\)"),
    ({"page_size": -1}, "page_size: expected at least 0"),
    ({"out": X}, r"out: expected shape \(4,\)"),
    ({"out_positions": X}, "out_positions: expected dtype int64"),
    ({"out_positions": LONG, "block_table": X[:, None], "page_size": 4, "out_slots": LONG[:2]},
     r"out_slots: expected shape \(4,\)"),
]  # fmt: skip


@pytest.mark.parametrize("changes, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorError, match=f"cu_seqlens: {text}"):
        cu_seqlens(**{"lengths": X, **changes})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_registered_op_passes_opcheck(device: str) -> None:
    x, out = X.to(device), torch.empty(4, dtype=torch.int32, device=device)
    slots, positions = (torch.empty(5, dtype=torch.int64, device=device) for _ in range(2))
    arguments = (x, x.clone(), x[:, None].clone(), 4, out, positions, slots)
    torch.library.opcheck(
        torch.ops.kernel_hub.cu_seqlens.default, arguments,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back() -> None:
    check_back_to_back("""
lengths = torch.arange(5000, device="cuda").int() % 7 - 1
cases = [partial(ops.cu_seqlens, lengths[:n]) for n in (1, 37, 1000, 5000)]
""")
