"""From a body to what an engine is asked, and from its deltas to OpenAI's objects."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from itertools import accumulate
from typing import Any

from ...errors import RequestError
from ..grammars import Grammars
from ..requests import Delta, Generated, Request, SamplingParams, TokenLogprob
from ..worker import EngineError
from .bodies import MOST_CHOICES, Chat, Completion, Format
from .refusals import ApiError, api_error

Json = dict[str, Any]
ENCODED = json.JSONEncoder(separators=(",", ":")).encode
LEAST = -9999.0  # JSON has no -inf and no nan


class Answer:
    """The choices of one body: `n` for each of its prompts, in their order.

    Made beside the event loop, as long texts take long: of the engine, the texts' part alone is
    used, which may be while it steps. Raises what `refused` tells of.
    """

    def __init__(
        self, engine: Any, grammars: Grammars, kind: type[Completion] | type[Chat], body: bytes
    ) -> None:
        asked = self.asked = kind.model_validate_json(body)
        check_model(engine, asked.model)
        self._engine, self._is_chat, formatted = engine, kind is Chat, None
        if isinstance(asked, Chat):
            tools = None if asked.tool_choice == "none" else asked.tools
            prompts = [tuple(engine.chat([one.plain() for one in asked.messages], tools=tools))]
            begins, formatted = [""], asked.response_format
        else:
            given = (engine.encode(x) if isinstance(x, str) else x for x in asked.prompt)
            prompts = [*map(tuple, given)]
            begins = [""] * len(prompts)
            if asked.echo:
                begins = [x if isinstance(x, str) else engine.decode(x) for x in asked.prompt]
                if asked.logprobs is not None:
                    said = "There are no log-probabilities of what 'echo' repeats."
                    raise ApiError(400, said, "echo")
        num_each = asked.n or 1
        if num_each * len(prompts) > MOST_CHOICES:
            raise ApiError(400, f"One request has at most {MOST_CHOICES} choices.", "n")
        self._begins = [text for text in begins for _ in range(num_each)]
        self._offsets = [*map(len, self._begins)]
        self._num_read, self._num_made = sum(map(len, prompts)), 0
        chat = f"chat.completion{'.chunk' if asked.stream else ''}"
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": chat if self._is_chat else "text_completion",
            "created": int(time.time()), "model": asked.model,
        }  # fmt: skip
        self.requests, knobs = list[Request](), asked.params()
        for index, grammar in enumerate(_grammars(grammars, formatted, len(self._begins))):
            of, nth = divmod(index, num_each)
            if asked.seed is not None:
                knobs["seed"] = (asked.seed + nth) % 2**63
            name, params = f"{self._head['id']}-{index}", SamplingParams(**knobs, grammar=grammar)
            self.requests.append(Request(name, prompts[of], params))

    def whole(self, deltas: Iterable[Delta]) -> Json:
        """The object of an answer that is not streamed."""
        found = [[Delta("", (), text)] for text in self._begins]
        for delta in deltas:
            found[self._count(delta)].append(delta)
        choices = []
        for index, said in enumerate(map(Generated.of, found)):
            message = {"role": "assistant", "content": said.text, "refusal": None}
            choices.append(self._choice(index, said, {"message": message}))
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def events(self, deltas: AsyncIterator[Delta | None]) -> AsyncIterator[str]:
        """Those of a stream. An error on the way is the last of them."""
        options = self.asked.stream_options
        rest = {"usage": None} if options and options.include_usage else {}

        def event(index: int, said: Delta, chat: Json) -> str:
            choice = self._choice(index, said, {"delta": chat})
            return _event({**self._head, "choices": [choice], **rest})

        for index, text in enumerate(self._begins):
            if self._is_chat or text:
                yield event(index, Delta("", (), text), {"role": "assistant", "content": ""})
        try:
            async for said in deltas:
                assert said is not None
                index = self._count(said)
                if said.text or said.logprobs or said.finish_reason:
                    yield event(index, said, {"content": said.text} if said.text else {})
        except (ApiError, EngineError) as error:
            yield _event(api_error(error).body)
            return
        if rest:
            yield _event({**self._head, "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _count(self, delta: Delta) -> int:
        """Which choice it is of."""
        self._num_made += len(delta.tokens)
        return int(delta.request_id.rpartition("-")[2])

    def _usage(self) -> Json:
        read, made = self._num_read, self._num_made
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    def _choice(self, index: int, said: Delta | Generated, chat: Json) -> Json:
        shown = chat if self._is_chat else {"text": said.text}
        logprobs = self._logprobs(index, said.logprobs) if said.logprobs else None
        return {"index": index, **shown, "logprobs": logprobs, "finish_reason": said.finish_reason}

    def _logprobs(self, index: int, scores: Iterable[TokenLogprob]) -> Json:
        def entry(token: int, logprob: float) -> Json:
            text = self._engine.decode([token])
            text = self._engine.decode([token, token])[len(text) :]  # as it is behind another
            told = {"token": text, "logprob": max(LEAST, logprob)}
            if self._is_chat:
                told["bytes"] = None if "\N{REPLACEMENT CHARACTER}" in text else [*text.encode()]
            return told

        found = [(entry(one.token, one.logprob), [entry(*e) for e in one.top]) for one in scores]
        if self._is_chat:
            content = [one | {"top_logprobs": top} for one, top in found]
            return {"content": content, "refusal": None}
        texts = [one["token"] for one, _ in found]
        *starts, self._offsets[index] = accumulate(map(len, texts), initial=self._offsets[index])
        return {
            "tokens": texts, "token_logprobs": [one["logprob"] for one, _ in found],
            # Of tokens with one text, pieces of characters, the likeliest is said.
            "top_logprobs": [{e["token"]: e["logprob"] for e in top[::-1]} for _, top in found],
            "text_offset": starts,
        }  # fmt: skip


def _event(what: Json) -> str:
    return f"data: {ENCODED(what)}\n\n"


def check_model(engine: Any, name: str) -> None:
    """Raises ApiError where the server has no model of that name."""
    if name != engine.name:
        said = f"The model `{name}` does not exist; this server has `{engine.name}`."
        raise ApiError(404, said, None, "model_not_found")


def _grammars(grammars: Grammars, asked: Format | None, count: int) -> list[Any]:
    """One for each of `count` choices, None of plain text."""
    if asked is None or asked.type == "text":
        return [None] * count
    param, schema = "response_format", {"type": "object"}
    if asked.type == "json_schema":
        if asked.json_schema is None:
            said = f"Missing required parameter: '{param}.json_schema'."
            raise ApiError(400, said, f"{param}.json_schema", "missing_required_parameter")
        schema = asked.json_schema.schema_
    try:
        return list(grammars.json(schema, count))
    except ImportError:
        said = "needs llguidance where the server runs: pip install 'kernel_hub[grammar]'"
        raise ApiError(400, f"{param} {asked.type} {said}", param) from None
    except RequestError as error:
        at = f"{param}.{asked.type}.schema" if error.argument else param
        raise ApiError(400, str(error), at) from None
