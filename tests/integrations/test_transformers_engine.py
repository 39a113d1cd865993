"""The engine beside transformers: the same folder, the same tokens, for every family it runs."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the ops are torch ops")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="models are read by safetensors")

import tiny_models  # noqa: E402
from lots import Lots  # noqa: E402
from tiny_models import FAMILIES, is_older, logits_of, model_of, truth_of  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402

from kernel_hub.engine.config import ModelConfig  # noqa: E402
from kernel_hub.engine.engine import Engine  # noqa: E402
from kernel_hub.engine.requests import SamplingParams  # noqa: E402
from kernel_hub.engine.text import Tokenizer  # noqa: E402
from kernel_hub.errors import RequestError  # noqa: E402
from kernel_hub.ops import rotary  # noqa: E402
from kernel_hub.testing.compare import check  # noqa: E402

VOCAB = 199
ALL_EXPERTS = {"mixtral": {"num_experts_per_tok": 6}, "qwen3_moe": {"num_experts_per_tok": 8}}


def saved(family: str, folder: Path, dtype: Any, **more: Any) -> Any:
    """A model of the family, and its folder as save_pretrained writes it."""
    model = model_of(family, dtype, **more)
    model.save_pretrained(folder)
    return model


def scores_of(
    model: Any, engine: Engine, prompts: list[list[int]], count: int
) -> tuple[Any, Any, Any, Any]:
    """Log-probabilities of all tokens at every place by the engine, by the model in fp64 on the
    very tokens that the engine chose, and by the model; and these tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=count, logprobs=VOCAB)
    answers = engine.generate(prompts, params)
    model.config._experts_implementation = "eager"  # others have no fp64
    truth_model = truth_of(model)
    ours, truth, own = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (answer.error, answer.finish_reason, len(answer.tokens)) == (None, "length", count)
        tokens = torch.tensor([[*prompt, *answer.tokens]])
        for place in answer.logprobs:
            row = torch.empty(VOCAB)
            for token, score in place.top:
                row[token] = score
            assert place.logprob == row[place.token] == row.max()
            ours.append(row)
        for each, found in ((truth_model, truth), (model, own)):
            logits = logits_of(each, input_ids=tokens)[0, len(prompt) - 1 : -1]
            found.append(torch.log_softmax(logits.double(), -1))
    chosen = torch.tensor([token for answer in answers for token in answer.tokens])
    return torch.stack(ours), torch.cat(truth), torch.cat(own).to(model.dtype), chosen


def check_answers(model: Any, engine: Engine, prompts: list[list[int]], count: int) -> None:
    """Scores by the numeric rule, and each choice the best or a tie."""
    ours, scores, theirs, chosen = scores_of(model, engine, prompts, count)
    check(ours, scores, theirs)
    behind = scores.max(-1).values - scores.gather(-1, chosen[:, None])[:, 0]
    error = (theirs.double() - scores).abs().max()
    assert (behind <= 4 * error).all(), f"{behind.max():.3g} behind the best, error {error:.3g}"


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    """Prompts longer than a window and a pass, beside short ones, in a cache of small pages."""
    lot = Lots(f"engine {family}")
    dtype = lot.choice([torch.bfloat16, torch.float16])
    # All experts: where two are as good, rounding would choose.
    more = {"seed": lot.randrange(2**31), **ALL_EXPERTS.get(family, {})}
    model = saved(family, tmp_path, dtype, **more)
    engine = Engine.from_pretrained(
        tmp_path, dtype=dtype, device="cpu", page_size=16, max_tokens_a_pass=lot.choice([48, 512]),
        drafts=lot.choice([0, 3]),
    )  # fmt: skip
    prompts = [
        [lot.randrange(1, VOCAB) for _ in range(length)] for length in (1, 17, lot.randint(60, 120))
    ]
    try:
        check_answers(model, engine, prompts, 12)
        check_answers(model, engine, prompts, 5)  # behind prefixes that the cache holds
    except AssertionError as error:
        raise AssertionError(str(lot)) from error


