"""The `openai` package against a running server: what it asks for it gets."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from lots import Lots

for package in ("starlette", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(package, reason="the server is made of it")
openai = pytest.importorskip("openai", reason="the client of these tests")

from byte_engine import EOS, alone, logits  # noqa: E402
from served_here import Served, served  # noqa: E402

from kernel_hub.engine.requests import SamplingParams  # noqa: E402
from kernel_hub.engine.server.bodies import Message  # noqa: E402

SAID = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé?"}]
CHAT_PROMPT = list("0<system>be brief<user>hé?<assistant>".encode())


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    with served() as running:
        yield running
        running.settles()


@pytest.fixture
def client(here: Served) -> Any:
    return here.openai()


def expected(prompt: list[int], **params: Any) -> tuple[list[int], str, str]:
    return alone(prompt, SamplingParams(**{"temperature": 0.0, **params}))


def test_a_completion_is_what_the_engine_says(client: Any) -> None:
    tokens, text, finish = expected(list(b"hello"), max_tokens=50)
    made = client.completions.create(model="bytes", prompt="hello", max_tokens=50, temperature=0)
    (choice,) = made.choices
    assert (choice.text, choice.finish_reason, choice.index) == (text, finish, 0)
    assert (made.object, made.model, choice.logprobs) == ("text_completion", "bytes", None)
    used = made.usage
    assert (used.prompt_tokens, used.completion_tokens) == (5, len(tokens))
    assert used.total_tokens == 5 + len(tokens)


def test_a_chat_is_what_the_engine_says(client: Any) -> None:
    tokens, text, finish = expected(CHAT_PROMPT, max_tokens=60)
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "é?"}]
    for content in ("hé?", parts):
        made = client.chat.completions.create(
            model="bytes", messages=[SAID[0], {"role": "user", "content": content}],
            max_completion_tokens=60, temperature=0, user="me", metadata={"a": "b"},
        )  # fmt: skip
        (choice,) = made.choices
        assert (choice.message.content, choice.message.role) == (text, "assistant")
        assert (choice.finish_reason, made.object) == (finish, "chat.completion")
        assert made.usage.completion_tokens == len(tokens)


def test_what_was_answered_can_be_sent_back(client: Any) -> None:
    first = client.chat.completions.create(model="bytes", messages=SAID, max_tokens=4)
    again = [*SAID, first.choices[0].message, {"role": "user", "content": "more"}]
    made = client.chat.completions.create(model="bytes", messages=again, max_tokens=4)
    assert made.usage.prompt_tokens > first.usage.prompt_tokens


def test_calls_that_are_sent_back_have_objects_for_arguments() -> None:
    """Templates go through them; what is no JSON, or too deep, stays text."""
    deep = 100_000 * "["
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": said}}
             for said in ('{"a": [1]}', "{", deep)]  # fmt: skip
    plain = Message(role="assistant", tool_calls=[*calls, {"odd": 1}]).plain()
    found = [call.get("function", {}).get("arguments") for call in plain["tool_calls"]]
    assert found == [{"a": [1]}, "{", deep, None]


@pytest.mark.parametrize("with_usage", [False, True])
def test_streams_say_the_same_in_pieces(client: Any, with_usage: bool) -> None:
    tokens, text, finish = expected(CHAT_PROMPT, max_tokens=80, stop=("zq",))
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    pieces = list(client.chat.completions.create(
        model="bytes", messages=SAID, max_tokens=80, temperature=0, stop="zq", stream=True,
        **options,
    ))  # fmt: skip
    assert len({piece.id for piece in pieces}) == 1
    assert {piece.object for piece in pieces} == {"chat.completion.chunk"}
    if with_usage:
        assert pieces[-1].choices == [] and pieces[-1].usage.completion_tokens == len(tokens)
        pieces.pop()
    assert all(piece.usage is None for piece in pieces)
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    ends = [piece.choices[0].finish_reason for piece in pieces]
    assert ends == [None] * (len(ends) - 1) + [finish]
    assert len(pieces) > 10, "piece by piece"


def test_several_prompts_and_choices_keep_their_places(client: Any) -> None:
    prompts = ["one", "twö", "three"]
    asked = {"model": "bytes", "prompt": prompts, "n": 3, "seed": 7, "max_tokens": 30}
    made = client.completions.create(**asked, temperature=0.9, echo=True)
    wanted = [
        prompt + expected(list(prompt.encode()), temperature=0.9, max_tokens=30, seed=7 + nth)[1]
        for prompt in prompts
        for nth in range(3)
    ]
    assert [choice.text for choice in sorted(made.choices, key=lambda c: c.index)] == wanted
    assert len(set(wanted)) == 9, "a seed gives each choice its own"
    assert made.usage.prompt_tokens == sum(len(prompt.encode()) for prompt in prompts)
    texts = [""] * 9
    for piece in client.completions.create(**asked, temperature=0.9, echo=True, stream=True):
        texts[piece.choices[0].index] += piece.choices[0].text
    assert texts == wanted
    ids = [list(prompt.encode()) for prompt in prompts]
    again = client.completions.create(**{**asked, "prompt": ids}, temperature=0.9, echo=True)
    assert [choice.text for choice in again.choices] == wanted
    one = client.completions.create(model="bytes", prompt=ids[0], max_tokens=5, echo=True)
    assert one.choices[0].text.startswith("one")


def test_choices_of_a_prompt_share_it(here: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one is there once, whatever `n` is."""
    taken, real = list[Any](), here.engine.submit

    def submit(request: Any) -> None:
        taken.append(request)
        real(request)

    monkeypatch.setattr(here.engine, "submit", submit)
    asked = {"model": "bytes", "prompt": ["one", [1, 2, 3]], "n": 4, "max_tokens": 1}
    here.openai().completions.create(**asked)
    here.openai().chat.completions.create(model="bytes", messages=SAID, n=4, max_tokens=1)
    assert len(taken) == 12 and len({id(one.prompt) for one in taken}) == 3


