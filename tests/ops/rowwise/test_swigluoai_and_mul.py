"""swigluoai_and_mul against fp64: interleaved and halves, every layout, rows of e4m3."""

from __future__ import annotations

import pytest
import torch
from gated_cases import Gate, check_values_that_are_none, each_dtype, fixture_of, strange
from gated_cases import test_layouts as test_layouts
from gated_cases import test_many_rows_by_the_element as test_many_rows_by_the_element
from gated_cases import test_refused as test_refused
from gated_cases import test_rows_of_e4m3 as test_rows_of_e4m3
from gated_cases import test_sizes as test_sizes
from gated_cases import test_strided_and_unaligned_rows as test_strided_and_unaligned_rows
from gated_cases import test_what_is_chosen_for_many_rows as test_what_is_chosen_for_many_rows
from gated_cases import test_what_torch_computes_on_the_cpu as test_what_torch_computes_on_the_cpu
from ways import Way

from kernel_hub.errors import TensorError
from kernel_hub.ops import swigluoai_and_mul
from kernel_hub.testing import reference

GATES = [
    Gate(swigluoai_and_mul, reference.swigluoai_and_mul, {"interleaved": each, **numbers})
    for each, numbers in ((True, {}), (False, {}), (True, {"alpha": 1.0, "limit": 0.5}))
]
gate = fixture_of(GATES, ids=["interleaved", "halves", "tight"])


@each_dtype
def test_nan_inf_and_what_is_clamped(way: Way, dtype: torch.dtype, gate: Gate) -> None:
    gates = strange(7.0, -7.0, 0.0, -5.0, 1.0)
    inf = float("inf")
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
