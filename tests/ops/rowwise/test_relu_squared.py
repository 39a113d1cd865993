"""relu_squared against fp64: every layout, in place, rows of e4m3."""

from __future__ import annotations

import pytest
import torch
from bits import same_bits
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

from kernel_hub.ops import relu_squared
from kernel_hub.ops.rowwise import gated
from kernel_hub.testing import reference

GATES = [Gate(relu_squared, reference.relu_squared, parts=1)]
each_gate = pytest.mark.parametrize("gate", GATES, ids=["relu_squared"])
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
    x = way.randn(3, size + 64, dtype=dtype)[:, :size]
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
def test_nan_inf_and_large_values(way: Way, dtype: torch.dtype, gate: Gate) -> None:
    inf = float("inf")
    gates = torch.tensor([float("nan"), inf, -inf, 100.0, -100.0, 9.0, -9.0, 0.0, -5.0, 1e2])
    x = gates.to(dtype).to(way.device)[None]
    check_values_that_are_none(gate, x)


@each_gate
@each_dtype
def test_in_place(way: Way, dtype: torch.dtype, gate: Gate) -> None:
    for x in (way.randn(3, 264, dtype=dtype), way.randn(3, 265, dtype=dtype)[:, 1:]):
        wanted = gate(x)
        assert gate(x, out=x) is x
        same_bits(x, wanted)


@each_gate
@each_dtype
def test_what_torch_computes_on_the_cpu(dtype: torch.dtype, gate: Gate) -> None:
    check_on_the_cpu(gate, dtype)


@each_gate
def test_refused(gate: Gate) -> None:
    check_refusals(gate)
