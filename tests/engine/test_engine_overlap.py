"""One pass ahead: which passes begin before the last is read, and what must not come of it."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is torch's")

from kernel_hub.engine.engine import Engine  # noqa: E402
from kernel_hub.engine.requests import Request, SamplingParams  # noqa: E402
from kernel_hub.engine.runner import Draws  # noqa: E402


def engine_of(**options: Any) -> Engine:
    return Engine.random(
        "tiny", **{"device": "cpu", "cache_tokens": 1024, "page_size": 16, **options}
    )


def params_of(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **more})


def prompts_by_lot(lot: random.Random, count: int) -> list[list[int]]:
    return [[lot.randrange(256) for _ in range(lot.randint(1, 70))] for _ in range(count)]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """'b' where a pass begins, 'r' where one is read."""
    found: list[str] = []
    read = Draws.read

    def reads(self: Draws) -> Any:
        found.append("r")
        return read(self)

    monkeypatch.setattr(Draws, "read", reads)
    return found


def watched(engine: Engine, said: list[str]) -> Engine:
    real = engine.runner.run

    def run(batch: Any) -> Any:
        said.append("b")
        return real(batch)

    engine.runner.run = run  # type: ignore[method-assign]
    return engine


class Anything:
    """A grammar that takes every token."""

    def bitmask(self, out: Any) -> None:
        out[:] = -1

    def __repr__(self) -> str:
        return "anything"

    def accept(self, token: int) -> bool:
        return 0 <= token < 256  # not the name of one that is on its way


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({}, {"grammar": Anything()}), ({}, {"presence_penalty": 0.5}), ({"drafts": 3}, {}),
        ({}, {"frequency_penalty": -1.0}), ({}, {"repetition_penalty": 1.2}),
    ],
    ids=str,
)  # fmt: skip
def test_passes_whose_tokens_are_needed_are_read_first(
    options: dict[str, Any], more: dict[str, Any], said: list[str]
) -> None:
    engine = watched(engine_of(**options), said)
    engine.generate([[1, 2, 3], [4]], [params_of(), params_of(**more)])
    assert "".join(said) == "br" * (len(said) // 2)


@pytest.mark.parametrize(
    "more",
    [{}, {"logprobs": 2}, {"logit_bias": {65: 4.0}}, {"temperature": 1.0}, {"stop": ("A",)}],
    ids=str,
)
def test_others_begin_before(more: dict[str, Any], said: list[str]) -> None:
    """All passes but the first; none is begun for requests whose last tokens are being drawn."""
    engine = watched(engine_of(), said)
    answers = engine.generate([[1, 2, 3], [4]], params_of(max_tokens=9, **more))
    longest = max(len(answer.tokens) for answer in answers)
    if "stop" not in more:
        assert longest == 9 and "".join(said) == "b" + "br" * 8 + "r"
    assert "".join(said).startswith("b" + "br" * (longest - 1))


def test_a_guided_request_comes_while_others_are_ahead(said: list[str]) -> None:
    """Of their tokens, which are on their way, its penalties know nothing: no pass fails."""
    engine = watched(engine_of(), said)
    engine.submit(Request("ahead", (1, 2), params_of(max_tokens=12)))
    for _ in range(3):
        engine.step()
    engine.submit(Request("guided", (3, 4), params_of(presence_penalty=0.5)))
    found = {"ahead": 2, "guided": 0}
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id] += len(delta.tokens)
    assert found == {"ahead": 12, "guided": 6}
    assert said.count("b") == engine.stats()["steps"] == 12


def test_a_guided_request_that_ends_lets_the_others_go_ahead(said: list[str]) -> None:
    engine = watched(engine_of(), said)
    engine.generate([[1], [2]], [params_of(max_tokens=12), params_of(grammar=Anything())])
    assert "".join(said) == "br" * 6 + "b" + "br" * 5 + "r"


@pytest.mark.parametrize("seed", range(4))
def test_a_name_given_again_while_a_pass_is_under_way(seed: int) -> None:
    """Tokens that the pass draws for the first of that name are not the second's."""
    lot, engine = random.Random(seed), engine_of()
    first, second, beside = prompts_by_lot(lot, 3)
    expected = [a.tokens for a in engine_of().generate([second, beside], params_of())]
    engine.submit(Request("beside", tuple(beside), params_of()))
    engine.submit(Request("a", tuple(first), params_of()))
    found: dict[str, list[int]] = {"a": [], "beside": []}

    def step() -> None:
        for delta in engine.step():
            if delta.finish_reason != "abort":
                found[delta.request_id] += delta.tokens

    for _ in range(lot.randint(1, 4)):
        step()
    engine.abort("a")
    found["a"] = []
    engine.submit(Request("a", tuple(second), params_of()))
    while engine.has_work:
        step()
    assert (tuple(found["a"]), tuple(found["beside"])) == tuple(expected)
    assert engine.stats()["pages_used"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_passes_that_fail_with_another_under_way(seed: int) -> None:
    """Now and then, those of several requests: nobody's answer is another."""
    lot, engine = random.Random(seed), engine_of()
    prompts = prompts_by_lot(lot, 6)
    params = [params_of(max_tokens=lot.randint(1, 20)) for _ in prompts]
    expected = [a.tokens for a in engine_of().generate(prompts, params)]
    real, failures = engine.runner.run, []

    def failing(batch: Any) -> Any:
        if len(batch.samples) > 1 and lot.random() < 0.3:
            failures.append(1)
            raise torch.OutOfMemoryError("out of memory")
        return real(batch)

    engine.runner.run = failing  # type: ignore[method-assign]
    answers = engine.generate(prompts, params)
    assert [a.tokens for a in answers] == expected and failures
    assert [a.finish_reason for a in answers] == ["length"] * 6
    assert engine.stats()["pages_used"] == 0


def test_tokens_that_cannot_be_read_end_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the pass alone; the next one is already under way."""
    engine, read, calls = engine_of(), Draws.read, list[int]()

    def reads(self: Draws) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return read(self)

    monkeypatch.setattr(Draws, "read", reads)
    answers = engine.generate([[1, 2], [3]], [params_of(), params_of(max_tokens=2)])
    assert [(len(a.tokens), a.finish_reason) for a in answers] == [(2, "error"), (2, "length")]
    assert "the device is gone" in str(answers[0].error)
    assert engine.stats()["pages_used"] == 0
    again = engine.generate([[1, 2]], params_of())[0]
    assert again.tokens == engine_of().generate([[1, 2]], params_of())[0].tokens


def test_what_was_drawn_for_a_request_that_ended_is_nowhere() -> None:
    """A stop string is seen a pass late: neither tokens nor counts say so."""
    engine = engine_of()
    plain = engine.generate([[7] * 20], params_of(max_tokens=30))[0]
    piece = engine.decode(plain.tokens[:20])[-1]
    before = engine.stats()["generated_tokens"]
    found = engine.generate([[7] * 20, [8]], params_of(max_tokens=30, stop=(piece,)))[0]
    assert found.finish_reason == "stop" and len(found.tokens) < 30
    assert found.tokens == plain.tokens[: len(found.tokens)]
    others = engine.generate([[8]], params_of(max_tokens=30, stop=(piece,)))[0]
    total = engine.stats()["generated_tokens"] - before
    assert total == len(found.tokens) + 2 * len(others.tokens)
