"""`kernel-hub export`: kernels as C sources, for programs without Python."""

from __future__ import annotations

import argparse

from ..archs import tokens_of
from ..errors import KernelHubError
from ..formats import c_export
from . import _console
from ._gather import add_arch, add_package

NAME = "export"
HELP = "write kernels as .c and .h, cubins included, and a CMakeLists.txt"
EXAMPLE = "kernel-hub export rms_norm silu_and_mul --to kernels && cmake -S kernels -B build"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="+", metavar="NAME",
        help="a cubin as in kernel-hub list, a Triton kernel of --package in all its "
        "configurations, or a path: .cubin, .fatbin, .ptx, a C source with arrays, .cu, a folder "
        "with a collection",
    )  # fmt: skip
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to write to")
    add_arch(parser, "only these builds")
    parser.add_argument("--prefix", default="", help="put before each file's and function's name")
    parser.add_argument("--dlpack", action="store_true", help="also functions on DLTensors")
    parser.add_argument(
        "--tvm-ffi", action="store_true", help="also TVM-FFI functions (apache-tvm-ffi), and dlpack"
    )
    parser.add_argument(
        "--signature", action="append", default=[], metavar="FUNCTION=TYPES",
        help="parameters of an image that carries only sizes: 'add=float* out, int n'; repeatable",
    )  # fmt: skip
    add_package(parser, default="kernel_hub")


def run(args: argparse.Namespace) -> int:
    signatures = {}
    for text in args.signature:
        function, equals, types = text.partition("=")
        if not equals or not function.strip() or not types.strip():
            raise KernelHubError(
                f"--signature {text}: FUNCTION=TYPES, such as 'add=float* out, int n'"
            )
        signatures[function.strip()] = types.strip()
    written = c_export.export(
        args.names,
        args.to,
        package=args.package,
        archs=None if args.arch is None else tokens_of(args.arch, "--arch"),
        prefix=args.prefix,
        dlpack=args.dlpack,
        tvm_ffi=args.tvm_ffi,
        signatures=signatures,
    )
    for path in written:
        _console.note(f"{path}  {_console.size(path.stat().st_size)}")
    return 0
