"""Folders as models come in: whole, in shards, inside of another model, or not whole."""

from __future__ import annotations

import json
import math
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is torch's")
safetensors = pytest.importorskip("safetensors.torch", reason="models are read by safetensors")

from kernel_hub import ops  # noqa: E402
from kernel_hub.engine.config import FAMILIES, ModelConfig  # noqa: E402
from kernel_hub.engine.engine import Engine  # noqa: E402
from kernel_hub.engine.parallel import Group  # noqa: E402
from kernel_hub.engine.requests import SamplingParams  # noqa: E402
from kernel_hub.engine.weights import Random, check_world, expected, load  # noqa: E402
from kernel_hub.errors import ModelError  # noqa: E402

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "eos_token_id": 95,
}  # fmt: skip
PROMPTS = [[1, 2, 3], list(range(40))]


def config_of(family: str) -> dict[str, Any]:
    return {"model_type": family, **SIZES}


def write(folder: Path, config: dict[str, Any], shards: int = 1, prefix: str = "") -> list[Path]:
    """The random model of a configuration as files, its tensors dealt out by lot."""
    own = ModelConfig.from_dict(config)
    source, lot = Random(own, torch.device("cpu")), random.Random(shards)
    files: list[dict[str, Any]] = [{} for _ in range(shards)]
    for name, shape in expected(own).items():
        # Their own memory: a slice would be saved with all of it.
        tensor = source.read(name, shape, 0, 0, shape[0]).to(torch.bfloat16).clone()
        lot.choice(files)[prefix + name] = tensor
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        safetensors.save_file(files[0], folder / "model.safetensors")
        return [folder / "model.safetensors"]
    paths = [folder / f"model-{i:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for path, tensors in zip(paths, files, strict=True):
        safetensors.save_file(tensors, path)
    where = {name: path.name for path, file in zip(paths, files, strict=True) for name in file}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    return paths


def tokens_of(engine: Engine) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    return [answer.tokens for answer in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("more", [{}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_family_is_loaded(family: str, more: dict[str, Any]) -> None:
    """Once: as many elements as its files have."""
    config = ModelConfig.from_dict(config_of(family) | more)
    cpu = torch.device("cpu")
    weights = load(config, Random(config, cpu), Group(cpu), cpu, torch.float32)
    found = [weights.embedding, weights.norm, *([] if config.is_tied else [weights.head])]
    for layer in weights.layers:
        own = vars(layer) | layer.norms
        found += [x for x in own.values() if torch.is_tensor(x)]
    wanted = sum(math.prod(shape) for shape in expected(config).values())
    assert sum(x.numel() for x in found) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_told_that_weights_are_there(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = "linear", "gated_linear", "qkv_linear", "rms_norm"
    told: dict[str, set[Any]] = {name: set() for name in names}

    def telling(name: str, op: Any, *given: Any, **more: Any) -> Any:
        told[name].add(more.get("weights_ready"))
        return op(*given, **more)

    for name in told:
        monkeypatch.setattr(ops, name, partial(telling, name, getattr(ops, name)))
    assert tokens_of(Engine.random(config_of(family), device="cpu"))
    # Norms of what a residual is added to have no product behind them.
    assert True in told.pop("rms_norm")
    assert told["linear"] == set().union(*told.values()) == {True}, told


@pytest.mark.parametrize("family", FAMILIES)
def test_files_are_read_as_the_same_weights_without_them(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    shards = random.Random(family).randint(1, 4)
    write(tmp_path, config, shards, prefix=random.Random(family).choice(["", "language_model."]))
    found = Engine.from_pretrained(tmp_path, device="cpu")
    assert found.name == tmp_path.name and found.eos_token_ids == {95}
    assert tokens_of(found) == tokens_of(Engine.random(config, device="cpu"))
    drawn = Engine.from_pretrained(tmp_path, device="cpu", random_weights=True)
    assert tokens_of(drawn) == tokens_of(found)


def test_a_text_model_inside_of_one_that_sees(tmp_path: Path) -> None:
    text = config_of("gemma3_text")
    (path,) = write(tmp_path, text)
    tensors = safetensors.load_file(path)
    inside = {name.replace("model.", "model.language_model."): t for name, t in tensors.items()}
    for name in ("vision_tower.patches.weight", "audio_tower.conv1.bias", "image_newline"):
        inside[f"model.{name}"] = torch.zeros(3, 3)
    safetensors.save_file(inside, path)
    outer = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 95]}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    found = Engine.from_pretrained(tmp_path, device="cpu")
    assert tokens_of(found) == tokens_of(Engine.random(text, device="cpu"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 106]}')
    assert Engine.from_pretrained(tmp_path, device="cpu").eos_token_ids == {1, 106}


def test_what_is_missing_or_odd_is_named(tmp_path: Path) -> None:
    config = config_of("qwen2")
    paths = write(tmp_path, config, 3)

    def refused(*words: str) -> None:
        with pytest.raises(ModelError) as error:
            Engine.from_pretrained(tmp_path, device="cpu")
        assert all(word in str(error.value) for word in words), error.value

    kept = paths[1].read_bytes()
    paths[1].unlink()
    refused(paths[1].name)
    paths[1].write_bytes(kept[: len(kept) // 2])
    refused(paths[1].name, "no whole file")
    paths[1].write_bytes(kept)
    (only,) = write(tmp_path, config)
    (tmp_path / "model.safetensors.index.json").unlink()
    tensors = safetensors.load_file(only)
    names = sorted(tensors)

    def changed(tensors: dict[str, Any]) -> None:
        safetensors.save_file(tensors, only)

    name = random.Random(2).choice(names)
    changed({key: value for key, value in tensors.items() if key != name})
    refused("missing", name)
    changed({**tensors, name: torch.zeros(5, 3)})
    refused(name, "(5, 3)")
    changed({**tensors, "model.layers.0.self_attn.sinks": torch.zeros(4)})
    refused("model.layers.0.self_attn.sinks", "ignore")
    shutil.copy(only, tmp_path.parent / "outside.safetensors")
    where = {"weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(where))
    refused("../outside.safetensors")
    for text, words in (("[]", ["JSON object"]), ("{", ["no JSON"])):
        (tmp_path / "config.json").write_text(text)
        refused(*words)
    (tmp_path / "config.json").unlink()
    refused("config.json")


def test_a_head_of_its_own_counts_whatever_the_configuration_says(tmp_path: Path) -> None:
    """As in transformers: tied are those that a file has once, or twice with the same values."""
    config, lot = config_of("qwen2") | {"tie_word_embeddings": False}, torch.Generator()
    (path,) = write(tmp_path, config)
    tensors = safetensors.load_file(path)
    head = torch.randn(96, 64, generator=lot.manual_seed(4)).to(torch.bfloat16)
    for own in (tensors["model.embed_tokens.weight"].clone(), head):
        safetensors.save_file({**tensors, "lm_head.weight": own}, path)
        found = []
        for is_tied in (False, True):
            text = json.dumps({**config, "tie_word_embeddings": is_tied})
            (tmp_path / "config.json").write_text(text)
            engine = Engine.from_pretrained(tmp_path, device="cpu")
            found.append(tokens_of(engine))
            weights = engine.runner.model.weights
            is_one = weights.head.data_ptr() == weights.embedding.data_ptr()
            assert is_one == (is_tied and own is not head)
        assert found[0] == found[1]
    wide = tensors["model.embed_tokens.weight"].float()  # the same numbers, whatever holds them
    safetensors.save_file({**tensors, "lm_head.weight": wide}, path)
    weights = Engine.from_pretrained(tmp_path, device="cpu").runner.model.weights
    assert weights.head.data_ptr() == weights.embedding.data_ptr()
    safetensors.save_file({**tensors, "lm_head.weight": head[:50].clone()}, path)
    with pytest.raises(ModelError, match=r"lm_head\.weight: expected shape \(96, 64\)"):
        Engine.from_pretrained(tmp_path, device="cpu")


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    """Numbers without their scales would be taken for what they are worth."""
    config = config_of("llama")
    (path,) = write(tmp_path, config)
    tensors = safetensors.load_file(path)
    name = random.Random(7).choice(sorted(tensors))
    for dtype, said in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        safetensors.save_file({**tensors, name: tensors[name].to(dtype)}, path)
        with pytest.raises(ModelError, match=f"{name}: .* found {said}"):
            Engine.from_pretrained(tmp_path, device="cpu")
    safetensors.save_file(tensors, path)
    for nothing in (None, {}):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": nothing}))
        assert Engine.from_pretrained(tmp_path, device="cpu")
    for quantised, said in (({"quant_method": "awq"}, "'awq'"), ({"bits": 4}, "quantization")):
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"quantization_config": quantised})
        )
        with pytest.raises(ModelError, match=f"quantised .*{said}"):
            Engine.from_pretrained(tmp_path, device="cpu")
    assert Engine.from_pretrained(tmp_path, device="cpu", random_weights=True)


KINDS = [["full_attention"], ["chunked_attention", "full_attention"], "full_attention", [0, 1]]


@pytest.mark.parametrize("kinds", KINDS, ids=str)
def test_kinds_of_layers_that_are_not_known_are_refused(kinds: Any) -> None:
    with pytest.raises(ModelError, match="layer_types"):
        ModelConfig.from_dict(config_of("llama") | {"layer_types": kinds})


ODD_FILES = [
    ("model.safetensors.index.json", '{"weight_map": {"a": 5}}'),
    ("model.safetensors.index.json", '{"weight_map": []}'), ("tokenizer.json", "{"),
    ("model.safetensors.index.json", '{"weight_map": null}'), ("tokenizer.json", ""),
    ("tokenizer_config.json", '{"chat_template": ["a"]}'),
    ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), ODD_FILES, ids=lambda x: x[:30])
def test_files_that_are_no_such_ones_are_named(name: str, text: str, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizer of a folder")
    write(tmp_path, config_of("llama"))
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    assert Engine.from_pretrained(tmp_path, device="cpu")
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=name):
        Engine.from_pretrained(tmp_path, device="cpu")


def test_what_is_no_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="no model's folder"):
        Engine.from_pretrained(tmp_path / "model.gguf", device="cpu")
    with pytest.raises(ModelError, match="hf download org/name --local-dir name"):
        Engine.from_pretrained("org/name", device="cpu")
    for path in ("/no_such", "../no_such", "~/no_such", "no_such"):  # no names of the hub's
        with pytest.raises(ModelError, match=r"config\.json$"):
            Engine.from_pretrained(path, device="cpu")


def test_an_embedding_is_tied_as_the_outside_of_a_model_says(tmp_path: Path) -> None:
    text = config_of("gemma3_text") | {"tie_word_embeddings": False}
    inside = {"model_type": "gemma3", "text_config": text}
    assert ModelConfig.from_dict(inside).is_tied
    assert not ModelConfig.from_dict(inside | {"tie_word_embeddings": False}).is_tied
    other = {"model_type": "llava", "text_config": config_of("llama")}  # silence is no tie there
    assert not ModelConfig.from_dict(other).is_tied
    assert ModelConfig.from_dict(other | {"tie_word_embeddings": True}).is_tied


def test_what_belongs_to_a_rotation_may_stand_outside_of_it() -> None:
    """Phi 3's spelling of its first length, which goes before the one inside; a rotated part."""
    whole = config_of("llama") | {"rope_theta": 1e4, "original_max_position_embeddings": 64}
    for kind in ("longrope", "yarn", "llama3"):
        inside = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16}
        found = ModelConfig.from_dict(whole | {"rope_scaling": inside}).raw.rope_parameters
        assert found["original_max_position_embeddings"] == 64
    partial = {"partial_rotary_factor": 0.5}
    for kind, part in (("linear", 0.5), ("default", None)):  # as transformers reads it
        rope = {"rope_scaling": {"type": kind, "factor": 2.0}}
        found = ModelConfig.from_dict(config_of("llama") | partial | rope).raw.rope_parameters
        assert found.get("partial_rotary_factor") == part


def test_attention_is_capped_where_the_family_does() -> None:
    """As transformers' classes: of these Gemma 2's alone, its logits and Gemma 3's too."""
    caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}
    found = {f: ModelConfig.from_dict(config_of(f) | caps) for f in ("gemma2", "gemma3_text")}
    assert [c.attn_softcap for c in found.values()] == [5.0, 0.0]
    assert [c.final_softcap for c in found.values()] == [7.0, 7.0]
    assert ModelConfig.from_dict(config_of("gemma2")).attn_softcap == 50.0


