"""Options that say which model and how it is to run, and the engine of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...engine.engine import Engine

# Of Engine.from_pretrained, where their defaults are.
NUMBERS = {
    "max_batch": "requests that run at once",
    "max_tokens_a_pass": "tokens of one pass, of prompts and answers together",
    "max_model_len": "tokens of a prompt with its answer (default: the model's)",
    "cache_tokens": "tokens that the cache holds (default: what the free memory does)",
    "drafts": "guessed tokens that a pass verifies",
}


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model by its folder, and the engine's options."""
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, or `tiny`")
    parser.add_argument("--name", help="what it is called (default: as its folder)")
    parser.add_argument("--random-weights", action="store_true", help="read no weights, draw them")
    parser.add_argument("--device", help="cuda or cpu (default: a GPU where there is one)")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="default bf16")
    for name, text in NUMBERS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, metavar="N", help=text)


def opened(args: argparse.Namespace) -> Engine:
    """The engine that `args` asks for."""
    import torch

    from ...engine.engine import Engine

    names = ("name", "device", "random_weights", *NUMBERS)
    options = {name: value for name in names if (value := getattr(args, name))}
    options["dtype"] = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    if Path(args.model).is_dir():
        return Engine.from_pretrained(args.model, **options)
    return Engine.random(args.model, **options)
