"""`kernel-hub build-triton`: a Triton kernel ahead of time into a collection of cubins."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..archs import ARCHS
from ..errors import KernelHubError
from .parts import console
from .parts.gather import add_arch

if TYPE_CHECKING:
    from ..formats.triton.ahead.compiling import Built

NAME = "build-triton"
HELP = "build a Triton kernel ahead of time, for several architectures (needs Triton, no GPU)"
EXAMPLE = (
    "kernel-hub build-triton add.py:add_kernel --signature '*fp32:16,*fp32:16,*fp32:16,i32' "
    "--config BLOCK=512 --config BLOCK=1024,num_warps=8 --out cubins"
)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "function",
        metavar="FILE.py:NAME",
        help="a @triton.jit function; the file is executed. Or package.module:NAME",
    )
    parser.add_argument(
        "--signature", required=True, metavar="TYPES", help="by position: '*fp16:16,*fp16:16,i32' "
        "(':16': 16 divides the address or value), or by name: 'x=*fp16:16,n=i32'",
    )  # fmt: skip
    parser.add_argument(
        "--constexpr", action="append", default=[], metavar="NAME=VALUE",
        help="a constant of every configuration; 'tl.float16' is Triton's dtype",
    )  # fmt: skip
    parser.add_argument("--num-warps", type=int, default=4, help="warps a block (default 4)")
    parser.add_argument("--num-stages", type=int, default=3, help="pipeline stages (default 3)")
    parser.add_argument(
        "--config", action="append", default=[], metavar="A=V,B=V",
        help="one configuration: constants and options, such as BLOCK_M=64,num_warps=8; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--autotune", action="store_true", help="the configurations of its @triton.autotune"
    )
    add_arch(parser, f"for these (default {','.join(ARCHS)})")
    parser.add_argument(
        "--grid", metavar="EXPR", help="kept with the kernel: C expressions over integer arguments "
        "and constants, such as '(n + BLOCK - 1) / BLOCK, heads'",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the collection")


def run(args: argparse.Namespace) -> int:
    from ..formats.triton.ahead import compiling, frontend
    from ..formats.triton.configuration import split

    if args.autotune and args.config:
        raise KernelHubError("--autotune and --config: one of them")
    path, colon, name = args.function.rpartition(":")
    if not colon:
        raise KernelHubError(f"{args.function}: FILE.py:NAME, such as add.py:add_kernel")
    is_module = not path.endswith(".py") and all(map(str.isidentifier, path.split(".")))
    fn = frontend.from_module(path, name) if is_module else frontend.from_file(Path(path), name)
    signature: Any = args.signature
    if "=" in signature:
        signature = dict(_pair("--signature", part) for part in split(signature))
    options = {"num_warps": args.num_warps, "num_stages": args.num_stages}
    constants = {
        key: frontend.constant(text) for key, text in _pairs("--constexpr", args.constexpr)
    }
    configs = None
    if not args.autotune:
        configs = [
            {
                **options,
                **{k: frontend.constant(v) for k, v in _pairs("--config", text.split(","))},
            }
            for text in args.config
        ] or [options]
    tokens = compiling.archs(args.arch or ARCHS)
    total = len(tokens) * len(
        configs if configs is not None else getattr(fn, "configs", None) or []
    )
    with console.progress(total, "building") as advance:
        built = compiling.compile_configs(
            fn, configs, signature=signature, constexprs=constants, arch=tokens, out=args.out,
            grid=args.grid, on_step=advance,
        )  # fmt: skip
    console.table(
        ["name", "arch", "registers", "spilled", "shared", "size"],
        [_row(one) for one in built],
        right=["registers", "spilled", "shared", "size"],
    )
    for one in built:
        if one.problem:
            console.note(f"left out: {one.problem}")
    names = dict.fromkeys(one.name for one in built if one.entry is not None)
    console.note(f"{len(names)} kernels in {args.out}")
    return 0 if names else 1


def _row(one: Built) -> list[object]:
    if one.entry is None:
        return [one.name, one.arch, "-", "-", "too much", "-"]
    (function,) = one.entry.functions.values()
    shared = function.triton["metadata"]["shared"] if function.triton else 0
    return [
        *(one.name, one.arch, function.num_regs, function.local_bytes or "", shared),
        console.size(one.entry.size_bytes),
    ]


def _pairs(option: str, texts: list[str]) -> list[tuple[str, str]]:
    return [_pair(option, text) for text in texts]


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name.isidentifier() or not value:
        raise KernelHubError(f"{option} {text}: NAME=VALUE, such as BLOCK_M=64")
    return name, value
