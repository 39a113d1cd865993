"""Requests by lot through an engine that has too little room for them, some of them given up.

Prompts begin alike or repeat themselves; arrivals come in bursts. After each step every page of the
cache is accounted for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_hub.engine.engine import Engine
    from kernel_hub.engine.requests import Request, SamplingParams


@dataclass
class Answer:
    """What a request was told."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    guessed: int = 0  # tokens of drafts that were right


def drawn_params(lot: random.Random, most: int) -> SamplingParams:
    """Greedy or drawn."""
    from kernel_hub.engine.requests import SamplingParams

    return SamplingParams(
        max_tokens=lot.randint(1, most), seed=lot.getrandbits(40),
        temperature=lot.choice((0.0, 1.0)), top_p=lot.choice((1.0, 0.9)),
    )  # fmt: skip


def requests_by_lot(
    lot: random.Random, count: int, vocab_size: int, most: int, params: Callable[[], Any]
) -> list[Request]:
    """Prompts of up to `most` tokens and a quarter; some begin alike, some repeat themselves."""
    from kernel_hub.engine.requests import Request

    shared = [lot.choices(range(vocab_size), k=lot.randint(1, most)) for _ in range(5)]
    found = []
    for i in range(count):
        prompt = lot.choice(shared)[: lot.randint(0, most)] if lot.random() < 0.6 else []
        prompt = [*prompt, *lot.choices(range(vocab_size), k=lot.randint(1, max(1, most // 4)))]
        if lot.random() < 0.2:
            prompt = (prompt[:5] * most)[:most]
        found.append(Request(str(i), tuple(prompt), params()))
    return found


def answered(
    engine: Engine, requests: Sequence[Request], lot: random.Random,
    bursts: Sequence[int] = (0, 0, 1, 5), aborts: float = 0.05,
) -> dict[str, Answer]:  # fmt: skip
    """All of them, the last first. aborts: how often one under way is given up, a step."""
    waiting, found = list(requests), {request.id: Answer() for request in requests}
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), lot.choice(bursts))):
            engine.submit(waiting.pop())
        if lot.random() < aborts and (under_way := list(engine._live)):
            engine.abort(lot.choice(under_way))
        for delta in engine.step():
            answer = found[delta.request_id]
            assert answer.reason is None, "after its end"
            assert delta.error is None, delta.error
            answer.tokens += delta.tokens
            answer.text += delta.text
            answer.reason = delta.finish_reason
            answer.guessed += max(0, len(delta.tokens) - 1)
        check_pages(engine)
    stats = engine.stats()
    assert stats["pages_used"] == stats["running"] == stats["waiting"] == 0
    assert all(answer.reason is not None for answer in found.values())
    return found


def check_pages(engine: Engine) -> None:
    """Every page is free or has as many users as sequences list it."""
    pages = engine._scheduler.pages
    users = [0] * pages.num_pages
    for sequence in engine._scheduler.running:
        for page in sequence.pages:
            users[page] += 1
    assert users == pages._users
    assert sorted(pages.free) == [i for i, count in enumerate(users) if not count]
    assert {pages._digest_of[page]: page for page in pages._digest_of} == pages._page_of


def alone(engine: Engine, request: Request) -> tuple[int, ...]:
    """Its tokens from an engine that serves nobody beside it and has seen nothing before."""
    pages = engine._scheduler.pages
    pages._digest_of.clear()
    pages._page_of.clear()
    answer = engine.generate([list(request.prompt)], request.params)[0]
    assert answer.error is None, answer.error
    return answer.tokens


def is_that_of(answer: Answer, whole: tuple[int, ...]) -> bool:
    """Of one that was given up: as far as it went."""
    own = tuple(answer.tokens)
    return own == (whole[: len(own)] if answer.reason == "abort" else whole)
