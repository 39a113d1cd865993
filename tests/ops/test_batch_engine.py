"""deterministic="batch" in the engine: each request's tokens are those that it gets alone.

With shared prefixes, chunks, drafts and pages that run out. On the CPU by kernels in the emulator
(torch's own products there depend on what else is in a pass).
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.engine.engine import Engine
from kernel_hub.engine.requests import Request, SamplingParams
from kernel_hub.errors import ModelError
from kernel_hub.ops.core.launch import forget_all

# A run of a few minutes on a GPU: KERNEL_HUB_ENGINE_LOTS=10000.
COUNT = int(os.environ.get("KERNEL_HUB_ENGINE_LOTS", "48"))
TINY = {
    "model_type": "qwen3", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 256,
}  # fmt: skip
SMALL = {
    **TINY, "model_type": "llama", "vocab_size": 1031, "hidden_size": 1024, "head_dim": 128,
    "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip
MIXTURE = {
    **SMALL, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
WINDOWED = {
    **SMALL, "model_type": "gemma2", "sliding_window": 300, "query_pre_attn_scalar": 128,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


def lot_of_requests(lot: random.Random, count: int, vocab_size: int, most: int) -> list[Request]:
    """Some begin alike, some repeat themselves; greedy ones and drawn ones."""
    shared = [lot.choices(range(vocab_size), k=most) for _ in range(3)]
    found = []
    for i in range(count):
        prompt = lot.choice(shared)[: lot.randrange(most)] if lot.random() < 0.6 else []
        prompt = [*prompt, *lot.choices(range(vocab_size), k=lot.randint(1, max(1, most // 4)))]
        if lot.random() < 0.2:
            prompt = (prompt[:5] * most)[:most]
        params = SamplingParams(
            max_tokens=lot.randint(1, max(2, most // 8)), seed=lot.getrandbits(40),
            temperature=lot.choice((0.0, 1.0)), top_p=lot.choice((1.0, 0.9)),
        )  # fmt: skip
        found.append(Request(str(i), tuple(prompt), params))
    return found


def answers(engine: Engine, waiting: list[Request], lot: random.Random) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {request.id: [] for request in waiting}
    waiting = list(waiting)
    while waiting or engine.has_work:
        for _ in range(min(len(waiting), lot.choice((0, 1, 5)))):
            engine.submit(waiting.pop())
        for delta in engine.step():
            assert delta.error is None
            found[delta.request_id] += delta.tokens
    return found


def check(config: dict[str, Any], device: str, count: int, most: int, seed: object) -> None:
    lot = random.Random(f"engine batch {seed}")
    requests = lot_of_requests(lot, count, config["vocab_size"], most)
    how: dict[str, Any] = {"device": device, "deterministic": "batch"}
    how["page_size"] = 8 if device == "cpu" else 16
    room = 16 * (-(-(most + most) // 16))
    engine = Engine.random(
        config, **how, drafts=4, max_batch=lot.choice((4, 32)), cache_tokens=3 * room,
        max_tokens_a_pass=lot.choice((23, 200, 1000)),
    )  # fmt: skip
    together = answers(engine, requests, lot)
    assert engine.stats()["prefix_hit_tokens"] > 0
    engine.close()
    alone = Engine.random(config, **how, max_batch=1, cache_tokens=room)
    for request in requests:
        own = alone.generate([list(request.prompt)], request.params)[0].tokens
        assert tuple(together[request.id]) == own, f"request {request.id}"
    alone.close()


def test_answers_emulated(hopper_way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    if hopper_way.is_gpu:
        pytest.skip("the test below does that with larger models")
    forget_all()
    with hopper_attention(monkeypatch, 4):
        check(TINY, "cpu", 10, 40, "emulated")
    forget_all()


@pytest.mark.gpu
@pytest.mark.parametrize("drawn", range(2))
@pytest.mark.parametrize("config", [SMALL, MIXTURE, WINDOWED], ids=lambda c: c["model_type"])
def test_answers(hopper_way: Way, config: dict[str, Any], drawn: int) -> None:
    check(config, "cuda", COUNT, 600, (config["model_type"], drawn))


def test_refusals() -> None:
    with pytest.raises(ModelError, match="a multiple of 8, found cpu, 1 and 7"):
        Engine.random(TINY, device="cpu", deterministic="batch", page_size=7)
