"""The rule tests hold kernels to, and the guards around outputs."""

from __future__ import annotations

import pytest
import torch
from bits import same_bits

from kernel_hub.testing.compare import check, compare
from kernel_hub.testing.guard import Guarded

TRUTH = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
NAN, INF = float("nan"), float("inf")


def test_twice_the_budget_passes_and_more_does_not() -> None:
    own = (TRUTH + 0.01).float()
    assert compare((TRUTH + 0.019).float(), TRUTH, own, atol=0.0).ok
    result = compare((TRUTH + torch.tensor([0.0, 0.0, 0.03])).float(), TRUTH, own, atol=0.0)
    assert not result.ok
    assert "at (0, 2)" in result.message or "at (1, 2)" in result.message
    with pytest.raises(AssertionError, match="largest error"):
        check((TRUTH + 1).float(), TRUTH, own)


def test_without_budget_the_last_place_is_allowed() -> None:
    out = TRUTH.bfloat16()
    assert check(out, TRUTH, out).error == 0.0


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nan_and_inf_must_stand_where_the_truth_has_them(bad: float) -> None:
    out, truth = TRUTH.float(), TRUTH.clone()
    out[1, 0] = bad
    result = compare(out, truth, TRUTH.float())
    assert not result.ok and "first (1, 0)" in result.message
    truth[1, 0] = bad
    assert compare(out, truth, TRUTH.float()).ok
    truth[1, 0] = -bad
    assert compare(out, truth, TRUTH.float()).ok == (bad != bad)


def test_a_truth_beyond_the_dtype_is_inf_in_it() -> None:
    truth = torch.tensor([1e6, 1.0], dtype=torch.float64)
    assert compare(torch.tensor([INF, 1.0], dtype=torch.float16), truth, truth.half()).ok
    assert not compare(torch.tensor([65504.0, 1.0], dtype=torch.float16), truth, truth.half()).ok


def test_a_reference_that_overflows_gives_no_budget() -> None:
    out = TRUTH.half()
    own = torch.full_like(out, INF)
    assert compare(out, TRUTH, own).ok
    assert not compare(out + 1, TRUTH, own).ok


def test_shapes_must_agree_and_empty_is_right() -> None:
    assert not compare(TRUTH[:1].float(), TRUTH, TRUTH.float()).ok
    assert compare(TRUTH[:0].float(), TRUTH[:0], TRUTH[:0].float()).ok


def test_same_bits() -> None:
    a = torch.tensor([1.0, NAN, 0.0])
    same_bits(a, a.clone())
    with pytest.raises(AssertionError, match=r"1 of 3 elements differ.*\(2,\)"):
        same_bits(a, torch.tensor([1.0, NAN, -0.0]))
    with pytest.raises(AssertionError, match="float16"):
        same_bits(a, a.half())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("row_stride, shift", [(None, 0), (7, 0), (5, 3)])
def test_guard(dtype: torch.dtype, row_stride: int | None, shift: int) -> None:
    guarded = Guarded((2, 3, 5), dtype, "cpu", row_stride=row_stride, shift=shift)
    tensor = guarded.tensor
    assert tensor.shape == (2, 3, 5) and bool(tensor.isnan().all())
    assert (tensor.data_ptr() - guarded._words.data_ptr()) % 16 == shift * dtype.itemsize % 16
    guarded.fill(torch.ones(2, 3, 5))
    guarded.check()
    offset = tensor.storage_offset()
    for at in (offset - 1, offset + 30 * (row_stride or 5) // 5, 0):
        flat = guarded._words
        before = flat[at].item()
        flat[at] = 0
        with pytest.raises(AssertionError, match="1 elements outside"):
            guarded.check()
        flat[at] = before


def test_guard_sees_writes_between_rows() -> None:
    guarded = Guarded((3, 5), torch.float32, "cpu", row_stride=6)
    guarded.fill(torch.ones(3, 5))
    guarded._words[guarded.tensor.storage_offset() + 5] = 0
    with pytest.raises(AssertionError, match="first 5 elements from its start"):
        guarded.check()
