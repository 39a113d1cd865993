"""`kernel-hub verify`: every shipped cubin against its digest, and its ELF against the manifest."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ..cubin import read_cubin
from ..errors import KernelHubError
from ..manifest import Collection, CubinEntry
from . import _console
from ._gather import add_package, collections

NAME = "verify"
HELP = "check every shipped cubin: sha256, ELF, and that both agree with the manifest"
EXAMPLE = "kernel-hub verify && echo intact"


@dataclass(frozen=True)
class Verified:
    """One cubin; `problem` is None when everything holds."""

    package: str
    cubin: str
    arch: str
    sha256: str
    num_functions: int
    problem: str | None


def arguments(parser: argparse.ArgumentParser) -> None:
    add_package(parser, default=None)
    parser.add_argument("--json", action="store_true", help="print JSON")


def check(collection: Collection, entry: CubinEntry) -> str | None:
    """What is wrong with `entry`, or None."""
    try:
        info = read_cubin(collection.read(entry))
    except KernelHubError as error:
        return str(error)
    if info.target != entry.target:
        return f"built for {info.target}, the manifest says {entry.target}"
    if set(info.functions) != set(entry.functions):
        odd = sorted(set(info.functions) ^ set(entry.functions))
        return f"functions differ from the manifest: {', '.join(odd)}"
    for name, function in info.functions.items():
        seen = [(p.offset_bytes, p.size_bytes) for p in function.params]
        told = [(p.offset_bytes, p.size_bytes) for p in entry.functions[name].params]
        if seen != told:
            return f"parameters of {name} are {seen}, the manifest says {told}"
    return None


def verified(found: list[Collection]) -> list[Verified]:
    """One row a cubin."""
    return [
        Verified(
            collection.package,
            name,
            arch,
            entry.sha256,
            len(entry.functions),
            check(collection, entry),
        )
        for collection in found
        for name, entries in sorted(collection.manifest.cubins.items())
        for arch, entry in sorted(entries.items())
    ]


def run(args: argparse.Namespace) -> int:
    found, broken = collections(args.package)
    rows = verified(found)
    wrong = [row for row in rows if row.problem]
    if args.json:
        _console.as_json({"cubins": [row.__dict__ for row in rows], "unreadable": broken})
    else:
        _console.table(
            ["package", "cubin", "arch", "functions", "sha256", "result"],
            [
                (r.package, r.cubin, r.arch, r.num_functions, r.sha256[:16], r.problem or "ok")
                for r in rows
            ],
            right=["functions"],
        )
        for line in broken:
            _console.note(f"not readable: {line}")
        _console.note(f"{len(rows) - len(wrong)} of {len(rows)} cubins are intact")
    return 1 if wrong or broken or not rows else 0
