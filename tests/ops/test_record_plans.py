"""What record_plans.py writes down: launches of every op, the same each time."""

from __future__ import annotations

from plan_lots import DRAWN
from record_plans import GPUS, record

from kernel_hub import ops

# A view of its argument, then flash_attention.
VIEWS = {"flash_attention_qkvpacked"}


def test_every_op_is_drawn() -> None:
    assert {op for op, _ in DRAWN.values()} == set(ops.__all__) - VIEWS


def test_lines_are_the_same_each_time_and_differ_by_gpu() -> None:
    hopper = next(gpu for gpu in GPUS if "H200" in gpu[2])
    ampere = GPUS[0]
    for name in DRAWN:
        found = [record(name, seed, hopper) for seed in range(3)]
        assert found == [record(name, seed, hopper) for seed in range(3)]
        assert all(one["launches"] for one in found), name
        if "fp8" in name:
            assert "refused" in record(name, 0, ampere)
    linear = [record("linear", seed, hopper) for seed in range(8)]
    assert linear != [record("linear", seed, ampere) for seed in range(8)]
