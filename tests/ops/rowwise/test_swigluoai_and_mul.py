"""swigluoai_and_mul against fp64: interleaved and halves, every layout, rows of e4m3."""

from __future__ import annotations

import pytest
import torch
from gated_cases import (
    SHAPES,
    SIZES,
    Gate,
    check_e4m3,
    check_layouts,
    check_on_the_cpu,
    check_refusals,
    check_sizes,
    check_strides,
    check_values_that_are_none,
)
from ways import DTYPES, Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import swigluoai_and_mul
from kernel_hub.ops.rowwise import gated
from kernel_hub.testing import reference

GATES = [
    Gate(swigluoai_and_mul, reference.swigluoai_and_mul, {"interleaved": each, **numbers})
    for each, numbers in ((True, {}), (False, {}), (True, {"alpha": 1.0, "limit": 0.5}))
]
each_gate = pytest.mark.parametrize("gate", GATES, ids=["interleaved", "halves", "tight"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@each_gate
@pytest.mark.parametrize("size", SIZES)
@each_dtype
def test_sizes(way: Way, dtype: torch.dtype, size: int, gate: Gate) -> None:
    check_sizes(way, gate, dtype, size)


@each_gate
@pytest.mark.parametrize("size", SIZES)
@each_dtype
def test_rows_of_e4m3(way: Way, dtype: torch.dtype, size: int, gate: Gate) -> None:
    check_e4m3(way, gate, dtype, size)


@each_gate
@pytest.mark.parametrize("vecs, rows", SHAPES)
@each_dtype
def test_what_is_chosen_for_many_rows(
    way: Way, dtype: torch.dtype, vecs: int, rows: int, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = gated.choose_of_rows
    monkeypatch.setattr(gated, "choose_of_rows", lambda vecs, _: choose(vecs, rows))
    size = 16 // dtype.itemsize * vecs
    x = way.randn(3, 2 * size + 64, dtype=dtype)[:, : 2 * size]
    gate.check_e4m3(gate(x, out_dtype=torch.float8_e4m3fn), x)


@each_gate
def test_layouts(way: Way, gate: Gate) -> None:
    check_layouts(way, gate)


@each_gate
@each_dtype
def test_strided_and_unaligned_rows(way: Way, dtype: torch.dtype, gate: Gate) -> None:
    check_strides(way, gate, dtype)


@each_gate
@each_dtype
def test_nan_inf_and_what_is_clamped(way: Way, dtype: torch.dtype, gate: Gate) -> None:
    inf = float("inf")
    gates = torch.tensor([float("nan"), inf, -inf, 100.0, -100.0, 7.0, -7.0, 0.0, -5.0, 1.0])
    ups = torch.tensor([1.0, inf, 2.0, -inf, 100.0, -100.0, 7.0, -7.0, 3.0, -1.0])
    both = (gates, ups) if not gate.options["interleaved"] else torch.stack((gates, ups), -1)
    x = (torch.cat(both) if isinstance(both, tuple) else both.flatten()).to(dtype)[None]
    check_values_that_are_none(gate, x.to(way.device))


def test_refused_numbers() -> None:
    x = torch.ones(3, 8)
    for options, text in (
        ({"limit": -1.0}, "limit: expected at least 0"),
        ({"alpha": float("nan")}, "alpha: expected a finite number"),
        ({"interleaved": 2.0}, "interleaved: expected True or False"),
    ):
        with pytest.raises(TensorError, match=f"swigluoai_and_mul: {text}"):
            swigluoai_and_mul(x, **options)


@each_gate
@each_dtype
def test_what_torch_computes_on_the_cpu(dtype: torch.dtype, gate: Gate) -> None:
    check_on_the_cpu(gate, dtype)


@each_gate
def test_refused(gate: Gate) -> None:
    check_refusals(gate)
