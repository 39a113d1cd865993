"""The tensor maps that plans for Hopper ask for: which rows of a tensor their boxes bring."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from plan_lots import DRAWN, Lot
from record_plans import GPUS, pretending

from kernel_hub import ops
from kernel_hub.arrays.tensor_map import TensorMap

HOPPER = next(gpu for gpu in GPUS if "H200" in gpu[2])
SWIZZLE_BYTES = 1024  # of 8 rows of 128 bytes: where the pattern begins anew


class Asked(NamedTuple):
    """launches: as `record_plans` has them. maps: (tensor, box, how) of each that was made."""

    launches: list[list[Any]]
    maps: list[tuple[torch.Tensor, tuple[int, ...], dict[str, Any]]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """What calls ask of an H200."""
    with pretending(HOPPER) as recorder:
        found = Asked(recorder.launches, [])

        def tiled(tensor: torch.Tensor, box: tuple[int, ...], **how: Any) -> Any:
            found.maps.append((tensor, box, how))
            return SimpleNamespace(raw=repr((tensor.data_ptr(), box, how)).encode())

        with monkeypatch.context() as patch:
            patch.setattr(TensorMap, "tiled", tiled)
            yield found


@pytest.mark.parametrize("op", ["swiglu_linear", "gated_linear", "qkv_linear"])
def test_boxes_of_paired_weights_bring_every_row_once(asked: Asked, op: str) -> None:
    seen = 0
    for seed in range(40):
        asked.maps.clear()
        asked.launches.clear()
        args, options = DRAWN[op][1](Lot(f"{op} {seed}"))
        getattr(ops, op)(*args, **options)
        weights = args[1]
        for tensor, box, how in asked.maps:
            if tensor.data_ptr() != weights.data_ptr() or len(box) != 5:
                continue
            seen += 1
            pairs = zip(how["shape"][:-1], how["strides"][:-1], strict=True)
            ranges = [range(0, size * stride, stride) for size, stride in pairs]
            rows = sorted(sum(place) // weights.stride(0) for place in itertools.product(*ranges))
            assert rows == list(range(weights.shape[0]))
            if box[2:4] == (2, 8):  # the kernel is told how many rows one brings
                assert prod(box[:-1]) in asked.launches[0][5]
    assert seen > 5


@pytest.mark.parametrize("op", ["linear", "linear_fp8", "swiglu_linear"])
def test_maps_are_those_of_a_calls_addresses(asked: Asked, op: str) -> None:
    """A plan is there for the shapes; its maps are looked up by the addresses of every tensor."""
    dtype = torch.float8_e4m3fn if op == "linear_fp8" else torch.bfloat16
    a, b = ([torch.zeros(n, 64).to(dtype) for _ in range(2)] for n in (300, 256))
    columns = 128 if op == "swiglu_linear" else 256
    outs = [torch.zeros(300, columns, dtype=torch.bfloat16) for _ in range(2)]
    run = getattr(ops, op.removesuffix("_fp8"))
    found: dict[tuple[int, ...], Any] = {}
    for at in itertools.product(range(2), repeat=3):
        for _ in range(2):
            run(a[at[0]], b[at[1]], out=outs[at[2]])
        first, again = (launch[5] for launch in asked.launches[-2:])
        assert first == again
        found[at] = first
    named = 2 if op == "swiglu_linear" else 3  # its kernels have no map of out
    for one, other in itertools.combinations(found, 2):
        assert (found[one] == found[other]) == (one[:named] == other[:named]), (one, other)
    made = len(asked.maps)
    run(a[0], b[0], out=outs[0])
    assert made == len(asked.maps) > 0


@pytest.mark.parametrize(
    ("k", "row_stride", "promotion"),
    [(64, 64, "256B"), (128, 192, "256B"), (72, 72, "128B"), (64, 96, "128B")],
)
def test_rows_that_begin_within_a_line_are_fetched_line_by_line(
    asked: Asked, k: int, row_stride: int, promotion: str
) -> None:
    a = torch.zeros(300, row_stride, dtype=torch.bfloat16)[:, :k]
    ops.linear(a, torch.zeros(256, k, dtype=torch.bfloat16))
    kinds = {how["l2_promotion"] for x, _, how in asked.maps if x.data_ptr() == a.data_ptr()}
    assert kinds == {promotion}


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 12, 16, 24, 64, 100, 256])
def test_a_box_of_a_page_begins_where_the_swizzle_does(asked: Asked, page_size: int) -> None:
    q = torch.empty(2, 128, 4, 128, dtype=torch.bfloat16)
    cache = torch.empty(64, page_size, 2, 128, dtype=torch.bfloat16)
    ops.flash_attention(
        q, cache, cache, block_table=torch.full((2, 8), 0, dtype=torch.int32),
        cache_seqlens=torch.full((2,), 1, dtype=torch.int32),
    )  # fmt: skip
    assert asked.launches[0][0].endswith("_sm90") == bool(asked.maps) == (page_size % 8 == 0)
    boxes = [box for x, box, _ in asked.maps if x.data_ptr() == cache.data_ptr()]
    assert bool(boxes) == bool(asked.maps)
    for box in boxes:
        assert 128 * box[-2] % SWIZZLE_BYTES == 0 and page_size % box[-2] == 0
