"""What the parameters of a request do to its tokens, seen from outside."""

from __future__ import annotations

import math
import os
import random
from typing import Any

import drawn
import pytest

torch = pytest.importorskip("torch", reason="the engine is torch's")

from kernel_hub.engine.batch import _asked  # noqa: E402
from kernel_hub.engine.config import NAMED  # noqa: E402
from kernel_hub.engine.engine import Engine, Generated  # noqa: E402
from kernel_hub.engine.requests import Request, SamplingParams  # noqa: E402
from kernel_hub.engine.scheduler import Sequence  # noqa: E402

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


def near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-5)


def test_logprobs_are_of_the_model(engine: Engine) -> None:
    """Before temperature; the likeliest come first, and sum to 1 together."""
    found = answer(engine, temperature=0.7, seed=1, logprobs=256)
    for token, place in zip(found.tokens, found.logprobs, strict=True):
        scores = dict(place.top)
        assert place.token == token and scores[token] == place.logprob
        assert [s for _, s in place.top] == sorted(scores.values(), reverse=True)
        assert math.isclose(sum(map(math.exp, scores.values())), 1, rel_tol=1e-4)
    few = answer(engine, temperature=0.7, seed=1, logprobs=2)
    none = answer(engine, temperature=0.7, seed=1, logprobs=0)
    for all_, two, own in zip(found.logprobs, few.logprobs, none.logprobs, strict=True):
        assert near(own.logprob, all_.logprob) and near(two.logprob, all_.logprob)
        assert own.top == () and [t for t, _ in two.top] == [t for t, _ in all_.top[:2]]
        assert all(near(a, b) for (_, a), (_, b) in zip(two.top, all_.top, strict=False))
    assert answer(engine).logprobs == ()


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_logprobs_by_lot(softcap: float) -> None:
    """Of the kernels' own most likely, beside fp64; ties by the first token, few tokens, -inf."""
    lot = torch.Generator().manual_seed(int(os.environ.get(drawn.VARIABLE, "1")))
    engine = Engine.random({**NAMED["tiny"], "vocab_size": 40}, device="cpu", cache_tokens=64)
    config = engine.runner.model.config
    object.__setattr__(config, "final_softcap", softcap)
    for top in (0, 1, 5, 32, 40):
        logits = torch.randn(7, 40, generator=lot) * 4
        logits[0] = logits[0].round()
        logits[1, 3:] = -1e4
        ids = torch.randint(3, (7,), generator=lot)
        found = engine.runner._scores(logits, ids, top)
        z = logits.double()
        exact = ((z / softcap).tanh() * softcap if softcap else z).log_softmax(-1)
        assert found.shape == (7, 1 + 2 * top)
        assert torch.allclose(found[:, 0].double(), exact.gather(1, ids[:, None])[:, 0], atol=1e-4)
        values, which = found[:, 1 : 1 + top].double(), found[:, 1 + top :].long()
        assert torch.allclose(values, exact.topk(top).values, atol=1e-3, rtol=1e-5)
        assert torch.allclose(values, exact.gather(1, which), atol=1e-3, rtol=1e-5)
        assert all(len(set(row)) == top for row in which.tolist())


def test_penalties_and_biases_by_lot() -> None:
    """What the device makes of the places that are told of is what rows written out would be."""
    lot = random.Random(f"{os.environ.get(drawn.VARIABLE)} penalties")
    for vocab_size in (40, 97, 256):
        engine = Engine.random({**NAMED["tiny"], "vocab_size": vocab_size}, device="cpu")
        planned = []
        for i in range(5):
            prompt = tuple(lot.randrange(vocab_size) for _ in range(lot.randint(1, 30)))
            params = SamplingParams(
                repetition_penalty=lot.choice([1.0, 1.5]), presence_penalty=lot.choice([0, 0.5]),
                frequency_penalty=lot.choice([0, -0.5]) if i else 1.0,
                logit_bias={lot.randrange(vocab_size): lot.uniform(-9, 9) for _ in range(i)},
            )  # fmt: skip
            said = [lot.randrange(vocab_size) for _ in range(lot.randint(0, 9))]
            sequence = Sequence(Request(f"{i}", prompt, params), [*prompt, *said], 1, 99)
            sequence.drafts = [lot.randrange(vocab_size) for _ in range(2)]
            planned += [(sequence, i) for i in range(3)]
        more, sparse = _asked(planned, vocab_size)
        given = {name: torch.from_numpy(value) for name, value in sparse.items()}
        found = engine.runner._dense(given, len(planned) + 1)
        for row, (sequence, i) in enumerate(planned):
            params, prompt = sequence.request.params, sequence.request.prompt
            said = sequence.tokens[len(prompt) :] + sequence.drafts[:i]
            counts = [said.count(t) * sequence.is_guided for t in range(vocab_size)]
            assert found["output_counts"][row].tolist() == counts
            bias = torch.tensor([params.logit_bias.get(t, 0.0) for t in range(vocab_size)])
            assert torch.equal(found["bias"][row], bias)
            words = found["prompt_bitmask"][row].tolist()
            has = {t for t in range(32 * len(words)) if words[t // 32] >> t % 32 & 1}
            assert has == (set(prompt) if params.repetition_penalty != 1 else set())
            assert more["frequency_penalty"][row] == params.frequency_penalty
        assert not any(rows[-1].any() for rows in found.values())
        assert not found.keys() - {"output_counts", "bias", "prompt_bitmask"}


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


@pytest.mark.parametrize("page_size", [1, 16])
def test_drafts_beside_a_text_that_is_at_its_end(page_size: int) -> None:
    """What stands behind the drafts of one reaches over the context's end, its pages and table."""
    texts = []
    for drafts in (0, 6):
        engine = Engine.random(
            "tiny", device="cpu", cache_tokens=192, max_model_len=64, page_size=page_size,
            drafts=drafts,
        )  # fmt: skip
        bias = {97: 40.0, 98: 39.0}
        params = SamplingParams(temperature=0.0, logit_bias=bias, ignore_eos=True)
        prompts = [[*b"abab" * (n // 4)] for n in (60, 40, 52)]
        texts.append(engine.generate(prompts, params))
        assert not engine.stats()["pages_used"]
    assert [a.tokens for a in texts[0]] == [a.tokens for a in texts[1]]
    assert [len(a.tokens) for a in texts[1]] == [4, 24, 12]


def test_prefixes_are_found_again(engine: Engine) -> None:
    """Pages of a prompt that was there before are not computed again, and change nothing."""
    prompt = list(range(100, 180))
    first = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8))[0]
    before = engine.stats()["prefix_hit_tokens"]
    again = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8))[0]
    assert again.tokens == first.tokens
    assert engine.stats()["prefix_hit_tokens"] - before == 64  # whole pages, less the last token
