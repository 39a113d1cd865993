"""Loads by lot on the scheduler: what is done in a second, and how long tokens are apart."""

from __future__ import annotations

import random

import load_model
import pytest

pytest.importorskip("torch", reason="the engine is torch's")

from kernel_hub.engine.scheduler import BESIDE, Scheduler

COUNT = 200
SEEDS = [1, 2, 3]


def arrivals(seed: int, a_second: float) -> load_model.Arrivals:
    return load_model.arrived(random.Random(seed), COUNT, a_second)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_at_once_takes_about_what_its_parts_do(seed: int) -> None:
    """As without a limit to a few per cent: passes are as large as the backlog asks."""
    full = load_model.ran(arrivals(seed, 0.0))
    assert full.floor / full.total > 0.9
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Scheduler, "_beside", lambda self: self.max_tokens)
        assert full.total < 1.06 * load_model.ran(arrivals(seed, 0.0)).total


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("load", [0.3, 0.7])
def test_tokens_are_two_steps_apart_at_most(seed: int, load: float) -> None:
    """Of a hundred 95; without a limit more than twice that."""
    rate = load * COUNT / (load_model.ran(arrivals(seed, 0.0)).total / 1e6)
    some = load_model.ran(arrivals(seed, rate))
    assert some.p95 <= 2 * some.step
    if load < 0.7:  # fewer of a hundred are beside prompts
        return
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Scheduler, "_beside", lambda self: self.max_tokens)
        assert load_model.ran(arrivals(seed, rate)).p95 > 2 * some.p95


@pytest.mark.parametrize("seed", SEEDS)
def test_passes_have_few_tokens_of_prompts_beside_decodes(seed: int) -> None:
    """A multiple of 64 where there are more; all that a pass takes where nobody answers."""
    passes: list[tuple[int, int]] = []
    load_model.ran(arrivals(seed, 0.0), passes=passes)
    load_model.ran(arrivals(seed, 20.0), passes=passes)
    beside = [prompt for decodes, prompt in passes if decodes and prompt]
    assert sum(prompt <= BESIDE for prompt in beside) > len(beside) / 3
    assert max(beside) < 2048 and min(decodes for decodes, _ in passes) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_that_of_its_requests_alone(seed: int) -> None:
    """No clock is in it: the same requests at the same passes are cut in the same way."""
    first: list[tuple[int, int]] = []
    second: list[tuple[int, int]] = []
    for passes in (first, second):
        load_model.ran(arrivals(seed, 0.0), passes=passes)
    assert first == second
