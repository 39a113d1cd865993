"""Loads by lot on the scheduler: what is done in a second, and how long tokens are apart."""

from __future__ import annotations

import random

import load_model
import pytest

pytest.importorskip("torch", reason="the engine is torch's")

from kernel_hub.engine import scheduler, shapes

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
        patched.setattr(scheduler, "beside", lambda decodes, backlog: 2048)
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
        patched.setattr(scheduler, "beside", lambda decodes, backlog: 2048)
        assert load_model.ran(arrivals(seed, rate)).p95 > 2 * some.p95


@pytest.mark.parametrize("seed", SEEDS)
def test_passes_beside_decodes_fill_graphs(seed: int) -> None:
    """Most that have answers; those without them take as many tokens as a pass does."""
    passes: list[tuple[int, int]] = []
    load_model.ran(arrivals(seed, 0.0), passes=passes)
    load_model.ran(arrivals(seed, 20.0), passes=passes)
    beside = [(decodes, prompt) for decodes, prompt in passes if decodes and prompt]
    rows = []
    for decodes, prompt in beside:
        shape = shapes.room(decodes, 1, 1, prompt, 100)
        rows.append((shape.decodes + shape.prompt, prompt / shape.prompt) if shape else (2048, 1.0))
    small = [share for most, share in rows if most <= 256]
    assert len(small) > len(rows) / 3 and sum(share == 1 for share in small) > len(small) / 2
    assert max(prompt for _, prompt in beside) < 2048 and min(passes)[0] == 0


@pytest.mark.parametrize("max_pages", [24, 32, 100, 1000])
@pytest.mark.parametrize("max_batch, max_tokens", [(1, 100), (5, 7), (9, 100), (64, 300)])
def test_all_shapes_are_those_that_passes_ask_for(
    max_batch: int, max_tokens: int, max_pages: int
) -> None:
    wanted = {
        shapes.room(decodes, 1, bool(prompt), prompt, pages, is_even)
        for pages in (1, 24, 25, 32, 33, 128, 129, 192, 193)
        for is_even in (True, False)
        if pages <= max_pages
        for decodes in range(max_batch + 1)
        for prompt in range(max(0, max_tokens - decodes) + 1)
        if decodes or prompt
    }
    found = [*shapes.all_of(max_batch, max_tokens, max_pages)]
    assert set(found) == wanted - {None} and len(found) == len(set(found))


@pytest.mark.parametrize("decodes", [1, 8, 53, 64, 100, 128, 129, 200, 256, 257, 1000])
def test_what_goes_beside_fills_the_rows_of_a_graph(decodes: int) -> None:
    """At most 256 of them, or twice those that decode."""
    for backlog in (0, 5000, 9000, 40_000):
        prompt = shapes.beside(decodes, backlog)
        shape = shapes.room(decodes, 1, 1, prompt, 100)
        if backlog < 16 * 512 and decodes <= 256:
            assert shape is not None and shape.prompt == prompt
            assert shape.decodes + prompt == (256 if decodes <= 128 else 512)
        assert prompt >= min(64, decodes) and decodes + prompt >= min(2048, backlog // 16 - 511)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_is_that_of_its_requests_alone(seed: int) -> None:
    """No clock is in it: the same requests at the same passes are cut in the same way."""
    first: list[tuple[int, int]] = []
    second: list[tuple[int, int]] = []
    for passes in (first, second):
        load_model.ran(arrivals(seed, 0.0), passes=passes)
    assert first == second


def test_tables_are_as_wide_as_the_longest_asks_for() -> None:
    """Of few not all; beside one that is much longer only narrow ones are ones of their own."""
    found = [
        shape.pages if (shape := shapes.room(decodes, 1, 0, 0, pages, is_even)) else None
        for decodes, pages, is_even in (
            (64, 32, True), (64, 33, True), (64, 128, True), (64, 129, True), (64, 192, True),
            (64, 193, True), (64, 33, False), (64, 32, False), (3, 24, True), (3, 33, True),
            (3, 193, True), (8, 33, True), (8, 24, True), (16, 24, True),
            (9, 24, False), (16, 25, True),
        )
    ]  # fmt: skip
    assert found == [32, 128, 128, 192, 192, 0, 0, 32, 32, 192, 0, 128, 32, 24, 24, 32]
