"""The makers of rotation tables beside transformers' own, bit for bit, every rope_type by lot."""

from __future__ import annotations

import importlib
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import LlamaConfig  # noqa: E402
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.llama.modeling_llama import (  # noqa: E402
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding  # noqa: E402

from kernel_hub.ops import rope, rotary  # noqa: E402
from kernel_hub.testing.compare import check  # noqa: E402

KINDS = ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]


def config_of(kind: str, seed: int) -> tuple[Any, int]:
    """(a configuration, the original positions); whole factors, on which versions 4 and 5 agree."""
    lot = random.Random(f"{kind} {seed}")
    head_dim, part = lot.choice([32, 64, 80, 96, 128]), lot.choice([1.0, 0.5, 0.25])
    factor, original = float(lot.choice([2, 4, 8, 32])), lot.choice([2048, 4096, 8192])
    pairs = int(head_dim * part) // 2
    more = {
        "default": {},
        "linear": {"factor": factor},
        "dynamic": {"factor": factor},
        "yarn": {
            "factor": factor, "original_max_position_embeddings": original,
            **lot.choice([{}, {"beta_fast": 48.0, "beta_slow": 2.0}, {"attention_factor": 1.25},
                          {"mscale": 0.7, "mscale_all_dim": 1.1}]),
        },
        "longrope": {
            "short_factor": [1 + lot.random() for _ in range(pairs)],
            "long_factor": [1 + 30 * lot.random() for _ in range(pairs)],
            **lot.choice([{"factor": factor}, {"factor": factor, "attention_factor": 1.5}]),
        },
        "llama3": {
            "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        },
        "proportional": lot.choice([{}, {"factor": factor}]),
    }[kind]  # fmt: skip
    parameters = {"rope_type": kind, **more}
    options: dict[str, Any] = {
        "hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim,
        "max_position_embeddings": int(factor) * original,
    }  # fmt: skip
    if kind == "longrope":
        options["original_max_position_embeddings"] = original
    theta = lot.choice([10_000.0, 500_000.0, 1_000_000.0])
    if "default" in ROPE_INIT_FUNCTIONS:  # transformers 4
        scaling = None if kind == "default" else parameters
        config = LlamaConfig(**options, rope_theta=theta, rope_scaling=scaling)
        config.partial_rotary_factor = part
    else:
        parameters |= {"rope_theta": theta, "partial_rotary_factor": part}
        if kind == "longrope":
            parameters["original_max_position_embeddings"] = original
        config = LlamaConfig(**options, rope_parameters=parameters)
    return config, original


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_frequencies_are_transformers_own(kind: str, seed: int) -> None:
    if kind == "proportional" and kind not in ROPE_INIT_FUNCTIONS:
        pytest.skip("this version of transformers has no proportional rope_type")
    config, original = config_of(kind, seed)
    for seqlen in (None, original, original + 1, 3 * config.max_position_embeddings):
        ours = rotary.frequencies_of(config, seqlen=seqlen)
        if kind in ROPE_INIT_FUNCTIONS:
            theirs, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=seqlen)
        else:
            theirs, factor = PhiRotaryEmbedding.compute_default_rope_parameters(config)
        assert torch.equal(ours.inv_freq, theirs)
        assert ours.attention_factor == factor


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_and_what_rope_makes_of_them(kind: str, dtype: Any) -> None:
    config, _ = config_of(kind, 0)
    # Whole heads, as Llama's.
    config.partial_rotary_factor = 1.0
    if getattr(config, "rope_parameters", None):
        config.rope_parameters["partial_rotary_factor"] = 1.0
        scaling = config.rope_parameters
    else:
        scaling = config.rope_scaling or {}
    for name in ("short_factor", "long_factor"):
        if name in scaling:
            scaling[name] = [1.0 + i / 8 for i in range(config.head_dim // 2)]
    q, k = torch.randn(2, 4, 7, config.head_dim), torch.randn(2, 2, 7, config.head_dim)
    q, k = q.to(dtype), k.to(dtype)
    for rows in (1, 2):
        positions = torch.randint(0, 2000, (rows, 7))
        theirs = LlamaRotaryEmbedding(config)(q, positions)
        ours = rotary.embeddings(rotary.frequencies_of(config), positions, dtype=dtype)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
        found = rope(q.transpose(1, 2), k.transpose(1, 2), *ours)
        expected = apply_rotary_pos_emb(q, k, *theirs)
        truth = apply_rotary_pos_emb(q.double(), k.double(), *(x.double() for x in theirs))
        for mine, other, exact in zip(found, expected, truth, strict=True):
            check(mine.transpose(1, 2), exact, other)


@pytest.mark.parametrize(
    "module, name, section",
    [("qwen2_vl", "Qwen2VL", [4, 6, 6]), ("qwen3_vl", "Qwen3VLText", [6, 5, 5])],
)
def test_several_axes_are_qwens(module: str, name: str, section: list[int]) -> None:
    if module == "qwen3_vl" and "default" in ROPE_INIT_FUNCTIONS:
        pytest.skip("this version of transformers has no Qwen3-VL")
    theirs = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    models = importlib.import_module("transformers")
    parameters = {"rope_type": "default", "mrope_section": section}
    options = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}
    if "default" in ROPE_INIT_FUNCTIONS:
        config = models.Qwen2VLConfig(**options, rope_theta=1e6, rope_scaling=dict(parameters))
        config = getattr(config, "text_config", config)
    else:
        config = getattr(models, "Qwen3VLTextConfig" if "3" in name else "Qwen2VLTextConfig")(
            **options, rope_parameters={**parameters, "rope_theta": 1e6}
        )
    positions = torch.randint(0, 500, (3, 2, 9))
    q, k = torch.randn(2, 2, 9, 32), torch.randn(2, 1, 9, 32)
    rotation = getattr(theirs, f"{name}RotaryEmbedding")(config=config)
    cos, sin = rotation(q, positions)
    if cos.dim() == 4:  # transformers 4: an embedding an axis, joined in each layer
        expected = theirs.apply_multimodal_rotary_pos_emb(q, k, cos, sin, section)
    else:
        expected = apply_rotary_pos_emb(q, k, cos, sin)
    ours = rotary.embeddings(
        rotary.frequencies_of(config), positions, mrope_section=section,
        mrope_interleaved=module == "qwen3_vl",
    )  # fmt: skip
    if cos.dim() == 3:
        assert torch.equal(ours[0], cos) and torch.equal(ours[1], sin)
    found = rope(q.transpose(1, 2), k.transpose(1, 2), *ours)
    for mine, other in zip(found, expected, strict=True):
        check(mine.transpose(1, 2), other.double(), other)
