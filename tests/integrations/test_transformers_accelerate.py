"""accelerate(model): every family against fp64 by the numeric rule; restore gives the same bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402

from kernel_hub.errors import TensorError  # noqa: E402
from kernel_hub.integrations import transformers as door  # noqa: E402
from kernel_hub.integrations.transformers import counts, families, replacing  # noqa: E402
from kernel_hub.integrations.transformers import fused as fusing  # noqa: E402
from kernel_hub.testing.compare import check  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(autouse=True)
def counted() -> None:
    counts.reset()


@pytest.fixture(scope="module", autouse=True)
def unregistered() -> Iterator[None]:
    yield
    door.unregister()


@pytest.fixture(scope="module", params=[f"{f}-{d}" for f in tiny.FAMILIES for d in DTYPES])
def models(request: pytest.FixtureRequest) -> tiny.Models:
    family, dtype = request.param.split("-")
    found = tiny.Models(family, DTYPES[dtype], attention="eager")
    door.accelerate(found.ours)
    return found


def bits_of(model: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same_bits(model: Any, bits: dict[str, Any]) -> bool:
    found = model.state_dict()
    return list(found) == list(bits) and all(
        found[name].dtype is value.dtype and torch.equal(found[name], value)
        for name, value in bits.items()
    )


@pytest.mark.parametrize("length", [1, 7, 513])
def test_a_prompt(models: tiny.Models, length: int) -> None:
    models.check(tiny.tokens_of(1 if length > 100 else 3, length))
    assert not door.report()["passed"]
    assert door.report()["taken"]["rms_norm"] > 2


def test_left_pads(models: tiny.Models) -> None:
    tokens = tiny.tokens_of(3, 41)
    mask = torch.ones_like(tokens)
    mask[0, :9], mask[2, :40] = 0, 0
    models.check(tokens, mask)


def test_greedy_tokens_of_a_static_cache(models: tiny.Models) -> None:
    tokens = tiny.tokens_of(2, 39)
    models.check_greedy(tokens, torch.ones_like(tokens), "static", new_tokens=5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_restored_is_bit_identical(family: str) -> None:
    before = "eager" if family == "gemma2" else "sdpa"
    model = tiny.with_attention(tiny.model_of(family, torch.bfloat16), before)
    tokens = tiny.tokens_of(2, 21)
    bits, logits = bits_of(model), tiny.logits_of(model, input_ids=tokens)
    parameters = dict(model.named_parameters())
    door.accelerate(model)
    assert same_bits(model, bits)
    tiny.logits_of(model, input_ids=tokens)
    door.restore(model)
    assert same_bits(model, bits)
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert not any("forward" in vars(m) or "_kernel_hub" in vars(m) for m in model.modules())
    # Memory of its own again: nothing keeps a joined matrix.
    storages = [p.untyped_storage().nbytes() for p in parameters.values()]
    assert storages == [p.numel() * p.element_size() for p in parameters.values()]
    assert model.config._attn_implementation == before
    assert torch.equal(tiny.logits_of(model, input_ids=tokens), logits)
    door.restore(model)


def ops_of(table: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in table.replaced:
        found.setdefault(row.module, set()).add(row.op)
    return found


def test_the_table_of_llama() -> None:
    table = door.accelerate(tiny.model_of("llama", torch.bfloat16))
    assert ops_of(table) == {
        "LlamaRMSNorm": {"rms_norm"}, "LlamaAttention": {"qkv_linear"},
        "LlamaMLP": {"swiglu_linear"}, "Linear": {"linear"},
        "LlamaConfig": {"flash_attention, decode_attention"},
    }  # fmt: skip
    assert not table.left_alone
    text = str(table).splitlines()
    assert len(text) == 10
    assert text[1].split() == ["model.layers.*.self_attn", "LlamaAttention", "2", "qkv_linear"]


def reason_of(model: Any, name: str, **switches: Any) -> str:
    rows = [row for row in door.accelerate(model, **switches).left_alone if row.name == name]
    assert rows, f"{name} was replaced"
    return rows[0].reason


MLP = "model.layers.0.mlp"
ATTENTION = "model.layers.0.self_attn"


def test_the_table_of_gemma() -> None:
    """A GELU gate, and norms of queries and keys in their projection."""
    ops = ops_of(door.accelerate(tiny.model_of("gemma3", torch.bfloat16)))
    assert ops["Gemma3MLP"] == {"gated_linear"}
    assert ops["Gemma3Attention"] == {"qkv_linear"}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_table_of_a_mixture(family: str) -> None:
    table = door.accelerate(tiny.model_of(family, torch.bfloat16))
    assert not table.left_alone
    ops = {op for row in table.replaced for op in str(row.op).split(", ")}
    assert ops >= {"moe_route", "moe_permute", "grouped_linear", "moe_combine"}


def test_an_unknown_gate_is_left_alone() -> None:
    model = tiny.model_of("llama", torch.bfloat16, hidden_act="relu")
    assert "ReLU: SiLU and GELU are known" in reason_of(model, MLP)
    # Its linear layers are not.
    assert "_kernel_hub" in vars(model.get_submodule(f"{MLP}.gate_proj"))


@pytest.mark.parametrize("what", ["a size", "an unknown gate", "a hook", "an expert's class"])
def test_mixtures_left_alone(what: str) -> None:
    sizes = {"moe_intermediate_size": 44} if what == "a size" else {}
    acts = {"hidden_act": "relu"} if what == "an unknown gate" else {}
    model = tiny.model_of("qwen3_moe", torch.bfloat16, **sizes, **acts)
    block = model.model.layers[0].mlp
    is_older = isinstance(block.experts, torch.nn.ModuleList)
    if what == "a hook" and not is_older:
        pytest.skip("one parameter has all experts: hooks on them run")
    if what == "a hook":
        block.experts[3].register_forward_hook(print)
    if what == "an expert's class":
        changed = block.experts[3] if is_older else block.experts
        changed.__class__ = type("Own", (type(changed),), {"__module__": "somewhere"})
    name = MLP if is_older else f"{MLP}.experts"
    expected = {
        "a size": "44", "an unknown gate": "ReLU", "a hook": "hooks",
        "an expert's class": "somewhere",
    }  # fmt: skip
    assert expected[what] in reason_of(model, name)


def test_tied_weights_are_left_alone() -> None:
    model = tiny.model_of("qwen2", torch.bfloat16)
    assert reason_of(model, "lm_head") == "weight is tied: another parameter has its memory"


def test_fp32_is_left_alone_but_for_norms_and_rotation() -> None:
    table = door.accelerate(tiny.model_of("qwen3"))
    assert ops_of(table) == {"Qwen3RMSNorm": {"rms_norm"}, "Qwen3Attention": {"rope"}}
    reasons = {row.module: row.reason for row in table.left_alone}
    assert reasons["Qwen3MLP"] == "dtype float32 of gate_proj.weight: float16, bfloat16 are taken"
    assert "float32" in reasons["Qwen3Config"]


def test_a_head_dim_we_lack_is_left_alone() -> None:
    model = tiny.model_of("llama", torch.bfloat16, head_dim=12)
    assert "head_dim 12" in reason_of(model, "config")
    tokens = tiny.tokens_of(1, 5)
    tiny.logits_of(model, input_ids=tokens)


def test_unknown_classes_are_named() -> None:
    model = tiny.model_of("llama", torch.bfloat16)

    class MyMLP(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        pass

    model.model.layers[0].mlp.__class__ = MyMLP
    assert reason_of(model, MLP) == "this class is not known"


def test_a_class_of_a_known_name_from_elsewhere_is_left_alone() -> None:
    model = tiny.model_of("llama", torch.bfloat16)
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("LlamaMLP", (type(mlp),), {"__module__": "somewhere"})
    assert reason_of(model, MLP) == "class of somewhere, not of transformers.models"


def test_a_forward_that_does_more_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model_of("llama", torch.bfloat16)
    cls = type(model.model.norm)

    def forward(self: Any, hidden_states: Any) -> Any:
        return self.weight * self.something_new(hidden_states)

    monkeypatch.setattr(cls, "forward", forward)
    assert "uses something_new" in reason_of(model, "model.norm")


def test_adapters_and_hooks_are_left_alone() -> None:
    class Adapter(torch.nn.Linear):
        pass

    model = tiny.model_of("llama", torch.bfloat16)
    model.model.layers[0].mlp.up_proj.__class__ = Adapter
    assert "up_proj is a Adapter" in reason_of(model, MLP)
    model = tiny.model_of("llama", torch.bfloat16)
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: None)
    assert reason_of(model, MLP) == "gate_proj has hooks"
    model.model.layers[0].mlp.down_proj.forward = lambda x: x
    name = f"{MLP}.down_proj"
    assert reason_of(model, name) == "forward is replaced by something else already"


def test_weights_on_no_device_are_left_alone() -> None:
    model = tiny.model_of("llama", torch.bfloat16).to("meta")
    table = door.accelerate(model)
    assert not [row for row in table.replaced if row.name != "config"]
    assert "meta: sharded or offloaded" in table.left_alone[0].reason


SWITCHES = ["attention", "norms", "rotary", "mlps", "experts", "linears", "fuse_qkv"]


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch(switch: str) -> None:
    family = "qwen3_moe" if switch == "experts" else "qwen3"
    models = tiny.Models(family, torch.bfloat16, attention="eager")
    table = door.accelerate(models.ours, **{switch: False})
    assert f"{switch}=False" in str(table)
    models.check(tiny.tokens_of(2, 9))


def test_again_begins_anew() -> None:
    model = tiny.model_of("llama", torch.bfloat16)
    bits = bits_of(model)
    first = door.accelerate(model)
    assert str(door.accelerate(model)) == str(first)
    door.accelerate(model, fuse_qkv=False)
    assert same_bits(model, bits)


@pytest.mark.parametrize("at", range(6))
def test_what_fails_in_the_middle_leaves_the_model(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.with_attention(tiny.model_of("llama", torch.bfloat16), "sdpa")
    bits = bits_of(model)
    calls = 0
    joined = fusing._point

    def failing(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise MemoryError("no more")
        joined(*arguments)

    monkeypatch.setattr(fusing, "_point", failing)
    if at == 0:  # after all weights and forwards
        monkeypatch.setattr(replacing, "_set_attention", failing)
        calls = -5
    if at < 5:
        with pytest.raises(MemoryError):
            door.accelerate(model)
        assert same_bits(model, bits)
        assert not any("forward" in vars(m) or "_kernel_hub" in vars(m) for m in model.modules())
        assert model.config._attn_implementation == "sdpa"
    else:
        door.accelerate(model)


def test_gradients_go_by_the_classes_own_forwards() -> None:
    models = tiny.Models("llama", torch.bfloat16, attention="eager")
    door.accelerate(models.ours, attention=False)
    tokens = tiny.tokens_of(1, 9)
    for model in (models.ours, models.own):
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
    for ours, own in zip(models.ours.parameters(), models.own.parameters(), strict=True):
        assert torch.equal(ours.grad, own.grad)
    assert not door.report()["taken"]
    assert door.report()["passed"]["LlamaMLP: gradients"] == 2


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_gradients_of_experts_alone(family: str) -> None:
    models = tiny.Models(family, torch.bfloat16, attention="eager")
    door.accelerate(models.ours, attention=False)
    tokens = tiny.tokens_of(1, 9)
    for model in (models.ours, models.own):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0." in name and ".experts." in name)
        model(input_ids=tokens, labels=tokens).loss.backward()
    found = [p.grad for p in models.ours.parameters() if p.requires_grad]
    expected = [p.grad for p in models.own.parameters() if p.requires_grad]
    assert found and [x is None for x in found] == [x is None for x in expected]
    assert not all(x is None for x in found)


def test_weights_that_an_optimizer_wrote_are_seen() -> None:
    models = tiny.Models("llama", torch.bfloat16, attention="eager")
    door.accelerate(models.ours)
    with torch.no_grad():
        for model in (models.ours, models.own):
            model.model.layers[0].self_attn.k_proj.weight.mul_(-1.5)
            model.model.layers[1].mlp.up_proj.weight.mul_(2)
    models.truth = tiny.truth_of(models.own)
    models.check(tiny.tokens_of(1, 9))
    assert not door.report()["passed"]


def test_weights_that_moved_are_no_longer_joined() -> None:
    models = tiny.Models("llama", torch.bfloat16, attention="eager")
    door.accelerate(models.ours)
    for model in (models.ours, models.own):
        model.to(torch.float16)
    models.truth = tiny.truth_of(models.own)
    models.check(tiny.tokens_of(1, 9))
    reason = "weights that were moved since accelerate()"
    assert door.report()["passed"] == {f"LlamaAttention: {reason}": 2, f"LlamaMLP: {reason}": 2}
    bits = bits_of(models.ours)
    door.restore(models.ours)
    assert same_bits(models.ours, bits)


def test_a_copy_runs_unjoined_and_can_be_restored() -> None:
    models = tiny.Models("llama", torch.bfloat16, attention="eager")
    door.accelerate(models.ours)
    accelerated, models.ours = models.ours, copy.deepcopy(models.ours)
    models.check(tiny.tokens_of(1, 9))
    assert len(door.report()["passed"]) == 2
    door.restore(models.ours)
    assert not any("forward" in vars(m) for m in models.ours.modules())
    assert any("forward" in vars(m) for m in accelerated.modules())


def test_a_forward_put_over_ours_stays() -> None:
    model = tiny.model_of("llama", torch.bfloat16)
    door.accelerate(model)
    theirs = model.model.norm.__dict__["forward"] = lambda x: x
    door.restore(model)
    assert vars(model.model.norm)["forward"] is theirs


def test_autocast_goes_by_the_classes_own_forwards() -> None:
    model = tiny.model_of("llama", torch.bfloat16)
    door.accelerate(model, attention=False)
    with torch.autocast("cpu", torch.bfloat16):
        tiny.logits_of(model, input_ids=tiny.tokens_of(1, 3))
    assert not door.report()["taken"]


def test_compiled_whole() -> None:
    models = tiny.Models("llama", torch.bfloat16, attention="eager")
    door.accelerate(models.ours)
    tokens = tiny.tokens_of(2, 19)
    torch._dynamo.reset()
    compiled = torch.compile(models.ours, backend="aot_eager", fullgraph=True)
    found = [tiny.logits_of(compiled, input_ids=tokens)]
    found += [tiny.logits_of(model, input_ids=tokens) for model in (models.truth, models.own)]
    check(*found)


def test_no_model_is_refused() -> None:
    with pytest.raises(TensorError, match=r"model: expected a torch\.nn\.Module, found str"):
        door.accelerate("llama")  # type: ignore[arg-type]


def test_all_known_classes_are_there() -> None:
    """Every class that is known by name is one of this version's, or a version's before."""
    import importlib

    found = set()
    for stem in (
        "gemma", "gemma2", "gemma3", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3",
        "qwen3_moe",
    ):  # fmt: skip
        found |= set(vars(importlib.import_module(f"transformers.models.{stem}.modeling_{stem}")))
    assert found >= families.NORMS | families.ATTENTIONS | families.MLPS
