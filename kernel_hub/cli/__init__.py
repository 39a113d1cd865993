"""The `kernel-hub` command: one module a subcommand, each gathers data and prints it.

A command module has NAME, HELP, EXAMPLE, `arguments(parser)` and `run(args) -> exit code`.
"""

from __future__ import annotations

import argparse
import ast
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import __version__, tuning
from ..archs import ARCHS
from ..errors import KernelHubError
from ..registry import DTYPE_TOKENS, own, packages
from . import (
    bench,
    build,
    build_triton,
    cpm_alias,
    demo,
    doctor,
    export,
    generate,
    inspect,
    listing,
    new,
    serve,
    tune,
    verify,
)
from .parts import completion
from .parts.console import Parser, complain

COMMANDS = (
    listing,
    inspect,
    doctor,
    verify,
    demo,
    generate,
    bench,
    tune,
    serve,
    new,
    export,
    build_triton,
    cpm_alias,
)
ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code (2 for an error that the message explains)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == [build.NAME]:  # its options are the builder's own to parse
        return build.run(argv[1:])
    parser, commands = _parser()
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(ERROR)
    if argv[:1] == ["--completion"]:
        return _complete(parser, commands, argv[1:])
    args, unknown = parser.parse_known_args(argv)
    if unknown:  # said with the usage of the command, not of them all
        args.usage.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = args.run(args)
        sys.stdout.flush()  # a closed pipe shows here, not at exit
        return code
    except KernelHubError as error:
        complain(f"kernel-hub {args.command}: {error}")
        return ERROR
    except BrokenPipeError:
        # The reader (head, less) has seen enough; keep the interpreter's last flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        complain(f"kernel-hub {args.command}: {error.filename}: {error.strerror}")
        return ERROR
    except KeyboardInterrupt:
        print(f"kernel-hub {args.command}: interrupted", file=sys.stderr)
        return 130


def _complete(
    parser: argparse.ArgumentParser,
    commands: dict[str, argparse.ArgumentParser],
    asked: Sequence[str],
) -> int:
    """Print the script for the shell that is asked for."""
    if len(asked) != 1 or asked[0] not in completion.SHELLS:
        parser.error(f"--completion takes one of {', '.join(completion.SHELLS)}")
    commands = {**commands, build.NAME: build.parser()}
    helps = {module.NAME: module.HELP for module in (*COMMANDS, build)}
    try:
        cubins = list(own)
    except KernelHubError:  # a checkout before its first build
        cubins = []
    words = {
        inspect.NAME: cubins,
        export.NAME: cubins,
        bench.NAME: _ops(),
        tune.NAME: sorted(
            path.stem for path in Path(tuning.__file__).with_name("shipped").glob("*.json")
        ),
    }
    values = {"arch": ARCHS, "dtype": DTYPE_TOKENS, "package": packages()}
    found = completion.completed(commands, helps, words, values)
    print(completion.script(asked[0], found), end="")
    return 0


def _ops() -> list[str]:
    """The names of the ops as they are written: importing them takes torch, and seconds."""
    try:
        text = Path(__file__).parent.with_name("ops").joinpath("__init__.py").read_text()
    except OSError:  # a zip import
        return []
    (names,) = (
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return list(ast.literal_eval(names))


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The command line, and the parser of each command."""
    parser = Parser(
        prog="kernel-hub",
        description="Prebuilt CUDA kernels: what is shipped, what runs here, and how fast.",
    )
    parser.add_argument("--version", action="version", version=f"kernel_hub {__version__}")
    parser.add_argument(
        "--completion", choices=completion.SHELLS, help="print a script that completes commands"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        command = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.HELP[:1].upper() + module.HELP[1:] + ".",
            epilog=f"example: {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.arguments(command)
        command.set_defaults(run=module.run, usage=command)
    found: dict[str, argparse.ArgumentParser] = dict(commands.choices)
    commands.add_parser(build.NAME, help=build.HELP)
    return parser, found
