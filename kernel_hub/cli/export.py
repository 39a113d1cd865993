"""`kernel-hub export`: kernels as C sources, or all ops as a repository of Hugging Face's hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..archs import tokens_of
from ..errors import KernelHubError
from ..formats import c_export
from .parts import console
from .parts.gather import add_arch, add_package

NAME = "export"
HELP = "write kernels as .c and .h with a CMakeLists.txt, or all as a hub repository"
_OF_C = ("names", "to", "arch", "prefix", "dlpack", "tvm_ffi", "signature")
EXAMPLE = "kernel-hub export rms_norm silu_and_mul --to kernels && cmake -S kernels -B build"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME",
        help="a cubin as in kernel-hub list, a Triton kernel of --package in all its "
        "configurations, or a path: .cubin, .fatbin, .ptx, a C source with arrays, .cu, a folder "
        "with a collection",
    )  # fmt: skip
    parser.add_argument("--to", metavar="DIR", help="folder to write C sources to")
    parser.add_argument(
        "--hub", type=Path, metavar="DIR",
        help="write all ops as the folder that Hugging Face's kernels package loads, and no C",
    )  # fmt: skip
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
    if args.hub is not None:
        return _run_hub(args)
    if not args.names or args.to is None:
        raise KernelHubError("export wants names and --to DIR, or --hub DIR alone")
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
        console.note(f"{path}  {console.size(path.stat().st_size)}")
    return 0


def _run_hub(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if name in _OF_C and value}
    if given:
        names = ", ".join(sorted(given)).replace("_", "-")
        raise KernelHubError(f"--hub writes the whole library: leave out {names}")
    from ..integrations.kernels import hub_folder

    with console.progress(2, "hub repository") as advance:
        builds = hub_folder.write(args.hub, advance)
    for build in builds:
        total = sum(path.stat().st_size for path in build.rglob("*") if path.is_file())
        console.note(f"{build}  {console.size(total)}")
    return 0
