"""`kernel-hub generate`: a model's folder and a prompt to text, as it comes."""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .parts import console, step_report
from .parts.model import add_model, opened

if TYPE_CHECKING:
    from ..engine.engine import Engine

NAME = "generate"
HELP = "text by a model of a Hugging Face folder, on the GPU or the CPU"
EXAMPLE = "kernel-hub generate Qwen3-8B --chat --prompt 'Why is the sky blue?'"


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="what to go on from; may be repeated"
    )
    parser.add_argument("--chat", action="store_true", help="prompts are messages of a user")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0: the likeliest token"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default 1: all")
    parser.add_argument("--seed", type=int, metavar="N", help="of the draws; default: another each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--report", nargs="?", const="", metavar="FILE.png",
        help="then say a decode step behind the prompts op by op; FILE.png: draw it (matplotlib)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    from ..engine.requests import SamplingParams

    step_report.check_ready(args.report)
    engine = opened(args)
    if engine.group.rank:
        engine.follow()
        return 0
    try:
        params = SamplingParams(
            max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p,
            seed=args.seed,
        )  # fmt: skip
        given = args.prompt or [sys.stdin.read() if not sys.stdin.isatty() else "Hello"]
        # Bytes that are no UTF-8, and characters that the terminal has not, end nothing.
        prompts = [text.encode(errors="surrogateescape").decode(errors="replace") for text in given]
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        ids = [
            engine.chat([{"role": "user", "content": text}]) if args.chat else engine.encode(text)
            for text in prompts
        ]
        if args.json:
            answers = engine.generate(ids, params)
            console.as_json(
                [{"prompt": p, **a._asdict()} for p, a in zip(prompts, answers, strict=True)]
            )
            return int(any(answer.error for answer in answers))
        code = max(_shown(engine, each, params) for each in ids)
        if args.report is not None:
            _report(engine, ids, args.report)
        return code
    finally:
        engine.close()


def _shown(engine: Engine, prompt: list[int], params: Any) -> int:
    """Print an answer as it comes."""
    from ..engine.requests import Request

    engine.submit(Request("generate", tuple(prompt), params))
    error = None
    while engine.has_work:
        for delta in engine.step():
            print(delta.text, end="", flush=True)
            error = delta.error or error
    print()
    if error:
        console.note(error)
    return int(error is not None)


def _report(engine: Engine, prompts: list[list[int]], picture: str) -> None:
    from ..measure.steps.decode import decode_step

    step = decode_step(engine, prompts)
    step_report.show(step)
    if picture:
        step_report.draw(step, Path(picture))
