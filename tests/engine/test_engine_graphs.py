"""Passes by graphs: what is copied into their inputs, padding, rows that are drawn again.

Without a GPU: a graph here is what it recorded, run again on the same tensors.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import drawn
import pytest

torch = pytest.importorskip("torch", reason="the engine is torch's")

from kernel_hub.engine.engine import Engine  # noqa: E402
from kernel_hub.engine.requests import Request, SamplingParams  # noqa: E402
from kernel_hub.engine.runner import Runner  # noqa: E402
from kernel_hub.engine.shapes import GraphShape  # noqa: E402


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
def recording(graph: Recorded, **how: Any) -> Iterator[None]:
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
    Recorded.replays = 0


def answers(
    has_graphs: bool,
    prompts: list[list[int]],
    params: list[SamplingParams],
    drafts: int = 0,
    is_warm: bool = False,
) -> Any:
    options: dict[str, Any] = {"cache_tokens": 1024, "page_size": 16, "drafts": drafts}
    if is_warm:
        options |= {"max_batch": 9, "max_tokens_a_pass": 100}
    engine = Engine.random("tiny", device="cpu", **options)
    engine.runner.has_graphs = has_graphs
    if is_warm:
        engine.runner.warm_up()
    shapes = set(engine.runner._graphs)
    found = engine.generate(prompts, params)
    assert not is_warm or set(engine.runner._graphs) == shapes
    assert not engine.stats()["pages_used"]
    widths = {shape.width for shape in engine.runner._graphs}
    assert not has_graphs or (max(widths) > 1) == (drafts > 0)
    return found


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_graphs_verify_drafts(seed: int) -> None:
    """Texts that repeat, some rows with fewer drafts or none: what plain passes say without any."""
    lot = random.Random(f"{os.environ.get(drawn.VARIABLE)} {seed}")
    prompts, params = [], []
    for _ in range(lot.choice([1, 3, 6])):
        word = [lot.randrange(256) for _ in range(lot.randint(1, 4))]
        prompts.append((word * 40)[: lot.randint(8, 120)])
        params.append(SamplingParams(
            temperature=0.0, max_tokens=lot.randint(20, 40), ignore_eos=True,
            frequency_penalty=lot.choice([0, 0, 0.1]), logprobs=lot.choice([None, 2]),
            logit_bias={token: 40.0 + i for i, token in enumerate(word)},
        ))  # fmt: skip
    found, before = answers(True, prompts, params, drafts=lot.choice([2, 5])), Recorded.replays
    for own, other in zip(found, answers(False, prompts, params), strict=True):
        assert (own.tokens, own.finish_reason) == (other.tokens, "length"), seed
        assert len(own.logprobs) == len(other.logprobs)
        for one, two in zip(own.logprobs, other.logprobs, strict=True):
            assert one.token == two.token and abs(one.logprob - two.logprob) < 1e-2
    assert 0 < before < max(each.max_tokens or 0 for each in params)


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
    found = answers(True, prompts, params, is_warm=seed == 1)
    assert Recorded.replays > 5
    for own, other in zip(found, answers(False, prompts, params), strict=True):
        assert (own.tokens, own.finish_reason) == (other.tokens, "length"), seed
        for one, two in zip(own.logprobs, other.logprobs, strict=True):
            assert one.token == two.token and abs(one.logprob - two.logprob) < 1e-3
            assert [t for t, _ in one.top] == [t for t, _ in two.top]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_text_that_grows_out_of_a_short_table_goes_on_in_another_graph(seed: int) -> None:
    """Of 32 pages of 16 tokens into one of 192; alone, or beside one that stays short."""
    lot, told = random.Random(seed), []
    prompts = [[lot.randrange(256) for _ in range(n)] for n in (lot.randint(490, 511), 40)[:seed]]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for has_graphs in (True, False):
        engine = Engine.random("tiny", device="cpu", cache_tokens=1024, page_size=16)
        engine.runner.has_graphs = has_graphs
        told.append([each.tokens for each in engine.generate(prompts, params)])
        if has_graphs:
            alone = [shape for shape in engine.runner._graphs if not shape.chunks]
            assert {shape.pages for shape in alone} == {32, 192}
    assert told[0] == told[1]


def test_a_short_table_without_room_for_its_graph_goes_by_the_wide_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And without either, by no graph."""
    lot, told, replays = random.Random(5), [], []
    prompts = [[lot.randrange(256) for _ in range(lot.randint(1, 30))] for _ in range(2)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for kept in (2, 1, 0):  # of both, as many as memory has room for
        engine = Engine.random("tiny", device="cpu", max_batch=2, cache_tokens=1024, page_size=16)
        runner = engine.runner
        runner.has_graphs, room = True, iter([True] * kept)
        monkeypatch.setattr(runner, "_has_room", lambda rows, room=room: next(room, False))
        for pages in (0, 32):
            runner._graph(GraphShape(2, 1, pages=pages))
        before = Recorded.replays
        told.append([each.tokens for each in engine.generate(prompts, params)])
        replays.append(Recorded.replays - before)
        assert len(runner._graphs) == kept
    assert told[0] == told[1] == told[2] and replays[0] == replays[1] > 5 and not replays[2]


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_chunks_of_prompts_beside_decodes_are_graphs(seed: int) -> None:
    """Requests that come one by one, prompts cut or whole, several in a pass, none or all drawn."""
    lot, found = random.Random(f"{os.environ.get(drawn.VARIABLE)} {seed}"), list[Any]()
    requests = [
        Request(str(i), tuple(lot.randrange(256) for _ in range(lot.randint(1, 90))),
                SamplingParams(
                    temperature=lot.choice([0.0, 1.5]), seed=i, max_tokens=lot.randint(1, 20),
                    ignore_eos=True, logprobs=lot.choice([None, 1]),
                    presence_penalty=lot.choice([0, 0, 0, 0.5]),
                ))
        for i in range(16)
    ]  # fmt: skip
    most, coming = lot.choice([20, 70, 600]), [lot.choice([0, 1, 1, 3]) for _ in range(200)]
    for has_graphs in (True, False):
        engine = Engine.random(
            "tiny", device="cpu", cache_tokens=4096, page_size=16, max_tokens_a_pass=most
        )
        engine.runner.has_graphs, waiting, tokens = has_graphs, requests[::-1], dict[str, Any]()
        arrivals = iter(coming)
        while waiting or engine.has_work:
            for _ in range(min(len(waiting), next(arrivals))):
                engine.submit(waiting.pop())
            for delta in engine.step():
                assert delta.error is None
                said = tokens.setdefault(delta.request_id, [[], []])
                said[0] += delta.tokens
                said[1] += [score.logprob for score in delta.logprobs]
        assert not engine.stats()["pages_used"]
        found.append(tokens)
        if has_graphs:
            assert any(shape.chunks for shape in engine.runner._graphs)
            assert Recorded.replays <= engine.stats()["steps"]  # no pass failed
    for name, (own, scores) in found[0].items():
        assert own == found[1][name][0], (seed, name)
        assert scores == pytest.approx(found[1][name][1], abs=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_on_the_device_graphs_ahead_say_what_plain_passes_in_step_do(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the first place where two tokens are as likely as the order of sums tells apart.

    With penalties, which are drawn behind a graph, and with drafts that graphs verify.
    """
    monkeypatch.undo()  # the device's own graphs
    lot = random.Random(seed)
    prompts = [[lot.randrange(256) for _ in range(lot.randint(1, 300))] for _ in range(20)]
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=lot.randint(1, 60), ignore_eos=True, logprobs=2,
            presence_penalty=lot.choice([0, 0.5]) if seed == 2 else 0,
        )
        for _ in prompts
    ]  # fmt: skip
    drafts = 4 if seed == 3 else 0
    if drafts:  # which only texts that repeat have
        prompts = [(prompt[:3] * 100)[: max(4, len(prompt))] for prompt in prompts]
        params = [replace(own, logit_bias=dict.fromkeys(prompt[:3], 9.0))
                  for own, prompt in zip(params, prompts, strict=True)]  # fmt: skip
    engine = Engine.random("tiny", device="cuda", cache_tokens=16384, drafts=drafts)
    found = engine.generate(prompts, params)
    assert [answer.error for answer in found] == [None] * len(found)
    assert any((shape.width > 1) == (drafts > 0) for shape in engine.runner._graphs)
    assert any(shape.chunks for shape in engine.runner._graphs)
    engine = Engine.random("tiny", device="cuda", cache_tokens=16384)
    engine.runner.has_graphs, begun = False, engine._begun

    def in_step(planned: Any) -> Any:
        flight = begun(planned)
        flight.is_awaited = True
        return flight

    monkeypatch.setattr(engine, "_begun", in_step)
    num_same = 0
    for own, other in zip(found, engine.generate(prompts, params), strict=True):
        assert own.error is None and len(own.tokens) == len(other.tokens)
        for one, two in zip(own.logprobs, other.logprobs, strict=True):
            if one.token != two.token:
                assert seed != 1 or abs(one.top[0][1] - one.top[1][1]) < 0.1
                break
            assert abs(one.logprob - two.logprob) < 0.1
        else:
            num_same += 1
    assert num_same >= 15
