"""kernel_hub's own engine on tiny random models behind the server: the same as alone."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lots import Lots

for package in ("starlette", "uvicorn", "prometheus_client", "httpx", "openai"):
    pytest.importorskip(package, reason="the server or its client is made of it")
pytest.importorskip("torch", reason="the ops are torch ops")

import openai  # noqa: E402
from served_here import Served, served  # noqa: E402

from kernel_hub.engine.engine import Engine  # noqa: E402
from kernel_hub.engine.requests import SamplingParams  # noqa: E402

CONFIG = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 1024, "eos_token_id": 257,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools | length if tools }}[assistant]"
)


def made(**options: Any) -> Engine:
    options = {"device": "cpu", "page_size": 16, "cache_tokens": 2048, "drafts": 2, **options}
    return Engine.random(CONFIG, name="small", **options)


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    with served(made(max_batch=5, max_tokens_a_pass=64)) as running:
        yield running
        running.settles()


def alone(prompt: str, params: SamplingParams) -> Any:
    """Of an engine of its own, and nobody else's requests."""
    return made().generate([prompt], params)[0]


def test_greedy_answers_by_lot(here: Served) -> None:
    """Whole, streamed and abandoned, many at once: the texts of each are its own."""
    lots = Lots("the real engine")
    cases = []
    for _ in range(10):
        prompt = "".join(lots.choices("abcd é", k=lots.choice([1, 15, 16, 17, 60, 200])))
        cases.append((prompt, lots.choice([1, 5, 30]), lots.random() < 0.5))

    async def one(client: Any, prompt: str, most: int, stream: bool) -> str:
        asked = {"model": "small", "prompt": prompt, "temperature": 0, "max_tokens": most}
        answer = await client.completions.create(**asked, stream=stream)
        if not stream:
            return str(answer.choices[0].text)
        return "".join([piece.choices[0].text async for piece in answer])

    async def leave(client: Any, seed: int) -> None:
        own = random.Random(seed)
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=own.uniform(0.01, 0.3)).completions.create(
                model="small", prompt="x" * own.randrange(1, 400), max_tokens=600, n=3,
                extra_body={"ignore_eos": True},
            )  # fmt: skip

    async def all_at_once() -> list[str]:
        async with here.async_openai() as client:
            left = [leave(client, lots.randrange(2**32)) for _ in range(4)]
            asked = [one(client, *case) for case in cases]
            return (await asyncio.gather(*asked, *left))[: len(asked)]

    texts = asyncio.run(all_at_once())
    here.settles()
    for (prompt, most, _), text in zip(cases, texts, strict=True):
        params = SamplingParams(max_tokens=most, temperature=0.0)
        assert text == alone(prompt, params).text, str(lots)


def test_seeds_and_logprobs(here: Served) -> None:
    asked = {"model": "small", "prompt": "abc", "seed": 5, "max_tokens": 12, "logprobs": 2}
    answer = here.openai().completions.create(**asked).choices[0]
    wanted = alone("abc", SamplingParams(max_tokens=12, seed=5, logprobs=2))
    assert answer.text == wanted.text
    found = [one.logprob for one in wanted.logprobs]
    assert answer.logprobs.token_logprobs == pytest.approx(found, abs=0.05)


