"""Any optional tensor of any registered op may be None: refused, or what the CPU makes of it.

The ops and their arguments come from the schemas, the calls by lot (registered_calls). A tensor
that is not there is address 0 to a kernel: the emulator ends a launch that reads it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import drawn
import pytest
import torch
from arena import SEED, Arena
from registered_calls import optional_tensors, record
from torch.utils._pytree import tree_leaves
from ways import Way

from kernel_hub.errors import KernelHubError
from kernel_hub.ops.core.register import NAMESPACE

OPS = {op: names for op, names in optional_tensors().items() if names}
SEEDS = 8  # public calls of each name
CALLS = 6  # of a registered op, of those that they lead to; each without one tensor after another
DRAWN = 12  # of them by lot in a run that draws
# Sums in another order, tiles in another dtype: what None means is seen in larger differences.
TOLERANCE = {torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 6e-2}


@functools.cache
def calls() -> dict[str, list[dict[str, Any]]]:
    return record(SEEDS)


@pytest.fixture(params=sorted(OPS))
def op(request: pytest.FixtureRequest) -> str:
    """Asked for first: the reference runs before launches take its place."""
    expected(request.param)
    return str(request.param)


def overload(op: str) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), op.partition("::")[2]).default


def without(op: str, generator: random.Random) -> Iterator[dict[str, Any]]:
    """Calls by lot, each with one of its tensors not there, with some, and with none of them."""
    recorded = calls()[op]
    for given in generator.sample(recorded, min(CALLS, len(recorded))):
        there = [name for name in OPS[op] if given[name] is not None]
        some = [name for name in there if generator.random() < 0.5]
        for left_out in (*([name] for name in there), some, there):
            yield {**given, **dict.fromkeys(left_out)}


def run(op: str, given: dict[str, Any], device: str) -> list[torch.Tensor] | None:
    """What the op returns and writes, from tensors of an arena; None where it refuses the call."""
    schema = overload(op)._schema
    written = [x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write]
    with Arena(device, random.Random(op)) as arena:
        placed = arena.put_all(**given)
        try:
            with torch.no_grad():
                returned = overload(op)(*placed.values())
        except KernelHubError:
            return None
        arena.check()
        found = [*tree_leaves(returned), *(placed[name] for name in written)]
        return [x.cpu().clone() for x in found if isinstance(x, torch.Tensor)]


@functools.cache
def expected(op: str) -> list[tuple[dict[str, Any], list[torch.Tensor] | None]]:
    """Calls and what the reference makes of them."""
    cases = drawn.some(list(without(op, random.Random(f"{SEED} {op}"))), DRAWN, op)
    return [(given, run(op, given, "cpu")) for given in cases]


def check_alike(found: torch.Tensor, wanted: torch.Tensor) -> None:
    if not found.is_floating_point():
        tolerance = 1.0 if found.dtype == torch.int8 else 0.0
    else:
        tolerance = TOLERANCE.get(found.dtype, 0.1)
    torch.testing.assert_close(
        found.double(), wanted.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def check_op(op: str, device: str) -> None:
    print(f"KERNEL_HUB_SEED={SEED}")
    for given, wanted in expected(op):
        left_out = [name for name in OPS[op] if given[name] is None]
        print(f"{op} without {left_out}: {'refused' if wanted is None else 'runs'}")
        found = run(op, given, device)
        assert (found is None) == (wanted is None)
        for one, other in zip(found or (), wanted or (), strict=True):
            check_alike(one, other)


def test_every_registered_op_is_called() -> None:
    assert set(calls()) == set(optional_tensors())


def test_nothing_for_a_tensor(op: str, way: Way) -> None:
    check_op(op, way.device)


def test_nothing_for_a_tensor_on_hopper(op: str, hopper_way: Way) -> None:
    check_op(op, hopper_way.device)
