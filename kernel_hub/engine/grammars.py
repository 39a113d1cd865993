"""JSON answers by llguidance (extra `grammar`): which tokens may follow, by a schema."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from ..errors import RequestError

# llguidance reads a schema by recursion, which ends the process where a stack ends, and some small
# schemas for hours: it has a thread with a stack for the largest, which is left if it takes long.
MOST_BYTES, STACK_BYTES, MOST_S = 64 << 10, 256 << 20, 5.0


class Grammar:
    """A request's place in a grammar, as `SamplingParams` takes it."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, token: int) -> bool:
        """Raises RequestError where llguidance gives up, as a schema is too large for it."""
        if not self._matcher.consume_token(token):
            raise _refusal(self._matcher)
        return True

    def bitmask(self, out: Any) -> None:
        """A token t that may follow is bit t % 32 of word t // 32."""
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, 4 * len(out))


class Grammars:
    """Grammars over an engine's vocabulary, which is read when the first is asked for."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._reader = engine, threading.Thread()

    def json(self, schema: Any, count: int) -> list[Grammar]:
        """For `count` requests. Raises RequestError, ImportError without llguidance."""
        text, first = json.dumps(schema), Future[Any]()
        if len(text) > MOST_BYTES:
            said = f"This schema can not be followed: it is larger than {MOST_BYTES} bytes"
            raise RequestError(said, argument="schema")
        if self._reader.is_alive():
            raise RequestError("Another schema is still being read: try again later.")
        args, before = (text, self._vocabulary, first), threading.stack_size(STACK_BYTES)
        try:
            self._reader = threading.Thread(target=_read, args=args, daemon=True)
            self._reader.start()
        finally:
            threading.stack_size(before)
        self._reader.join(MOST_S)
        if self._reader.is_alive():
            said = f"This schema can not be followed: reading it takes over {MOST_S:g} s"
            raise RequestError(said, argument="schema")
        matcher = first.result()
        if matcher.is_error():
            raise _refusal(matcher)
        return [Grammar(matcher), *(Grammar(matcher.deep_copy()) for _ in range(count - 1))]

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        engine, ends = self._engine, sorted(self._engine.eos_token_ids)
        if not ends:
            raise RequestError("The model has no token to end JSON with.")
        if engine.tokenizer is not None:
            text, size = engine.tokenizer.to_str(), engine.vocab_size
            if engine.tokenizer.get_vocab_size() > size:  # by the image token of Gemma 3's text
                told = json.loads(text)
                told["added_tokens"] = [x for x in told["added_tokens"] if x["id"] < size]
                text = json.dumps(told)
            try:
                return LLTokenizer(text, n_vocab=size, eos_token=ends)
            except ValueError as error:
                raise RequestError(f"JSON by this model's tokenizer: {error}") from error
        return LLTokenizer(TokenizerWrapper(_Bytes(engine.vocab_size, ends[0])), eos_token=ends)


def _read(text: str, vocabulary: Any, found: Future[Any]) -> None:
    try:
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(text)
        found.set_result(LLMatcher(vocabulary, grammar, log_level=0))
    except BaseException as error:  # noqa: BLE001 - told to who waits
        found.set_exception(error)


def _refusal(matcher: Any) -> RequestError:
    said = matcher.get_error().splitlines()[0]
    return RequestError(f"This schema can not be followed: {said}", argument="schema")


class _Bytes:
    """The vocabulary of a model without a tokenizer, as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, size: int, eos: int) -> None:
        self.tokens = [bytes([i]) if i < 256 else b"" for i in range(size)]
        self.tokens[eos] = b"<eos>"
        self.eos_token_id, self.special_token_ids = eos, [eos]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
