"""The bodies of requests, checked by pydantic: what OpenAI's clients send, and our few more."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from ..requests import SamplingParams
from .refusals import ApiError


def _listed(value: Any) -> Any:
    """One is a list of one: a string, or the token ids of one prompt."""
    is_one = isinstance(value, str) or (isinstance(value, list) and type((*value, "")[0]) is int)
    return [value] if is_one else value


def _parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Bias = dict[int, Annotated[float, Field(ge=-100, le=100)]]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Positive = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[int], Field(min_length=1)]
Prompts = Annotated[list[Text | Tokens], BeforeValidator(_listed), Field(min_length=1)]
Stops = Annotated[list[Text], BeforeValidator(_listed), Field(max_length=4)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # no padding is ever sent


class Sampled(Body):
    """What both routes take; None is "not given", as null is at OpenAI."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops | None = None
    user: str | None = None
    # Not OpenAI's: `extra_body=` of its client.
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None

    def params(self, nth: int, num_logprobs: int | None, grammar: Any) -> SamplingParams:
        """These as the engine takes them, of the nth choice of a prompt."""
        names = self.model_fields_set & SamplingParams.__dataclass_fields__.keys()
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        seed = None if self.seed is None else (self.seed + nth) % 2**63
        ends = {name: tuple(given.get(name, ())) for name in ("stop", "stop_token_ids")}
        own = {"max_tokens": self.max_tokens, "seed": seed, "logprobs": num_logprobs}
        return SamplingParams(**{**given, **ends, **own, "grammar": grammar})


class Completion(Sampled):
    max_tokens: Positive | None = 16  # OpenAI's default
    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class Part(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    model_config = ConfigDict(extra="ignore")  # clients send back what they were answered, whole

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[Part], BeforeValidator(_parts)] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """As chat templates read it: text in place of parts."""
        text = "".join(part.text for part in self.content or ())
        return self.model_dump(exclude_none=True) | {"content": text}


class JsonSchema(Body):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


Format = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class Chat(Sampled):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Format | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    # They change nothing of what is answered here.
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


def read(kind: type[Completion] | type[Chat], body: bytes) -> Completion | Chat:
    """The body as `kind`. Raises ValidationError, or ApiError of what cannot go together."""
    asked = kind.model_validate_json(body)
    if asked.stream_options and not asked.stream:
        raise ApiError(400, "'stream_options' needs 'stream' to be true.", "stream_options")
    if isinstance(asked, Completion):
        if asked.echo and asked.logprobs is not None:
            raise ApiError(400, "There are no log-probabilities of what 'echo' repeats.", "echo")
        return asked
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    asked.max_tokens = asked.max_completion_tokens or asked.max_tokens
    return asked
