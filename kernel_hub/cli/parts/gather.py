"""What more than one command asks: the collections there are, and the cubin a GPU would take."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ...collection.manifest import Collection, CubinEntry, find_collection, open_collection
from ...collection.resolve import fitting
from ...errors import KernelHubError
from ...registry import packages


@dataclass(frozen=True)
class Pick:
    """What a GPU would load for a shipped name: an entry, or None with every refusal."""

    name: str
    entry: CubinEntry | None
    rejected: dict[str, str]


def choices(collection: Collection, compute_capability: tuple[int, int]) -> list[Pick]:
    """The resolver's choice for each cubin of `collection`."""
    made = []
    for name, entries in sorted(collection.manifest.cubins.items()):
        made.append(Pick(name, *fitting(compute_capability, entries.values())))
    return made


def add_package(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    """The option that says whose cubins are meant."""
    parser.add_argument(
        "--package", default=default, metavar="PACKAGE|DIR",
        help="whose cubins: a package's, or those of a folder with a manifest.json",
    )  # fmt: skip


def add_arch(parser: argparse.ArgumentParser, text: str) -> None:
    """`--arch`, for `text`; `archs.tokens_of` reads what it was given."""
    parser.add_argument(
        "--arch", action="append", metavar="SM,SM",
        help=f"{text}: sm80,sm90 (or sm_90, 90); repeatable",
    )  # fmt: skip


def collections(package: str | None = None) -> tuple[list[Collection], list[str]]:
    """kernel_hub's own collection and those of other packages, and why others cannot be read.

    package: only this package's, or a folder's. Raises what `find_collection` does for it.
    """
    if package is not None:
        return [find_collection(package)], []
    found, broken = [], []
    for package in dict.fromkeys(["kernel_hub", *packages().values()]):
        try:
            found.append(open_collection(package))
        except (KernelHubError, ImportError) as error:
            broken.append(f"{package}: {error}")
    return found, broken
