"""Decode passes by graphs: what is copied into their inputs, padding, rows that are drawn again.

Without a GPU: a graph here is what it recorded, run again on the same tensors.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is torch's")

from kernel_hub.engine.engine import Engine  # noqa: E402
from kernel_hub.engine.requests import SamplingParams  # noqa: E402
from kernel_hub.engine.runner import Runner  # noqa: E402


class Recorded:
    """Calls with the tensors that they made, which a replay fills again."""

    under_way: Recorded | None = None
    replays = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], Any]] = []

    def pool(self) -> None:
        return None

    def replay(self) -> None:
        Recorded.replays += 1
        for call, given, made in self.calls:
            made.copy_(call(*given))


@contextlib.contextmanager
def recording(graph: Recorded, pool: Any = None) -> Iterator[None]:
    Recorded.under_way = graph
    yield
    Recorded.under_way = None
    for _, _, made in graph.calls:  # a capture computes nothing
        made.fill_(-1)


@pytest.fixture(autouse=True)
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of torch's names, by `Recorded`."""
    for name in ("_logits", "_draw"):
        real = getattr(Runner, name)

        def recorded(self: Runner, *given: Any, real: Any = real) -> Any:
            made = real(self, *given)
            if Recorded.under_way is not None:
                Recorded.under_way.calls.append((real, (self, *given), made))
            return made

        monkeypatch.setattr(Runner, name, recorded)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    Recorded.replays = 0


def answers(has_graphs: bool, prompts: list[list[int]], params: list[SamplingParams]) -> Any:
    engine = Engine.random("tiny", device="cpu", cache_tokens=1024, page_size=16)
    engine.runner._has_graphs = has_graphs
    return engine.generate(prompts, params)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_graphs_are_no_other_passes(seed: int) -> None:
    """Batches that shrink as requests end, of greedy and drawn rows, some with more than that."""
    lot = random.Random(seed)
    count = lot.choice([3, 5, 9])
    prompts = [[lot.randrange(256) for _ in range(lot.randint(1, 60))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=lot.choice([0.0, 1.5]), top_k=lot.choice([0, 9]), seed=lot.getrandbits(40),
            top_p=lot.choice([1.0, 0.9]), max_tokens=lot.randint(1, 25), ignore_eos=True,
            frequency_penalty=lot.choice([0, 0, 0.5]) if seed == 2 else 0,
            logit_bias=lot.choice([{}, {65: 3.0}]) if seed == 2 else {},
            logprobs=lot.choice([None, 3]) if seed == 3 else None,
        )
        for _ in range(count)
    ]  # fmt: skip
    found = answers(True, prompts, params)
    assert Recorded.replays > 5
    for own, other in zip(found, answers(False, prompts, params), strict=True):
        assert (own.tokens, own.finish_reason) == (other.tokens, "length"), seed
        for one, two in zip(own.logprobs, other.logprobs, strict=True):
            assert one.token == two.token and abs(one.logprob - two.logprob) < 1e-3
            assert [t for t, _ in one.top] == [t for t, _ in two.top]
