"""Published model configurations, as data, and the weights of their 1-, 2-, 4- and 8-way slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

WAYS = (1, 2, 4, 8)


class Model(NamedTuple):
    """A dense model as its config.json has it."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int = 0  # 0: no output layer
    is_gated: bool = True  # SwiGLU or GeGLU
    has_rope: bool = True


class Mixture(NamedTuple):
    """The experts of a model, of which a token takes `num_chosen`."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    num_chosen: int


class Attending(NamedTuple):
    """Attention of a model that is in neither list, or that differs from it.

    window: keys before a query that it sees in some layers, 0: all. softcap: of its scores.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_causal: bool = True
    window: int = 0
    softcap: float = 0.0


class Weight(NamedTuple):
    """One slice of a layer: out (m, n) = a (m, k) b (n, k)^T."""

    name: str
    n: int
    k: int


MODELS = (
    Model("Qwen2.5 0.5B", 896, 4864, 14, 2, 64, 151936),
    Model("Qwen2.5 1.5B", 1536, 8960, 12, 2, 128, 151936),
    Model("Qwen2.5 3B", 2048, 11008, 16, 2, 128, 151936),
    Model("Qwen2.5 7B", 3584, 18944, 28, 4, 128, 152064),
    Model("Qwen2.5 14B", 5120, 13824, 40, 8, 128, 152064),
    Model("Qwen2.5 32B", 5120, 27648, 40, 8, 128, 152064),
    Model("Qwen2.5 72B", 8192, 29568, 64, 8, 128, 152064),
    Model("Llama 3.2 1B", 2048, 8192, 32, 8, 64, 128256),
    Model("Llama 3.2 3B", 3072, 8192, 24, 8, 128, 128256),
    Model("Llama 3.1 8B", 4096, 14336, 32, 8, 128, 128256),
    Model("Llama 3.1 70B", 8192, 28672, 64, 8, 128, 128256),
    Model("Mistral Nemo 12B", 5120, 14336, 32, 8, 128, 131072),
    Model("Mistral Small 24B", 5120, 32768, 32, 8, 128, 131072),
    Model("Gemma 2 2B", 2304, 9216, 8, 4, 256, 256000),
    Model("Gemma 2 9B", 3584, 14336, 16, 8, 256, 256000),
    Model("Gemma 2 27B", 4608, 36864, 32, 16, 128, 256000),
    Model("Gemma 3 1B", 1152, 6912, 4, 1, 256, 262144),
    Model("Gemma 3 4B", 2560, 10240, 8, 4, 256, 262208),
    Model("Gemma 3 12B", 3840, 15360, 16, 8, 256, 262208),
    Model("Gemma 3 27B", 5376, 21504, 32, 16, 128, 262208),
    Model("OLMo 2 7B", 4096, 11008, 32, 32, 128, 100352),
    Model("OLMo 2 13B", 5120, 13824, 40, 40, 128, 100352),
    Model("OLMo 2 32B", 5120, 27648, 40, 8, 128, 100352),
    Model("DeepSeek V2 Lite", 2048, 10944, 16, 16, 128, 102400),
    Model("Phi 2", 2560, 10240, 32, 32, 80, 51200, is_gated=False),
    Model("Phi 3 mini", 3072, 8192, 32, 32, 96, 32064),
    Model("Phi 4", 5120, 17920, 40, 10, 128, 100352),
    Model("BERT base", 768, 3072, 12, 12, 64, is_gated=False, has_rope=False),
    Model("BERT large", 1024, 4096, 16, 16, 64, is_gated=False, has_rope=False),
    Model("ViT B", 768, 3072, 12, 12, 64, is_gated=False, has_rope=False),
    Model("ViT L", 1024, 4096, 16, 16, 64, is_gated=False, has_rope=False),
    Model("ViT H", 1280, 5120, 16, 16, 80, is_gated=False, has_rope=False),
    Model("ViT SO400M", 1152, 4304, 16, 16, 72, is_gated=False, has_rope=False),
    Model("Whisper large", 1280, 5120, 20, 20, 64, 51866, is_gated=False, has_rope=False),
    Model("GPT-2 XL", 1600, 6400, 25, 25, 64, 50257, is_gated=False, has_rope=False),
    Model("OPT 6.7B", 4096, 16384, 32, 32, 128, 50272, is_gated=False, has_rope=False),
)
MIXTURES = (
    Mixture("Mixtral 8x7B", 4096, 14336, 8, 2),
    Mixture("Mixtral 8x22B", 6144, 16384, 8, 2),
    Mixture("Qwen1.5 MoE A2.7B", 2048, 1408, 60, 4),
    Mixture("Qwen2 57B A14B", 3584, 2560, 64, 8),
    Mixture("Qwen3 30B A3B", 2048, 768, 128, 8),
    Mixture("Qwen3 235B A22B", 4096, 1536, 128, 8),
    Mixture("DeepSeek V2 Lite", 2048, 1408, 64, 6),
    Mixture("DeepSeek V3", 7168, 2048, 256, 8),
    Mixture("OLMoE 1B 7B", 2048, 1024, 64, 8),
    Mixture("Phi 3.5 MoE", 4096, 6400, 16, 2),
    Mixture("gpt-oss 20B", 2880, 2880, 32, 4),
)
# What MODELS leave out: windows and caps of models there, and attention without their products.
ATTENDING = (
    Attending("Gemma 2 2B", 8, 4, 256, window=4095, softcap=50.0),
    Attending("Gemma 2 9B", 16, 8, 256, window=4095, softcap=50.0),
    Attending("Gemma 2 27B", 32, 16, 128, window=4095, softcap=50.0),
    Attending("Gemma 3 1B", 4, 1, 256, window=511),
    Attending("Gemma 3 4B", 8, 4, 256, window=1023),
    Attending("Gemma 3 27B", 32, 16, 128, window=1023),
    Attending("Mistral 7B", 32, 8, 128, window=4095),
    Attending("Phi 3 mini", 32, 32, 96, window=2046),
    Attending("gpt-oss 20B", 64, 8, 64, window=127),
    Attending("ModernBERT base", 12, 12, 64, is_causal=False, window=64),
    Attending("Grok 1", 48, 8, 128, softcap=30.0),
    Attending("Falcon 7B", 71, 1, 64),
    Attending("Falcon 40B", 128, 8, 64),
    Attending("StarCoder 15B", 48, 1, 128),
    Attending("GPT-NeoX 20B", 64, 64, 96),
    Attending("DeepSeek V2 Lite expanded", 16, 16, 192),
    Attending("Zamba2 7B", 32, 32, 224),
    Attending("MiniLM L12", 12, 12, 32, is_causal=False),
    Attending("Stable Diffusion 1.5 64 x 64", 8, 8, 40, is_causal=False),
    Attending("Stable Diffusion 1.5 32 x 32", 8, 8, 80, is_causal=False),
    Attending("Stable Diffusion 1.5 16 x 16", 8, 8, 160, is_causal=False),
    Attending("ViT g", 16, 16, 88, is_causal=False),
    Attending("ViT bigG", 16, 16, 104, is_causal=False),
)


