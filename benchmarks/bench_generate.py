"""Prefill and decode of an 8B-shaped Llama of transformers, with random weights: accelerate(model)
beside the model as it is, by SDPA and a static cache, both as they are and under torch.compile.

Wall time of forwards, interleaved, each waited for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import OURS, Report, arguments

QUICK = {"rounds": 3, "layers": 4}
CONTEXT = 1024
COMPILED, PLAIN, OURS_COMPILED = "torch.compile", "sdpa", f"{OURS} torch.compile"


def model_of(layers: int) -> Any:
    """Llama 3 8B's sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).eval()


def step_of(model: Any, run: Any, batch_size: int, new_tokens: int) -> Callable[[], Any]:
    """A forward of `new_tokens` a sequence: a prompt into an empty cache, or one behind CONTEXT."""
    from transformers import StaticCache

    cache = StaticCache(
        config=model.config, max_batch_size=batch_size, max_cache_len=CONTEXT + 64,
        device="cuda", dtype=torch.bfloat16,
    )  # fmt: skip
    tokens = torch.randint(1, 1000, (batch_size, new_tokens), device="cuda")
    first = 0 if new_tokens > 1 else CONTEXT
    positions = torch.arange(first, first + new_tokens, device="cuda")

    # Its tensors are made at the first use: not by a graph, which would take them for its own.
    with torch.inference_mode():
        model(
            input_ids=tokens[:, :1], past_key_values=cache, position_ids=positions[None, :1],
            cache_position=positions[:1],
        )  # fmt: skip

    def step() -> Any:
        with torch.inference_mode():
            cache.reset()
            return run(
                input_ids=tokens, past_key_values=cache, position_ids=positions[None],
                cache_position=positions, logits_to_keep=1,
            ).logits  # fmt: skip

    return step


def seconds(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def run(options: argparse.Namespace) -> int:
    from kernel_hub.integrations.transformers import accelerate, restore

    report = Report("generate", options)
    model = model_of(options.layers)
    for case, batch_size, new_tokens in (
        ("decode b1", 1, 1), ("decode b16", 16, 1), ("prefill b1 1024", 1, CONTEXT),
    ):  # fmt: skip
        samples: dict[str, list[float]] = {}
        for name in (COMPILED, PLAIN, OURS, OURS_COMPILED):
            torch.compiler.reset()
            restore(model)
            if name in (OURS, OURS_COMPILED):
                print(accelerate(model))
            forward = model
            if name in (COMPILED, OURS_COMPILED):
                forward = torch.compile(model, mode="reduce-overhead")
            step = step_of(model, forward, batch_size, new_tokens)
            for _ in range(3):
                step()
            samples[name] = [seconds(step) * 1e6 for _ in range(options.rounds)]
            print(f"{case} {name} {statistics.median(samples[name]):.1f} us", flush=True)
        medians = report.case(case, samples, "us", ratio_to=COMPILED)
        print(case, {name: round(value, 1) for name, value in medians.items()}, flush=True)
    return report.done()


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--layers", type=int, default=32)

    return run(arguments(__doc__, rounds=15, quick=QUICK, more=more))


if __name__ == "__main__":
    sys.exit(main())