def test_logprobs_of_completions(client: Any) -> None:
    asked = {"model": "bytes", "prompt": "abc", "temperature": 0, "max_tokens": 25, "logprobs": 3}
    made = client.completions.create(**asked)
    found, choice = made.choices[0].logprobs, made.choices[0]
    tokens, _, _ = expected(list(b"abc"), max_tokens=25)
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(tokens)
    context = list(b"abc")
    for place, token in enumerate(tokens):
        scores = logits(context)
        truth = scores - math.log(sum(math.exp(float(x)) for x in scores))
        assert found.token_logprobs[place] == pytest.approx(truth[token], abs=1e-5)
        assert max(found.top_logprobs[place].values()) == pytest.approx(max(truth), abs=1e-5)
        context.append(token)
    ends = list(itertools.accumulate(map(len, found.tokens)))
    assert found.text_offset == [0, *ends[:-1]]
    if "�" not in "".join(found.tokens):
        assert "".join(found.tokens) == choice.text
    streamed = [p.choices[0].logprobs for p in client.completions.create(**asked, stream=True)]
    joined = [one for piece in streamed if piece for one in piece.token_logprobs]
    assert joined == found.token_logprobs
    assert [o for p in streamed if p for o in p.text_offset] == found.text_offset


@pytest.mark.parametrize("top", [None, 0, 5])
def test_logprobs_of_chats(client: Any, top: int | None) -> None:
    options = {} if top is None else {"top_logprobs": top}
    made = client.chat.completions.create(
        model="bytes", messages=SAID, max_tokens=20, temperature=0, logprobs=True, **options
    )
    entries = made.choices[0].logprobs.content
    tokens, _, _ = expected(CHAT_PROMPT, max_tokens=20)
    assert len(entries) == len(tokens)
    for token, entry in zip(tokens, entries, strict=True):
        assert len(entry.top_logprobs) == (top or 0)
        if token < 128:
            assert (entry.token, entry.bytes) == (chr(token), [token])
        elif token < 256:
            assert entry.bytes is None, "half a character"
        if top:
            assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)
    plain = client.chat.completions.create(model="bytes", messages=SAID, max_tokens=3)
    assert plain.choices[0].logprobs is None


