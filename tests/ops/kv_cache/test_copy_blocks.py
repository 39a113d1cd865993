"""copy_blocks against pages copied one by one: dtypes, layouts, pairs that are none."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from back_to_back import check_back_to_back
from bits import same_bits
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import copy_blocks
from kernel_hub.testing.guard import Guarded

KINDS = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8]


def copied(cache: torch.Tensor, pairs: list[list[int]]) -> torch.Tensor:
    """Page by page."""
    pages = list(cache.clone().unbind(0))
    for source, target in pairs:
        if min(source, target) >= 0 and max(source, target) < len(pages):
            pages[target] = cache[source]
    return torch.stack(pages)


def draw_pairs(lot: random.Random, num_pages: int) -> list[list[int]]:
    """Targets that are no sources, and each once; some pairs are none."""
    pages = lot.sample(range(num_pages), num_pages)
    half = num_pages // 2
    pairs = [[lot.choice(pages[:half]), to] for to in pages[half:]] if half else []
    return [lot.choice((pair, pair, pair, [-1, pair[1]], [pair[0], -1])) for pair in pairs]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_drawn_by_lot(way: Way, kind: torch.dtype) -> None:
    lot = random.Random(f"{way.name} {kind}")
    for number in range(40 if way.is_gpu else 8):
        num_pages, page = lot.choice((1, 2, 9, 40)), lot.choice((1, 16))
        heads, dim = lot.choice((1, 2, 8)), lot.choice((8, 18, 64, 128))
        sizes = [page * heads * dim, page * heads * lot.choice((dim, 8))]
        pairs = draw_pairs(lot, num_pages)
        guarded, wanted = [], []
        for i, size in enumerate(sizes):
            shape, stride = (num_pages, size), size + lot.choice((0, 0, 16, 3))
            each = Guarded(shape, kind, way.device, row_stride=stride, shift=lot.choice((0, 0, 1)))
            values = way.randn(*shape, seed=2 * number + i).mul(9).to(kind)
            each.tensor.view(torch.uint8 if kind.itemsize == 1 else kind).copy_(
                values.view(torch.uint8 if kind.itemsize == 1 else kind)
            )
            guarded.append(each)
            wanted.append(copied(values.view(_word(kind)), pairs))
        index = lot.choice((torch.int32, torch.int64))
        mapping = torch.tensor(pairs, dtype=index, device=way.device).view(-1, 2)
        print(number, num_pages, sizes, pairs, index)
        copy_blocks(guarded[0].tensor, guarded[1].tensor, mapping)
        for each, right in zip(guarded, wanted, strict=True):
            each.check("cache")
            same_bits(each.tensor.view(_word(kind)).contiguous(), right)


def _word(kind: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[kind.itemsize]


def test_caches_of_one_tensor(way: Way) -> None:
    both = way.randn(6, 2, 4, 2, 8)
    k_cache, v_cache = both.unbind(1)
    before = both.clone()
    copy_blocks(k_cache, v_cache, torch.tensor([[0, 5], [2, 3]], device=way.device))
    same_bits(both, copied(before, [[0, 5], [2, 3]]))


def test_by_torch_on_the_cpu() -> None:
    pairs = [[0, 3], [-1, 2], [4, -7], [1, 5], [9, 2], [1, 99]]
    for kind in KINDS:
        cache = torch.randn(6, 4, 8).mul(9).to(kind)
        wanted = copied(cache.view(_word(kind)), pairs)
        other = cache.clone()
        copy_blocks(cache, other, torch.tensor(pairs))
        same_bits(cache.view(_word(kind)), wanted)
        same_bits(other.view(_word(kind)), wanted)


X, PAIRS = torch.zeros(4, 8), torch.zeros(2, 2, dtype=torch.int64)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"k_cache": None}, "k_cache: expected a torch tensor"),
    ({"k_cache": X.double()}, r"k_cache: expected shape \(num_pages, \.\.\.\), of elements"),
    ({"v_cache": X[:3].clone()}, "v_cache: expected 4 pages"),
    ({"v_cache": torch.zeros(4, 8, 2)[..., 0]}, "v_cache: expected contiguous pages"),
    ({"v_cache": X[:1].clone().expand(4, 8)}, "v_cache: expected an output whose elements"),
    ({"v_cache": X}, "[kv]_cache: expected memory of its own"),
    ({"block_mapping": PAIRS.float()}, "block_mapping: expected dtype int32 or int64"),
    ({"block_mapping": PAIRS[:, :1]}, r"block_mapping: expected shape \(2, 2\)"),
    ({"block_mapping": PAIRS.repeat(1, 2)[:, :2]}, "block_mapping: expected a contiguous"),
]


@pytest.mark.parametrize("changes, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(changes: dict[str, Any], text: str) -> None:
    given = {"k_cache": X, "v_cache": X.clone(), "block_mapping": PAIRS, **changes}
    with pytest.raises(TensorError, match=f"copy_blocks: {text}"):
        copy_blocks(**given)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_registered_op_passes_opcheck(device: str) -> None:
    k_cache, v_cache, pairs = (x.clone().to(device) for x in (X, X, PAIRS))
    torch.library.opcheck(
        torch.ops.kernel_hub.copy_blocks.default, (k_cache, v_cache, pairs),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )  # fmt: skip


@pytest.mark.gpu
def test_a_thousand_launches_back_to_back() -> None:
    check_back_to_back("""
caches = [randn(60, 16, 8, 128) for _ in range(2)]
def run(n):
    pairs = torch.stack([torch.arange(n), torch.arange(n) + 30], 1).cuda()
    def copy():
        ops.copy_blocks(*caches, pairs)
        return caches[0]
    copy()
    return copy
cases = [run(n) for n in (30, 1, 7)]
""")
