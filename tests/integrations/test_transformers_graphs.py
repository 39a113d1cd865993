"""accelerate(model, graphs=True) on a CPU: which steps are captured, replayed, refused, forgotten;
what a replay does to caches and gives back. CUDA graphs are stood in for (graph_recorder)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import graph_recorder  # noqa: E402
import tiny_models as tiny  # noqa: E402
from graph_recorder import (  # noqa: E402
    LENGTH,
    Chat,
    Waits,
    accelerated,
    generated,
    passed,
    replays,
    same_generated,
)

from kernel_hub.integrations import transformers as door  # noqa: E402
from kernel_hub.integrations.transformers import capturing, counts, families, step_graphs  # noqa: E402


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[graph_recorder.Recorder]]:
    counts.reset()
    with graph_recorder.recorded(monkeypatch) as found:
        yield found
    door.unregister()


@pytest.fixture
def model() -> Any:
    return accelerated("llama")


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_steps(family: str, batch_size: int, made: Any) -> None:
    """The first step runs as it is, the second is captured, all from it on are replays."""
    more = {"layer_types": ["full_attention"] * 2} if family == "gemma2" else {}
    model = accelerated(family, **more)
    if family == "gemma2" and tiny.is_older():
        pytest.skip("layer_types are not asked: its caches slide")
    chat = Chat(model, batch_size)
    chat.check(model)
    assert not made
    chat.check(model, 5)
    assert len(made) == 1 and made[0].replays == replays() == 5
    assert not passed()


def test_outputs_are_the_callers_own(model: Any) -> None:
    chat = Chat(model)
    found = [chat.say(model) for _ in range(4)]
    kept = [each.logits.clone() for each in found]
    chat.say(model)
    assert all(torch.equal(x.logits, was) for x, was in zip(found, kept, strict=True))
    assert found[-1].past_key_values is chat.cache
    assert type(found[-1]) is type(found[0])
    assert len({each.logits.data_ptr() for each in found}) == 4


def test_outputs_of_other_shapes(model: Any, made: Any) -> None:
    """Tuples, and hidden states, as they are without graphs."""
    chat = Chat(model)
    for _ in range(3):
        found = chat.say(model, return_dict=False)
    assert type(found) is tuple and found[1] is chat.cache and made[0].replays == 2
    outputs = [chat.say(model, output_hidden_states=True) for _ in range(3)]
    assert [len(each.hidden_states) for each in outputs] == [3] * 3


def test_counters_stand_where_steps_left_them(model: Any) -> None:
    chat, plain = Chat(model), Chat(model)
    for _ in range(4):
        chat.say(model)
    door.restore(model)
    for _ in range(4):
        plain.say(model)
    assert int(chat.cache.get_seq_length()) == int(plain.cache.get_seq_length()) == 15
    for x, y in zip(*map(step_graphs._tensors_of, (chat.cache, plain.cache)), strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4)


def test_two_caches_in_turn(model: Any, made: Any) -> None:
    chats = [Chat(model, prompt=5 + 9 * i, seed=i) for i in range(2)]
    for _ in range(4):
        for chat in chats:
            chat.check(model)
    assert [each.replays for each in made] == [3, 3]


def test_a_cache_that_is_reset(model: Any, made: Any) -> None:
    chat = Chat(model)
    chat.check(model, 3)
    with torch.inference_mode():
        chat.cache.reset()
    chat.at = 0
    chat.tokens = tiny.tokens_of(1, LENGTH, 7)
    chat.say(model, 20)
    chat.check(model, 3)
    assert len(made) == 1 and made[0].replays == 5


def test_a_dropped_cache_frees_its_graph(model: Any) -> None:
    chats = [Chat(model) for _ in range(2)]
    for chat in chats:
        chat.check(model, 3)
    graphs = vars(model)[step_graphs.STATE]._graphs
    assert len(graphs) == 2
    del chat, chats[0]
    assert len(graphs) == 1
    chats[0].check(model, 2)


def test_the_oldest_is_forgotten(model: Any, made: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(step_graphs, "MOST", 2)
    chats = [Chat(model, seed=i) for i in range(3)]
    for chat in (*chats[:2], chats[0], chats[2]):
        chat.check(model, 2)
    assert [each.replays for each in made] == [3, 1, 1]
    chats[0].check(model)
    assert [each.replays for each in made] == [4, 1, 1]
    chats[1].check(model, 2)  # forgotten: the third came after its last
    assert len(made) == 4


def test_other_arguments_are_other_graphs(model: Any, made: Any) -> None:
    chat = Chat(model)
    for more in ({}, {"logits_to_keep": 1}, {"use_cache": True}, {"use_cache": 1}):
        for _ in range(2):
            chat.say(model, **more)
    assert len(made) == 4
    with torch.inference_mode():
        for _ in range(2):
            chat.say(model)
    assert len(made) == 5
    chat.say(model)  # the first graph's inputs are no tensors of inference mode
    assert len(made) == 5


def test_moved_weights(model: Any, made: Any) -> None:
    """A graph reads memory: what lies elsewhere since is seen, what is changed in place is too."""
    chat = Chat(model)
    chat.check(model, 3)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    chat.check(model)
    assert len(made) == 1
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    chat.check(model, 3)
    assert len(made) == 2
    model.lm_head = copy.deepcopy(model.lm_head)
    chat.check(model, 3)
    assert len(made) == 3
    del model.lm_head._parameters["bias"], model.model.norm._parameters["weight"]
    with pytest.raises(AttributeError, match="weight"):
        chat.say(model)  # the model's own error, not the graphs'


def test_a_hook_is_called(model: Any, made: Any) -> None:
    chat, calls = Chat(model), []
    chat.check(model, 2)
    hook = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    chat.say(model)
    assert calls and passed() == ["step graphs: hooks of modules"]
    hook.remove()
    chat.check(model)
    assert made[0].replays == 2


def test_gradients(model: Any, made: Any) -> None:
    chat = Chat(model)
    positions = torch.arange(chat.at, chat.at + 1)
    for _ in range(3):
        cache = copy.deepcopy(chat.cache)
        logits = model(
            input_ids=chat.tokens[:, :1], past_key_values=cache, position_ids=positions[None],
            cache_position=positions,
        ).logits  # fmt: skip
    assert logits.requires_grad and not made and passed() == ["step graphs: gradients or training"]
    with torch.no_grad():
        model.train()
        for _ in range(3):
            chat.say(model)
    assert not made


def refused_step(model: Any, **given: Any) -> str:
    """Why steps with these are not for graphs."""
    chat = Chat(model)
    for _ in range(3):
        chat.say(model, **given)
    (reason,) = passed()
    return reason.removeprefix("step graphs: ")


def test_masks_that_grow_are_refused(model: Any, made: Any) -> None:
    """Their shape would be another graph's with each step, and looking at them waits."""
    mask = torch.ones(1, LENGTH, dtype=torch.long)
    assert "attention_mask of two dimensions" in refused_step(model, attention_mask=mask)
    assert not made


