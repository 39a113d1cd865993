"""What one request is refused for, and that what goes wrong in one leaves the others alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is torch's")

from kernel_hub.engine.engine import Engine  # noqa: E402
from kernel_hub.engine.requests import Delta, Request, SamplingParams  # noqa: E402
from kernel_hub.errors import ModelError, PromptTooLongError, RequestError  # noqa: E402

NAN = float("nan")
ODD: list[tuple[str, dict[str, Any]]] = [
    ("temperature", {"temperature": -0.1}), ("temperature", {"temperature": NAN}),
    ("temperature", {"temperature": "warm"}), ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -1}), ("top_k", {"top_k": None}), ("min_p", {"min_p": NAN}),
    ("max_tokens", {"max_tokens": 0}), ("seed", {"seed": 2**63}), ("logprobs", {"logprobs": -1}),
    ("logit_bias", {"logit_bias": {256: 1.0}}), ("logit_bias", {"logit_bias": {3: NAN}}),
    ("stop_token_ids", {"stop_token_ids": (-1,)}), ("stop", {"stop": ("",)}),
    ("stop", {"stop": "END"}), ("repetition_penalty", {"repetition_penalty": 0}),
    ("presence_penalty", {"presence_penalty": 3}), ("frequency_penalty", {"frequency_penalty": -3}),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.random("tiny", device="cpu", cache_tokens=512)


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 6, **more})


def run(engine: Engine) -> dict[str, list[Delta]]:
    """All that is under way to its end, by request."""
    found: dict[str, list[Delta]] = {}
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    return found


@pytest.mark.parametrize(("argument", "given"), ODD, ids=lambda x: str(x)[:40])
def test_odd_parameters_are_refused_by_name(
    engine: Engine, argument: str, given: dict[str, Any]
) -> None:
    with pytest.raises(RequestError, match=argument) as error:
        engine.submit(Request("odd", (1,), SamplingParams(**given)))
    assert error.value.argument == argument
    assert not engine.has_work


@pytest.mark.parametrize("prompt", [(), (256,), (-1,), (1.5,), ("a",)], ids=str)
def test_odd_prompts_are_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(RequestError) as error:
        engine.submit(Request("odd", prompt))
    assert error.value.argument == "prompt"


def test_prompts_that_leave_no_room_are_refused(engine: Engine) -> None:
    assert engine.max_model_len == 512  # of the cache: the model has more
    with pytest.raises(PromptTooLongError, match="512"):
        engine.submit(Request("long", (1,) * 512))
    engine.submit(Request("all", (1,) * 511, greedy(max_tokens=None)))
    (deltas,) = run(engine).values()
    assert (deltas[-1].finish_reason, len(deltas[-1].tokens)) == ("length", 1)


def test_a_refused_prompt_leaves_nothing_of_those_before_it(engine: Engine) -> None:
    (alone,) = engine.generate([[1, 2]], greedy())
    with pytest.raises(RequestError):
        engine.generate([[1, 2], [], [3]], greedy())
    assert engine.generate([[1, 2]], greedy()) == [alone] and not engine.has_work
    assert engine.stats()["pages_used"] == 0


def test_a_name_is_there_once(engine: Engine) -> None:
    engine.submit(Request("twice", (1,), greedy()))
    with pytest.raises(RequestError, match="under way"):
        engine.submit(Request("twice", (1,), greedy()))
    engine.abort("twice")
    engine.abort("twice")
    engine.abort("never")
    assert run(engine) == {"twice": [Delta("twice", (), "", (), "abort")]}
    assert engine.stats()["pages_used"] == 0


class Faulty:
    """A grammar that raises at its n-th call, or takes no token at it."""

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how, self.calls = at, how, 0

    def bitmask(self, out: Any) -> None:
        self.calls += 1
        if self.how == "bitmask" and self.calls >= self.at:
            raise RuntimeError("no mask today")

    def accept(self, token: int) -> bool:
        if self.how == "accept" and self.calls >= self.at:
            raise RuntimeError("no token today")
        return self.how != "refuse" or self.calls < self.at


@pytest.mark.parametrize("how", ["bitmask", "accept", "refuse"])
def test_a_faulty_request_ends_alone(engine: Engine, how: str) -> None:
    lot = random.Random(how)
    prompts = [tuple(lot.randrange(256) for _ in range(lot.randint(1, 90))) for _ in range(5)]
    expected = [a.tokens for a in engine.generate(prompts, greedy())]
    bad = lot.randrange(5)
    for i, prompt in enumerate(prompts):
        more = {"grammar": Faulty(lot.randint(1, 4), how)} if i == bad else {}
        engine.submit(Request(str(i), prompt, greedy(**more)))
    found = run(engine)
    for i, tokens in enumerate(expected):
        own = tuple(token for delta in found[str(i)] for token in delta.tokens)
        last = found[str(i)][-1]
        if i == bad:
            assert last.finish_reason == "error" and last.error and own == tokens[: len(own)]
        else:
            assert (last.finish_reason, own) == ("length", tokens)
    assert engine.stats()["pages_used"] == engine.stats()["running"] == 0


def test_a_pass_that_fails_is_run_again_request_by_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the device's memory is out: what fails alone, too, ends; the others go on."""
    prompts = [(5, 6, 7), (8,) * 70, (9, 10)]
    expected = [a.tokens for a in engine.generate(prompts, greedy())]
    whole = engine.runner.run

    def failing(batch: Any) -> Any:
        if 8 in batch.inputs["ids"] or len(batch.inputs["before"]) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return whole(batch)

    monkeypatch.setattr(engine.runner, "run", failing)
    answers = engine.generate(prompts, greedy())
    assert [a.tokens for a in answers] == [expected[0], (), expected[2]]
    assert answers[1].finish_reason == "error"
    assert "OutOfMemoryError" in str(answers[1].error)
    assert engine.stats()["pages_used"] == 0


def test_models_that_are_not_known_are_named() -> None:
    with pytest.raises(ModelError, match="gpt2"):
        Engine.random({"model_type": "gpt2"}, device="cpu")
    with pytest.raises(ModelError, match="'hidden_size'"):
        Engine.random({"model_type": "llama", "num_attention_heads": 4}, device="cpu")
    with pytest.raises(RequestError, match="tiny"):
        Engine.random("huge", device="cpu")
