"""Small models of transformers with random weights, one of each family that the doors know."""

from __future__ import annotations

import copy
from typing import Any

import torch

from kernel_hub.testing.compare import check

# Tiny products: more threads than one wait for each other.
torch.set_num_threads(1)

SIZES = {
    "vocab_size": 199, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
# (class stem, what differs)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_theta": 1e4}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 37}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 37, "query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "Gemma3Text", {"sliding_window": 37, "query_pre_attn_scalar": 64},
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 4}),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
            "norm_topk_prob": True, "mlp_only_layers": [1],
        },
    ),
}  # fmt: skip
# What `register` takes and `accelerate` leaves alone. All experts are chosen: a router's choice of
# some would differ from one dtype to the next.
ATTENTION_ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": (
        "GptOss",
        {
            "sliding_window": 37, "num_local_experts": 3, "num_experts_per_tok": 3,
            "experts_implementation": "eager",
        },
    ),
}  # fmt: skip


def config_of(family: str, **more: Any) -> Any:
    """A configuration of the family."""
    import transformers

    stem, differs = {**FAMILIES, **ATTENTION_ALONE}[family]
    return getattr(transformers, f"{stem}Config")(**{**SIZES, **differs, **more})


def model_of(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any) -> Any:
    """A model of the family, whose norms and biases are random too, not 1 and 0."""
    import transformers

    stem, _ = {**FAMILIES, **ATTENTION_ALONE}[family]
    cls = getattr(transformers, f"{stem.removesuffix('Text')}ForCausalLM")
    torch.manual_seed(seed)
    model = cls(config_of(family, **more))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.2
            base = parameter if parameter.dim() == 1 else torch.zeros(())
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((base + scale * noise).to(dtype).float())
    # As `from_pretrained` leaves them: rounded frequencies are further off with every place.
    exact = {name: x for name, x in model.named_buffers() if name.endswith("inv_freq")}
    model = model.to(dtype).eval()
    for name, frequencies in exact.items():
        module, _, own = name.rpartition(".")
        setattr(model.get_submodule(module), own, frequencies)
    return model


def with_attention(model: Any, name: str) -> Any:
    """The same weights, attention by `name`."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name
            if hasattr(module.config, "_experts_implementation"):
                module.config._experts_implementation = "eager"  # others have no fp64
    return model


def truth_of(model: Any) -> Any:
    """The same weights in fp64, attention written out over transformers' own dense masks."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("truth", _written_out)
    AttentionMaskInterface.register("truth", AttentionMaskInterface._global_mapping["eager"])
    return with_attention(model, "truth").double()


def _written_out(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0,
    scaling: Any = None, softcap: Any = None, s_aux: Any = None, **more: Any,
) -> tuple[Any, None]:  # fmt: skip
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[2]]
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return (torch.softmax(scores, -1)[..., : key.shape[2]] @ value).transpose(1, 2), None


def tokens_of(batch_size: int, length: int, seed: int = 0) -> torch.Tensor:
    """Tokens by lot, none of them a pad."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SIZES["vocab_size"], (batch_size, length), generator=generator)


def logits_of(model: Any, **inputs: Any) -> torch.Tensor:
    """Logits without gradients."""
    with torch.no_grad():
        return model(**inputs).logits


def is_older() -> bool:
    """Whether models want cache_position and masks come by it."""
    import inspect

    from transformers.masking_utils import AttentionMaskInterface

    mask = AttentionMaskInterface._global_mapping["sdpa"]
    return "cache_position" in inspect.signature(mask).parameters


def _with_routes(model: Any, tokens: torch.Tensor, mask: Any) -> tuple[Any, list[torch.Tensor]]:
    """Logits, and those of the router of each layer that has one."""
    routes: list[torch.Tensor] = []

    def look(router: Any, given: Any, found: Any) -> None:
        routes.append((found if torch.is_tensor(found) else found[0]).double())

    routers = [module for name, module in model.named_modules() if name.endswith(".gate")]
    hooks = [router.register_forward_hook(look) for router in routers]
    logits = logits_of(model, input_ids=tokens, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    return logits, routes


class Models:
    """One model thrice: with our attention, in fp64, and by transformers' eager one in `dtype`."""

    def __init__(
        self, family: str, dtype: torch.dtype, attention: str = "kernel_hub", **more: Any
    ) -> None:
        self.own = with_attention(model_of(family, dtype, **more), "eager")
        self.truth = truth_of(self.own)
        self.ours = with_attention(self.own, attention)

    def check(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        """Logits of every token that is no pad, by the numeric rule; of mixtures of experts, up to
        the first token in a sequence that rounding sent elsewhere."""
        found, routes = zip(
            *(_with_routes(model, tokens, mask) for model in (self.ours, self.truth, self.own)),
            strict=True,
        )
        compared = torch.ones_like(tokens).bool() if mask is None else mask.bool()
        for ours, truth in zip(routes[0], routes[1], strict=True):
            k = self.own.config.num_experts_per_tok
            best, own = (logits.topk(k + 1, -1) for logits in (truth, ours))
            ways = [chosen.indices[:, :k].sort(-1).values for chosen in (best, own)]
            elsewhere = (ways[0] != ways[1]).any(-1) | (own.values[:, -2] == own.values[:, -1])
            elsewhere &= compared.flatten()
            ahead = (best.values[:, -2] - best.values[:, -1])[elsewhere]
            assert (ahead < 0.05 * truth.std()).all(), f"other experts, and no tie: {ahead}"
            compared = compared & (elsewhere.view(tokens.shape).cumsum(-1) == 0)
        assert compared.any()
        check(*(logits[compared] for logits in found))

    def check_greedy(
        self, tokens: torch.Tensor, mask: torch.Tensor, cache: str, new_tokens: int
    ) -> None:
        """Each token that ours chooses is the best of fp64's scores, or a tie: worse by no more
        than twice what the model's own dtype errs, and an ulp."""
        is_static = cache == "static" and getattr(self.ours, "_supports_static_cache", True)
        more = {"cache_implementation": "static"} if is_static else {}
        found = self.ours.generate(
            tokens, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False,
            disable_compile=True, **more,
        )  # fmt: skip
        whole = torch.cat((mask, torch.ones_like(found[:, mask.shape[1] :])), 1)
        scores, own = (
            logits_of(model, input_ids=found, attention_mask=whole)[:, tokens.shape[1] - 1 : -1]
            for model in (self.truth, self.own)
        )
        error = (own.double() - scores).abs().max()
        limit = 2 * (2 * error + torch.finfo(own.dtype).eps * scores.abs().max())
        chosen = found[:, tokens.shape[1] :, None]
        behind = scores.max(-1).values - scores.gather(-1, chosen)[..., 0]
        assert (behind <= limit).all(), (
            f"a token {behind.max():.3g} behind the best, not {limit:.3g}"
        )
