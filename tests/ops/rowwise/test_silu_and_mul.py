"""silu_and_mul against fp64, in every layout the op accepts."""

from __future__ import annotations

import pytest
import torch
from bits import same_bits
from gated_cases import SHAPES, SIZES, Gate, check_e4m3, check_layouts, check_refusals
from row_layouts import say_rows
from ways import DTYPES, Way

from kernel_hub.ops import silu_and_mul
from kernel_hub.ops.core import common
from kernel_hub.ops.rowwise import gated
from kernel_hub.testing import reference
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

GATE = Gate(silu_and_mul, reference.silu_and_mul)


def check_silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    check(out, reference.silu_and_mul(x), reference.silu_and_mul(x, dtype=x.dtype))


@pytest.mark.parametrize("size", [1, 7, 8, 127, 128, 129, 199, 4096, 5120, 11008, 14336, 40000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sizes(way: Way, dtype: torch.dtype, size: int) -> None:
    for rows in [1, 3, 300, 1000] if way.is_gpu else [1, 3]:
        x = way.randn(rows, 2 * size, dtype=dtype)
        out = Guarded((rows, size), dtype, way.device)
        assert silu_and_mul(x, out=out.tensor) is out.tensor
        out.check()
        check_silu_and_mul(out.tensor, x)
        same_bits(silu_and_mul(x), out.tensor)


def test_many_rows(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    # More than gridDim.y can be, or is said to be: the rows are walked in steps.
    if not way.is_gpu:
        monkeypatch.setattr(common, "MAX_GRID_Y", 1000)
    x = way.randn(70_000 if way.is_gpu else 2500, 2, dtype=torch.float16)
    check_silu_and_mul(silu_and_mul(x), x)


@pytest.mark.parametrize("row_stride, shift", [(264, 0), (257, 0), (264, 1), (256, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_and_unaligned_rows(
    way: Way, dtype: torch.dtype, row_stride: int, shift: int
) -> None:
    x = Guarded((3, 256), dtype, way.device, row_stride=row_stride, shift=shift)
    x.fill(way.randn(3, 256, dtype=dtype))
    out = Guarded((3, 128), dtype, way.device, row_stride=row_stride, shift=shift)
    silu_and_mul(x.tensor, out=out.tensor)
    out.check()
    x.check("x")
    check_silu_and_mul(out.tensor, x.tensor)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_e4m3(way: Way, dtype: torch.dtype, size: int) -> None:
    check_e4m3(way, GATE, dtype, size)


@pytest.mark.parametrize("vecs, rows", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_chosen_for_many_rows(
    way: Way, dtype: torch.dtype, vecs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_rows(monkeypatch, gated, rows)
    x = way.randn(3, 32 // dtype.itemsize * vecs, dtype=dtype)
    GATE.check_e4m3(GATE(x, out_dtype=torch.float8_e4m3fn), x)


def test_layouts(way: Way) -> None:
    check_layouts(way, GATE)


def test_refused() -> None:
    check_refusals(GATE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_inf_and_large_values(way: Way, dtype: torch.dtype) -> None:
    inf = float("inf")
    gates = torch.tensor([float("nan"), inf, -inf, 100.0, -100.0, 88.0, -88.0, 0.0, -0.0, 1e4])
    x = torch.cat((gates, torch.full_like(gates, 2.0))).to(dtype).to(way.device)[None]
    out = silu_and_mul(x)
    assert out[0, 0].isnan() and out[0, 1] == inf and out[0, 2].isnan()
    check_silu_and_mul(out[:, 3:], torch.cat((x[:, 3:10], x[:, 13:]), -1))


def test_the_same_bits_every_time(way: Way) -> None:
    x = way.randn(17, 2 * 5120, dtype=torch.bfloat16)
    first = silu_and_mul(x)
    for _ in range(20 if way.is_gpu else 1):
        same_bits(silu_and_mul(x), first)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    rows, size = (1 << 31) // 16384 + 5, 8192
    x = torch.empty(rows, 2 * size, device="cuda", dtype=torch.bfloat16).normal_()
    out = silu_and_mul(x)
    for part in (slice(0, 4), slice(rows - 8, rows)):
        check_silu_and_mul(out[part], x[part])
