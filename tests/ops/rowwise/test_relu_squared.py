"""relu_squared against fp64: every layout, in place, rows of e4m3."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from gated_cases import Gate, check_values_that_are_none, each_dtype, fixture_of, strange
from gated_cases import test_in_place as test_in_place
from gated_cases import test_layouts as test_layouts
from gated_cases import test_many_rows_by_the_element as test_many_rows_by_the_element
from gated_cases import test_refused as test_refused
from gated_cases import test_rows_of_e4m3 as test_rows_of_e4m3
from gated_cases import test_sizes as test_sizes
from gated_cases import test_strided_and_unaligned_rows as test_strided_and_unaligned_rows
from gated_cases import test_what_is_chosen_for_many_rows as test_what_is_chosen_for_many_rows
from gated_cases import test_what_torch_computes_on_the_cpu as test_what_torch_computes_on_the_cpu
from ways import Way

from kernel_hub.ops import relu_squared
from kernel_hub.testing import reference
from kernel_hub.testing.guard import Guarded

GATED: Any = importlib.import_module("kernel_hub.ops.rowwise.relu_squared")._relu_squared
GATES = [Gate(relu_squared, reference.relu_squared, parts=1)]
gate = fixture_of(GATES, ids=["relu_squared"])


@each_dtype
def test_nan_inf_and_large_values(way: Way, dtype: torch.dtype, gate: Gate) -> None:
    gates = strange(9.0, -9.0, 0.0, -5.0, 1e2)
    x = gates.to(dtype).to(way.device)[None]
    check_values_that_are_none(gate, x)


@each_dtype
def test_odd_rows_as_a_whole(way: Way, dtype: torch.dtype, gate: Gate) -> None:
    """Contiguous rows that are no whole vectors; all together they are, or by the element."""
    sizes = [(8, 127), (16, 3), (5, 7), (77, 3)]
    for rows, size in [*sizes, (40, 1001), (3001, 177)] if way.is_gpu else sizes:
        x = way.randn(rows, size, dtype=dtype)
        out = Guarded((rows, size), dtype, way.device)
        gate(x, out=out.tensor)
        out.check()
        gate.check(out.tensor, x)
        plan = GATED.plan(x, (), out.tensor, None, 0)
        variant = "_scalar" if rows * size % 2 else "_flat"
        assert plan.function.name.endswith(variant) and plan.grid[1:] == (1, 1)