@pytest.mark.parametrize("family", ALL_EXPERTS)
def test_some_experts(family: str, tmp_path: Path) -> None:
    """Most places are right: rounding sends few tokens to other experts."""
    lot = random.Random(family)
    model = saved(family, tmp_path, torch.float16)
    engine = Engine.from_pretrained(tmp_path, dtype=torch.float16, device="cpu", page_size=16)
    prompts = [[lot.randrange(1, VOCAB) for _ in range(9)] for _ in range(6)]
    ours, scores, theirs, _ = scores_of(model, engine, prompts, 8)
    found, own = ((each.double() - scores).abs().amax(-1).median() for each in (ours, theirs))
    assert found <= 2 * own + 1e-3, (found, own)


TEMPLATE = """{% for message in messages %}{{ bos_token }}{{ message.role }}
{{ message.content | trim }}
{% if message.role == 'system' and not loop.first %}
{{ raise_exception('a system message comes first') }}
{%- endif %}
{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}assistant
{% endif %}"""
TEXTS = [
    "plain words",
    "",
    "  blanks  and\nlines",
    "naïve 🙂🙂 €",
    "日本語のテキスト",
    "<s>special</s>",
]


def tokenizer_into(folder: Path) -> Any:
    """A tokenizer of bytes and a few merges, with a chat template, as transformers saves it."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(["plain words and more plain words, assistant user"] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return fast


def test_texts_and_conversations(tmp_path: Path) -> None:
    """The tokens of transformers' own tokenizer, of any text and of any conversation."""
    fast = tokenizer_into(tmp_path)
    saved("qwen3", tmp_path, torch.bfloat16, vocab_size=len(fast), eos_token_id=1)
    engine = Engine.from_pretrained(tmp_path, device="cpu")
    assert engine.tokenizer is not None and engine.eos_token_ids == {1}
    for text in TEXTS:
        assert engine.encode(text) == fast.encode(text)
        assert engine.decode(engine.encode(text)) == fast.decode(
            fast.encode(text), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    lot = random.Random(3)
    for i in range(20):
        messages = [
            {"role": lot.choice(["user", "assistant"]), "content": lot.choice(TEXTS)}
            for _ in range(lot.randint(1, 5))
        ]
        more: dict[str, Any] = {"add_generation_prompt": i % 2 == 0}
        if i % 3 == 0:
            more["tools"] = [{"type": "function", "function": {"name": "naïve"}}]
        whole = fast.apply_chat_template(messages, tokenize=False, **more)
        assert engine.chat(messages, **more) == fast.encode(whole, add_special_tokens=False)
    with pytest.raises(RequestError, match="a system message comes first"):
        engine.chat([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])
    # What streams is what all tokens decode to, whatever they are.
    params = SamplingParams(temperature=3.0, max_tokens=60, ignore_eos=True, seed=2)
    for answer in engine.generate(TEXTS[:1] * 8, [replace(params, seed=i) for i in range(8)]):
        assert answer.text == engine.decode(answer.tokens)


ODD_TEMPLATES: list[Any] = [
    "{% for m in messages %}{{ m.role }}:\n  {% generation %}{{ m.content }}{% endgeneration %}\n"
    "{%- generation -%} {{ m.role }} {%- endgeneration +%}\n{% endfor %}",
    "{{ messages | tojson(ensure_ascii=True, indent=1) }}{{ messages | tojson(sort_keys=True) }}",
    "{% if tools is none %}nothing{% endif %}{% if documents is none %} at all{% endif %}",
    {"default": "plain {{ messages[0].content }}", "tool_use": "{{ tools | tojson }} in use"},
]


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("template", ODD_TEMPLATES, ids=range(4))
def test_odd_templates(template: Any, in_files: bool, tmp_path: Path) -> None:
    """Tags around what is trained on, a template for tools, options of filters."""
    fast = tokenizer_into(tmp_path)
    fast.chat_template = template
    fast.save_pretrained(tmp_path / "own", save_jinja_files=in_files)
    own = Tokenizer(tmp_path / "own")
    for more in ({}, {"tools": [{"type": "function", "function": {"name": "naïve"}}]}):
        for texts in (["é"], ["a ", " b", "c"]):
            messages = [{"role": "user", "content": text} for text in texts]
            whole = fast.apply_chat_template(messages, tokenize=False, **more)
            assert own.chat(messages, **more) == fast.encode(whole, add_special_tokens=False)


NAMED = ["<s>", "</s>", "<new>", "<zz>", "plain", "<im>", "<x>", "<y>"]
LISTS = ("extra_special_tokens", "additional_special_tokens")


def drawn_token(lot: Lots, text: str) -> dict[str, Any]:
    """A token as files spell it."""
    likely = {"lstrip": 0.2, "rstrip": 0.2, "normalized": 0.3, "special": 0.6, "single_word": 0.0}
    return {"content": text, **{name: lot.random() < p for name, p in likely.items()}}


@pytest.mark.skipif(is_older(), reason="transformers 5 reads them so")
def test_special_tokens_wherever_a_folder_has_them(tmp_path: Path) -> None:
    """In tokenizer.json, tokenizer_config.json, an older special_tokens_map.json; by name, in a
    list, as tokens that are added or are none yet. A text is spelled in one way by all names."""
    import tokenizers
    from transformers import AutoTokenizer

    tokenizer_into(tmp_path)
    lot = Lots("engine special tokens")
    names = ("bos_token", "eos_token", "pad_token", "unk_token", "image_token")
    template = "".join(f"{{{{ {name} }}}}|" for name in (*names, "odd_token"))
    for i in range(60):
        folder = tmp_path / str(i)
        folder.mkdir()
        made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        for text in lot.sample(NAMED, lot.randint(0, 4)):
            made.add_tokens([tokenizers.AddedToken(**drawn_token(lot, text))])
        made.save(str(folder / "tokenizer.json"))
        spelled: dict[str, Any] = {
            text: lot.choice([text, {"__type": "AddedToken", **drawn_token(lot, text)}])
            for text in NAMED
        }
        file: dict[str, Any] = {name: lot.choice(NAMED) for name in names if lot.random() < 0.6}
        file = {name: spelled[text] for name, text in file.items()}
        if lot.random() < 0.5:
            file[lot.choice(LISTS)] = [spelled[text] for text in lot.sample(NAMED, 2)]
        elif lot.random() < 0.3:
            file["extra_special_tokens"] = {"odd_token": spelled[lot.choice(NAMED)]}
        if lot.random() < 0.5:
            tokens = {token.pop("id"): token for token in json.loads(made.to_str())["added_tokens"]}
            for token in tokens.values():
                token["special"] ^= lot.random() < 0.2
            news = [text for text in NAMED if made.token_to_id(text) is None]
            if news and lot.random() < 0.4:
                tokens[500] = drawn_token(lot, news[0])
            file["added_tokens_decoder"] = tokens
        file |= {"chat_template": template + "{{ messages[0].content }}"}
        file |= {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(file))
        if lot.random() < 0.4:
            older = {name: spelled[lot.choice(NAMED)] for name in names[:4] if lot.random() < 0.5}
            if lot.random() < 0.4:
                older[LISTS[1]] = [spelled[text] for text in lot.sample(NAMED, 2)]
            (folder / "special_tokens_map.json").write_text(json.dumps(older))
        (folder / "config.json").write_text('{"model_type": "llama"}')
        own, truth = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        for text in ("more plain <new></s> words<zz> ", " <s> more <x> <y> <im> plain"):
            assert own.encode(text) == truth.encode(text), (i, lot, file)
            messages = [{"role": "user", "content": text}]
            whole = truth.apply_chat_template(messages, tokenize=False)
            wanted = truth.encode(whole, add_special_tokens=False)
            assert own.chat(messages) == wanted, (i, lot, file)
            assert own.decode(wanted) == truth.decode(
                wanted, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ), (i, lot, file)


LEFT_OUT = {
    "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "sliding_window",
    "use_sliding_window", "max_window_layers", "layer_types", "attention_bias", "hidden_act",
    "hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "norm_topk_prob",
    "final_logit_softcapping", "num_local_experts", "num_experts", "num_experts_per_tok",
    "moe_intermediate_size", "mlp_only_layers", "decoder_sparse_step", "rope_parameters",
}  # fmt: skip


@pytest.mark.skipif(is_older(), reason="transformers 5 reads them so")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_file_leaves_out_is_what_the_class_has(family: str) -> None:
    lot = Lots(f"engine left out {family}")
    for _ in range(20):
        file = tiny_models.config_of(family, num_hidden_layers=lot.choice([1, 2, 7])).to_dict()
        for name in [name for name in file if name in LEFT_OUT and lot.random() < 0.3]:
            del file[name]
        truth = type(tiny_models.config_of(family))(
            **{k: v for k, v in file.items() if k != "model_type"}
        )
        found = ModelConfig.from_dict(copy.deepcopy(file))
        head_dim = getattr(truth, "head_dim", None) or truth.hidden_size // 4
        kinds = getattr(truth, "layer_types", None) or ["sliding_attention"] * len(found.layers)
        window = getattr(truth, "sliding_window", None) or 0
        assert (
            found.head_dim, found.num_kv_heads, found.eps, found.is_tied, found.attn_softcap,
            [layer.window + 1 for layer in found.layers],
        ) == (
            head_dim, truth.num_key_value_heads, truth.rms_norm_eps, truth.tie_word_embeddings,
            getattr(truth, "attn_logit_softcapping", None) or 0.0,
            [window if kind == "sliding_attention" else 0 for kind in kinds],
        ), (lot, sorted(file))  # fmt: skip
        for kind in {layer.rope for layer in found.layers}:
            theta = (truth.rope_parameters[kind] if kind else truth.rope_parameters)["rope_theta"]
            plain = theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
            own = rotary.frequencies_of(found.raw, layer_type=kind).inv_freq
            assert torch.allclose(own, plain), (lot, theta)


@pytest.mark.skipif(is_older(), reason="transformers 5 reads them so")
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_sizes_that_a_text_config_leaves_out_are_those_of_its_class(family: str) -> None:
    """As LLaVA 1.5's and 1.6's, Qwen2-Audio's and Gemma 3's files do."""
    truth = type(tiny_models.config_of(family))()
    inside = {"model_type": truth.model_type}
    found = ModelConfig.from_dict({"model_type": "other", "text_config": inside})
    assert (
        found.hidden_size, found.intermediate_size, len(found.layers), found.num_heads,
        found.num_kv_heads, found.vocab_size, found.max_position,
    ) == (
        truth.hidden_size, truth.intermediate_size, truth.num_hidden_layers,
        truth.num_attention_heads, truth.num_key_value_heads, truth.vocab_size,
        truth.max_position_embeddings,
    )  # fmt: skip


ROPES = [
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
]  # fmt: skip


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_scaled_rotations(rope: dict[str, Any], tmp_path: Path) -> None:
    key = "rope_scaling" if is_older() else "rope_parameters"
    given = rope if is_older() else {"rope_theta": 1e4, **rope}
    model = saved(
        "llama", tmp_path, torch.float16, attention_bias=True, mlp_bias=True, **{key: given}
    )
    engine = Engine.from_pretrained(tmp_path, dtype=torch.float16, device="cpu")
    lot = random.Random(8)
    check_answers(model, engine, [[lot.randrange(1, VOCAB) for _ in range(200)]], 5)


@pytest.mark.skipif(is_older(), reason="transformers 4 reckons the factor from two lengths")
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_older_spellings_of_rotations(rope: dict[str, Any], tmp_path: Path) -> None:
    """rope_theta beside rope_scaling: a factor that is given counts, whatever the lengths."""
    saved("llama", tmp_path, torch.float16)
    file = json.loads((tmp_path / "config.json").read_text())
    del file["rope_parameters"]
    spelled = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    older = {"rope_theta": 5e4, "rope_scaling": spelled, "max_position_embeddings": 512}
    truth = tiny_models.config_of("llama", **older)
    found = ModelConfig.from_dict(file | older)
    wanted, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](truth, torch.device("cpu"))
    own = rotary.frequencies_of(found.raw)
    assert torch.equal(own.inv_freq, wanted) and own.attention_factor == pytest.approx(factor)
