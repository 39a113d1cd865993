"""The bodies of requests, checked by pydantic: what OpenAI's clients send, and our few more."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from ..requests import SamplingParams

MOST_CHOICES = 128  # of one body


def _listed(value: Any) -> Any:
    """One is a list of one: a string, or the token ids of one prompt."""
    is_one = isinstance(value, str) or (isinstance(value, list) and type((*value, "")[0]) is int)
    return [value] if is_one else value


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _needs(other: str) -> AfterValidator:
    """Not without another field, which is declared before it."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if not info.data.get(other):
            said = f"'{info.field_name}' needs '{other}' to be true"
            raise PydanticCustomError("together", said)
        return value

    return AfterValidator(check)


Bias = Annotated[float, Field(ge=-100, le=100)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Positive = Annotated[int, Field(ge=1)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
Text = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
First = Field(fail_fast=True)  # of a list's errors: a million of them take seconds to tell
Some = Field(fail_fast=True, min_length=1)
Tokens = Annotated[list[Token], Some]
Prompts = Annotated[list[Text | Tokens], Some, BeforeValidator(_listed)]
Stops = Annotated[list[Stop], First, BeforeValidator(_listed)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # no padding is ever sent


class Sampled(Body):
    """What both routes take; None is "not given", as null is at OpenAI."""

    model: str
    stream: bool | None = None
    stream_options: Annotated[StreamOptions, _needs("stream")] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[int, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[Stops, Field(max_length=4)] | None = None
    user: str | None = None
    # Not OpenAI's: `extra_body=` of its client.
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None

    def params(self) -> dict[str, Any]:
        """What is given of `SamplingParams`."""
        given = self.model_dump(include={*SamplingParams.__dataclass_fields__}, exclude_none=True)
        return {x: tuple(y) if isinstance(y, list) else y for x, y in given.items()}


class Completion(Sampled):
    prompt: Annotated[Prompts, Field(max_length=MOST_CHOICES)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None

    def params(self) -> dict[str, Any]:
        return {"max_tokens": 16, **super().params()}  # OpenAI's default


class Part(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    model_config = ConfigDict(extra="ignore")  # clients send back what they were answered, whole

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], First, BeforeValidator(_parts)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], First] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates read it: text in place of parts, arguments of calls as objects."""
        text = "".join(part.text for part in self.content or ())
        found = self.model_dump(exclude_none=True) | {"content": text}
        for call in found.get("tool_calls", ()):
            # Of a shape of their own: as they are.
            with suppress(KeyError, TypeError, ValueError, RecursionError):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return found


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class Format(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Chat(Sampled):
    messages: Annotated[list[Message], Some]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), _needs("logprobs")] | None = None
    response_format: Format | None = None
    tools: Annotated[list[dict[str, Any]], First] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    # They change nothing of what is answered here.
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def params(self) -> dict[str, Any]:
        most = self.max_completion_tokens or self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return super().params() | {"max_tokens": most, "logprobs": logprobs}
