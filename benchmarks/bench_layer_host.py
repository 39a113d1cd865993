"""What a decoder layer of transformers costs the host: as it is by SDPA, with attention by
`register()`, and with all that `accelerate(model)` replaces.

Small layers, so that the GPU is never what is waited for: the time until a forward's launches are
enqueued, of a model of many layers less that of one of few, a layer. Steps of one token behind a
short prompt, and that prompt.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import OURS, Report, arguments

FEW, MANY = 2, 10
PROMPT = 16
SDPA, ATTENTION = "sdpa", f"{OURS} attention"
SIZES = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
FAMILIES = ("Llama", "Qwen3")
KINDS = ("step, static cache", "step, dynamic cache", "prompt")


def model_of(family: str, layers: int, contender: str) -> Any:
    import transformers

    from kernel_hub.integrations.transformers import accelerate, register

    config = getattr(transformers, f"{family}Config")(
        **SIZES, num_hidden_layers=layers, attn_implementation="sdpa"
    )
    with torch.device("cuda"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval()
    if contender == OURS:
        accelerate(model)
    elif contender == ATTENTION:
        register()
        model.set_attn_implementation("kernel_hub")
    return model


def forward_of(model: Any, kind: str) -> Callable[[], float]:
    """Microseconds of the host for one more forward."""
    from transformers import DynamicCache, StaticCache

    prompt = torch.randint(1, SIZES["vocab_size"], (1, PROMPT), device="cuda")
    token = prompt[:, :1].contiguous()
    places = torch.arange(PROMPT, device="cuda")[None]
    state: dict[str, Any] = {"at": 0}

    def start() -> None:
        static = {"config": model.config, "max_cache_len": 1024}
        state["cache"] = StaticCache(**static) if "static" in kind else DynamicCache()
        state["at"] = PROMPT
        if kind != "prompt":
            forward(prompt, places)

    def forward(tokens: Any, positions: Any) -> None:
        with torch.inference_mode():
            model(
                input_ids=tokens, past_key_values=state["cache"], position_ids=positions,
                logits_to_keep=1,
            )  # fmt: skip

    def run() -> float:
        if kind == "prompt" or not 0 < state["at"] < 512:
            start()
        positions = places if kind == "prompt" else places[:, :1] + state["at"]
        tokens = prompt if kind == "prompt" else token
        torch.cuda.synchronize()
        began = time.perf_counter()
        forward(tokens, positions)
        took = (time.perf_counter() - began) * 1e6
        state["at"] += 1
        return took

    return run


def run(options: argparse.Namespace) -> int:
    """Every family and kind, the contenders and both depths in random turn."""
    report = Report("layer_host", options)
    for family in FAMILIES:
        names = (SDPA, ATTENTION, OURS)
        models = {(x, n): model_of(family, n, x) for x in names for n in (FEW, MANY)}
        for kind in KINDS:
            calls = {key: forward_of(model, kind) for key, model in models.items()}
            samples: dict[Any, list[float]] = {key: [] for key in calls}
            for i in range(-5, options.rounds):
                for key in random.sample(list(calls), len(calls)):
                    took = calls[key]()
                    if i >= 0:
                        samples[key].append(took)
            layers = {
                x: [
                    (many - few) / (MANY - FEW)
                    for few, many in zip(samples[x, FEW], samples[x, MANY], strict=True)
                ]
                for x in names
            }
            medians = report.case(f"{family}, {kind}", layers, "us", ratio_to=SDPA)
            print(f"{family}, {kind}:", {x: round(us, 1) for x, us in medians.items()}, flush=True)
    return report.done()


def main() -> int:
    return run(arguments(__doc__, rounds=60, quick={"rounds": 15}))


if __name__ == "__main__":
    sys.exit(main())
