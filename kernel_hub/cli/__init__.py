"""The `kernel-hub` command: one module a subcommand, each gathers data and prints it.

A command module has NAME, HELP, EXAMPLE, `arguments(parser)` and `run(args) -> exit code`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import KernelHubError
from . import (
    bench,
    build,
    build_triton,
    cpm_alias,
    demo,
    doctor,
    export,
    inspect,
    listing,
    new,
    tune,
    verify,
)

COMMANDS = (
    listing,
    inspect,
    doctor,
    verify,
    demo,
    bench,
    tune,
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
    args, unknown = _parser().parse_known_args(argv)
    if unknown:  # said with the usage of the command, not of them all
        args.usage.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = args.run(args)
        sys.stdout.flush()  # a closed pipe shows here, not at exit
        return code
    except KernelHubError as error:
        print(f"kernel-hub {args.command}: {error}", file=sys.stderr)
        return ERROR
    except BrokenPipeError:
        # The reader (head, less) has seen enough; keep the interpreter's last flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"kernel-hub {args.command}: {error.filename}: {error.strerror}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print(f"kernel-hub {args.command}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kernel-hub",
        description="Prebuilt CUDA kernels: what is shipped, what runs here, and how fast.",
    )
    parser.add_argument("--version", action="version", version=f"kernel_hub {__version__}")
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
    commands.add_parser(build.NAME, help=build.HELP)
    return parser
