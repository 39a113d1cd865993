"""What the parameters of a request do to its tokens, seen from outside."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is torch's")

from kernel_hub.engine.engine import Engine, Generated  # noqa: E402
from kernel_hub.engine.requests import SamplingParams  # noqa: E402

PROMPT = list(b"once upon a time there was")
CACHE = 320  # tokens, more than any prompt here has


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.random("tiny", device="cpu", cache_tokens=CACHE, page_size=16)


def answer(engine: Engine, **params: Any) -> Generated:
    more = {"temperature": 0.0, "max_tokens": 12, **params}
    return engine.generate([PROMPT], SamplingParams(**more))[0]


def test_a_seed_is_a_text(engine: Engine) -> None:
    """The same alone and in company; another seed gives another."""
    one = answer(engine, temperature=1.5, seed=7)
    lot = random.Random(1)
    prompts = [[lot.randrange(256) for _ in range(40)] for _ in range(4)]
    params = [SamplingParams(temperature=1.5, seed=7, max_tokens=12) for _ in range(5)]
    beside = engine.generate([*prompts, PROMPT], params)[-1]
    assert beside.tokens == one.tokens
    assert answer(engine, temperature=1.5, seed=8).tokens != one.tokens
    assert answer(engine, temperature=1.5).tokens != answer(engine, temperature=1.5).tokens


def test_logprobs_are_of_the_model(engine: Engine) -> None:
    """Before temperature; the likeliest come first, and sum to 1 together."""
    found = answer(engine, temperature=0.7, seed=1, logprobs=256)
    for token, place in zip(found.tokens, found.logprobs, strict=True):
        scores = dict(place.top)
        assert place.token == token and scores[token] == place.logprob
        assert [s for _, s in place.top] == sorted(scores.values(), reverse=True)
        assert math.isclose(sum(map(math.exp, scores.values())), 1, rel_tol=1e-4)
    few = answer(engine, temperature=0.7, seed=1, logprobs=2)
    assert [p.top for p in few.logprobs] == [p.top[:2] for p in found.logprobs]
    none = answer(engine, temperature=0.7, seed=1, logprobs=0)
    assert [p.logprob for p in none.logprobs] == [p.logprob for p in found.logprobs]
    assert none.logprobs[0].top == () and answer(engine).logprobs == ()


def test_bias_and_penalties_reach_the_tokens(engine: Engine) -> None:
    plain = answer(engine).tokens
    assert answer(engine, logit_bias={65: 100.0}).tokens == (65,) * 12
    assert plain[0] not in answer(engine, logit_bias={plain[0]: -100.0}).tokens
    # A token counts once it was said, so that no other comes twice.
    once = answer(engine, presence_penalty=2.0, frequency_penalty=2.0, logit_bias={65: 5.0}).tokens
    assert once.count(65) < 4 and 65 in once
    # All of the prompt's bytes were said before: the likeliest of the others.
    lot = dict.fromkeys(PROMPT, 20.0)
    fresh = answer(engine, repetition_penalty=100.0, logit_bias=lot).tokens
    assert fresh[0] not in PROMPT and plain != fresh


def test_stops(engine: Engine) -> None:
    plain = answer(
        engine, max_tokens=None, logit_bias={65: 30.0, 66: 29.5}, seed=3, temperature=1.0
    )
    assert plain.finish_reason == "length" and len(plain.tokens) == CACHE - len(PROMPT)
    same = {"max_tokens": 100, "logit_bias": {65: 30.0, 66: 29.5}, "seed": 3, "temperature": 1.0}
    at = plain.text.index("BA")
    cut = answer(engine, stop=("BA", "zz"), **same)
    assert (cut.text, cut.finish_reason) == (plain.text[:at], "stop")
    assert cut.tokens == plain.tokens[: at + 2]
    ended = answer(engine, stop_token_ids=(66,), **same)
    first = plain.text.index("B")
    assert (ended.text, ended.finish_reason) == (plain.text[:first], "stop")
    assert ended.tokens == plain.tokens[: first + 1]


class Digits:
    """A grammar of digits alone, up to a count of them."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def bitmask(self, out: Any) -> None:
        assert out.dtype == "int32" and out.shape == (8,) and out.flags.c_contiguous
        out[:] = 0
        for token in range(48, 58):
            out[token // 32] |= 1 << token % 32

    def accept(self, token: int) -> bool:
        self.taken.append(token)
        return 48 <= token < 58


@pytest.mark.parametrize("drafts", [0, 3])
def test_grammars(drafts: int) -> None:
    engine = Engine.random("tiny", device="cpu", cache_tokens=256, drafts=drafts)
    grammars = [Digits(), Digits()]
    each = [SamplingParams(max_tokens=20, grammar=grammar) for grammar in grammars]
    free = SamplingParams(max_tokens=20, temperature=2.0)
    answers = engine.generate([PROMPT] * 3, [each[0], free, each[1]])
    for found, grammar in zip((answers[0], answers[2]), grammars, strict=True):
        assert found.text.isdigit() and list(found.tokens) == grammar.taken
    assert not answers[1].text.isdigit()


def test_drafts_are_taken_where_a_text_repeats() -> None:
    """Fewer passes for the same tokens."""
    steps, texts = [], []
    for drafts in (0, 5):
        engine = Engine.random("tiny", device="cpu", cache_tokens=512, drafts=drafts)
        params = SamplingParams(temperature=0.0, max_tokens=60, logit_bias={97: 40.0})
        texts.append(engine.generate([list(b"abcabcabc"), PROMPT], params))
        steps.append(engine.stats()["steps"])
    assert [a.tokens for a in texts[0]] == [a.tokens for a in texts[1]]
    assert steps[0] >= 60 and steps[1] < 30


def test_prefixes_are_found_again(engine: Engine) -> None:
    """Pages of a prompt that was there before are not computed again, and change nothing."""
    prompt = list(range(100, 180))
    first = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8))[0]
    before = engine.stats()["prefix_hit_tokens"]
    again = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8))[0]
    assert again.tokens == first.tokens
    assert engine.stats()["prefix_hit_tokens"] - before == 64  # whole pages, less the last token
