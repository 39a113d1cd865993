"""`kernel-hub verify`: every shipped cubin against its digest, and its ELF against the manifest.

Every other file of the package against what vouches for it, and the names of those that nothing
vouches for.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ..collection.manifest import Collection, CubinEntry
from ..cubin import read_cubin
from ..errors import KernelHubError
from .parts import console
from .parts.files import File, files_of
from .parts.gather import add_package, collections

NAME = "verify"
HELP = "check every shipped file: its sha256, and of cubins that the ELF and the manifest agree"
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


def _verdict(row: Verified) -> console.Cell:
    return console.bad("WRONG") if row.problem else console.good("ok")


def run(args: argparse.Namespace) -> int:
    found, broken = collections(args.package)
    rows = verified(found)
    wrong = [row for row in rows if row.problem]
    files: list[File] = []
    unknown: list[File] = []
    is_checkout = False
    for collection in found:
        of_one, is_recorded = files_of(collection)
        files += of_one
        if collection.package == "kernel_hub" and not is_recorded:
            is_checkout = True
        else:
            unknown += [file for file in of_one if not file.is_vouched]
    changed = [file for file in files if file.problem]
    if args.json:
        console.as_json(
            {
                "cubins": [row.__dict__ for row in rows],
                "files": [file.__dict__ for file in files],
                "is_checkout": is_checkout,
                "unreadable": broken,
            }
        )
    else:
        console.table(
            ["package", "cubin", "arch", "functions", "sha256", "result"],
            [
                (r.package, r.cubin, r.arch, r.num_functions, r.sha256[:16], _verdict(r))
                for r in rows
            ],
            right=["functions"],
            once=["package"],
        )
        for row in wrong:
            console.note(f"WRONG: {row.cubin} for {row.arch}: {row.problem}")
        for line in broken:
            console.note(f"not readable: {line}")
        for file in changed:
            console.note(f"changed: {file.file}: {file.problem}")
        for file in unknown:
            console.note(f"nothing vouches for {file.file}")
        console.note(f"{len(rows) - len(wrong)} of {len(rows)} cubins are intact")
        vouched = sum(file.is_vouched for file in files)
        console.note(f"{vouched - len(changed)} of {vouched} other files with a digest are intact")
        if is_checkout:
            number = len(files) - vouched - len(unknown)
            console.note(
                f"nothing here vouches for {number} files of kernel_hub: it was not installed from "
                "a wheel, so there is no record of them (git knows those of a checkout; --json "
                "names them)"
            )
    return 1 if wrong or broken or changed or unknown or not rows else 0
