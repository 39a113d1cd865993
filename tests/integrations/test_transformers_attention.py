"""attn_implementation="kernel_hub": small models of every family against fp64, by the numeric rule.

Where a model is fp32 its attention passes through the door to torch, which is held to the same.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from open_door import registered as registered  # noqa: E402

from kernel_hub.errors import TensorError  # noqa: E402
from kernel_hub.integrations import transformers as door  # noqa: E402
from kernel_hub.integrations.transformers import attention, families, masks  # noqa: E402
from kernel_hub.testing.compare import check, compare  # noqa: E402

LENGTHS = (1, 7, 513)


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def models(request: pytest.FixtureRequest) -> tiny.Models:
    return tiny.Models(request.param, torch.bfloat16)


def took(what: str) -> int:
    return door.report()["taken"].get(what, 0)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt(models: tiny.Models, length: int) -> None:
    models.check(tiny.tokens_of(1 if length > 100 else 3, length))
    # Older versions say where a token is on the device alone: a token then goes as a step.
    assert took("flash_attention") + took("decode_attention") == 2
    assert not door.report()["passed"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_pads_by_lot(models: tiny.Models, side: str, seed: int) -> None:
    models.check(*padded(side, seed))
    assert took("flash_attention") == 2
    assert not door.report()["passed"]


def test_left_pads_when_debugging(models: tiny.Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNEL_HUB_DEBUG", "1")
    tokens, mask = padded("left", 4)
    models.check(tokens[1:], mask[1:])  # all begin with pads
    assert took("flash_attention") == 2


def padded(side: str, seed: int) -> tuple[Any, Any]:
    """(tokens, attention_mask) of 1 to 4 sequences, with pads by lot, none in one of them."""
    lot = random.Random(f"{side} {seed}")
    batch_size, length = lot.randint(2, 4), lot.randint(2, 70)
    tokens = tiny.tokens_of(batch_size, length, seed)
    mask = torch.ones_like(tokens)
    for row in range(1, batch_size):
        left = lot.randint(0, length - 1) if side != "right" else 0
        right = lot.randint(0, length - 1 - left) if side != "left" else 0
        mask[row, :left] = 0
        mask[row, length - right :] = 0
    return tokens * mask, mask


def test_pads_between_tokens_are_left_to_torch(models: tiny.Models) -> None:
    tokens = tiny.tokens_of(2, 30)
    mask = torch.ones_like(tokens)
    mask[0, 5:9] = 0
    models.check(tokens, mask)
    assert door.report() == {
        "taken": {}, "passed": {"attention: a mask that is no lengths and left pads": 2},
    }  # fmt: skip


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("pads", [False, True])
def test_greedy_tokens_of_a_longer_cache(models: tiny.Models, cache: str, pads: bool) -> None:
    tokens = tiny.tokens_of(2, 33)
    mask = torch.ones_like(tokens)
    if pads:
        mask[0, :11] = 0
    models.check_greedy(tokens, mask, cache, new_tokens=8)
    # A step of left-padded sequences goes by flash_attention, where they lie.
    assert took("decode_attention") == (0 if pads else 14)
    assert took("flash_attention") == (16 if pads else 2)


def test_steps_by_hand_into_a_static_cache() -> None:
    """A prompt of 7 in a cache of 64, then 3 tokens at once, then one."""
    from transformers import StaticCache

    models = tiny.Models("llama", torch.bfloat16)
    tokens = tiny.tokens_of(2, 11)
    found = []
    for model in (models.ours, models.truth, models.own):
        cache = StaticCache(
            config=model.config, max_batch_size=2, max_cache_len=64, dtype=model.dtype, device="cpu"
        )
        parts = []
        for first, last in ((0, 7), (7, 10), (10, 11)):
            more = {"cache_position": torch.arange(first, last)} if tiny.is_older() else {}
            out = tiny.logits_of(
                model, input_ids=tokens[:, first:last], past_key_values=cache, **more
            )
            parts.append(out)
        found.append(torch.cat(parts, 1))
    check(*found)
    assert (took("flash_attention"), took("decode_attention")) == (0, 6)


def test_fp32_passes_through_and_is_right() -> None:
    models = tiny.Models("gemma2", torch.float32)
    models.check(*padded("left", 5))
    reason = "attention: dtype float32: float16 or bfloat16 are taken"
    assert door.report() == {"taken": {}, "passed": {reason: 2}}


def test_without_the_mask_function_a_padded_batch_is_wrong() -> None:
    """What this test file would find: transformers gives unknown names no mask at all."""
    from transformers.masking_utils import AttentionMaskInterface

    models = tiny.Models("llama", torch.bfloat16)
    tokens, mask = padded("left", 5)
    AttentionMaskInterface._global_mapping.pop("kernel_hub")
    real = mask.bool()
    found = [
        tiny.logits_of(model, input_ids=tokens, attention_mask=mask)[real]
        for model in (models.ours, models.truth, models.own)
    ]
    assert not compare(*found).ok


def test_training_gives_the_same_gradients() -> None:
    models = tiny.Models("mistral_window", torch.bfloat16)
    tokens, mask = padded("left", 3)
    # A token is predicted by the row before it, which is no pad's.
    labels = torch.where(mask.bool() & mask.roll(1, -1).bool(), tokens, -100)
    gradients = []
    for model in (models.ours, models.truth, models.own):
        model = tiny.with_attention(model, model.config._attn_implementation)
        model(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    check(*gradients)
    assert took("flash_attention") == 2


def test_dropout_is_left_to_torch() -> None:
    model = tiny.with_attention(tiny.model_of("llama", torch.bfloat16), "kernel_hub").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    tokens = tiny.tokens_of(1, 9)
    first, second = (tiny.logits_of(model, input_ids=tokens) for _ in range(2))
    assert not torch.equal(first, second)
    assert door.report()["passed"] == {"attention: dropout": 4}


def test_packed_sequences_do_not_see_each_other() -> None:
    models = tiny.Models("llama", torch.bfloat16)
    tokens = tiny.tokens_of(1, 12)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    found = [
        tiny.logits_of(model, input_ids=tokens, position_ids=positions, use_cache=False)
        for model in (models.ours, models.truth, models.own)
    ]
    check(*found)
    assert not door.report()["taken"]


def test_compiled_whole() -> None:
    models = tiny.Models("llama", torch.bfloat16)
    tokens = tiny.tokens_of(2, 19)
    torch._dynamo.reset()
    compiled = torch.compile(models.ours, backend="aot_eager", fullgraph=True)
    found = [tiny.logits_of(compiled, input_ids=tokens, use_cache=True)]
    found += [tiny.logits_of(model, input_ids=tokens) for model in (models.truth, models.own)]
    check(*found)


def call(**options: Any) -> Any:
    q = torch.zeros(1, 2, 3, 32, dtype=torch.bfloat16)
    return attention.attention(torch.nn.Identity(), q, q, q, None, **options)


def test_a_paged_cache_is_refused() -> None:
    with pytest.raises(TensorError, match="cache: expected None, found object"):
        call(cache=object())


@pytest.mark.parametrize("head_dim_v", [32, 16])
def test_encoders_without_a_mask_see_everything(head_dim_v: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 4, 9, 32, generator=generator).bfloat16() for _ in range(2))
    v = torch.randn(2, 4, 9, head_dim_v, generator=generator).bfloat16()
    module = torch.nn.Identity()
    module.is_causal = False
    out, _ = attention.attention(module, q, k, v, None)
    own, truth = (
        torch.nn.functional.scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)))
        for dtype in (torch.bfloat16, torch.float64)
    )
    check(out, truth.transpose(1, 2), own.transpose(1, 2))


def test_the_name_goes_again() -> None:
    from transformers import AttentionInterface

    door.register()  # a second time
    door.unregister()
    assert "kernel_hub" not in AttentionInterface._global_mapping
    door.unregister()


@pytest.mark.parametrize("seed", range(40))
def test_masks_are_transformers_own(seed: int) -> None:
    """Lengths by lot, decoded to a dense mask, against the one that sdpa gets."""
    from transformers import masking_utils

    lot = random.Random(seed)
    batch_size, q_length = lot.randint(1, 3), lot.choice((1, 2, 7, 20))
    q_offset, slack = lot.choice((0, 0, 1, 30)), lot.choice((0, 0, 9))
    window = lot.choice((0, 0, 4, 25))
    # The last of a full cache of a window begin later.
    kv_offset = max(0, q_offset - window + 1) if window and lot.random() < 0.5 else 0
    kv_length = q_offset + q_length - kv_offset + slack
    function = masking_utils.causal_mask_function
    if window:
        function = masking_utils.sliding_window_causal_mask_function(window)
    padding = None
    if lot.random() < 0.7:
        padding = torch.ones(batch_size, q_offset + q_length, dtype=torch.bool)
        for row in range(batch_size):
            padding[row, : lot.choice((0, 3, 8, q_offset + q_length))] = False
    given = {
        "batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset,
        "mask_function": function, "attention_mask": padding, "allow_is_causal_skip": False,
    }  # fmt: skip
    if tiny.is_older():
        given["cache_position"] = torch.arange(q_offset, q_offset + q_length)
    else:
        offset = torch.tensor(q_offset) if lot.random() < 0.5 else q_offset
        given.update(q_length=q_length, q_offset=offset)
    found = masks.lengths_mask(**given)
    assert masks.is_encoded(found)
    seen = masks.decode(found)
    assert masks.decode(found.clone()) is not seen  # from shape and values too
    expected = masks._sdpa_mask()(**given).expand(batch_size, 1, q_length, kv_length)
    dense = masks.dense(masks.decode(found.clone()), batch_size, q_length, kv_length, "cpu")
    if padding is not None:  # what rows of pads see is nobody's business
        real = padding[:, q_offset:]
        expected, dense = expected[:, 0][real], dense[:, 0][real]
    assert torch.equal(dense, expected)


@pytest.mark.parametrize("name", families.CACHES)
def test_a_cache_by_any_name(name: str) -> None:
    """Attention alone, told of its cache as this transformers or another calls it: as the class."""
    from transformers import DynamicCache

    own = tiny.with_attention(tiny.model_of("llama"), "sdpa")
    ours = copy.deepcopy(own)
    door.accelerate(ours, attention=False)
    found = []
    for model in (own, ours):
        cache = DynamicCache()
        for at in range(2):
            x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(at))
            angles = model.model.rotary_emb(x, torch.arange(3 * at, 3 * at + 3)[None])
            with torch.no_grad():
                out, _ = model.model.layers[0].self_attn(x, angles, None, **{name: cache})
        found.append((out, cache.get_seq_length()))
    torch.testing.assert_close(found[1][0], found[0][0], atol=2e-5, rtol=1e-4)
    assert found[1][1] == found[0][1]
