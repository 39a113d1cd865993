"""`kernel-hub cpm-alias`: run a program whose `import cpm_kernels` is kernel_hub's."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from pathlib import Path

from ..errors import CubinNotFoundError, KernelHubError, ParamsError
from ..integrations import cpm_kernels

NAME = "cpm-alias"
HELP = "run a Python script that launches kernels by cpm_kernels, on kernel_hub"
EXAMPLE = "kernel-hub cpm-alias --substitute -- chat.py --model chatglm3-6b"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--substitute",
        action="store_true",
        help="launch kernel_hub's own kernels where the program's have no code for the GPU",
    )
    parser.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="-- script.py args", help="what to run"
    )


def run(args: argparse.Namespace) -> int:
    command = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not command:
        raise ParamsError(f"no script is named, as in: {EXAMPLE}")
    path = Path(command[0])
    if not path.is_file():
        raise CubinNotFoundError(f"no script {command[0]!r} (looked at {path.absolute()})")
    cpm_kernels.install(substitute=args.substitute)
    sys.argv = command
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except KernelHubError:
        traceback.print_exc()  # the program's own, with its own lines
        return 1
    return 0
