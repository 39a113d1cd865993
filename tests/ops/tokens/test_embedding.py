"""embedding against rows taken one by one, and torch's own: ids, slices, positions, layouts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import embedding
from kernel_hub.testing import reference_tokens
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

INDICES = [torch.int32, torch.int64]
SIZES = [
    (1, 1), (3, 7), (5, 8), (2, 64), (300, 40), (7, 1032), (1, 2056), (270, 264), (257, 525),
]  # fmt: skip


def draw_ids(
    way: Way, shape: tuple[int, ...], rows: int, dtype: torch.dtype = torch.int64, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows, shape, generator=generator).to(dtype).to(way.device)


def check_embedding(way: Way, ids: torch.Tensor, weight: torch.Tensor, **given: Any) -> None:
    """A call into a guarded output, held to fp64 by the rule, or bit by bit where rows are kept."""
    out = Guarded((*ids.shape, weight.shape[1]), weight.dtype, way.device)
    assert embedding(ids, weight, **given, out=out.tensor) is out.tensor
    out.check()
    host = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    own = reference_tokens.embedding(ids.cpu(), weight.cpu(), **host, dtype=weight.dtype)
    if given.get("scale") is None and given.get("position_weight") is None:
        same_bits(out.tensor.cpu(), own)
    else:
        check(out.tensor.cpu(), reference_tokens.embedding(ids.cpu(), weight.cpu(), **host), own)
    same_bits(embedding(ids, weight, **given), out.tensor)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(way: Way, dtype: torch.dtype, size: tuple[int, int]) -> None:
    tokens, hidden = size
    weight, table = way.randn(50, hidden, dtype=dtype), way.randn(tokens, hidden, dtype=dtype)
    for kind in INDICES:
        ids = draw_ids(way, (tokens,), 50, kind)
        check_embedding(way, ids, weight)
        same_bits(embedding(ids, weight), torch.nn.functional.embedding(ids, weight))
        check_embedding(way, ids, weight, scale=3.1)
        check_embedding(way, ids, weight, scale=0.7, position_weight=table)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_as_gemma_does(way: Way, dtype: torch.dtype) -> None:
    # transformers multiplies by a tensor of the dtype: one rounding, as here.
    weight, ids = way.randn(30, 72, dtype=dtype), draw_ids(way, (9,), 30)
    scale = torch.tensor(72**0.5, dtype=dtype)
    same_bits(embedding(ids, weight, scale=float(scale)), weight[ids] * scale.to(way.device))


def test_positions(way: Way) -> None:
    weight, table = way.randn(20, 24), way.randn(9, 24, seed=1)
    ids = draw_ids(way, (3, 5), 20)
    for kind in INDICES:
        for shape in ((5,), (3, 5)):
            positions = draw_ids(way, shape, 9, kind, seed=2)
            check_embedding(way, ids, weight, position_weight=table, positions=positions)
    check_embedding(way, ids, weight, position_weight=table)
    check_embedding(way, ids[0, 0], weight, position_weight=table)
    by_torch = torch.nn.functional.embedding(ids, weight) + table[:5]
    torch.testing.assert_close(embedding(ids, weight, position_weight=table), by_torch)


def test_ranks_of_a_vocabulary_sum_to_the_whole(way: Way) -> None:
    whole, table, ids = way.randn(64, 40), way.randn(6, 40), draw_ids(way, (4, 6), 64)
    given: dict[str, Any] = {"scale": 2.0, "position_weight": table}
    parts = []
    for first, last in ((0, 20), (20, 21), (21, 64)):
        piece = {**given, "first_id": first, "vocab_size": 64}
        check_embedding(way, ids, whole[first:last], **piece)
        parts.append(embedding(ids, whole[first:last], **piece))
    same_bits(sum(parts[1:], parts[0]), embedding(ids, whole, **given))


def test_rows_of_padding_are_not_read(way: Way) -> None:
    weight = torch.cat([way.randn(10, 8), torch.full((6, 8), torch.nan, device=way.device)])
    ids = torch.arange(16, device=way.device)
    check_embedding(way, ids, weight, vocab_size=10)
    assert not embedding(ids, weight, vocab_size=10).isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(way: Way, dtype: torch.dtype) -> None:
    for shift, width in ((0, 72), (1, 64), (0, 65), (8, 80)):
        wide = Guarded((11, 64), dtype, way.device, row_stride=width, shift=shift)
        out = Guarded((6, 64), dtype, way.device, row_stride=width, shift=shift)
        weight = wide.fill(way.randn(11, 64, dtype=dtype))
        every = draw_ids(way, (2, 6), 11)
        for ids in (every[1], every.t()[:, 0], every.flatten()[::2]):
            embedding(ids, weight, out=out.tensor)
            out.check()
            same_bits(out.tensor.contiguous(), weight[ids])
            embedding(ids, weight, scale=2.0, position_weight=weight, out=out.tensor)
            out.check()
            own = (weight[ids].float() * 2.0 + weight[:6].float()).to(dtype)
            same_bits(out.tensor.contiguous(), own)


def test_what_is_no_number_stays(way: Way) -> None:
    for dtype in DTYPES:
        weight = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0] * 2, dtype=dtype)
        kind = torch.int32 if dtype.itemsize == 4 else torch.int16
        payload = weight.view(kind).clone()
        payload[0] |= 5  # copied rows keep even this
        rows = payload.view(dtype)[None].to(way.device)
        same_bits(embedding(torch.zeros(3, dtype=torch.int32, device=way.device), rows),
                  rows.expand(3, -1).contiguous())  # fmt: skip


def test_drawn_by_lot(way: Way) -> None:
    lot = random.Random(way.name)
    for _ in range(100 if way.is_gpu else 25):
        tokens = round(2 ** (lot.random() * (13 if way.is_gpu else 8)))
        hidden = lot.choice((896, 2048, 4096, 2880, 5376, 33) if way.is_gpu else (8, 72, 129, 896))
        rows, dtype = lot.choice((1, 17, 1000)), lot.choice(DTYPES)
        weight = way.randn(rows, hidden, dtype=dtype, seed=lot.randrange(99))
        ids = draw_ids(way, (tokens,), rows, lot.choice(INDICES), lot.randrange(1 << 20))
        given: dict[str, Any] = {}
        if lot.random() < 0.5:
            given["scale"] = lot.uniform(-3, 3)
        if lot.random() < 0.4:
            given["position_weight"] = way.randn(31, hidden, dtype=dtype, seed=7)
            given["positions"] = draw_ids(way, (tokens,), 31, lot.choice(INDICES), 5)
        if lot.random() < 0.3:
            given |= {"first_id": lot.randrange(rows), "vocab_size": 2 * rows}
        print(tokens, hidden, rows, dtype, sorted(given))
        check_embedding(way, ids, weight, **given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_by_torch_on_the_cpu(dtype: torch.dtype) -> None:
    way = Way("torch", "cpu")  # without the fixture, which puts the kernel in torch's place
    weight, table = way.randn(12, 40, dtype=dtype), way.randn(5, 40, dtype=dtype)
    ids = torch.tensor([[0, 11, -1, 12, 7], [3, 4, 2**40, 5, 6]])
    positions = torch.tensor([0, 4, 1, 5, -1])
    for given in (
        {}, {"scale": 1.7}, {"position_weight": table},
        {"position_weight": table, "positions": positions, "scale": 0.3},
        {"first_id": 5, "vocab_size": 12}, {"first_id": 5, "vocab_size": 12, "scale": 2.0},
    ):  # fmt: skip
        check_embedding(way, ids, weight, **given)
    check_embedding(way, ids, weight[:0])


def test_nothing_to_look_up(way: Way) -> None:
    weight = way.randn(5, 8)
    empty = torch.zeros(0, dtype=torch.int64, device=way.device)
    assert embedding(empty, weight).shape == (0, 8)
    assert embedding(empty.view(2, 0), weight, scale=2.0).shape == (2, 0, 8)
    assert embedding(empty.new_zeros(3), weight[:, :0]).shape == (3, 0)
    assert not embedding(empty.new_zeros(3), weight[:0]).any()


X, IDS = torch.randn(9, 8), torch.zeros(2, 3, dtype=torch.int64)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"ids": None}, "ids: expected a torch tensor"),
    ({"ids": IDS.float()}, "ids: expected dtype int32 or int64"),
    ({"weight": X[0]}, "weight: expected two dimensions"),
    ({"weight": X.long()}, "weight: expected dtype"),
    ({"weight": X.t()}, "weight: expected a contiguous last dimension"),
    ({"scale": "two"}, "scale: expected a number"),
    ({"scale": float("nan")}, "scale: expected a finite number"),
    ({"first_id": -1}, "first_id: expected at least 0"),
    ({"vocab_size": 2.5}, "vocab_size: expected a whole number"),
    ({"positions": IDS}, "positions: expected position_weight with them"),
    ({"position_weight": X[:, :4]}, r"position_weight: expected shape \(9, 8\)"),
    ({"position_weight": X.half()}, "position_weight: expected dtype float32"),
    ({"position_weight": X[:2]}, "position_weight: expected at least seqlen = 3 rows"),
    ({"position_weight": X, "positions": IDS[:, :2]}, r"positions: expected shape \(2, 3\)"),
    ({"position_weight": X, "positions": IDS.int().float()}, "positions: expected dtype int32"),
    ({"position_weight": X, "positions": IDS.t().contiguous().t()}, "positions: expected a contig"),
    ({"out": X[:6]}, r"out: expected shape \(2, 3, 8\)"),
    ({"out": torch.empty(1, 1, 8).expand(2, 3, 8)}, "out: expected an output whose elements"),
    ({"out": X[:6].view(2, 3, 8)}, "out: expected memory of its own"),
]  # fmt: skip


@pytest.mark.parametrize("changes, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorError, match=f"embedding: {text}"):
        embedding(**{"ids": IDS, "weight": X, **changes})


def test_ids_that_are_not_evenly_spaced_are_refused(way: Way) -> None:
    ids = draw_ids(way, (3, 5), 9)[:, :3]
    with pytest.raises(TensorError, match="embedding: the leading dimensions"):
        embedding(ids, way.randn(9, 8))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
UTILS = (
    "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic",
)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_registered_ops_pass_opcheck(device: str) -> None:
    registered, weight = torch.ops.kernel_hub, torch.randn(9, 8).to(device)
    ids, out = IDS.to(device), torch.empty(2, 3, 8, device=device)
    for op, arguments in (
        (registered.embedding, (ids, weight, None, None, None, 0, None)),
        (registered.embedding, (ids, weight, 2.5, weight, ids, 1, 20)),
        (registered.embedding_out, (ids, weight, 2.5, weight, None, 0, None, out)),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=UTILS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_equals_eager(backend: str, device: str) -> None:
    weight, ids = torch.randn(9, 8).to(device), IDS.to(device)

    def run(ids: torch.Tensor) -> torch.Tensor:
        return embedding(ids, weight, scale=3.0) + 1

    found = torch.compile(run, fullgraph=True, backend=backend)(ids)
    torch.testing.assert_close(found, run(ids), rtol=0, atol=0)


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back() -> None:
    check_back_to_back("""
weight, table = randn(1000, 896), randn(3000, 896)
ids = torch.randint(0, 1000, (3000,), device="cuda")
cases = [partial(ops.embedding, ids[:n], weight, scale=s, position_weight=p)
         for n, s, p in itertools.product((1, 37, 300, 3000), (None, 2.0), (None, table))]
""")
