"""Tells autograd that a tensor was written, so that a backward that saved it before fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


def _find() -> Callable[[Iterable[torch.Tensor]], None]:
    """What bumps the version of several tensors; inference tensors have none and are left out."""
    with torch.inference_mode():
        inference = torch.empty(0, device="cpu")
    several = getattr(torch._C, "_increment_version", None)
    try:
        several((inference,))  # type: ignore[misc]
        return several  # type: ignore[return-value]
    except (TypeError, RuntimeError):  # an older torch takes one tensor, another may have no such
        one = torch.autograd.graph.increment_version

    def bump(tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if not tensor.is_inference():
                one(tensor)

    return bump


# Called with a tuple of the tensors that the caller gave to be written. torch's own function where
# it takes one: 90 ns for a tensor, 40 more for each other.
written = _find()


def marking(run: Callable[..., Any], places: Sequence[int]) -> Callable[..., Any]:
    """`run` of a registered op, whose arguments at `places` it writes."""

    def run_and_mark(*arguments: Any) -> Any:
        found = run(*arguments)
        given = [arguments[place] for place in places if place < len(arguments)]  # but defaults
        written(tuple([x for x in given if x is not None]))
        return found

    return run_and_mark
