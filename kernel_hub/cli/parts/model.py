"""Options that say which model and how it is to run, and the engine of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ModelError

if TYPE_CHECKING:
    from ...engine.engine import Engine

# Of Engine.from_pretrained, where their defaults are.
NUMBERS = {
    "max_model_len": "tokens of a prompt with its answer (default: the model's)",
    "drafts": "tokens to guess a pass (default 0)",
    "max_batch": "requests that run at once",
    "max_tokens_a_pass": "tokens of one pass, of prompts and answers together",
    "cache_tokens": "tokens that the cache holds (default: as free memory has room)",
}


def add_model(parser: argparse.ArgumentParser) -> None:
    """What says which model is run, and how much room it has."""
    group = parser.add_argument_group("model")
    group.add_argument("model", metavar="FOLDER", help="a folder, or 'tiny': random, of no use")
    group.add_argument(
        "--random-weights", action="store_true", help="of the folder, read config.json alone"
    )
    group.add_argument("--device", metavar="DEVICE", help="default: the GPU where there is one")
    group.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16", help="default bf16")
    group.add_argument(
        "--deterministic", choices=("batch",),
        help="batch: a request's tokens do not depend on what runs beside it (GPUs; slower)",
    )  # fmt: skip
    for name, text in NUMBERS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)


def opened(args: argparse.Namespace, **options: Any) -> Engine:
    """The engine that the arguments of `add_model` name."""
    from ... import ops  # noqa: F401 - where torch is missing, it says how to get it
    from ...arrays.interop import loaded_torch
    from ...engine.config import NAMED, how_to_get
    from ...engine.engine import Engine

    _check_device(args.device)
    given = {name: value for name in NUMBERS if (value := getattr(args, name)) is not None}
    dtype = getattr(loaded_torch(), {"bf16": "bfloat16", "fp16": "float16"}[args.dtype])
    if args.deterministic:
        given["deterministic"] = args.deterministic
    options = {"device": args.device, "dtype": dtype, **given, **options}
    if Path(args.model).is_dir():
        return Engine.from_pretrained(args.model, random_weights=args.random_weights, **options)
    if args.model not in NAMED:
        raise ModelError(f"there is no folder {args.model!r}{how_to_get(args.model)}")
    return Engine.random(args.model, **options)


def _check_device(name: str | None) -> None:
    """Raise ModelError where torch has no such device."""
    from ...arrays.interop import loaded_torch

    torch = loaded_torch()
    try:
        kind = torch.device(name or "cpu").type
    except RuntimeError:
        kind = "unknown"
    if kind not in ("cpu", "cuda"):
        raise ModelError(f"--device: expected cpu, cuda or cuda:N, found {name!r}")
    if kind == "cuda" and not torch.cuda.device_count():
        raise ModelError(f"--device {name}: torch {torch.__version__} sees no GPU here")
