"""Text by a whole model: of the folder that is named, or a tiny one of random weights."""

import sys

import torch

from kernel_hub.engine.engine import Engine
from kernel_hub.engine.requests import SamplingParams

if not torch.cuda.is_available():
    print("needs an NVIDIA GPU: without one the ops run their reference on the CPU")
    torch.set_num_threads(1)

# Five lines to text: of a folder as Hugging Face has them, or of nothing (and so it reads).
engine = Engine.from_pretrained(sys.argv[1]) if len(sys.argv) > 1 else Engine.random("tiny")
letters = {} if len(sys.argv) > 1 else dict.fromkeys(b" abcdefghijklmnopqrstuvwxyz", 50.0)
params = SamplingParams(temperature=0.8, seed=1, max_tokens=40, logit_bias=letters)
prompts = ["Once upon a time", "The sea"]
for prompt, answer in zip(prompts, engine.generate(prompts, params), strict=True):
    print(f"{prompt}: {answer.text!r} ({answer.finish_reason})")

if len(sys.argv) == 1:  # a draw belongs to its place, however a prompt is cut into passes
    small = Engine.random("tiny", max_tokens_a_pass=5, page_size=8, cache_tokens=256)
    again = small.generate(prompts, params)[1]
    print(f"in passes of 5 tokens at most: {again.text!r}")
    print(small.stats())
