"""layer_norm against fp64: parameters of each type, residuals before and after, quantised rows."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from bits import same_bits
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import layer_norm
from kernel_hub.testing import reference
from kernel_hub.testing.compare import check
from kernel_hub.testing.guard import Guarded

plans: Any = importlib.import_module("kernel_hub.ops.rowwise.norm")
HIDDEN_SIZES = [1, 7, 16, 127, 129, 256, 264, 1024, 4096, 5120, 16384, 40000]
E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def check_layer_norm(out: torch.Tensor, x: torch.Tensor, **options: Any) -> None:
    check(
        out, reference.layer_norm(x, **options), reference.layer_norm(x, **options, dtype=x.dtype)
    )  # fmt: skip


def check_quantised(
    out: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, **options: Any
) -> None:
    """Each number is the nearest of its row's grid, but for fp32's error before it is rounded."""
    truth = reference.layer_norm(x, **options)
    most, least = (448.0, 2.0**-6) if out.dtype == E4M3 else (127.0, 0.0)
    largest = truth.abs().amax(-1).clamp_min(1e-12)
    torch.testing.assert_close(scale.double(), largest / most, rtol=2e-5, atol=0)
    rows = scale.double()[..., None]
    error = (out.double() * rows - truth).abs()
    # Half a step: e4m3 has 3 bits behind the first, and steps of 2^-9 below 2^-6.
    step = torch.ones_like(truth)
    if out.dtype == E4M3:
        step = torch.exp2(torch.floor(torch.log2((truth.abs() / rows).clamp_min(least)))) / 8
    assert bool((error <= rows * step * 0.5 + 3e-5 * largest[..., None]).all())


def rows_for(way: Way, hidden: int) -> list[int]:
    if way.is_gpu:
        return [1, 3, 1000, 5000] if hidden <= 8192 else [1, 3, 1000]
    return [2] if hidden > 1024 else [1, 9]


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm(way: Way, dtype: torch.dtype, hidden: int) -> None:
    for rows in rows_for(way, hidden):
        x, bias = way.randn(rows, hidden, dtype=dtype) + 2, way.randn(hidden, dtype=dtype, seed=2)
        for kind in {dtype, torch.float32}:
            weight = way.randn(hidden, dtype=kind, seed=1)
            out = Guarded((rows, hidden), dtype, way.device)
            assert layer_norm(x, weight, bias.to(kind), out=out.tensor) is out.tensor
            out.check()
            check_layer_norm(out.tensor, x, weight=weight, bias=bias.to(kind))
        plain = layer_norm(x, eps=1e-3)
        check_layer_norm(plain, x, eps=1e-3)
        check_layer_norm(layer_norm(x, None, bias), x, bias=bias)
        moved = layer_norm(x, weight, weight_offset=1.0)
        check_layer_norm(moved, x, weight=weight, weight_offset=1.0)


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_before_and_after(way: Way, dtype: torch.dtype, hidden: int) -> None:
    for rows in rows_for(way, hidden):
        x, residual = (way.randn(rows, hidden, dtype=dtype, seed=seed) for seed in (0, 2))
        weight = way.randn(hidden, seed=1)
        out, residual_out = (Guarded((rows, hidden), dtype, way.device) for _ in range(2))
        layer_norm(x, weight, residual=residual, out=out.tensor, residual_out=residual_out.tensor)
        out.check()
        residual_out.check("residual_out")
        same_bits(residual_out.tensor, x + residual, name="residual_out")
        check_layer_norm(out.tensor, x, weight=weight, residual=residual)
        after = layer_norm(x, weight, residual=residual, adds_after=True)
        check_layer_norm(after, x, weight=weight, residual=residual, adds_after=True)
        inside = residual.clone()
        layer_norm(x, weight, residual=inside, adds_after=True, out=inside)
        same_bits(inside, after)


@pytest.mark.parametrize("hidden", HIDDEN_SIZES)
@pytest.mark.parametrize("kind", [E4M3, INT8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantised(way: Way, dtype: torch.dtype, kind: torch.dtype, hidden: int) -> None:
    for rows in rows_for(way, hidden):
        x, residual = (way.randn(rows, hidden, dtype=dtype, seed=seed) for seed in (0, 2))
        weight = way.randn(hidden, dtype=dtype, seed=1)
        x[-1], residual[-1] = 3, 1  # a row whose norm is 0
        out = Guarded((rows, hidden), kind, way.device)
        scale = Guarded((rows,), torch.float32, way.device)
        found = layer_norm(x, weight, out=out.tensor, out_scale=scale.tensor)
        assert found[0] is out.tensor and found[1] is scale.tensor
        out.check()
        scale.check("out_scale")
        check_quantised(*found, x, weight=weight)
        assert not found[0][-1].float().any()
        fresh, fresh_scale, total = layer_norm(x, weight, residual=residual, out_dtype=kind)
        same_bits(total, x + residual, name="residual_out")
        check_quantised(fresh, fresh_scale, x, weight=weight, residual=residual)


@pytest.mark.parametrize("vecs, rows", [(40, 1024), (160, 1024), (160, 8192), (1024, 1024)])
@pytest.mark.parametrize("kind", [None, E4M3, INT8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_chosen_for_many_rows(
    way: Way, dtype: torch.dtype, kind: Any, vecs: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several vectors a thread and rows a block, on rows that are no whole number of blocks.
    choose, hidden = plans._choose, 16 // dtype.itemsize * vecs
    monkeypatch.setattr(plans, "_choose", lambda vecs, _, adds: choose(vecs, rows, adds))
    x = way.randn(3, hidden + 64, dtype=dtype)[:, :hidden]
    weight = way.randn(hidden, seed=1)
    found = layer_norm(x, weight, weight, out_dtype=kind)
    if kind is None:
        check_layer_norm(found, x, weight=weight, bias=weight)
    else:
        check_quantised(*found, x, weight=weight, bias=weight)


@pytest.mark.parametrize("kind", [None, E4M3, INT8], ids=str)
def test_leading_dimensions_of_any_kind(way: Way, kind: Any) -> None:
    weight = way.randn(64)
    for x in (
        way.randn(64),
        way.randn(2, 3, 4, 64),
        way.randn(4, 3, 64).transpose(0, 1),
        way.randn(2, 3, 96)[..., :64],
        way.randn(3, 64).expand(2, 3, 64),
        way.randn(3, 65)[:, 1:],
    ):
        found = layer_norm(x, weight, out_dtype=kind)
        if kind is None:
            check_layer_norm(found, x, weight=weight)
        else:
            assert found[1].shape == x.shape[:-1]
            check_quantised(*found, x, weight=weight)


def test_large_means_and_values_that_are_none(way: Way) -> None:
    x = way.randn(4, 256) + 1000
    check_layer_norm(layer_norm(x), x)
    x[1, 3], x[2, 5] = float("nan"), float("inf")
    out = layer_norm(x)
    assert bool(out[1].isnan().all()) and not out[0].isnan().any()
    check_layer_norm(out[::3], x[::3])
    quantised, scale = layer_norm(x, out_dtype=E4M3)
    assert bool(quantised[1].float().isnan().all()) and bool(scale[::3].isfinite().all())


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 64)])
@pytest.mark.parametrize("kind", [None, E4M3], ids=str)
def test_nothing_to_do(way: Way, shape: tuple[int, ...], kind: Any) -> None:
    x = way.randn(*shape)
    found = layer_norm(x, residual=x, out_dtype=kind)
    assert len(found) == (2 if kind is None else 3) and found[0].shape == found[-1].shape == shape


def test_the_same_bits_every_time(way: Way) -> None:
    x, weight = way.randn(33, 5120, dtype=torch.bfloat16), way.randn(5120)
    first = layer_norm(x, weight, out_dtype=INT8)
    for _ in range(20 if way.is_gpu else 1):
        again = layer_norm(x, weight, out_dtype=INT8)
        same_bits(again[0], first[0])
        same_bits(again[1], first[1])


X, W = torch.ones(3, 8), torch.ones(8)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": None}, "x: expected a torch tensor"),
    ({"x": X.long()}, "x: expected dtype float16, bfloat16 or float32"),
    ({"weight": W[:7]}, r"weight: expected shape \(8,\)"),
    ({"weight": W.half()}, "weight: expected dtype float32"),
    ({"weight": W, "bias": W.half()}, "bias: expected dtype float32"),
    ({"residual": X[:2]}, r"residual: expected shape \(3, 8\)"),
    ({"eps": -1.0}, "eps: expected at least 0"),
    ({"adds_after": True}, "adds_after is set without residual"),
    ({"adds_after": 2.0, "residual": X}, "adds_after: expected True or False"),
    ({"residual": X, "adds_after": True, "out_dtype": E4M3}, "out: .* as adds_after is set"),
    ({"residual_out": X}, "residual_out is given without a residual added before"),
    ({"out_scale": W[:3]}, "out_scale is given, but out is not quantised"),
    ({"out_dtype": torch.float16}, "out_dtype: expected torch.float32 or torch.float8_e4m3fn or"),
    ({"out": X.to(E4M3), "out_dtype": INT8}, "out: expected dtype int8, as out_dtype"),
    ({"out_dtype": E4M3, "out_scale": W}, r"out_scale: expected shape \(3,\)"),
    ({"out_dtype": E4M3, "out_scale": torch.ones(6)[::2]}, "out_scale: expected a contiguous last"),
]


@pytest.mark.parametrize("arguments, text", REFUSED, ids=[text for _, text in REFUSED])
def test_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TensorError, match=f"layer_norm: {text}"):
        layer_norm(**{"x": X.clone(), **arguments})
