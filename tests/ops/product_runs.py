"""Runs cases of product_cases.py: guarded, poisoned outputs, twice, held against fp64.

With `variants`, also with every other kernel that the op's plan could have chosen.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from bits import same_bits
from product_cases import Case
from product_problems import Problem, problem_of

from kernel_hub import ops
from kernel_hub.ops.core.launch import forget_all
from kernel_hub.ops.matmul import (
    grouped_plan,
    linear_fp8_plan,
    linear_fp32_plan,
    linear_plan,
    paired_plan,
)
from kernel_hub.tuning import Gpu

if TYPE_CHECKING:  # the grid of products runs without it
    import pytest
    from ways import Way


def force_choice(
    module: Any, monkeypatch: pytest.MonkeyPatch, choice: Callable[[Any], Any]
) -> None:
    """An op of many products takes the launch that `choice` makes of a problem."""
    monkeypatch.setattr(module, "choose", lambda *given: choice(given[2]))
    forget_all()


def portable(way: Way, which: int) -> Callable[[Any], Any]:
    """The choice of one of the bodies for every GPU, of many products."""
    capability = torch.cuda.get_device_capability() if way.is_gpu else (8, 0)
    return lambda problem: list(grouped_plan.portable_choices(capability, problem))[which]


def _ran(problem: Problem) -> float:
    """Two launches, the same bits; the ratio of the first."""
    found: list[list[torch.Tensor]] = []
    ratios = [0.0]
    for attempt in range(2):
        for output in problem.outputs:
            output.reset()
        problem.launch()
        if attempt == 0:
            ratios += [output.ratio() for output in problem.outputs]
        else:
            for output in problem.outputs:
                output.out.check(f"{output.name} of the second launch")
        found.append([output.out.tensor.clone() for output in problem.outputs])
    for output, first, second in zip(problem.outputs, *found, strict=True):
        same_bits(second, first, name=f"{output.name} of two launches")
    return max(ratios)


def run_product(case: Case, device: str, variants: bool = False) -> float:
    """The largest error in units of what is allowed; raises AssertionError beyond that.

    variants: also of every other launch that `kernel-hub tune` would measure.
    """
    problem = problem_of(case, device)
    if not variants:
        return _ran(problem)
    calls: list[tuple[Any, ...]] = []
    plan = _PLANS[case.op]

    def noting(*given: Any, **named: Any) -> Any:
        call = inspect.signature(plan.choose).bind(*given, **named)
        call.apply_defaults()
        calls.append(call.args)
        return plan.choose(*call.args)

    with _choosing(case.op, noting):
        worst = _ran(problem)
    for row, choice in _others(case.op, calls[0]) if calls else ():  # none: nothing to compute
        with _choosing(case.op, lambda *_, c=choice, **__: c):
            try:
                worst = max(worst, _ran(problem))
            except Exception as error:
                raise AssertionError(f"with {row}: {error}") from error
    return worst


_PLANS: dict[str, Any] = {
    "linear": linear_plan, "linear_fp32": linear_fp32_plan, "linear_fp8": linear_fp8_plan,
    "swiglu_linear": paired_plan, "qkv_linear": paired_plan, "grouped_linear": grouped_plan,
    "batched_matmul": grouped_plan,
}  # fmt: skip


@contextlib.contextmanager
def _choosing(op: str, choose: Callable[..., Any]) -> Iterator[None]:
    """Within, the op asks `choose` for its launches."""
    apart = {"linear": "linear_launch", "linear_fp32": "linear_launch", "linear_fp8": "linear_fp8"}
    name = f"kernel_hub.ops.matmul.{apart[op]}" if op in apart else getattr(ops, op).__module__
    module: Any = importlib.import_module(name)
    chooses = "choose_fp32" if op == "linear_fp32" else "choose"
    before = getattr(module, chooses)
    setattr(module, chooses, choose)
    forget_all()
    try:
        yield
    finally:
        setattr(module, chooses, before)
        forget_all()


def _rows(op: str, call: tuple[Any, ...]) -> Iterator[Any]:
    """The candidates of what an op asked its plan."""
    if op == "linear":
        capability, num_sms, m, n, k, _, name, *_ = call
        return linear_plan.candidates(Gpu(capability, num_sms, name), m, n=n, k=k)
    if op == "linear_fp8":
        num_sms, m, n, k, fast, name, *_ = call
        return linear_fp8_plan.candidates(Gpu((9, 0), num_sms, name), m, n=n, k=k, fast=int(fast))
    if _PLANS[op] is paired_plan:
        _, gpu, m, n, k = call[:5]
        return paired_plan.candidates(op, gpu, m, n=n, k=k)
    capability, num_sms, problem, _, name, _ = call
    return grouped_plan.candidates(
        op, Gpu(capability, num_sms, name), problem.rows, num_products=problem.num_products,
        n=problem.n, k=problem.k,
    )  # fmt: skip


def _others(op: str, call: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """(row, choice), each choice once, but for the one that was made."""
    plan: Any = _PLANS[op]
    if op == "linear_fp32":
        capability, num_sms, m, n, k, is_aligned, _ = call
        for splits in (1, 3)[: 1 + (k >= 3 * 256)]:
            for choice in plan.choices(capability, num_sms, m, n, splits, is_aligned):
                yield (choice.variant, splits), choice
        return
    table = plan.TABLE if hasattr(plan, "TABLE") else plan.TABLES[op]
    seen = {plan.choose(*call)}
    is_wide = op == "linear" and call[5]
    if is_wide:  # no table says what fp32 results take
        call = (*call[:5], False, *call[6:])
    for row in _rows(op, call):
        with table.forcing(row):
            choice = plan.choose(*call)
        has_fp32 = (
            choice.variant in linear_plan.HOPPER_FP32
            if choice.cubin == "linear_sm90"
            else choice.variant != "m8_deep"  # of results of 16 bits only
        )
        if choice not in seen and (has_fp32 or not is_wide):
            seen.add(choice)
            yield row, choice
