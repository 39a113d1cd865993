"""From a body to what an engine is asked, and from its deltas to OpenAI's objects."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ..requests import Delta, Request, TokenLogprob
from .bodies import Chat, Completion, read
from .grammars import Grammars
from .refusals import ApiError
from .worker import Worker

Json = dict[str, Any]
MOST_CHOICES = 128
LEAST = -9999.0  # JSON has no -inf and no nan


class Answer:
    """The choices of one body: `n` for each of its prompts, in their order.

    Made beside the event loop, as long texts take long: of the engine, the texts' part alone is
    used, which may be while it steps. Raises what `told` tells of.
    """

    def __init__(
        self, worker: Worker, engine: Any, grammars: Grammars, kind: type[Completion] | type[Chat],
        body: bytes,
    ) -> None:  # fmt: skip
        self._worker, self._engine = worker, engine
        self._asked = asked = read(kind, body)
        check_model(engine, asked.model)
        self._chat = asked if isinstance(asked, Chat) else None
        prompts = self._prompts(asked)
        self._id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._used = [sum(map(len, prompts)), 0]  # tokens read and generated
        num_each, wanted, echo = asked.n or 1, asked.logprobs, [""] * len(prompts)
        if self._chat:
            wanted = (self._chat.top_logprobs or 0) if self._chat.logprobs else None
        elif isinstance(asked, Completion) and asked.echo:
            echo = [one if isinstance(one, str) else engine.decode(one) for one in asked.prompt]
        if num_each * len(prompts) > MOST_CHOICES:
            raise ApiError(400, f"One request has at most {MOST_CHOICES} choices.", "n")
        self._echo = [text for text in echo for _ in range(num_each)]
        self._offsets = list(map(len, self._echo))
        made = grammars.make(self._chat and self._chat.response_format, len(self._echo))
        self._requests = [
            Request(
                f"{self._id}-{index}",
                tuple(prompts[index // num_each]),
                asked.params(index % num_each, wanted, grammar),
            )
            for index, grammar in enumerate(made)
        ]

    @property
    def streams(self) -> bool:
        return bool(self._asked.stream)

    def _prompts(self, asked: Completion | Chat) -> list[Any]:
        if isinstance(asked, Completion):
            encode = self._engine.encode
            return [encode(one) if isinstance(one, str) else one for one in asked.prompt]
        tools = None if asked.tool_choice == "none" else asked.tools
        return [self._engine.chat([one.plain() for one in asked.messages], tools=tools)]

    async def whole(self) -> Json:
        """The object of an answer that is not streamed."""
        found: list[list[Delta]] = [[] for _ in self._echo]
        async with contextlib.aclosing(self._worker.deltas(self._requests)) as deltas:
            async for delta in deltas:
                if delta:
                    found[self._count(delta)].append(delta)
        choices = []
        for index, echo in enumerate(self._echo):
            text = echo + "".join(delta.text for delta in found[index])
            what: Json = {"text": text}
            if self._chat:
                what = {"message": {"role": "assistant", "content": text, "refusal": None}}
            logprobs = [one for delta in found[index] for one in delta.logprobs]
            choices.append(self._choice(index, what, logprobs, found[index][-1].finish_reason))
        return self._object(choices, "") | self._usage()

    async def pieces(self) -> AsyncGenerator[Json, None]:
        """The objects of a stream; before them {}, once the engine has taken the requests."""
        options = self._asked.stream_options
        rest: Json = {"usage": None} if options and options.include_usage else {}

        def piece(index: int, text: str, delta: Json, *more: Any) -> Json:
            choice = self._choice(index, {"delta": delta} if self._chat else {"text": text}, *more)
            return self._object([choice], ".chunk") | rest

        async with contextlib.aclosing(self._worker.deltas(self._requests)) as deltas:
            await anext(deltas)
            yield {}
            for index, text in enumerate(self._echo):
                if self._chat or text:
                    yield piece(index, text, {"role": "assistant", "content": ""}, (), None)
            async for delta in deltas:
                assert delta is not None
                index, end = self._count(delta), delta.finish_reason
                if delta.text or delta.logprobs or end:
                    what = {"content": delta.text} if delta.text else {}
                    yield piece(index, delta.text, what, delta.logprobs, end)
        if rest:
            yield self._object([], ".chunk") | self._usage()

    def _count(self, delta: Delta) -> int:
        """Which choice it is of."""
        self._used[1] += len(delta.tokens)
        return int(delta.request_id.rpartition("-")[2])

    def _object(self, choices: list[Json], suffix: str) -> Json:
        kind = f"chat.completion{suffix}" if self._chat else "text_completion"
        head = {"id": self._id, "object": kind, "created": self._created}
        return head | {"model": self._asked.model, "choices": choices}

    def _usage(self) -> Json:
        read, made = self._used
        used = {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}
        return {"usage": used}

    def _choice(
        self, index: int, what: Json, logprobs: Sequence[TokenLogprob], finish: str | None
    ) -> Json:
        found: Json | None = None
        if logprobs:
            found = self._of_chat(logprobs) if self._chat else self._of_text(index, logprobs)
        return {"index": index, **what, "logprobs": found, "finish_reason": finish}

    def _of_chat(self, logprobs: Sequence[TokenLogprob]) -> Json:
        def entry(token: int, logprob: float) -> Json:
            text = self._engine.decode([token])
            known = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
            return {"token": text, "logprob": max(LEAST, logprob), "bytes": known}

        content = [
            entry(one.token, one.logprob) | {"top_logprobs": [entry(*each) for each in one.top]}
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _of_text(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json:
        decode = self._engine.decode
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in logprobs:
            text = decode([one.token])
            # Of tokens with one text, pieces of characters, the likeliest is said.
            top = {decode([token]): max(LEAST, value) for token, value in reversed(one.top)}
            values = text, max(LEAST, one.logprob), top, self._offsets[index]
            for part, value in zip(found.values(), values, strict=True):
                part.append(value)
            self._offsets[index] += len(text)
        return found


def check_model(engine: Any, name: str) -> None:
    """Raises ApiError where the server has no model of that name."""
    if name != engine.name:
        said = f"The model `{name}` does not exist; this server has `{engine.name}`."
        raise ApiError(404, said, None, "model_not_found")
