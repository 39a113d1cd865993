"""`kernel-hub export`: shipped kernels as C sources, for programs without Python."""

from __future__ import annotations

import argparse

from ..formats import c_export
from . import _console
from ._gather import add_package

NAME = "export"
HELP = "write shipped kernels as .c and .h, cubins included, and a CMakeLists.txt"
EXAMPLE = "kernel-hub export rms_norm silu_and_mul --to kernels && cmake -S kernels -B build"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", help="cubins, as in kernel-hub list")
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to write to")
    parser.add_argument(
        "--arch", action="append", metavar="SM,SM", help="only these builds: sm80,sm90; repeatable"
    )
    parser.add_argument("--prefix", default="", help="put before each file's and function's name")
    parser.add_argument("--dlpack", action="store_true", help="also functions on DLTensors")
    parser.add_argument(
        "--tvm-ffi", action="store_true", help="also TVM-FFI functions (apache-tvm-ffi), and dlpack"
    )
    add_package(parser, default="kernel_hub")


def run(args: argparse.Namespace) -> int:
    written = c_export.export(
        args.names,
        args.to,
        package=args.package,
        archs=None if args.arch is None else ",".join(args.arch),
        prefix=args.prefix,
        dlpack=args.dlpack,
        tvm_ffi=args.tvm_ffi,
    )
    for path in written:
        _console.note(f"{path}  {_console.size(path.stat().st_size)}")
    return 0
