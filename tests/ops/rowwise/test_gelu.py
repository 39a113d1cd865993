"""gelu against fp64: both forms, every layout, in place, rows of e4m3."""

from __future__ import annotations

import pytest
import torch
from gated_cases import Gate, check_values_that_are_none, each_dtype, fixture_of, strange
from gated_cases import test_exact_to_16_bits as test_exact_to_16_bits
from gated_cases import test_in_place as test_in_place
from gated_cases import test_layouts as test_layouts
from gated_cases import test_many_rows_by_the_element as test_many_rows_by_the_element
from gated_cases import test_refused as test_refused
from gated_cases import test_rows_of_e4m3 as test_rows_of_e4m3
from gated_cases import test_sizes as test_sizes
from gated_cases import test_strided_and_unaligned_rows as test_strided_and_unaligned_rows
from gated_cases import test_what_is_chosen_for_many_rows as test_what_is_chosen_for_many_rows
from gated_cases import test_what_torch_computes_on_the_cpu as test_what_torch_computes_on_the_cpu
from row_layouts import say_rows
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import gelu
from kernel_hub.ops.rowwise import gated
from kernel_hub.testing import reference

GATES = [
    Gate(gelu, reference.gelu, {"approximate": form}, slack=2e-5, parts=1)
    for form in ("none", "tanh")
]
gate = fixture_of(GATES, ids=["erf", "tanh"])


@each_dtype
def test_nan_inf_and_large_values(way: Way, dtype: torch.dtype, gate: Gate) -> None:
    gates = strange(9.0, -9.0, 0.0, -5.0, 1e4)
    x = gates.to(dtype).to(way.device)[None]
    check_values_that_are_none(gate, x)


@pytest.mark.parametrize("size", [8, 64, 264, 4096, 8192])
@each_dtype
def test_rows_whose_largest_magnitude_is_of_no_large_number(
    way: Way, dtype: torch.dtype, size: int, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    if size == 8192:
        say_rows(monkeypatch, gated, 2048)
    x = way.randn(7, size, dtype=dtype)
    x[1], x[3], x[6] = -x[1].abs(), -0.75, x[6] / 100
    gate.check_e4m3(gate(x, out_dtype=torch.float8_e4m3fn), x)


def test_an_approximation_that_there_is_not() -> None:
    with pytest.raises(TensorError, match="gelu: approximate: expected 'none' or 'tanh'"):
        gelu(torch.ones(3, 8), approximate="erf")
