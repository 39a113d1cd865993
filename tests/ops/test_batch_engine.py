"""deterministic="batch" in the engine: each request's tokens are those that it gets alone.

With shared prefixes, chunks, drafts, pages that run out and requests given up. On the CPU by
kernels in the emulator (torch's own products there depend on what else is in a pass).
"""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any

import pytest
from crowd import alone, answered, drawn_params, is_that_of, requests_by_lot
from emulated_attention import hopper_attention
from ways import Way

from kernel_hub.engine.engine import Engine
from kernel_hub.errors import ModelError
from kernel_hub.ops.core.launch import forget_all

# More of them, and of a smaller model: tests/gpu_requests.py.
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


def check(config: dict[str, Any], device: str, count: int, most: int, seed: object) -> None:
    lot = random.Random(f"engine batch {seed}")
    params = partial(drawn_params, lot, max(2, most // 8))
    requests = requests_by_lot(lot, count, config["vocab_size"], most, params)
    how: dict[str, Any] = {"device": device, "deterministic": "batch"}
    how["page_size"] = 8 if device == "cpu" else 16
    room = 16 * (-(-(most + most) // 16))
    engine = Engine.random(
        config, **how, drafts=4, max_batch=lot.choice((4, 32)), cache_tokens=3 * room,
        max_tokens_a_pass=lot.choice((23, 200, 1000)),
    )  # fmt: skip
    together = answered(engine, requests, lot)
    assert engine.stats()["prefix_hit_tokens"] > 0
    engine.close()
    single = Engine.random(config, **how, max_batch=1, cache_tokens=room)
    for request in requests:
        own = alone(single, request)
        assert is_that_of(together[request.id], own), f"request {request.id}"
    single.close()


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
