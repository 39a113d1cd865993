"""Calls of the products drawn by lot: those of tests/gpu_products_grid.py, and the grid itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpu_products_grid as grid
import pytest
import torch
from lots import SEED
from product_cases import OPS, draw
from product_runs import run_product
from ways import Way

from kernel_hub import ops


def run_lots(way: Way, op: str, count: int, most: int, variants: bool) -> None:
    for i in range(count):
        case = draw(op, (SEED, i), most=most)
        try:
            run_product(case, way.device, variants=variants and i == 0)
        except AssertionError as error:
            raise AssertionError(f"KERNEL_HUB_SEED={SEED} {case}: {error}") from error


@pytest.mark.parametrize("op", OPS)
def test_cases_drawn_by_lot(way: Way, op: str) -> None:
    if op == "linear_fp8" and not way.is_gpu:
        pytest.skip("kernels for compute capability 9.0 alone: the test below")
    run_lots(way, op, 30 if way.is_gpu else 4, most=1500 if way.is_gpu else 20, variants=True)


@pytest.mark.parametrize("op", OPS)
def test_cases_for_hopper_drawn_by_lot(hopper_way: Way, op: str) -> None:
    if not hopper_way.is_gpu:  # on a GPU the test above
        run_lots(hopper_way, op, 6, most=150, variants=False)


ARGUMENTS = ["--device", "cpu", "--most", "40", "--seed", "3"]


def test_the_grid_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert grid.main([*ARGUMENTS, "--cases", "40"]) == 0
    text = capsys.readouterr().out
    assert "40 cases, 0 failed, seed 3" in text and all(op in text for op in OPS)


def wrong(out: torch.Tensor, _: int) -> None:
    out[-1, -1] += 1 + out[-1, -1].abs()


def left_out(out: torch.Tensor, _: int) -> None:
    out[0, 0] = float("nan")


def beside(out: torch.Tensor, _: int) -> None:
    out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0)


def behind(out: torch.Tensor, _: int) -> None:
    last = out.storage_offset() + (out.shape[0] - 1) * out.stride(0) + out.shape[1]
    out.as_strided((1,), (1,), last).fill_(0)


def unsteady(out: torch.Tensor, calls: int) -> None:
    if calls % 2 == 0:
        out.view(torch.int16)[0, 0] ^= 1


@pytest.mark.parametrize(
    ("harm", "words"),
    [(wrong, "largest error"), (left_out, "nan differs"), (beside, "outside the tensor"),
     (behind, "outside the tensor"), (unsteady, "two launches")],
)  # fmt: skip
def test_the_grid_sees_what_is_wrong(
    harm: Callable[[torch.Tensor, int], None], words: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    calls = []

    def harming(op: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def harmed(*arguments: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
            calls.append(1)
            op(*arguments, out=out, **options)
            harm(out, len(calls))
            return out

        return harmed

    for name in ("swiglu_linear", "gated_linear"):  # as the cases have it
        monkeypatch.setattr(ops, name, harming(getattr(ops, name)))
    options = [*ARGUMENTS, "--op", "swiglu_linear"]
    assert grid.main([*options, "--cases", "3"]) == 1
    text = capsys.readouterr().out
    assert "3 cases, 3 failed" in text and words in text
    again = next(line for line in text.splitlines() if "again: " in line).split()
    with pytest.raises(AssertionError, match=words):
        grid.main(again[again.index("--seed") :])
