"""Requests by lot through a small cache: no page is lost, and each answer is what it is alone.

Lengths, shared beginnings, parameters, arrivals and aborts are drawn; pages run out, so that
requests wait and give way to each other; some of it with drafts, some with chunks of a few tokens.
"""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any

import drawn
import pytest
from crowd import alone, answered, is_that_of, requests_by_lot

torch = pytest.importorskip("torch", reason="the ops are torch ops")

from kernel_hub.engine import scheduler  # noqa: E402
from kernel_hub.engine.engine import Engine  # noqa: E402
from kernel_hub.engine.model import Model  # noqa: E402
from kernel_hub.engine.requests import SamplingParams  # noqa: E402

# A run of a few minutes: KERNEL_HUB_ENGINE_LOTS=500.
COUNT = int(os.environ.get("KERNEL_HUB_ENGINE_LOTS", "24"))
CONFIG = {
    "model_type": "qwen3", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 96,
}  # fmt: skip


class InDoubles(torch.overrides.TorchFunctionMode):
    """The ops' references with fp64 where they have fp32.

    The order of fp32 sums depends on what else is in a pass: of 2,000 answers one was another,
    from a draw between two tokens on.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose scores do not depend on the pass that they are made in."""
    forward = Model.forward

    def doubled(self: Model, *args: Any) -> Any:
        with InDoubles():
            return forward(self, *args)

    monkeypatch.setattr(Model, "forward", doubled)


def params_by_lot(lot: random.Random) -> SamplingParams:
    """Greedy or drawn, with any of the other parameters at times."""
    more: dict[str, Any] = {}
    if lot.random() < 0.6:
        more = {
            "temperature": lot.choice([0.3, 1.0, 2.0]), "top_k": lot.choice([0, 0, 7]),
            "top_p": lot.choice([1.0, 0.8]), "min_p": lot.choice([0.0, 0.0, 0.05]),
        }  # fmt: skip
    if lot.random() < 0.15:
        more["frequency_penalty"] = lot.choice([-0.5, 0.7])
        more["repetition_penalty"] = lot.choice([1.0, 1.3])
    if lot.random() < 0.1:
        more["logit_bias"] = {lot.randrange(97): 3.0}
    if lot.random() < 0.2:
        more["stop"] = (chr(lot.randrange(32, 97)),)
    return SamplingParams(
        max_tokens=lot.randint(1, 30), seed=lot.getrandbits(40), **{"temperature": 0.0, **more}
    )


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_answers_are_those_of_requests_alone(
    seed: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed == 2:
        monkeypatch.setattr(scheduler, "beside", lambda decodes, backlog: 8)
    lot = random.Random(1000 * seed + drafts)
    engine = Engine.random(
        CONFIG, page_size=8, cache_tokens=lot.choice([96, 120]), drafts=drafts, device="cpu",
        max_batch=lot.choice([4, 16]), max_tokens_a_pass=lot.choice([7, 40, 500]),
    )  # fmt: skip
    requests = requests_by_lot(lot, COUNT, 97, 72, partial(params_by_lot, lot))
    found = answered(engine, requests, lot)
    stats = engine.stats()
    assert stats["preemptions"] > 0 and stats["prefix_hit_tokens"] > 0
    single, wrong = Engine.random(CONFIG, max_batch=1, page_size=8, device="cpu"), []
    for request in drawn.some(requests, COUNT // 3, "alone", seed, drafts):
        whole, answer = alone(single, request), found[request.id]
        if answer.reason != "abort" and not request.params.stop:
            assert answer.text == engine.decode(answer.tokens)
        if not is_that_of(answer, whole):
            wrong.append((request.id, answer, whole))
    assert not wrong, f"seed {seed}, drafts {drafts}: {len(wrong)} of {COUNT}: {wrong[:3]}"
