"""`kernel-hub list`: the shipped cubins by name, architecture and dtype."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, field

from ..archs import tokens_of
from ..collection.manifest import Collection, CubinEntry
from ..collection.resolve import names_target
from ..registry import DTYPE_TOKENS, dtype_of, nothing_for
from .parts import console
from .parts.gather import add_arch, add_package, collections

NAME = "list"
HELP = "list the shipped cubins: architectures, dtypes, functions, sizes"
EXAMPLE = "kernel-hub list --arch sm90 --dtype bf16 --functions"


@dataclass(frozen=True)
class Listed:
    """One cubin of one architecture, with the functions that the filters left."""

    package: str
    cubin: str
    arch: str
    target: str
    size_bytes: int
    toolkit: str
    minimum_driver: int
    dtypes: dict[str, int]
    functions: dict[str, str] = field(repr=False)


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arch(parser, "only these architectures")
    add_package(parser, default=None)
    parser.add_argument(
        "--dtype", metavar="DTYPE", help=f"only functions of this: {', '.join(DTYPE_TOKENS)}"
    )
    parser.add_argument("--functions", action="store_true", help="show every signature")
    parser.add_argument("--json", action="store_true", help="print JSON")


def shipped(
    found: list[Collection], *, archs: list[str] | None = None, dtype: str | None = None
) -> list[Listed]:
    """The cubins of `found`, filtered."""
    rows = []
    for collection in found:
        for name, entries in sorted(collection.manifest.cubins.items()):
            for entry_arch, entry in sorted(entries.items()):
                functions = _functions(entry, dtype)
                wanted = archs is None or any(names_target(a, entry.target) for a in archs)
                if functions and wanted:
                    dtypes = Counter(token for f in functions if (token := dtype_of(f)))
                    rows.append(
                        Listed(
                            collection.package,
                            name,
                            entry_arch,
                            entry.target,
                            entry.size_bytes,
                            entry.toolkit,
                            entry.minimum_driver,
                            dict(dtypes),
                            functions,
                        )
                    )
    return rows


def _functions(entry: CubinEntry, dtype: str | None) -> dict[str, str]:
    """Function name -> signature."""
    return {
        name: f"{name}({', '.join(f'{p.type} {p.name}' for p in function.params)})"
        for name, function in sorted(entry.functions.items())
        if dtype is None or dtype_of(name) == dtype
    }


def _check_asked(found: list[Collection], archs: list[str] | None, dtype: str | None) -> None:
    """Raise CubinNotFoundError for an architecture, or a dtype, that nothing is for."""
    rows = shipped(found)
    where = ", ".join(collection.package for collection in found)
    for arch in archs or ():
        if not shipped(found, archs=[arch]):
            raise nothing_for(where, "arch", arch, sorted({row.arch for row in rows}))
    if dtype is not None and not shipped(found, dtype=dtype):
        raise nothing_for(where, "dtype", dtype, sorted({t for row in rows for t in row.dtypes}))


def run(args: argparse.Namespace) -> int:
    found, broken = collections(args.package)
    archs = None if args.arch is None else tokens_of(args.arch, "--arch")
    _check_asked(found, archs, args.dtype)
    rows = shipped(found, archs=archs, dtype=args.dtype)
    if args.json:
        console.as_json([row.__dict__ for row in rows])
        return 0
    if not rows:
        console.note(f"no cubin of dtype {args.dtype} for {', '.join(archs or ())}")
        return 0
    console.table(
        ["package", "cubin", "arch", "functions", "dtypes", "size", "toolkit", "driver from"],
        [
            (
                row.package,
                row.cubin,
                row.target.replace("_", ""),
                len(row.functions),
                " ".join(row.dtypes) or "-",
                console.size(row.size_bytes),
                row.toolkit,
                console.cuda_version(row.minimum_driver),
            )
            for row in rows
        ],
        right=["functions", "size"],
        once=["package", "toolkit", "driver from"],
    )
    if args.functions:
        for cubin in dict.fromkeys((row.package, row.cubin) for row in rows):
            console.heading(f"\n{'.'.join(cubin)}")
            signatures = [row.functions for row in rows if (row.package, row.cubin) == cubin]
            for text in dict.fromkeys(text for table in signatures for text in table.values()):
                console.note(f"  {text}")
    total = sum(row.size_bytes for row in rows)
    console.note(f"{console.count(len(rows), 'cubin')}, {console.size(total)}")
    for line in broken:
        console.note(f"not readable: {line}")
    return 0
