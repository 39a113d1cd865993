"""Prefill and decode of an 8B-shaped Llama of transformers, with random weights: accelerate(model)
beside the model as it is, by SDPA and a static cache, both as they are and under torch.compile, and
with steps by CUDA graphs of our own.

Wall time of forwards, each waited for; steps go on behind a prompt, whose time does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from harness import OURS, Report, arguments

QUICK = {"rounds": 3, "layers": 4}
CONTEXT = 1024
# Name -> batch size, new tokens.
CASES = {"decode b1": (1, 1), "decode b16": (16, 1), "prefill b1 1024": (1, CONTEXT)}
COMPILED, PLAIN, OURS_COMPILED = "torch.compile", "sdpa", f"{OURS} torch.compile"
GRAPHS = f"{OURS} graphs"
CONTENDERS = (PLAIN, OURS, GRAPHS, COMPILED, OURS_COMPILED)


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


class Forwards:
    """Forwards of `new_tokens` a sequence: prompts, each into an empty cache, or, of one token,
    steps behind a prompt of CONTEXT, which the cache holds until start() is called again.
    """

    def __init__(self, model: Any, forward: Any, batch_size: int, new_tokens: int) -> None:
        from transformers import StaticCache

        self.model, self.forward, self.is_step = model, forward, new_tokens == 1
        self.cache = StaticCache(
            config=model.config, max_batch_size=batch_size, max_cache_len=CONTEXT + 64,
            device="cuda", dtype=torch.bfloat16,
        )  # fmt: skip
        self.prompt = torch.randint(1, 1000, (batch_size, CONTEXT), device="cuda")
        self.tokens = self.prompt[:, :new_tokens].contiguous()
        self.first = 0
        self._run(
            model, self.prompt
        )  # makes the cache's tensors: a graph would take them for its own
        self.start()

    def start(self) -> None:
        """Empty the cache; before steps, the prompt by the model as it is."""
        with torch.inference_mode():
            self.cache.reset()
        self.first = 0
        if self.is_step:
            self._run(self.model, self.prompt)

    def _run(self, forward: Any, tokens: Any) -> None:
        behind = self.first + tokens.shape[1]
        positions = torch.arange(self.first, behind, device="cuda")
        with torch.inference_mode():
            forward(
                input_ids=tokens, past_key_values=self.cache, position_ids=positions[None],
                cache_position=positions, logits_to_keep=1,
            )  # fmt: skip
        self.first = behind

    def __call__(self) -> float:
        """Microseconds of one."""
        if not self.is_step:
            self.start()
        torch.cuda.synchronize()
        began = time.perf_counter()
        self._run(self.forward, self.tokens)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e6


def run(options: argparse.Namespace) -> int:
    from kernel_hub.integrations.transformers import accelerate, restore

    report = Report("generate", options)
    model = model_of(options.layers)
    for case in options.case or CASES:
        batch_size, new_tokens = CASES[case]
        samples: dict[str, list[float]] = {}
        for name in options.contender or CONTENDERS:
            torch.compiler.reset()
            restore(model)
            if name in (OURS, GRAPHS, OURS_COMPILED):
                print(accelerate(model, graphs=name == GRAPHS))
            forward = model
            if name in (COMPILED, OURS_COMPILED):
                forward = torch.compile(model, mode="reduce-overhead")
            forwards = Forwards(model, forward, batch_size, new_tokens)
            for _ in range(4):
                forwards()
            samples[name] = [forwards() for _ in range(options.rounds)]
            print(f"{case} {name} {statistics.median(samples[name]):.1f} us", flush=True)
        base = COMPILED if COMPILED in samples else next(iter(samples))
        medians = report.case(case, samples, "us", ratio_to=base)
        print(case, {name: round(value, 1) for name, value in medians.items()}, flush=True)
    return report.done()


def main() -> int:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--layers", type=int, default=32)
        parser.add_argument("--case", action="append", choices=CASES, help="may be repeated")
        parser.add_argument("--contender", action="append", choices=CONTENDERS, help="the same")

    return run(arguments(__doc__, rounds=15, quick=QUICK, more=more))


if __name__ == "__main__":
    sys.exit(main())