def attending() -> list[Attending]:
    """Every model that attends; models without rotated positions are encoders here."""
    others = {one.name for one in ATTENDING}
    plain = [
        Attending(x.name, x.num_heads, x.num_kv_heads, x.head_dim, x.has_rope)
        for x in MODELS
        if x.name not in others
    ]
    return [*plain, *ATTENDING]


def heads_of(model: Model | Attending, ways: int) -> tuple[int, int] | None:
    """Heads of queries and of keys of one slice; fewer key heads than slices are repeated."""
    if model.num_heads % ways or (model.num_kv_heads % ways and ways % model.num_kv_heads):
        return None
    return model.num_heads // ways, max(1, model.num_kv_heads // ways)


def weights_of(model: Model, ways: int) -> Iterator[Weight]:
    """The weights of one slice, as far as the model divides."""
    label = f"{model.name}/{ways}" if ways > 1 else model.name
    if (heads := heads_of(model, ways)) is not None:
        num_heads, num_kv_heads = heads
        yield Weight(f"{label} qkv", (num_heads + 2 * num_kv_heads) * model.head_dim, model.hidden)
        yield Weight(f"{label} o", model.hidden, num_heads * model.head_dim)
    if model.intermediate % ways == 0:
        rows = model.intermediate // ways
        up = Weight(f"{label} gate_up", 2 * rows, model.hidden)
        yield up if model.is_gated else Weight(f"{label} up", rows, model.hidden)
        yield Weight(f"{label} down", model.hidden, rows)
    if model.vocab and model.vocab % ways == 0:
        yield Weight(f"{label} vocab", model.vocab // ways, model.hidden)


def expert_weights_of(mixture: Mixture, ways: int) -> Iterator[Weight]:
    """The weights of one expert of one slice."""
    if mixture.intermediate % ways == 0:
        label = f"{mixture.name}/{ways}" if ways > 1 else mixture.name
        rows = mixture.intermediate // ways
        yield Weight(f"{label} gate_up", 2 * rows, mixture.hidden)
        yield Weight(f"{label} down", mixture.hidden, rows)