def test_unknown_arguments_are_refused(model: Any, made: Any) -> None:
    assert refused_step(model, something=object()) == "something of object"
    counts.reset()
    assert refused_step(model, something={1: None}) == "something of NoneType"
    assert not made


def test_a_dynamic_cache_is_refused(model: Any, made: Any) -> None:
    cache = transformers.DynamicCache()
    tokens = tiny.tokens_of(1, 9)
    with torch.no_grad():
        for i in range(9):
            logits = model(input_ids=tokens[:, i : i + 1], past_key_values=cache).logits
    assert passed() == ["step graphs: a DynamicCache"] and not made
    whole = tiny.logits_of(model, input_ids=tokens)
    torch.testing.assert_close(logits[:, -1], whole[:, -1], atol=2e-5, rtol=1e-4)


def test_counts_on_the_host_are_put_back(model: Any, made: Any, monkeypatch: Any) -> None:
    """A replay would not advance them: refused, with the cache as if nothing had been tried."""
    chat = Chat(model)
    if not hasattr(chat.cache, "layers"):
        pytest.skip("this version's cache has no layers")
    layer, own = type(chat.cache.layers[0]), type(chat.cache.layers[0]).update

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return own(self, *args, **kwargs)

    monkeypatch.setattr(layer, "update", update)
    chat.check(model, 4)
    assert chat.cache.layers[0].calls == 4
    assert passed() == [
        "step graphs: capture failed: a step changes what the cache keeps on the host"
    ]
    assert made[0].replays == 0


