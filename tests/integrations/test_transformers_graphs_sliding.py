"""accelerate(model, graphs=True) with caches of sliding layers: before they are full, while they
get full, from then on. CUDA graphs are stood in for (graph_recorder)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import graph_recorder  # noqa: E402
import tiny_models as tiny  # noqa: E402
from graph_recorder import Chat, accelerated, passed, replays, same_generated  # noqa: E402

from kernel_hub.integrations import transformers as door  # noqa: E402
from kernel_hub.integrations.transformers import counts, sliding, step_graphs  # noqa: E402


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[graph_recorder.Recorder]]:
    counts.reset()
    with graph_recorder.recorded(monkeypatch) as found:
        yield found
    door.unregister()


def has_sliding_layers(model: Any) -> bool:
    """Whether this version's caches have layers that slide, and count as those known here."""
    layers = getattr(Chat(model).cache, "layers", None) or ()
    return any("cumulative_length_int" in vars(layer) for layer in layers)


SLIDING = ["gemma2", "gemma3", "mistral_window", "qwen2_window"]


@pytest.mark.parametrize(("batch_size", "prompt"), [(1, 11), (3, 29), (1, 36), (2, 37), (1, 45)])
@pytest.mark.parametrize("family", SLIDING)
def test_sliding_layers(family: str, batch_size: int, prompt: int, made: Any) -> None:
    """A graph until they are full, one from then on; masks, positions and counts go on."""
    model = accelerated(family)
    if not has_sliding_layers(model):
        pytest.skip("this version's sliding caches are refused")
    chat = Chat(model, batch_size, prompt)
    before, after = max(0, 37 - prompt), 9
    chat.check(model, before + after)
    assert len(made) == (before > 1) + 1
    assert replays() == max(0, before - 1) + after - 1 and not passed()
    slides = [x for x in chat.cache.layers if type(x).__name__ == sliding.NAME]
    assert slides and {x.cumulative_length_int for x in slides} == {chat.at}
    assert not {"update", "get_seq_length", "get_mask_sizes"} & {*vars(slides[0])}
    with torch.inference_mode():
        chat.cache.reset()
    chat.at = 0
    chat.say(model, prompt)
    chat.check(model, before + after)
    assert len(made) == (before > 0) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SLIDING)
def test_sliding_layers_generate(family: str, dtype: Any, made: Any) -> None:
    """Masks come from generate, left pads in them."""
    own = "eager" if family == "gemma2" else "sdpa"
    model = tiny.with_attention(tiny.model_of(family, dtype), own)
    plain = copy.deepcopy(model)
    door.accelerate(model, graphs=True)
    door.accelerate(plain)
    if not has_sliding_layers(model):
        pytest.skip("this version's sliding caches are refused")
    # Lengths (bf16) say no first keys any more once the pads are out of the window: another graph.
    last = 6 if dtype is torch.float32 else 5
    for batch_size, length, steps in ((1, 9, 6), (3, 33, 5), (2, 40, last)):
        before = replays()
        same_generated(tiny.tokens_of(batch_size, length), model, plain)
        assert replays() == before + steps
    assert not passed()


def test_sliding_layers_without_positions(made: Any) -> None:
    """The model counts by its cache then."""
    model = accelerated("mistral_window")
    if not has_sliding_layers(model):
        pytest.skip("this version's sliding caches are refused")
    chat = Chat(model, prompt=30)
    for _ in range(14):
        chat.check_after(model, chat.say(model, position_ids=None, cache_position=None))
    assert replays() == 12


def test_sliding_layers_that_count_otherwise_are_refused(made: Any) -> None:
    found = accelerated("mistral_window")
    chat = Chat(found)
    slides = [x for x in getattr(chat.cache, "layers", ()) if type(x).__name__ == sliding.NAME]
    if not has_sliding_layers(found):
        assert "Static" in str(step_graphs.refused_cache(chat.cache)) or tiny.is_older()
        return
    slides[0].cumulative_length_int += 1
    assert "count in another way" in str(step_graphs.refused_cache(chat.cache))
    for _ in range(3):
        chat.say(found)
    assert not made and "count in another way" in passed()[0]
