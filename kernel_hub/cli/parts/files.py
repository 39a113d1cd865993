"""The files of a package beside its cubins, and what vouches for each: a digest somewhere else.

The manifest has those of all machine code, cubins and the C launcher, and the record that pip
leaves those of everything that a wheel brought. Knows no kernel.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ...collection.manifest import Collection

PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class File:
    """One file; `problem` is None when its digest is the one that vouches for it."""

    package: str
    file: str
    problem: str | None
    is_vouched: bool


def files_of(collection: Collection) -> tuple[list[File], bool]:
    """Every file of the collection's folder, of kernel_hub's own all of the package; cubins of the
    manifest are left out (see `verify`). With it whether pip left a record of them."""
    root = collection.root
    if not isinstance(root, Path):  # in a zip file, which has its own check
        return [], False
    root = root.resolve()
    known = {
        root / entry.file for entries in collection.manifest.cubins.values()
        for entry in entries.values()
    }  # fmt: skip
    own = collection.package == "kernel_hub"
    installed = _record(PACKAGE) if own else {}
    listed = {PACKAGE / file: digest for file, digest in collection.manifest.files.items()}
    record = {**installed, **listed} if own else {}
    found = []
    for path in sorted({*_below(root), *(_below(PACKAGE) if own else ())} - known):
        vouched = record.get(path)
        if vouched is None and not own and path == root / "manifest.json":
            continue  # it vouches for the rest
        problem = None
        if vouched is not None:
            seen = hashlib.sha256(path.read_bytes()).hexdigest()
            if seen != vouched:
                problem = f"sha256 expected {vouched}, found {seen}"
        found.append(File(collection.package, str(path), problem, vouched is not None))
    return found, bool(installed)


def _below(folder: Path) -> Iterator[Path]:
    """Ordinary files and links, less what Python compiled of its sources."""
    for path in folder.rglob("*"):
        compiled = path.suffix == ".pyc" and path.parent.name == "__pycache__"
        if not compiled and (path.is_symlink() or not path.is_dir()):
            yield path


def _record(package: Path) -> dict[Path, str]:
    """Path -> sha256 of what was installed with `package`; nothing for a checkout."""
    try:
        installed = metadata.distribution(package.name)
    except metadata.PackageNotFoundError:
        return {}
    found = {}
    for file in installed.files or ():
        if file.hash is not None and file.hash.mode == "sha256":
            digest = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4))
            found[Path(str(installed.locate_file(file))).resolve()] = digest.hex()
    return found if package / "__init__.py" in found else {}