def test_yarn_makes_a_model_as_long_as_its_factor_says() -> None:
    """Also where the file is that of the model before, as Qwen's own words have it."""
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 200}
    found = ModelConfig.from_dict(config_of("qwen3") | {"rope_theta": 1e6, "rope_scaling": rope})
    assert found.max_position == 800 and found.raw.max_position_embeddings == 256
    engine = Engine.random(found.raw.__dict__, device="cpu", cache_tokens=1024)
    assert engine.max_model_len == 800


ODD_SIZES = [
    ("qwen3", {"hidden_size": 60}), ("llama", {"head_dim": 20}), ("qwen3", {"head_dim": 8}),
    ("qwen3", {"head_dim": 264}), ("qwen3", {"intermediate_size": 90}),
    ("qwen3", {"num_key_value_heads": 3}), ("qwen3", {"hidden_size": -8}),
    ("qwen3", {"num_attention_heads": 0}), ("qwen3", {"vocab_size": "many"}),
    ("qwen3", {"num_key_value_heads": "2"}), ("qwen3", {"num_key_value_heads": -2}),
    ("qwen3", {"max_position_embeddings": None}), ("qwen3", {"rms_norm_eps": None}),
    ("qwen3_moe", {"moe_intermediate_size": 20}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "odd"), ODD_SIZES, ids=lambda x: str(x)[:40])
def test_sizes_that_no_kernel_takes_are_refused_with_the_model(
    family: str, odd: dict[str, Any]
) -> None:
    """Not with the first request."""
    with pytest.raises(ModelError):
        Engine.random(config_of(family) | odd, device="cpu")


def test_dense_layers_beside_experts_are_divided_too() -> None:
    config = config_of("qwen3_moe") | {"mlp_only_layers": [1], "intermediate_size": 72}
    check_world(ModelConfig.from_dict(config), 1)
    with pytest.raises(ModelError, match="2 processes do not divide intermediate_size 72"):
        check_world(ModelConfig.from_dict(config), 2)


@pytest.mark.parametrize(
    "name",
    ["max_batch", "max_tokens_a_pass", "max_model_len", "cache_tokens", "page_size", "dtype"],
)
def test_options_that_nothing_runs_with_are_refused(name: str) -> None:
    """An engine of no rows would step for ever."""
    with pytest.raises(ModelError, match=name):
        Engine.random("tiny", device="cpu", **{name: torch.float32 if name == "dtype" else 0})
