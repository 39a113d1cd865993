"""gelu_and_mul against fp64: both forms, every layout, rows of e4m3."""

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
from kernel_hub.ops import gelu_and_mul
from kernel_hub.ops.rowwise import gated
from kernel_hub.testing import reference

GATES = [
    Gate(gelu_and_mul, reference.gelu_and_mul, {"approximate": form}, slack=2e-5)
    for form in ("none", "tanh")
]
each_gate = pytest.mark.parametrize("gate", GATES, ids=["erf", "tanh"])
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
def test_nan_inf_and_large_values(way: Way, dtype: torch.dtype, gate: Gate) -> None:
    inf = float("inf")
    gates = torch.tensor([float("nan"), inf, -inf, 100.0, -100.0, 9.0, -9.0, 0.0, -5.0, 1e4])
    x = torch.cat((gates, torch.full_like(gates, 2.0))).to(dtype).to(way.device)[None]
    check_values_that_are_none(gate, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_exact_to_16_bits(way: Way, dtype: torch.dtype) -> None:
    # The whole range of gates, so that the polynomial is seen everywhere.
    gates = torch.linspace(-12, 12, 4096 if way.is_gpu else 1024).to(dtype).to(way.device)
    x = torch.cat((gates, torch.ones_like(gates)))[None]
    for gate in GATES:
        error = (gate(x).double() - gate.reference(x, **gate.options)).abs()
        bound = gates.double().abs() * torch.finfo(dtype).eps / 2 + 3e-5
        assert bool((error <= bound).all())


def test_an_approximation_that_there_is_not() -> None:
    with pytest.raises(TensorError, match="gelu_and_mul: approximate: expected 'none' or 'tanh'"):
        gelu_and_mul(torch.ones(3, 8), approximate="erf")


@each_gate
@each_dtype
def test_what_torch_computes_on_the_cpu(dtype: torch.dtype, gate: Gate) -> None:
    check_on_the_cpu(gate, dtype)


@each_gate
def test_refused(gate: Gate) -> None:
    check_refusals(gate)
