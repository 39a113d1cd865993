"""JSON answers by llguidance (extra `grammar`): which tokens may follow, by a schema."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from .bodies import Format
from .refusals import ApiError


def grammar_of(matcher: Any) -> SimpleNamespace:
    """A request's place in a grammar, as `SamplingParams` takes it: a token t that may follow is
    bit t % 32 of word t // 32 of a mask.
    """

    def bitmask(out: Any) -> None:
        matcher.unsafe_compute_mask_ptr(out.ctypes.data, 4 * len(out))

    return SimpleNamespace(bitmask=bitmask, accept=matcher.consume_token)


class Grammars:
    """Grammars over an engine's vocabulary, which is read when the first is asked for."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._vocabulary: Any = None

    def make(self, asked: Format | None, count: int) -> list[Any]:
        """One for each of `count` choices, None of plain text. Raises ApiError."""
        if asked is None or asked.type == "text":
            return [None] * count
        param, schema = "response_format", {"type": "object"}
        if asked.type == "json_schema":
            param += ".json_schema"
            if asked.json_schema is None:
                said = f"Missing required parameter: '{param}'."
                raise ApiError(400, said, param, "missing_required_parameter")
            schema = asked.json_schema.schema_
        try:
            from llguidance import LLMatcher
        except ImportError:
            said = "needs llguidance where the server runs: pip install 'kernel_hub[grammar]'"
            raise ApiError(400, f"response_format {asked.type} {said}", "response_format") from None
        self._vocabulary = self._vocabulary or _vocabulary(self._engine)
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        first = LLMatcher(self._vocabulary, grammar, log_level=0)
        if first.is_error():
            said = f"This schema can not be followed: {first.get_error().splitlines()[0]}"
            raise ApiError(400, said, f"{param}.schema")
        return [grammar_of(one) for one in (first, *(first.deep_copy() for _ in range(count - 1)))]


def _vocabulary(engine: Any) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    ends = sorted(engine.eos_token_ids)
    if not ends:
        raise ApiError(400, "The model has no token to end JSON with.", "response_format")
    if engine.tokenizer is None:
        return LLTokenizer(TokenizerWrapper(_Bytes(engine.vocab_size, ends[0])), eos_token=ends)
    return LLTokenizer(engine.tokenizer.to_str(), n_vocab=engine.vocab_size, eos_token=ends)


class _Bytes:
    """The vocabulary of a model without a tokenizer, as llguidance asks for it."""

    bos_token_id = None

    def __init__(self, size: int, eos: int) -> None:
        self.tokens = [bytes([i]) if i < 256 else b"" for i in range(size)]
        self.tokens[eos] = b"<eos>"
        self.eos_token_id, self.special_token_ids = eos, [eos]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
