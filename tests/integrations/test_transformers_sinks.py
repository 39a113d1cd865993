"""gpt-oss' attention sinks by attn_implementation="kernel_hub", against transformers' own eager
attention of that model and fp64.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
module = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")

import tiny_models as tiny  # noqa: E402
from open_door import registered as registered  # noqa: E402

from kernel_hub.integrations import transformers as door  # noqa: E402
from kernel_hub.integrations.transformers import attention, masks  # noqa: E402
from kernel_hub.testing.compare import check  # noqa: E402


@pytest.fixture(scope="module")
def models() -> tiny.Models:
    made = tiny.Models("gpt_oss", torch.bfloat16)
    for layer, (own, ours, truth) in enumerate(
        zip(*(model.model.layers for model in (made.own, made.ours, made.truth)), strict=True)
    ):
        sinks = 3 * torch.randn(4, generator=torch.Generator().manual_seed(layer))
        for each in (own, ours, truth):
            each.self_attn.sinks.data.copy_(sinks.bfloat16())
    return made


def took(what: str) -> int:
    return door.report()["taken"].get(what, 0)


@pytest.mark.parametrize("seed", range(12))
def test_beside_the_models_own_attention(seed: int) -> None:
    """One layer's call: fp64 and bf16 by transformers, with its own dense mask."""
    lot = random.Random(seed)
    batch, kv_heads, length = lot.randint(1, 3), lot.choice((1, 2)), lot.randint(1, 90)
    heads, window = kv_heads * lot.choice((1, 4, 8)), lot.choice((0, 5, 40))
    generator = torch.Generator().manual_seed(seed)

    def randn(count: int) -> Any:
        return torch.randn(batch, count, length, 64, generator=generator).bfloat16()

    q, k, v = randn(heads), randn(kv_heads), randn(kv_heads)
    sinks = lot.choice((1.0, 5.0, 20.0)) * torch.randn(heads, generator=generator).bfloat16()
    seen = masks.Seen(True, window, None, None)
    dense = masks.dense(seen, batch, length, length, "cpu").view(-1, 1, length, length)
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        layer = torch.nn.Module()
        layer.sinks, layer.num_key_value_groups = sinks.to(dtype), heads // kv_heads
        mask = torch.zeros(dense.shape, dtype=dtype).masked_fill(~dense, torch.finfo(dtype).min)
        given = [x.to(dtype) for x in (q, k, v)]
        found.append(module.eager_attention_forward(layer, *given, mask, scaling=0.125)[0])
    out = attention._ours(q, k, v, seen, 0.125, 0.0, sinks)
    check(out, *found)


@pytest.mark.parametrize("length", [1, 7, 300])
def test_a_prompt(models: tiny.Models, length: int) -> None:
    models.check(tiny.tokens_of(2, length))
    assert took("flash_attention") + took("decode_attention") == 2
    assert not door.report()["passed"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_pads(models: tiny.Models, side: str) -> None:
    tokens = tiny.tokens_of(3, 50)
    mask = torch.ones_like(tokens)
    for row, pads in ((1, 11), (2, 44)):
        mask[row, slice(0, pads) if side == "left" else slice(50 - pads, 50)] = 0
    models.check(tokens * mask, mask)
    assert took("flash_attention") == 2 and not door.report()["passed"]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_tokens(models: tiny.Models, cache: str) -> None:
    tokens = tiny.tokens_of(2, 33)
    models.check_greedy(tokens, torch.ones_like(tokens), cache, new_tokens=8)
    assert (took("flash_attention"), took("decode_attention")) == (2, 14)


@pytest.mark.parametrize("frozen", [True, False])
def test_training(models: tiny.Models, frozen: bool) -> None:
    """Sinks that are frozen leave attention to us; the gradients of others are torch's."""
    tokens, gradients = tiny.tokens_of(2, 21), []
    for model in (models.ours, models.truth, models.own):
        model = tiny.with_attention(model, model.config._attn_implementation)
        for layer in model.model.layers:
            layer.self_attn.sinks.requires_grad_(not frozen)
        model(input_ids=tokens, labels=tokens).loss.backward()
        first = model.model.layers[0].self_attn
        gradients.append((first.q_proj.weight.grad, first.sinks.grad))
    check(*(weights for weights, _ in gradients))
    if frozen:
        assert took("flash_attention") == 2 and not door.report()["passed"]
    else:
        check(*(sinks for _, sinks in gradients))
        assert door.report()["passed"] == {"attention: sinks that require grad": 2}