def test_a_schema_is_followed(here: Served, tmp_path: Path) -> None:
    """By bytes, and by a tokenizer of Hugging Face's, with its chat template."""
    pytest.importorskip("llguidance", reason="the grammars of JSON answers")
    pytest.importorskip("tokenizers", reason="the tokenizer of a folder")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: place for place, text in enumerate([*alphabet, "tr", "true", "<end>"])}
    merges = [("t", "r"), ("tr", "ue")]
    vocabulary["ue"] = len(vocabulary)
    made_of = Tokenizer(models.BPE(vocab=vocabulary, merges=[("u", "e"), *merges]))
    made_of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made_of.decoder = decoders.ByteLevel()
    made_of.add_special_tokens(["<end>"])
    made_of.save(str(tmp_path / "tokenizer.json"))
    config = {**CONFIG, "eos_token_id": vocabulary["<end>"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    schema = {
        "type": "object", "additionalProperties": False, "required": ["yes", "kind"],
        "properties": {"yes": {"const": True}, "kind": {"enum": ["a", "ü", "c"]}},
        "x-guidance": {"whitespace_flexible": False},
    }  # fmt: skip
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    messages: Any = [{"role": "user", "content": "say it"}]
    engine = Engine.from_pretrained(
        tmp_path, random_weights=True, device="cpu", name="folder", page_size=16
    )
    with served(engine) as with_tokens:
        client = with_tokens.openai()
        for seed in range(4):
            answer = client.chat.completions.create(
                model="folder", messages=messages, response_format=wanted, seed=seed, max_tokens=90
            ).choices[0]
            assert answer.finish_reason == "stop"
            found = json.loads(answer.message.content)
            assert found["yes"] is True and found["kind"] in ("a", "ü", "c")
        used = client.chat.completions.create(model="folder", messages=messages, max_tokens=1).usage
        assert used.prompt_tokens == len("[user]say it[assistant]")
        with pytest.raises(openai.BadRequestError, match="no tools") as caught:
            tool: Any = {"role": "tool", "content": "x", "tool_call_id": "y"}
            client.chat.completions.create(model="folder", messages=[*messages, tool])
        assert caught.value.param == "messages"
        with_tokens.settles()
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        here.openai().chat.completions.create(model="small", messages=messages)


def test_a_tokenizer_of_words(tmp_path: Path) -> None:
    """Tokens of log-probabilities have the blank before them; JSON by it is refused by name."""
    pytest.importorskip("llguidance", reason="the grammars of JSON answers")
    pytest.importorskip("tokenizers", reason="the tokenizer of a folder")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<end>", *(f"▁{letter * 2}" for letter in "abcdefg"), "h", "i"]
    made_of = Tokenizer(models.WordLevel({text: i for i, text in enumerate(words)}, "<end>"))
    made_of.pre_tokenizer, made_of.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made_of.add_special_tokens(["<end>"])
    made_of.save(str(tmp_path / "tokenizer.json"))
    config = {**CONFIG, "vocab_size": len(words), "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    engine = Engine.from_pretrained(tmp_path, random_weights=True, device="cpu", name="words")
    with served(engine) as here:
        client, asked = here.openai(), {"model": "words", "max_tokens": 12, "seed": 3}
        made = client.completions.create(prompt="aa bb", echo=True, **asked).choices[0]
        again = client.completions.create(prompt="aa bb", logprobs=0, **asked).choices[0]
        assert made.text == "aa bb" + again.text == "aa bb" + "".join(again.logprobs.tokens)
        for at, token in zip(again.logprobs.text_offset, again.logprobs.tokens, strict=True):
            assert again.text[at:].startswith(token)
        messages: Any = [{"role": "user", "content": "aa"}]
        with pytest.raises(openai.BadRequestError, match="tokenizer"):
            client.chat.completions.create(
                messages=messages, response_format={"type": "json_object"}, **asked
            )


def test_refusals_of_the_engine(here: Served) -> None:
    client = here.openai()
    for wrong, param in (
        ({"prompt": [1, 300]}, "prompt"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
    ):
        asked: Any = {"model": "small", "prompt": "a", **wrong}
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**asked)
        assert (caught.value.param, caught.value.code) == (param, "invalid_value")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="small", prompt="x" * 1024)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_a_pass_that_fails_hurts_one_request(here: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out wherever one prompt is in the pass: the others are answered."""
    real = here.engine.runner.run

    def run(batch: Any) -> Any:
        if ord("#") in batch.inputs["ids"]:
            raise MemoryError("no room")
        return real(batch)

    monkeypatch.setattr(here.engine.runner, "run", run)

    async def all_at_once() -> list[Any]:
        more: Any = {"logit_bias": {str(ord("#")): -100}, "ignore_eos": True}
        async with here.async_openai() as client:
            asked = [
                client.completions.create(
                    model="small", prompt=prompt, max_tokens=40, extra_body=more
                )
                for prompt in ("ab", "a#b", "ba")
            ]
            return await asyncio.gather(*asked, return_exceptions=True)

    first, wrong, last = asyncio.run(all_at_once())
    assert isinstance(wrong, openai.InternalServerError) and "no room" in str(wrong)
    assert [one.usage.completion_tokens for one in (first, last)] == [40, 40]
    here.settles()
