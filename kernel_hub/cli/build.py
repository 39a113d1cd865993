"""`kernel-hub build`: the builder, `python -m kernel_hub.build`, under one more name."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .parts.console import Parser

NAME = "build"
HELP = "build .cu files into a package's cubins (needs nvcc)"


def parser() -> argparse.ArgumentParser:
    """The builder's command line."""
    from ..build import parser

    return parser("kernel-hub build", Parser)


def run(argv: Sequence[str]) -> int:
    """Hand `argv` to the builder."""
    from ..build import main

    return main(argv, parser())
