"""From a body to what an engine is asked, and from its deltas to OpenAI's objects."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ..requests import Delta, Request, TokenLogprob
from .bodies import Chat, Completion
from .grammars import Grammars
from .refusals import ApiError
from .worker import Worker

Json = dict[str, Any]
MOST_CHOICES = 128
LEAST = -9999.0  # JSON has no -inf and no nan


class Answer:
    """The choices of one body: `n` for each of its prompts, in their order.

    Made beside the event loop, as long texts take long: of the engine, the texts' part alone is
    used, which may be while it steps. Raises what `refused` tells of.
    """

    def __init__(
        self, worker: Worker, engine: Any, grammars: Grammars, kind: type[Completion] | type[Chat],
        body: bytes,
    ) -> None:  # fmt: skip
        self._worker, self._decode = worker, engine.decode
        self.asked = asked = kind.model_validate_json(body)
        check_model(engine, asked.model)
        self._is_chat, echo, more = isinstance(asked, Chat), [""], Json()
        if isinstance(asked, Chat):
            tools = None if asked.tool_choice == "none" else asked.tools
            prompts = [engine.chat([one.plain() for one in asked.messages], tools=tools)]
            more["logprobs"] = (asked.top_logprobs or 0) if asked.logprobs else None
            more["max_tokens"] = asked.max_completion_tokens or asked.max_tokens
        else:
            prompts = [engine.encode(x) if isinstance(x, str) else x for x in asked.prompt]
            echo = [""] * len(prompts)
            if asked.echo:
                echo = [x if isinstance(x, str) else engine.decode(x) for x in asked.prompt]
                if asked.logprobs is not None:
                    said = "There are no log-probabilities of what 'echo' repeats."
                    raise ApiError(400, said, "echo")
        num_each = asked.n or 1
        if num_each * len(prompts) > MOST_CHOICES:
            raise ApiError(400, f"One request has at most {MOST_CHOICES} choices.", "n")
        self._echo = [text for text in echo for _ in range(num_each)]
        self._offsets = [*map(len, self._echo)]
        self._num_read, self._num_made = sum(map(len, prompts)), 0
        self._head = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": "", "created": int(time.time()), "model": asked.model,
        }  # fmt: skip
        formatted = getattr(asked, "response_format", None)
        self._requests = [
            Request(
                f"{self._head['id']}-{index}",
                tuple(prompts[index // num_each]),
                asked.params(index % num_each, grammar=grammar, **more),
            )
            for index, grammar in enumerate(grammars.make(formatted, len(self._echo)))
        ]

    async def whole(self) -> Json:
        """The object of an answer that is not streamed."""
        found: list[list[Delta]] = [[] for _ in self._echo]
        async with aclosing(self._worker.deltas(self._requests)) as deltas:
            async for delta in deltas:
                if delta:
                    found[self._count(delta)].append(delta)
        choices = []
        for index, own in enumerate(found):
            text = self._echo[index] + "".join(delta.text for delta in own)
            message = {"role": "assistant", "content": text, "refusal": None}
            logprobs = [one for delta in own for one in delta.logprobs]
            end = own[-1].finish_reason
            choices.append(self._choice(index, text, {"message": message}, logprobs, end))
        return self._object(choices, "") | self._usage()

    async def events(self) -> AsyncGenerator[str, None]:
        """Those of a stream; before them '', once the engine has taken the requests. An error on
        the way is the last of them.
        """
        options = self.asked.stream_options
        rest: Json = {"usage": None} if options and options.include_usage else {}

        def piece(index: int, text: str, delta: Json, *more: Any) -> str:
            choice = self._choice(index, text, {"delta": delta}, *more)
            return event(self._object([choice], ".chunk") | rest)

        async with aclosing(self._worker.deltas(self._requests)) as deltas:
            await anext(deltas)
            yield ""
            for index, text in enumerate(self._echo):
                if self._is_chat or text:
                    yield piece(index, text, {"role": "assistant", "content": ""}, (), None)
            try:
                async for delta in deltas:
                    assert delta is not None
                    index, end = self._count(delta), delta.finish_reason
                    if delta.text or delta.logprobs or end:
                        what = {"content": delta.text} if delta.text else {}
                        yield piece(index, delta.text, what, delta.logprobs, end)
            except ApiError as error:
                yield event(error.body)
                return
        if rest:
            yield event(self._object([], ".chunk") | self._usage())
        yield "data: [DONE]\n\n"

    def _count(self, delta: Delta) -> int:
        """Which choice it is of."""
        self._num_made += len(delta.tokens)
        return int(delta.request_id.rpartition("-")[2])

    def _object(self, choices: list[Json], suffix: str) -> Json:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices}

    def _usage(self) -> Json:
        read, made = self._num_read, self._num_made
        used = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        return {"usage": used}

    def _choice(
        self, index: int, text: str, chat: Json, logprobs: Sequence[TokenLogprob], end: str | None
    ) -> Json:
        of = self._of_chat if self._is_chat else self._of_text
        what = chat if self._is_chat else {"text": text}
        found = of(index, logprobs) if logprobs else None
        return {"index": index, **what, "logprobs": found, "finish_reason": end}

    def _of_chat(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json:
        def entry(token: int, logprob: float) -> Json:
            text = self._decode([token])
            known = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
            return {"token": text, "logprob": max(LEAST, logprob), "bytes": known}

        content = [
            entry(one.token, one.logprob) | {"top_logprobs": [entry(*each) for each in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _of_text(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json:
        texts, tops, offsets = [self._decode([one.token]) for one in logprobs], [], []
        for text, one in zip(texts, logprobs, strict=True):
            # Of tokens with one text, pieces of characters, the likeliest is said.
            tops.append({self._decode([t]): max(LEAST, x) for t, x in reversed(one.top)})
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        scores = [max(LEAST, one.logprob) for one in logprobs]
        return {"tokens": texts, "token_logprobs": scores, "top_logprobs": tops,
                "text_offset": offsets}  # fmt: skip


def event(what: Json) -> str:
    return f"data: {json.dumps(what, separators=(',', ':'))}\n\n"


def check_model(engine: Any, name: str) -> None:
    """Raises ApiError where the server has no model of that name."""
    if name != engine.name:
        said = f"The model `{name}` does not exist; this server has `{engine.name}`."
        raise ApiError(404, said, None, "model_not_found")
