"""What an engine is asked for and what it answers, a step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end."""

    max_tokens: int | None = None  # None: as many as the model's context has room for
    temperature: float = 1.0  # 0: the greatest logit
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; n: of the chosen token and of the n likeliest
    grammar: Any = None  # `bitmask(out)`, `accept(token)`; one a request


@dataclass(frozen=True)
class Request:
    """One prompt, as token ids, and what is wanted of it."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()


class TokenLogprob(NamedTuple):
    """The log-probability of a chosen token and of the likeliest ones at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(NamedTuple):
    """What a step added to one request; the last one has a `finish_reason`."""

    request_id: str
    tokens: tuple[int, ...]
    text: str  # what may be shown: nothing that may still become a stop string or half a character
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    error: str | None = None


class Generated(NamedTuple):
    """A whole answer."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    error: str | None = None

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> Generated:
        """What these have said together."""
        text = "".join(d.text for d in deltas)
        tokens = tuple(t for d in deltas for t in d.tokens)
        logprobs = tuple(p for d in deltas for p in d.logprobs)
        return cls(text, tokens, logprobs, deltas[-1].finish_reason, deltas[-1].error)