def test_a_capture_that_fails_is_named_once(model: Any, monkeypatch: Any) -> None:
    tries = []

    def capture(*given: Any) -> Any:
        tries.append(given)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(capturing, "capture", capture)
    chat = Chat(model)
    chat.check(model, 4)
    Chat(model, seed=3).check(model, 3)  # another cache, steps of the same kind
    assert len(tries) == 1
    what = "step graphs: capture failed: operation not permitted when stream is capturing"
    assert door.report()["passed"] == {what: 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "mixtral"])
def test_generate(family: str, dtype: Any, made: Any) -> None:
    """Tokens and logits by graphs are those without, bit by bit; prompts of other lengths, left
    pads. In bf16 the masks are lengths and first keys (masks.encode)."""
    own = tiny.with_attention(tiny.model_of(family, dtype), "sdpa")
    if not getattr(own, "_supports_static_cache", True):
        pytest.skip("this version gives it no static cache")
    model, plain = copy.deepcopy(own), copy.deepcopy(own)
    door.accelerate(model, graphs=True)
    door.accelerate(plain)
    for batch_size, length in ((1, 9), (3, 30), (1, 21)):
        tokens = tiny.tokens_of(batch_size, length)
        before = replays()
        same_generated(tokens, model, plain)
        generated(tokens, own)  # whose caches are as long then: sums of zeros have an order too
        assert replays() == before + 6, (batch_size, door.report())
    door.restore(model)
    same_generated(tokens, model, own)
    assert replays() == 18 and not passed()


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_captured_waits_for_nothing(
    family: str, is_padded: bool, made: Any, monkeypatch: Any
) -> None:
    capture = capturing.capture

    def watched(*given: Any) -> Any:
        with Waits():
            return capture(*given)

    monkeypatch.setattr(capturing, "capture", watched)
    monkeypatch.setattr(Waits, "found", [])
    generated(tiny.tokens_of(1 + is_padded, 12), accelerated(family, torch.bfloat16))
    assert len(made) == 1 and not Waits.found
    with Waits():
        assert torch.ones(3).sum().item() == 3
    assert Waits.found


def test_generate_does_not_compile(model: Any) -> None:
    """Where graphs take the cache; where they do not, or it is asked to, it is as before."""
    chat, config = Chat(model), copy.deepcopy(model.generation_config)
    taken = inspect.signature(type(model).forward).parameters
    given = {next(name for name in families.CACHES if name in taken): chat.cache}
    config.compile_config = transformers.CompileConfig(fullgraph=False)
    config.compile_config._compile_all_devices = True
    assert model._valid_auto_compile_criteria(given, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "device", torch.device("cuda"))
        config.compile_config = None
        assert not model._valid_auto_compile_criteria(given, config)
        door.restore(model)
        assert model._valid_auto_compile_criteria(given, config)


def test_compiled_by_the_caller(model: Any, made: Any) -> None:
    chat = Chat(model)
    chat.check(model, 2)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(3):
        chat.check(compiled)
    assert made[0].replays == replays() == 1 and not passed()


def test_restored(model: Any) -> None:
    chat = Chat(model)
    chat.check(model, 3)
    graphs = vars(model)[step_graphs.STATE]
    door.restore(model)
    assert not graphs._graphs
    assert not {"forward", step_graphs.STATE, step_graphs._COMPILES} & set(vars(model))
    chat.check(model, 2)
    assert replays() == 2


def test_a_copy_has_graphs_of_its_own(model: Any, made: Any) -> None:
    chat = Chat(model)
    chat.check(model, 2)
    other = copy.deepcopy(model)
    Chat(other).check(other, 2)
    assert vars(other)[step_graphs.STATE] is not vars(model)[step_graphs.STATE]
    assert len(made) == 2
    door.restore(other)
    chat.check(model)
    assert made[0].replays == 2


def test_the_table() -> None:
    model = tiny.model_of("llama", torch.bfloat16)
    row = door.accelerate(model, graphs=True).rows[-1]
    assert (row.module, row.op) == ("LlamaForCausalLM", "CUDA graphs")
    row = door.accelerate(model.lm_head, graphs=True).rows[-1]
    assert row.op is None and row.reason == "its forward takes no cache or past_key_values"
    door.restore(model)
    vars(model)["forward"] = type(model).forward.__get__(model)
    row = door.accelerate(model, graphs=True).rows[-1]
    assert row.reason == "its forward is somebody's already"
    door.restore(model)
    assert "forward" in vars(model)
