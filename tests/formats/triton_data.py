"""The kept kernels of every Triton version, and what tests of several files need of them."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data/triton"
TLX = DATA / "fbtriton"  # 3.7.4, with the extension TLX
VERSIONS = sorted(path.name for path in DATA.iterdir() if path.name[0].isdigit())
NEWEST = DATA / VERSIONS[-1]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def hidden(version: str) -> int:
    return 0 if numbers(version) < (3, 3) else 1 if numbers(version) < (3, 5) else 2


def words(*values: int) -> tuple[bytes, ...]:
    return tuple(struct.pack("<Q", value) for value in values)


class TensorDescriptor:
    """What a call takes of Triton's class of that name."""

    def __init__(self, base: Any, shape: Any, block: Any, padding: str = "zero") -> None:
        self.base, self.shape, self.strides = base, list(shape), [shape[1], 1]
        self.block_shape, self.padding = list(block), padding


def copy(name: str, to: Path, version: str = "3.9.0") -> Path:
    """A kernel's files in a folder of their own; its json."""
    for suffix in (".cubin", ".json", ".ttir"):
        shutil.copy((DATA / version / name).with_suffix(suffix), to)
    return to / f"{name}.json"


def edit(path: Path, **fields: Any) -> None:
    """Change fields of a json; `...` takes one out."""
    found = json.loads(path.read_text())
    for name, value in fields.items():
        if value is ...:
            del found[name]
        else:
            found[name] = value
    path.write_text(json.dumps(found))
