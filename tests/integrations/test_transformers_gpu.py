"""The doors of transformers on a GPU, with layers as wide as an 8B model's."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402

from kernel_hub.integrations import transformers as door  # noqa: E402

WIDE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
pytestmark = pytest.mark.gpu


@pytest.fixture(params=["llama", "mistral_window", "qwen3", "gemma2"])
def models(request: pytest.FixtureRequest) -> Any:
    found = tiny.Models(request.param, torch.bfloat16, **WIDE)
    door.register()
    for model in (found.ours, found.truth, found.own):
        model.to("cuda")
    yield found
    door.unregister()


@pytest.mark.parametrize("is_accelerated", [False, True])
def test_prompts_pads_and_tokens(models: Any, is_accelerated: bool) -> None:
    if is_accelerated:
        door.accelerate(models.ours)
    for length in (1, 7, 513):
        models.check(tiny.tokens_of(2, length).cuda())
    tokens = tiny.tokens_of(3, 70).cuda()
    mask = torch.ones_like(tokens)
    mask[1, :9], mask[2, :64] = 0, 0
    models.check(tokens, mask)
    for cache in ("dynamic", "static"):
        models.check_greedy(tokens, mask, cache, new_tokens=64)