def test_stop_strings_are_never_shown(client: Any) -> None:
    lots = Lots("stop strings")
    num_stopped = 0
    for _ in range(12):
        prompt = "".join(lots.choices("abcdefgh ", k=6))
        _, text, _ = expected(list(prompt.encode()), max_tokens=60)
        at = lots.randrange(max(1, len(text) - 3))
        stop = [text[at : at + 3], "zzzz"][: lots.randint(1, 2)]
        if not all(stop):
            continue
        wanted = expected(list(prompt.encode()), max_tokens=60, stop=tuple(stop))
        made = client.completions.create(
            model="bytes", prompt=prompt, temperature=0, max_tokens=60, stop=stop, stream=True
        )
        pieces = list(made)
        assert "".join(p.choices[0].text for p in pieces) == wanted[1], str(lots)
        assert stop[0] not in wanted[1]
        assert pieces[-1].choices[0].finish_reason == wanted[2]
        num_stopped += wanted[2] == "stop"
    assert num_stopped > 4


def test_sampling_parameters_reach_the_engine(client: Any) -> None:
    letter = {"logit_bias": {"113": 100}, "max_tokens": 8}
    made = client.completions.create(model="bytes", prompt="x", temperature=0, **letter)
    assert made.choices[0].text == "q" * 8
    more = {"stop_token_ids": [EOS, 120], "ignore_eos": True, "top_k": 4, "min_p": 0.1}
    made = client.completions.create(model="bytes", prompt="x", extra_body=more, max_tokens=3)
    assert made.usage.completion_tokens <= 3
    default = client.completions.create(model="bytes", prompt="x", temperature=0)
    assert default.usage.completion_tokens <= 16
    seeds = {
        client.completions.create(model="bytes", prompt="x", seed=seed, max_tokens=20)
        .choices[0]
        .text
        for seed in (1, 1, -1, 2**62)
    }
    assert len(seeds) == 3


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["bytes"]
    assert client.models.retrieve("bytes").owned_by == "kernel_hub"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("meta/other")
    assert caught.value.code == "model_not_found"


SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "grün", "blue"]},
        "count": {"type": "integer", "minimum": 3, "maximum": 40},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["colour", "count", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def test_answers_follow_a_schema(client: Any) -> None:
    pytest.importorskip("llguidance", reason="the grammars of JSON answers")
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for seed in range(6):
        made = client.chat.completions.create(
            model="bytes", messages=SAID, response_format=wanted, seed=seed, n=2, max_tokens=200
        )
        for choice in made.choices:
            assert choice.finish_reason == "stop", choice
            found = json.loads(choice.message.content)
            assert found.keys() == {"colour", "count", "tags"}
            assert found["colour"] in ("red", "grün", "blue") and 3 <= found["count"] <= 40
            assert 1 <= len(found["tags"]) <= 3 and all(type(t) is bool for t in found["tags"])


def test_answers_are_objects(client: Any) -> None:
    pytest.importorskip("llguidance", reason="the grammars of JSON answers")
    made = client.chat.completions.create(
        model="bytes", messages=SAID, response_format={"type": "json_object"}, max_tokens=40,
        temperature=0, logit_bias={str(b): -100 for b in b" \n\r\t"},
    )  # fmt: skip
    assert made.choices[0].message.content.startswith("{")
    plain = client.chat.completions.create(
        model="bytes", messages=SAID, response_format={"type": "text"}, max_tokens=40, temperature=0
    )
    assert plain.choices[0].message.content == expected(CHAT_PROMPT, max_tokens=40)[1]


def test_a_schema_that_is_none_is_refused(client: Any) -> None:
    pytest.importorskip("llguidance", reason="the grammars of JSON answers")
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="nonsense") as caught:
        client.chat.completions.create(model="bytes", messages=SAID, response_format=wrong)
    assert caught.value.param == "response_format.json_schema.schema"


def test_without_the_grammar_package_its_name_is_said(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match=r"pip install 'kernel_hub\[grammar\]'"):
        client.chat.completions.create(
            model="bytes", messages=SAID, response_format={"type": "json_object"}
        )
